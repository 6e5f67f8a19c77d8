"""Sharded jobs: nothing lost, nothing twice, whatever ends a clip, a worker or the driver."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from job_workers import MakeTextWorker

from finetune.data.sources import open_source, parse_sources
from finetune.errors import UserError
from finetune.tools.jobs.engines import EngineSettings
from finetune.tools.jobs.job import Job
from finetune.tools.jobs.running import run_job


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Job]:
    """`job(texts, **fields)`: over a manifest of clips with these texts, 10 a shard."""

    def make(texts: list[str], **fields) -> Job:
        lines = [{"audio_filepath": f"{i:03d}.wav", "id": f"clip{i:03d}", "text": t} for i, t in enumerate(texts)]
        manifest = tmp_path / "manifest.jsonl"
        content = "".join(json.dumps(line) + "\n" for line in lines)
        if not manifest.is_file() or manifest.read_text() != content:
            manifest.write_text(content)
        sources = [open_source(s, "--data") for s in parse_sources(str(manifest), "--data", "train")]
        values = {"clips_a_shard": 10, "max_failed": 0.5, **fields}
        return Job("label", tmp_path / "out", {"model": "m"}, sources, MakeTextWorker(tmp_path), **values)

    return make


def ids(job: Job) -> list[str]:
    return [result["id"] for result in job.results()]


def expected(texts: list[str], without: tuple[int, ...] = ()) -> list[str]:
    return [f"clip{i:03d}" for i in range(len(texts)) if i not in without]


TEXTS = [f"text {i}" for i in range(43)]


def test_clips_that_raise_or_kill_cost_themselves_only(job):
    texts = [*TEXTS]
    texts[3], texts[14], texts[17], texts[42] = "kill", "raise", "once 17", "kill"
    done = job(texts)
    totals = run_job(done, EngineSettings(workers=2))
    assert totals.is_whole
    assert ids(done) == expected(texts, (3, 14, 42))
    assert totals.clips == len(texts)
    assert totals.seconds == 40
    failed = [json.loads(line) for line in (done.directory / "failed.jsonl").open()]
    assert [(f["kind"], f["source"].split()[-1]) for f in failed] == [
        ("killed", "4"),
        ("exception", "15"),
        ("killed", "43"),
    ]
    assert "a clip that cannot be processed" in failed[1]["reason"]
    assert failed[1]["id"] == "clip014"


def test_what_is_done_is_not_done_again(job, tmp_path):
    settings = EngineSettings(part=(1, 3))
    totals = run_job(job(TEXTS), settings)
    assert not totals.is_whole
    assert totals.shards_done == 2  # of 5: shards 1 and 4
    before = (tmp_path / "out" / "shards" / "00001.jsonl").stat()
    run_job(job(TEXTS), EngineSettings())
    assert (tmp_path / "out" / "shards" / "00001.jsonl").stat().st_mtime_ns == before.st_mtime_ns
    assert ids(job(TEXTS)) == expected(TEXTS)


def test_another_job_s_directory_is_refused(job, tmp_path):
    run_job(job(TEXTS[:5]), EngineSettings())
    other = job(TEXTS[:5], clips_a_shard=7)
    other.settings["model"] = "n"
    with pytest.raises(UserError, match=r"model was m, is n; clips_a_shard was 10, is 7") as caught:
        run_job(other, EngineSettings())
    assert "data" not in str(caught.value).split(":", 1)[1]
    with pytest.raises(UserError, match="the files of the data have changed"):
        run_job(job(TEXTS[:6]), EngineSettings())
