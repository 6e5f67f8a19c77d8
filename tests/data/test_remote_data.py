"""Data that lies elsewhere: a hub on loopback, an S3 server on loopback; and NeMo's tarred data sets."""

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from conftest import ROOT, read_lines, slow, write_manifest
from hub_server import serve
from moto.server import ThreadedMotoServer
from stream_cases import ROWS, all_ids, check_resume, ids, make_stream, read_epoch, same_batches

from finetune.data import sources
from finetune.data.shards import manifest_shards
from finetune.data.stream import UtteranceStream
from finetune.data.tarred import expand_ranges
from finetune.errors import UserError

# ---- a hub ----------------------------------------------------------------------------------------------------------


def check_from_hub(endpoint: str, tmp_path: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The check command on a data set of the hub, as a user would start it."""
    out = tmp_path / "check"
    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
        "HF_HUB_OFFLINE": "0",
        "HF_DATASETS_OFFLINE": "0",
    }
    command = [sys.executable, "-m", "finetune.check", "--output-dir", str(out), "--workers", "1", "--overwrite"]
    command += [*arguments, "data.min_duration=0"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False), out


@pytest.mark.slow
def test_a_data_set_of_a_hub_that_fails_now_and_then(corpus: Path, tmp_path: Path) -> None:
    with serve(corpus / "shards", "team/speech", {r"resolve/.*/train-00002": 3}) as (endpoint, hub):
        done, out = check_from_hub(endpoint, tmp_path, "--data", "team/speech")
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads((out / "check.json").read_text())
        assert (found["rows"], found["clips"], found["bad"]) == (ROWS, ROWS, 0)
        assert max(hub.failures.values()) == 0
        assert any("train-00004" in asked for asked in hub.asked)
        assert not any("validation" in asked and "resolve" in asked for asked in hub.asked)
        done, _ = check_from_hub(endpoint, tmp_path, "--data", "team/nothing")
        assert done.returncode == 2
        assert "--data: team/nothing" in done.stderr


# ---- S3 -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bucket(corpus: Path) -> Iterator[str]:
    """An S3 server with the corpus in a bucket."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    names = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setenv(name, value)
        system = fsspec.filesystem("s3")
        system.mkdir("speech")
        for file in [*corpus.glob("*.flac"), *corpus.glob("*.jsonl"), *corpus.glob("shards/data/*.parquet")]:
            system.put_file(str(file), f"speech/{file.name}")
        yield "s3://speech"
    server.stop()


@pytest.mark.parametrize("path", ["manifest.jsonl", slow("train-*.parquet")])
def test_s3(bucket: str, path: str) -> None:
    batches = read_epoch(make_stream(f"{bucket}/{path}", shuffle=False))
    assert [q for b in batches for q in b.quarantined] == []
    assert ids(batches) == all_ids()
    assert sorted(ids(read_epoch(make_stream(f"{bucket}/{path}", group_by_duration=True)))) == all_ids()


@pytest.mark.parametrize("path", [slow("manifest.jsonl"), "train-*.parquet"])
def test_s3_in_worker_processes(bucket: str, path: str) -> None:
    """This process has a connection already; workers must not use it."""
    assert len(read_epoch(make_stream(f"{bucket}/{path}"))) > 1
    assert sorted(ids(read_epoch(make_stream(f"{bucket}/{path}", workers=2)))) == all_ids()


def test_opening_is_tried_again_where_the_network_fails(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    tries, waits = [], []
    read = sources.manifest_shards

    def shaky(path: str) -> Any:
        tries.append(path)
        if len(tries) < 3:
            raise TimeoutError("no answer")
        return read(str(corpus / "manifest.jsonl"))

    monkeypatch.setattr(sources, "manifest_shards", shaky)
    monkeypatch.setattr(sources, "wait_before", waits.append)
    source = sources.parse_sources("memory://bucket/m.jsonl", "data.train", "train")[0]
    assert sources.open_source(source, "data.train").clips == ROWS
    assert (len(tries), waits) == (3, [2, 3])
    assert any("TimeoutError: no answer; attempt 3 of 3 follows" in said for said in messages)
    monkeypatch.setattr(sources, "ATTEMPTS", 1)
    tries.clear()
    with pytest.raises(UserError, match="no answer"):
        sources.open_source(source, "data.train")


def test_a_chunk_of_a_remote_manifest_is_read_in_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    system = fsspec.filesystem("memory")
    lines = b"".join(b'{"audio_filepath": "%d.wav", "text": "a"}\n' % i for i in range(20_000))
    system.pipe_file("/bucket/m.jsonl", lines)
    shards, _ = manifest_shards("memory://bucket/m.jsonl")
    asked, cat = [], type(system).cat_file
    monkeypatch.setattr(type(system), "cat_file", lambda self, path, **r: asked.append(r) or cat(self, path, **r))
    assert [n for n, _ in shards[1].read(0)] == list(range(shards[1].rows))
    assert len(asked) == 1
    assert asked[0]["end"] - asked[0]["start"] < len(lines) / 2


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gs://bucket/train.jsonl", r"pip install -c constraints.txt -e '.\[gs\]'"),
        ("no://bucket/a.parquet", "no:// is no"),
    ],
)
def test_storage_that_cannot_be_read(path: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UserError, match=f"data.train: {path}.*{message}"):
        make_stream(path)


