"""Bad audio, bad texts, bad paths: a message with the place and the remedy, or quarantine while the run goes on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
from conftest import read_lines, write_manifest

from finetune.data.decode import decode_audio
from finetune.data.quarantine import BadUtterance

RATE = 16_000
NOTHING_TO_JUDGE_BY: dict[str, Any] = {"validation": None, "test": None}


def good_rows(clips: Path) -> list[dict[str, Any]]:
    """Rows of the clips' manifest, with absolute paths."""
    rows = read_lines(clips / "manifest.jsonl")
    return [{**row, "audio_filepath": str(clips / row["audio_filepath"])} for row in rows]


def sine(seconds: float, rate: int, hertz: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


# ---- one file ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 22_254, 44_100, 48_000, 16_001])
def test_other_sample_rates_are_resampled(tmp_path: Path, rate: int) -> None:
    soundfile.write(tmp_path / "a.wav", sine(1.5, rate), rate)
    audio_S = decode_audio("a.wav", RATE, tmp_path)
    assert abs(len(audio_S) - 1.5 * RATE) <= 1
    assert audio_S.dtype == np.float32
    spectrum = np.abs(np.fft.rfft(audio_S))
    assert np.argmax(spectrum) * RATE / len(audio_S) == pytest.approx(440, abs=1)
    inner = slice(RATE // 10, -RATE // 10)
    assert np.abs(audio_S[inner] - sine(1.5, RATE)[: len(audio_S)][inner]).max() < 0.01


def test_channels_are_averaged(tmp_path: Path) -> None:
    left_S, right_S = sine(0.5, RATE, 300), sine(0.5, RATE, 500)
    soundfile.write(tmp_path / "a.wav", np.stack([left_S, right_S], axis=1), RATE, subtype="FLOAT")
    for audio in ("a.wav", {"bytes": (tmp_path / "a.wav").read_bytes(), "path": None}):
        audio_S = decode_audio(audio, RATE, tmp_path)
        assert audio_S.shape == (RATE // 2,)
        assert np.allclose(audio_S, (left_S + right_S) / 2, atol=1e-6)
    assert decode_audio({"array": left_S, "sampling_rate": 8_000}, RATE).shape == (RATE,)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.write_bytes(b""), "the audio is empty (0 bytes)"),
        (lambda path: path.write_bytes(b"RIFF this is no audio at all"), "the audio cannot be decoded: "),
        (lambda path: path.mkdir(), "there is no file "),
        (lambda path: None, "there is no file "),
        (lambda path: soundfile.write(path, np.zeros(0), RATE), "the audio is empty"),
        (
            lambda path: soundfile.write(path, np.array([0.0, np.nan, 0.1]), RATE, subtype="FLOAT"),
            "the audio holds samples that are not finite",
        ),
    ],
    ids=["zero bytes", "no audio", "a directory", "missing", "no samples", "NaN"],
)
def test_unusable_file(tmp_path: Path, make: Callable[[Path], Any], reason: str) -> None:
    path = tmp_path / "a.wav"
    make(path)
    with pytest.raises(BadUtterance) as caught:
        decode_audio(str(path), RATE)
    assert str(caught.value).startswith(reason)
    if path.is_file():
        with pytest.raises(BadUtterance):
            decode_audio({"bytes": path.read_bytes(), "path": None}, RATE)
    else:
        assert str(path) in str(caught.value)


# ---- bad clips among good ones -------------------------------------------------------------------------------------


