"""Sharded jobs: nothing lost, nothing twice, whatever ends a clip, a worker, a node or the process that runs them."""

import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given, settings, strategies
from job_workers import MakeTextWorker, TextWorker, make_job

from finetune.data.batching import BatchLimits
from finetune.data.options import StreamOptions
from finetune.data.reader import rows_from
from finetune.data.retry import UnreadableShard
from finetune.data.shards import NumberedRows, Shard
from finetune.data.sources import Source, open_source
from finetune.data.utterances import no_tokens
from finetune.durable_files import aside_of, put_in_place, write_text
from finetune.errors import UserError
from finetune.tools.jobs.clips import Clips, cut_into_shards, halves, with_counts
from finetune.tools.jobs.engines import Died, Done, EngineSettings, Event, Ready
from finetune.tools.jobs.job import Job
from finetune.tools.jobs.on_ray import RayEngine, share_of_a_gpu
from finetune.tools.jobs.running import run_job
from finetune.tools.jobs.work import Outcome, Task, answer

TEXTS = [f"text {i}" for i in range(43)]


def write_manifest(folder: Path, texts: list[str]) -> None:
    lines = [{"audio_filepath": f"{i:03d}.wav", "id": f"clip{i:03d}", "text": t} for i, t in enumerate(texts)]
    (folder / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def ids(job: Job) -> list[str]:
    return [result["id"] for result in job.results()]


def expected(clips: int, without: tuple[int, ...] = ()) -> list[str]:
    return [f"clip{i:03d}" for i in range(clips) if i not in without]


def wait_for(there: Callable[[], bool]) -> None:
    while not there():
        time.sleep(0.05)


class ProcessEnds(BaseException):
    """Stands for the end of a worker process."""


class MortalWorker(TextWorker):
    def end_process(self) -> None:
        raise ProcessEnds


class InlineEngine:
    """Does the tasks in this process, the latest first."""

    workers = 2

    def __init__(self, job: Job, settings: EngineSettings):
        self.job, self.started = job, 0
        self.events: list[Event] = []

    def start(self) -> int:
        self.started += 1
        self.events.append(Ready(self.started))
        return self.started

    def submit(self, worker: int, task: Task) -> None:
        assert isinstance(self.job.make_worker, MakeTextWorker)
        try:
            event = Done(worker, answer(MortalWorker(self.job.make_worker.folder), self.job.group, task))
        except ProcessEnds:
            event = Died(worker, "killed")
        self.events.append(event)

    def wait(self, seconds: float) -> list[Event]:
        return [self.events.pop()]

    def close(self) -> None:
        pass


@settings(max_examples=25, deadline=None)
@given(strategies.lists(strategies.sampled_from(["text"] * 12 + ["raise", "kill", "once"]), min_size=1, max_size=60))
def test_each_clip_is_done_once_or_noted_with_its_reason(tmp_path_factory, kinds):
    folder = tmp_path_factory.mktemp("job")
    texts = [f"{kind} {i}" for i, kind in enumerate(kinds)]
    write_manifest(folder, texts)
    job = make_job(folder, clips_a_shard=8, max_failed=1.0)
    totals = run_job(job, EngineSettings(), InlineEngine)
    spoiled = {i: kind for i, kind in enumerate(kinds) if kind in ("raise", "kill")}
    assert ids(job) == expected(len(texts), tuple(spoiled))
    assert totals.is_whole
    assert totals.clips == len(texts)
    assert totals.seconds == len(texts) - len(spoiled)
    found = [json.loads(line) for line in (folder / "out" / "failed.jsonl").open()]
    assert [(record["source"].split()[-1], record["kind"]) for record in found] == [
        (str(i + 1), {"raise": "exception", "kill": "killed"}[kind]) for i, kind in spoiled.items()
    ]


def test_too_many_failures_end_the_job_with_one_message(tmp_path):
    write_manifest(tmp_path, [*TEXTS, "raise", "raise", "raise"])
    with pytest.raises(UserError, match=r"3 of 46 clips failed, more than --max-failed 0.05: 3 exception") as caught:
        run_job(make_job(tmp_path, max_failed=0.05), EngineSettings(), InlineEngine)
    assert caught.value.exit_code == 1
    assert "clip043: ValueError: a clip that cannot be processed" in str(caught.value)
    assert len([*(tmp_path / "out" / "shards").iterdir()]) == 5


def test_what_failed_is_done_again_when_it_is_asked_for(tmp_path):
    write_manifest(tmp_path, ["later" if i in (3, 21) else "text" for i in range(43)])
    assert len(run_job(make_job(tmp_path), EngineSettings(), InlineEngine).failed) == 2
    (tmp_path / "go").touch()
    other = tmp_path / "out" / "shards" / "00001.jsonl"
    written = other.stat().st_mtime_ns
    assert len(run_job(make_job(tmp_path), EngineSettings(), InlineEngine).failed) == 2
    third = EngineSettings(part=(2, 3), retry_failed=True)  # has one of the two
    assert len(run_job(make_job(tmp_path), third, InlineEngine).failed) == 1
    assert not run_job(make_job(tmp_path), EngineSettings(retry_failed=True), InlineEngine).failed
    assert ids(make_job(tmp_path)) == expected(43)
    assert (tmp_path / "out" / "failed.jsonl").read_text() == ""
    assert other.stat().st_mtime_ns == written


def breaks_off(shard: Shard, error: Exception, mended: Path, first: int) -> NumberedRows:
    """Read a shard, up to an error at its sixth row until a file is there."""
    for number, row in shard.read(first):
        if number >= 5 and not mended.exists():
            raise error
        yield number, row


def job_that_breaks_off(folder: Path, error: Exception) -> Job:
    write_manifest(folder, TEXTS[:20])
    job = make_job(folder)
    (source,) = job.sources
    (shard,) = source.shards
    source.shards = [replace(shard, read=partial(breaks_off, shard, error, folder / "mended"))]
    return replace(job, sources=[source])


def test_storage_that_does_not_answer_ends_the_job_and_loses_nothing(tmp_path):
    job = job_that_breaks_off(tmp_path, OSError(errno.EIO, "Input/output error"))
    with pytest.raises(UserError, match=r"from line 6 on: OSError: .*Input/output error.*the same line goes on there"):
        run_job(job, EngineSettings(), InlineEngine)
    (tmp_path / "mended").touch()
    totals = run_job(job, EngineSettings(), InlineEngine)
    assert totals.is_whole
    assert not totals.failed
    assert ids(job) == expected(20)


def test_all_rows_behind_damage_count_as_failed(tmp_path):
    job = job_that_breaks_off(tmp_path, pyarrow.ArrowInvalid("corrupt"))
    totals = run_job(replace(job, max_failed=1.0), EngineSettings(), InlineEngine)
    assert totals.clips == 20
    assert [f["source"].split()[-1] for f in totals.failed] == [str(n) for n in range(6, 21)]
    assert {f["kind"] for f in totals.failed} == {"unreadable"}
    assert ids(job) == expected(5)


@pytest.mark.parametrize(
    ("error", "local", "remote"),
    [
        (OSError(errno.ESTALE, "stale"), True, True),
        (FileNotFoundError("a.parquet"), True, True),
        (TimeoutError(), True, True),
        (RuntimeError("a client's own"), False, True),
        (OSError("Corrupt snappy compressed data."), False, False),
        (pyarrow.ArrowInvalid("no parquet"), False, False),
        (EOFError(), False, False),
    ],
)
def test_an_outage_is_told_from_damage(error, local, remote):
    shard = Shard("a.parquet", "row", 0, 3, partial(broken, error))
    with pytest.raises(UnreadableShard) as caught:
        list(rows_from(shard, 0, 0))
    assert (caught.value.is_outage(False), caught.value.is_outage(True)) == (local, remote)


def broken(error: Exception, first: int) -> NumberedRows:
    raise error
    yield


def test_what_the_data_say_and_what_was_read_is_compared(tmp_path, caplog):
    write_manifest(tmp_path, TEXTS)
    job = make_job(tmp_path)
    job.sources[0].clips = 44
    with caplog.at_level("WARNING", "finetune"):
        run_job(job, EngineSettings(), InlineEngine)
    assert "the data say that they have 44 clips, and 43 were read" in caplog.text


def test_workers_that_always_end_do_not_go_on_for_ever(tmp_path):
    write_manifest(tmp_path, ["kill"] * 1000)
    with pytest.raises(UserError, match="26 worker processes in a row ended without a result"):
        run_job(make_job(tmp_path, clips_a_shard=1000, max_failed=1.0), EngineSettings(), InlineEngine)


class NodeEngine(InlineEngine):
    """Loses its workers at once: the first of them before they are made, and all over the first task of each."""

    workers = 40

    def start(self) -> int:
        worker = super().start()
        if worker <= self.workers:
            self.events[-1] = Died(worker, "lost")
        return worker

    def wait(self, seconds: float) -> list[Event]:
        events, self.events = self.events, []
        return events


def test_a_node_with_many_workers_is_lost_at_once(tmp_path):
    write_manifest(tmp_path, [f"once {i}" for i in range(60)])
    job = make_job(tmp_path, clips_a_shard=1)
    assert not run_job(job, EngineSettings(), NodeEngine).failed
    assert ids(job) == expected(60)


def test_another_model_under_the_same_name_is_another_job(tmp_path):
    write_manifest(tmp_path, TEXTS)
    model = tmp_path / "m.nemo"
    model.write_text("a")
    named = {"model": str(tmp_path)}
    run_job(make_job(tmp_path, settings=named), EngineSettings(), InlineEngine)
    (tmp_path / "report.html").touch()  # of the run whose directory it is
    run_job(make_job(tmp_path, settings=named), EngineSettings(), InlineEngine)
    model.write_text("trained again")
    with pytest.raises(UserError, match="another job: model_files have changed"):
        run_job(make_job(tmp_path, settings=named), EngineSettings(), InlineEngine)


def test_every_third_shard_and_then_the_rest(tmp_path):
    write_manifest(tmp_path, TEXTS)
    totals = run_job(make_job(tmp_path), EngineSettings(part=(1, 3)), InlineEngine)
    assert not totals.is_whole
    assert sorted(file.name for file in (tmp_path / "out" / "shards").iterdir()) == ["00001.jsonl", "00004.jsonl"]
    file = tmp_path / "out" / "shards" / "00001.jsonl"
    written = file.stat().st_mtime_ns
    assert run_job(make_job(tmp_path), EngineSettings(), InlineEngine).is_whole
    assert file.stat().st_mtime_ns == written
    assert ids(make_job(tmp_path)) == expected(43)


def test_the_directory_of_another_job_or_of_other_things_is_refused(tmp_path):
    write_manifest(tmp_path, TEXTS)
    run_job(make_job(tmp_path), EngineSettings(), InlineEngine)
    other = make_job(tmp_path, clips_a_shard=7, settings={"model": "n"})
    with pytest.raises(UserError, match=r"another job: model was m, is n; clips_a_shard was 10, is 7\. Name"):
        run_job(other, EngineSettings(), InlineEngine)
    write_manifest(tmp_path, TEXTS[1:])
    with pytest.raises(UserError, match="another job: the files of the data have changed"):
        run_job(make_job(tmp_path), EngineSettings(), InlineEngine)
    full = make_job(tmp_path)
    full.directory = tmp_path
    with pytest.raises(UserError, match="is not empty and holds no job"):
        run_job(full, EngineSettings(), InlineEngine)


def test_two_processes_do_not_do_the_same_shards(tmp_path):
    write_manifest(tmp_path, TEXTS)
    job = make_job(tmp_path)
    job.begin()
    for part, refused in (((0, 1), [(0, 1), (1, 3)]), ((0, 2), [(0, 2), (0, 4), (1, 3), (0, 1)])):
        with job.alone(part):
            for other in refused:
                with pytest.raises(UserError, match="another process works on"):
                    run_job(make_job(tmp_path), EngineSettings(part=other), InlineEngine)
            if part == (0, 2):
                run_job(make_job(tmp_path), EngineSettings(part=(3, 4)), InlineEngine)
    assert run_job(make_job(tmp_path), EngineSettings(), InlineEngine).is_whole


def test_two_processes_may_write_a_file_at_once(tmp_path):
    file = tmp_path / "failed.jsonl"
    aside = aside_of(file)
    aside.write_text("mine")
    other = multiprocessing.get_context("spawn").Process(target=write_text, args=(file, "theirs"))
    other.start()
    other.join()
    assert file.read_text() == "theirs"
    put_in_place(aside, file)
    assert file.read_text() == "mine"


def test_an_output_that_cannot_be_written_is_one_message(tmp_path):
    write_manifest(tmp_path, TEXTS)
    job = make_job(tmp_path)
    job.begin()
    shutil.rmtree(tmp_path / "out" / "counts")
    with pytest.raises(UserError, match=r"--output: .*out cannot be written"):
        job.write(0, Outcome())


@pytest.mark.parametrize("form", ["shards", "manifest.jsonl"])
def test_batches_hold_the_clips_of_a_shard_by_length(corpus, form):
    source = open_source(Source(path=str(corpus / form), split="train"), "--data")
    group = [(source, shard) for shard in source.shards]
    shards = cut_into_shards(group, 13, max_samples=40)
    assert [sum(piece.rows() for piece in pieces) for pieces in shards] == [13, 13, 13, 1]
    options, found = StreamOptions(BatchLimits(clips=4), 16_000), []
    for pieces in shards:
        clips, seconds = Clips(group, pieces), []
        for batch, entries in clips.batches(options, no_tokens):
            assert batch.ids == [entry.id for entry in entries]
            assert all(entry.place in clips.ids for entry in entries)
            seconds += [entry.seconds for entry in entries]
            found += batch.ids
        assert seconds == sorted(seconds, reverse=True)
    assert sorted(found) == [f"clip{i:02d}" for i in range(40)]


def test_spoiled_rows_are_noted(corpus):
    source = open_source(Source(path=str(corpus / "spoiled.jsonl")), "--data")
    group = [(source, shard) for shard in source.shards]
    (pieces,) = cut_into_shards(group, 100)
    clips = Clips(group, pieces)
    good = [
        name
        for batch, _ in clips.batches(StreamOptions(BatchLimits(clips=8), 16_000), no_tokens)
        for name in batch.ids
    ]
    assert clips.read == 47
    assert len(good) == 44
    assert {(record["kind"], record["source"].split()[-1]) for record in clips.failed} == {
        ("bad", n) for n in ("4", "21", "47")
    }


def test_a_source_that_does_not_tell_its_rows_is_cut_after_counting(corpus):
    import datasets

    from finetune.data.shards import dataset_shards

    stream = datasets.load_dataset(
        "parquet", data_files=str(corpus / "shards/data/train-*"), split="train", streaming=True
    )
    source = open_source(Source(path=str(corpus / "shards"), split="train"), "--data")
    source.shards = dataset_shards(stream, [f"shard {i}" for i in range(stream.num_shards)])
    group = [(source, shard) for shard in source.shards]
    shards = cut_into_shards(group, 5)
    assert [[piece.rows() for piece in pieces] for pieces in shards] == [[None]] * len(group)
    counted = with_counts(group, shards[2])
    assert [sum(piece.rows() for piece in half) for half in halves(counted)] == [7, 8]
    assert sum(piece.rows() for pieces in cut_into_shards(group, 5, max_samples=12) for piece in pieces) == 12


def test_an_audio_folder_is_cut_by_its_metadata(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    names = [f"{i:03d}.wav" for i in range(25)]
    for name in names:
        (folder / name).write_bytes(b"RIFF")
    lines = "".join(f"{name},text\n" for name in names)
    (folder / "metadata.csv").write_text(f"file_name,text\n{lines}")
    job = make_job(tmp_path, sources=[open_source(Source(path=str(folder), split="train"), "--data")])
    assert len(job.shards) == 3
    assert run_job(job, EngineSettings(), InlineEngine).clips == 25
    assert [Path(name).name for name in ids(job)] == names


@pytest.mark.slow
def test_a_killed_worker_process_is_replaced(tmp_path):
    write_manifest(tmp_path, ["text", "kill", "raise", "text"])
    job = make_job(tmp_path, clips_a_shard=1)
    totals = run_job(job, EngineSettings(workers=1))
    assert ids(job) == expected(4, (1, 2))
    assert [(f["kind"], f["source"].split()[-1]) for f in totals.failed] == [("killed", "2"), ("exception", "3")]
    assert "it ends the worker process (killed, most likely for want of memory)" in totals.failed[0]["reason"]


def test_a_job_goes_on_after_a_signal_and_after_its_process_was_killed(tmp_path):
    texts = ["wait" if i >= 20 else "text" for i in range(43)]
    write_manifest(tmp_path, texts)
    shards, made = tmp_path / "out" / "shards", tmp_path / "made"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path if path)}
    for number, code in ((signal.SIGTERM, 75), (signal.SIGKILL, -9)):
        made.unlink(missing_ok=True)
        driver = subprocess.Popen([sys.executable, "-m", "job_workers", str(tmp_path)], env=environment)
        wait_for(lambda: made.is_file() and (shards / "00001.jsonl").is_file())
        driver.send_signal(number)
        assert driver.wait() == code
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in made.read_text().split()))
        assert len([*shards.iterdir()]) == 2
    (tmp_path / "go").touch()
    assert run_job(make_job(tmp_path), EngineSettings(), InlineEngine).is_whole
    assert ids(make_job(tmp_path)) == expected(43)