def test_s3_that_is_not_there(bucket: str) -> None:
    with pytest.raises(UserError, match=r"data.train: the manifest .*nothing.jsonl cannot be read: FileNotFoundError"):
        make_stream(f"{bucket}/nothing.jsonl")
    with pytest.raises(UserError, match=r"data.train: no file matches s3://speech/none-\*.parquet"):
        make_stream(f"{bucket}/none-*.parquet")


# ---- NeMo's tarred data sets ----------------------------------------------------------------------------------------


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


@pytest.fixture
def tarred(corpus: Path, tmp_path: Path) -> Path:
    """The corpus in three tar files, a manifest for each and one for all; a row too many, a file in two parts."""
    rows = read_lines(corpus / "manifest.jsonl")
    common: list[dict[str, Any]] = []
    for shard in range(3):
        own = rows[shard::3]
        with tarfile.open(tmp_path / f"audio_{shard}.tar", "w") as tar:
            for row in reversed(own):
                add(tar, row["audio_filepath"], (corpus / row["audio_filepath"]).read_bytes())
        if shard == 0:
            first = own[0]
            half = first["duration"] / 2
            own = [
                {**first, "duration": half},
                {**first, "audio_filepath": "clip00-sub1.flac", "id": "second half", "offset": half, "duration": half},
                *own[1:],
            ]
        if shard == 2:
            own = [*own, {**own[0], "id": "lost", "audio_filepath": "lost.flac"}]
        write_manifest(tmp_path / f"manifest_{shard}.jsonl", own)
        common += [{**row, "shard_id": shard} for row in own]
    write_manifest(tmp_path / "common.jsonl", common)
    return tmp_path


@pytest.mark.parametrize("manifest", ["manifest__OP_0..2_CL_.jsonl", "manifest_{0..2}.jsonl", "common.jsonl"])
def test_tarred_data_sets(tarred: Path, corpus: Path, manifest: str) -> None:
    value = {"path": str(tarred / manifest), "tarred_audio": str(tarred / "audio_{0..2}.tar")}
    whole = read_epoch(make_stream(value, shuffle=False))
    assert sorted(ids(whole)) == sorted([*all_ids(), "second half"])
    ((problem,),) = ([q for b in whole for q in b.quarantined],)
    assert (problem["id"], "holds no lost.flac" in problem["reason"]) == ("lost", True)
    lengths = {i: int(n) for b in whole if b.ids for i, n in zip(b.ids, b.audio_lengths_B, strict=True)}
    rows = {row["id"]: row for row in read_lines(corpus / "manifest.jsonl")}
    for name in ("clip00", "second half"):
        assert lengths[name] == pytest.approx(rows["clip00"]["duration"] / 2 * 16_000, abs=2)
    assert lengths["clip07"] == pytest.approx(rows["clip07"]["duration"] * 16_000, abs=1)
    parts = [ids(read_epoch(make_stream(value, rank=rank, ranks=4))) for rank in range(4)]
    assert sorted(i for part in parts for i in part) == sorted(ids(whole))