def test_a_few_bad_clips_are_quarantined(
    failed: Callable[..., str], tiny_run: Callable[..., list[str]], clips: Path, tmp_path: Path
) -> None:
    good = good_rows(clips)
    audio = good[0]["audio_filepath"]
    (tmp_path / "zero.flac").write_bytes(b"")
    (tmp_path / "corrupt.flac").write_bytes(Path(audio).read_bytes()[:60] + b"\x55" * 500)
    soundfile.write(tmp_path / "nan.wav", np.full(RATE, np.nan), RATE, subtype="FLOAT")
    soundfile.write(tmp_path / "short.wav", np.zeros(100), RATE)
    soundfile.write(tmp_path / "stereo.wav", np.stack([sine(0.5, RATE)] * 2, axis=1), RATE)
    soundfile.write(tmp_path / "telephone.wav", sine(0.7, 8_000), 8_000)

    def row(name: str, **values: Any) -> dict[str, Any]:
        return {"audio_filepath": audio, "text": "yes", "lang": "en", "id": name, **values}

    bad = {
        "zero": (row("zero", audio_filepath="zero.flac"), "empty (0 bytes)"),
        "corrupt": (row("corrupt", audio_filepath="corrupt.flac"), "cannot be decoded"),
        "gone": (row("gone", audio_filepath="gone.flac"), f"there is no file {tmp_path / 'gone.flac'}"),
        "nan": (row("nan", audio_filepath="nan.wav"), "not finite"),
        "short": (row("short", audio_filepath="short.wav"), "too short"),
        "letters": (
            row("letters", text="日本 yes"),
            "no piece for '日本' (model.tokenizer.extend_from=DATA gives it pieces)",
        ),
        "number": (row("number", text=7), "no text in column 'text'"),
        "null": (row("null", text=None), "no text in column 'text'"),
        "no audio": ({"text": "yes", "id": "no audio"}, "no audio in column 'audio_filepath'"),
        "line": ('{"audio_filepath": "x.flac", "text":', "not valid JSON"),
        "list": ('["x.flac", "yes"]', "not a JSON object"),
    }
    filtered = [
        row("empty", text=""),
        row("dots", text=" ... "),
        row("long", duration=99.0),
        row("long too", duration=50),
    ]
    fine = [row("stereo", audio_filepath="stereo.wav"), row("telephone", audio_filepath="telephone.wav")]
    rows = [*good, *(r for r, _ in bad.values()), *filtered, *fine]
    manifest = write_manifest(tmp_path / "spoiled.jsonl", rows)
    data = {**NOTHING_TO_JUDGE_BY, "train": str(manifest), "min_duration": 0.0, "max_bad_fraction": 0.5}
    data["allow_large_losses"] = True  # the rows that claim 99 and 50 s hold most of the stated audio
    said = failed(0, *tiny_run("training.max_steps=-1", "training.num_train_epochs=2", data=data))

    assert "put in quarantine" in said
    lines = read_lines(tmp_path / "run" / "quarantine.jsonl")
    # Two epochs have met each of them twice; it is written once.
    assert len(lines) == len(bad)
    by_row = {int(line["source"].rsplit(" line ", 1)[1]) - 1: line for line in lines}
    for name, (bad_row, reason) in bad.items():
        line = by_row[rows.index(bad_row)]
        assert str(manifest) in line["source"]
        assert reason in line["reason"]
        assert line["id"] == (line["source"] if isinstance(bad_row, str) else name)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["quarantined"] == len(bad)
    assert summary["filtered"] == {"empty_text": 4, "longer_than_max_duration": 4}
    assert (summary["epochs"], summary["samples"]) == (2, 2 * (len(good) + len(fine)))


def test_bad_clips_of_an_evaluation(
    failed: Callable[..., str], tiny_run: Callable[..., list[str]], clips: Path, tmp_path: Path
) -> None:
    rows = good_rows(clips)[:6]
    judged = write_manifest(
        tmp_path / "judged.jsonl", [*rows, {**rows[0], "id": "lost", "audio_filepath": "lost.flac"}]
    )
    useless = write_manifest(tmp_path / "useless.jsonl", ["no JSON"])
    arguments = tiny_run("training.max_steps=1", data={"validation": str(judged), "test": str(useless)})
    said = failed(0, *arguments)
    assert "evaluation of test: no clip with words in it" in said
    lines = read_lines(tmp_path / "run" / "quarantine.jsonl")
    assert [line["id"] for line in lines if line["id"] == "lost"] == ["lost"]
    assert sum("not valid JSON" in line["reason"] for line in lines) == 1
    evaluations = read_lines(tmp_path / "run" / "evaluations.jsonl")
    assert {e["clips"] for e in evaluations if e["split"] == "validation" and e["language"] is None} == {6}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["quarantined"], summary["wer_after"]) == (2, None)
    assert (tmp_path / "run" / "model.nemo").is_file()


@pytest.fixture
def many(clips: Path, tmp_path: Path) -> Callable[[int, int], str]:
    """A manifest of so many good rows, a few short files over and over, and so many bad ones among them."""
    shortest = sorted(good_rows(clips), key=lambda row: row["duration"])[:4]

    def write(good: int, bad: int) -> str:
        rows = [{**shortest[i % 4], "id": f"good{i}"} for i in range(good)]
        rows += [{"audio_filepath": "gone.flac", "text": "yes", "duration": 0.5, "id": f"bad{i}"} for i in range(bad)]
        order = np.random.default_rng(0).permutation(len(rows))
        return str(write_manifest(tmp_path / f"many-{good}-{bad}.jsonl", [rows[i] for i in order]))

    return write