def test_a_cluster_that_does_not_answer_is_told_at_once(tmp_path):
    write_manifest(tmp_path, TEXTS)
    for address, message in (("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1"), ("head", "neither auto nor")):
        with pytest.raises(UserError, match=message):
            run_job(make_job(tmp_path), EngineSettings("ray", address=address))


@pytest.mark.parametrize(("workers", "gpus", "share"), [(3, 0, 0), (2, 2, 1), (1, 4, 1), (3, 2, 1 / 2), (5, 2, 1 / 3)])
def test_workers_share_gpus(workers, gpus, share):
    assert share_of_a_gpu(workers, gpus) == share


@pytest.mark.slow
def test_a_ray_node_that_comes_is_used_and_one_that_is_killed_loses_nothing(tmp_path, monkeypatch):
    from ray.cluster_utils import Cluster

    texts = ["wait" if i >= 20 else "text" for i in range(60)]
    texts[3], texts[15] = "kill", "raise"
    before = signal.getsignal(signal.SIGTERM)
    write_manifest(tmp_path, texts)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    monkeypatch.chdir(tmp_path)
    job = make_job(Path())  # relative paths begin here for the actors too

    class ChangingCluster(RayEngine):
        """Has a third node when two shards are done, and loses one when all three have a worker."""

        def wait(self, seconds: float) -> list[Event]:
            made = (tmp_path / "made").read_text().split() if (tmp_path / "made").exists() else []
            if len(nodes) == 2 and len([*(tmp_path / "out" / "shards").glob("*.jsonl")]) == 2:
                nodes.append(cluster.add_node(num_cpus=1))
            elif not (tmp_path / "go").exists() and sum(Path(f"/proc/{pid}").exists() for pid in made) == 3:
                cluster.remove_node(nodes[1], allow_graceful=False)
                (tmp_path / "go").touch()
            return super().wait(seconds)

    try:
        totals = run_job(job, EngineSettings("ray", address=cluster.address), ChangingCluster)
    finally:
        cluster.shutdown()
        signal.signal(signal.SIGTERM, before)  # a cluster in a process takes it over
    assert ids(job) == expected(60, (3, 15))
    assert [(f["kind"], f["source"].split()[-1]) for f in totals.failed] == [("killed", "4"), ("exception", "16")]