@pytest.mark.parametrize("group_by_duration", [False, True])
def test_tarred_data_sets_go_on(tarred: Path, group_by_duration: bool) -> None:
    value = {"path": str(tarred / "common.jsonl"), "tarred_audio": str(tarred / "audio_{0..2}.tar")}
    check_resume(lambda: make_stream(value, group_by_duration=group_by_duration), 1, [4, 1, -2])


@pytest.mark.parametrize(("before", "after"), [((1, 0), (1, 0)), ((2, 0), (1, 0)), ((1, 0), (3, 0)), ((2, 2), (2, 2))])
def test_webdataset_shards_go_on(
    corpus: Path, tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """Nobody tells how many rows these have."""
    rows = read_lines(corpus / "manifest.jsonl")
    for shard in range(3):
        with tarfile.open(tmp_path / f"s-{shard}.tar", "w") as tar:
            for row in rows[shard::3]:
                add(tar, f"{row['id']}.flac", (corpus / row["audio_filepath"]).read_bytes())
                add(tar, f"{row['id']}.txt", row["text"].encode())

    def streams(ranks: int, workers: int) -> list[UtteranceStream]:
        path = str(tmp_path / "s-*.tar")
        return [make_stream(path, rank=r, ranks=ranks, workers=workers) for r in range(ranks)]

    seen, states = [], []
    unbroken = [read_epoch(stream) for stream in streams(*before)]
    for stream in streams(*before):
        seen.append([batch for _, batch in zip(range(3), stream.batches())])
        states.append(json.loads(json.dumps(stream.state_dict())))
    rest = []
    for stream in streams(*after):
        stream.load_state_dict(states)
        rest.append(read_epoch(stream))
    if before == after:
        for whole, first, second in zip(unbroken, seen, rest, strict=True):
            assert same_batches(first + second, whole)
    assert sorted(i for part in [*seen, *rest] for i in ids(part)) == all_ids()


@pytest.mark.parametrize("path", ["manifest.jsonl", "train-*.parquet"])
def test_s3_goes_on(bucket: str, path: str) -> None:
    check_resume(lambda: make_stream(f"{bucket}/{path}", group_by_duration=True), 0, [5])


def test_tarred_data_sets_that_are_refused(tarred: Path) -> None:
    def stream(manifest: str, tars: str) -> None:
        make_stream({"path": str(tarred / manifest), "tarred_audio": str(tarred / tars)})

    with pytest.raises(UserError, match="3 manifests do not fit 2 tar files"):
        stream("manifest_{0..2}.jsonl", "audio_{0..1}.tar")
    with pytest.raises(UserError, match=r"common.jsonl line \d+ has shard_id 2; there are tar files 0 to 1"):
        stream("common.jsonl", "audio_{0..1}.tar")
    with pytest.raises(UserError, match=r"manifest cannot be read: FileNotFoundError"):
        stream("manifest_{3..5}.jsonl", "audio_{0..2}.tar")


@pytest.mark.parametrize("size", [700, 9000])
def test_a_tar_file_that_is_cut_off_loses_nothing_unsaid(tarred: Path, size: int) -> None:
    """Rows whose audio is behind the end are named one by one."""
    tar = tarred / "audio_1.tar"
    tar.write_bytes(tar.read_bytes()[:size])
    value = {"path": str(tarred / "common.jsonl"), "tarred_audio": str(tarred / "audio_{0..2}.tar")}
    batches = list(make_stream(value, shuffle=False).batches())
    error = batches[-1].error
    bad = {q["id"]: q["reason"] for b in batches for q in b.quarantined}
    readable = {i for i in all_ids() if int(i[4:]) % 3 != 1}
    assert readable <= set(ids(batches))
    assert (error is not None and str(tar) in error) or set(ids(batches)) | set(bad) >= set(all_ids())


def test_ranges() -> None:
    assert expand_ranges("a_{08..11}.tar") == [f"a_{n}.tar" for n in ("08", "09", "10", "11")]
    assert expand_ranges("d_OP_0..1_CL_/a_{0..1}.tar") == ["d0/a_0.tar", "d0/a_1.tar", "d1/a_0.tar", "d1/a_1.tar"]