def test_too_many_bad_clips_stop_the_run(
    failed: Callable[..., str], tiny_run: Callable[..., list[str]], many: Callable[[int, int], str], tmp_path: Path
) -> None:
    def arguments(good: int, bad: int, **data: Any) -> list[str]:
        return tiny_run(
            data={**NOTHING_TO_JUDGE_BY, "train": many(good, bad), **data},
            training={
                "max_steps": -1,
                "num_train_epochs": 1,
                "per_device_train_batch_size": 32,
                "overwrite_output_dir": True,
            },
        )

    message = failed(1, *arguments(230, 20))
    quarantine = tmp_path / "run" / "quarantine.jsonl"
    assert "clips had to be put in quarantine, more than data.max_bad_fraction=0.05" in message
    assert " without a file (such as bad" in message
    assert "quarantine.jsonl of the run lists them" in message
    assert "Mend the data, or raise data.max_bad_fraction" in message
    bad, read = (int(word) for word in message.split(" clips")[0].split(" of "))
    assert read >= 200
    assert bad > 0.05 * read
    assert len(read_lines(quarantine)) == bad
    assert {line["reason"] for line in read_lines(quarantine)} == {f"there is no file {tmp_path / 'gone.flac'}"}
    assert not (tmp_path / "run" / "summary.json").exists()
    # A small set is judged at the end of the epoch; what was trained until then is kept.
    assert "20 of 60 clips had to be put in quarantine" in failed(1, *arguments(40, 20))
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
    # A larger limit, and a smaller share: the run goes on.
    for good, bad, limit in ((230, 20, 0.1), (245, 5, 0.05)):
        failed(0, *arguments(good, bad, max_bad_fraction=limit))
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert (summary["quarantined"], summary["samples"]) == (bad, good)
        assert len(read_lines(quarantine)) == bad


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"min_duration": 30.0}, "24 shorter than data.min_duration 30 s"),
        ({"max_duration": 0.2, "min_duration": 0.0}, "24 longer than data.max_duration 0.2 s"),
    ],
)
def test_all_clips_filtered_out(
    failed: Callable[..., str], tiny_run: Callable[..., list[str]], data: dict[str, Any], reason: str
) -> None:
    message = failed(1, *tiny_run("data.allow_large_losses=true", data={**NOTHING_TO_JUDGE_BY, **data}))
    assert message.strip() == f"data.train: no clip is left to train on of 24: {reason}."


def test_all_clips_bad_or_none_there(
    failed: Callable[..., str], tiny_run: Callable[..., list[str]], tmp_path: Path
) -> None:
    rows = [{"audio_filepath": "gone.flac", "text": "yes"}, "no JSON", {"audio_filepath": "gone.flac", "text": ""}]
    manifest = write_manifest(tmp_path / "bad.jsonl", rows)
    message = failed(1, *tiny_run(data={**NOTHING_TO_JUDGE_BY, "train": str(manifest)}))
    assert "no clip is left to train on of 3: 2 bad: without a file (such as gone.flac)" in message
    assert f"1 bad: the line is not valid JSON (such as {manifest} line 2)" in message

    (tmp_path / "blank.jsonl").write_text("\n\n")
    message = failed(1, *tiny_run(data={**NOTHING_TO_JUDGE_BY, "train": str(tmp_path / "blank.jsonl")}))
    assert "no clip is left to train on of 0: there are none" in message


def test_audio_that_only_decoding_finds_bad(
    failed: Callable[..., str], tiny_run: Callable[..., list[str]], tmp_path: Path
) -> None:
    soundfile.write(tmp_path / "nan.wav", np.full(RATE, np.nan), RATE, subtype="FLOAT")
    rows = [{"audio_filepath": "nan.wav", "text": "yes", "id": f"nan{i}"} for i in range(3)]
    manifest = write_manifest(tmp_path / "bad.jsonl", rows)
    message = failed(1, *tiny_run(data={**NOTHING_TO_JUDGE_BY, "train": str(manifest)}))
    assert "no clip is left to train on. Read 3, put 3 in quarantine: 3 with samples that are not finite" in message
    assert len(read_lines(tmp_path / "run" / "quarantine.jsonl")) == 3