def test_options_of_jobs_need_a_directory(capsys):
    from finetune.evaluate import parse_arguments

    words = ["--model", "m.nemo", "--data", "d.jsonl"]
    for more, message in (
        (["--engine", "ray"], "--engine goes with --output DIR"),
        (["--shard", "1/2"], "--shard goes with --output DIR"),
        (["--output", "out", "--shard", "2/2"], "is I/N, such as 0/8 to 7/8"),
        (["--output", "out", "--workers", "0"], "--workers has to be"),
        (["--output", "out", "--look-ahead", "all"], "leave out --look-ahead"),
    ):
        with pytest.raises(SystemExit):
            parse_arguments([*words, *more])
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_an_evaluation_in_shards_finds_what_one_process_finds(tiny_model, clips, tmp_path, capsys):
    from finetune.evaluate import main

    words = ["--model", tiny_model, "--data", clips / "manifest.jsonl", "--batch-size", 1, "--bootstrap", 0]
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    assert main([str(word) for word in (*words, "--utterances", whole)]) == 0
    in_shards = [str(word) for word in (*words, "--output", tmp_path / "out", "--utterances", parts)]
    assert main([*in_shards, "--shard", "1/2"]) == 0  # there is one shard, of the other process
    assert "this part is done" in capsys.readouterr().out
    assert main(in_shards) == 0
    assert parts.read_text() == whole.read_text()
    began = (tmp_path / "out" / "shards" / "00000.jsonl").stat().st_mtime_ns
    assert main([*in_shards, "--batch-size", "2"]) == 0  # there is nothing left to do
    assert (tmp_path / "out" / "shards" / "00000.jsonl").stat().st_mtime_ns == began
    capsys.readouterr()
    assert main([*in_shards, "--language", "de"]) == 2
    assert "holds another job: language was None, is de" in capsys.readouterr().err


@pytest.mark.parametrize(("clips", "most", "shards"), [(43, -1, 1), (250, -1, 3), (250, 120, 2), (5000, -1, 20)])
def test_small_data_are_shared_out_too(tmp_path, clips, most, shards):
    write_manifest(tmp_path, [f"text {i}" for i in range(clips)])
    source = open_source(Source(path=str(tmp_path / "manifest.jsonl")), "--data")
    job = Job("evaluate", tmp_path / "job", {}, [source], MakeTextWorker(tmp_path), max_samples=most)
    assert len(job.shards) == shards
    assert job.clips == (clips if most < 0 else most)