def write_empty_shard(path: Path) -> None:
    schema = pa.schema([("audio", pa.struct([("bytes", pa.binary()), ("path", pa.string())])), ("text", pa.string())])
    pq.write_table(pa.Table.from_pylist([], schema=schema), path)


def test_an_empty_shard_among_others(
    failed: Callable[..., str], tiny_run: Callable[..., list[str]], clips: Path, tmp_path: Path
) -> None:
    for i in (0, 2):
        pq.write_table(parquet_table(good_rows(clips)[i : i + 2]), tmp_path / f"train-{i}.parquet")
    write_empty_shard(tmp_path / "train-1.parquet")
    write_empty_shard(tmp_path / "train-3.parquet")
    for path in (f"{tmp_path}/train-*.parquet", str(tmp_path)):
        failed(
            0,
            *tiny_run(
                "training.overwrite_output_dir=true",
                data={**NOTHING_TO_JUDGE_BY, "train": path},
                training={"max_steps": -1, "num_train_epochs": 1},
            ),
        )
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["samples"] == 4


def parquet_table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(
        [
            {"audio": {"bytes": Path(row["audio_filepath"]).read_bytes(), "path": None}, "text": row["text"]}
            for row in rows
        ]
    )


def test_a_broken_shard_stops_the_run(
    failed: Callable[..., str], tiny_run: Callable[..., list[str]], clips: Path, tmp_path: Path
) -> None:
    path = tmp_path / "shard.parquet"
    pq.write_table(parquet_table(good_rows(clips)), path, row_group_size=4)
    whole = path.read_bytes()
    path.write_bytes(whole[:200] + bytes(len(whole) // 2) + whole[200 + len(whole) // 2 :])
    message = failed(1, *tiny_run(data={**NOTHING_TO_JUDGE_BY, "train": str(path)}))
    assert message.startswith("data.train: ")
    assert str(path) in message
    assert "cannot be read from row" in message
    message = failed(1, *tiny_run(f"training.output_dir={tmp_path / 'second'}", data={"validation": str(path)}))
    assert message.startswith("evaluate validation: ")
    assert str(path) in message


# ---- data that is not there ----------------------------------------------------------------------------------------


def test_data_paths(refused: Callable[..., str], tiny_run: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "README.txt").write_text("nothing here")
    (tmp_path / "train.txt").write_text("nothing here")
    pq.write_table(pa.table({"audio": [{"path": "a"}], "n": [1]}), tmp_path / "wordless.parquet")
    pq.write_table(pa.table({"text": ["a"], "n": [1]}), tmp_path / "silent.parquet")
    write_empty_shard(tmp_path / "none.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 this is no parquet file")
    cases = {
        "empty.jsonl": "the manifest {} is empty",
        "nowhere.jsonl": "there is no manifest {}",
        "nowhere": "there is no file or directory {}",
        "folder": "the directory {} is empty",
        "notes": "{}",
        "train.txt": "{} is neither a manifest",
        "*.flac": "no file matches {}",
        "wordless.parquet": "{} has no column of text; it has ['audio', 'n']. Set `text_column`",
        "silent.parquet": "{} has no column of audio; it has ['text', 'n']. Set `audio_column`",
        "none.parquet": "{} (split train) is empty: it holds no clips",
        "broken.parquet": "{} (split train) cannot be opened",
    }
    for name, expected in cases.items():
        path = str(tmp_path / name)
        message = refused(*tiny_run(data={**NOTHING_TO_JUDGE_BY, "train": path}))
        assert message.startswith("data.train: ")
        assert expected.format(path) in message, message


def test_all_bad_paths_at_once(
    refused: Callable[..., str], tiny_run: Callable[..., list[str]], tmp_path: Path
) -> None:
    bad = {key: str(tmp_path / f"no-{key}.jsonl") for key in ("train", "validation", "guard")}
    message = refused(*tiny_run(data=bad))
    for key, path in bad.items():
        assert f"data.{key}: there is no manifest {path}" in message
    assert "data.test" not in message


def test_a_data_set_that_no_hub_has(refused: Callable[..., str], tiny_run: Callable[..., list[str]]) -> None:
    message = refused(*tiny_run(data={**NOTHING_TO_JUDGE_BY, "train": "nobody/no-such-data"}))
    assert "data.train: nobody/no-such-data" in message
    assert "no local path either; check the name and the network" in message
