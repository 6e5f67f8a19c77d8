"""Cutting recordings with their text into clips: texts, matching, choosing, and the command on a real model."""

import io
import json
import math
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import soundfile
from conftest import ROOT, VOICE_PROMPTS, read_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_cases import make_stream, read_epoch

from finetune.data.decode import as_float
from finetune.data.pauses import Stretch
from finetune.errors import UserError
from finetune.segment import main
from finetune.tools.segmentation.clips import fits
from finetune.tools.segmentation.hearing import Progress, batches_of
from finetune.tools.segmentation.matching import CELLS, anchored_share, match
from finetune.tools.segmentation.output import cut
from finetune.tools.segmentation.recording import SegmentSettings, open_recording, opened
from finetune.tools.segmentation.spans import Candidate, Judged, Span, choose
from finetune.tools.segmentation.texts import joined, read_words, words_of_line
from finetune.tools.transcription.subtitles import Cue, srt, vtt

BASE = ROOT / "examples" / "base" / "fastconformer_tdt_3m.nemo"
RATE = 16_000

# ---- texts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "normal"),
    [
        ("“Hello,” she said — it's 3.5 %.", ["hello", "she", "said", "it's", "3", "5"]),
        ("Call-Forward on L'heure", ["call", "forward", "on", "l'heure"]),
        ("你好，世界。Hello", ["你", "好", "世", "界", "hello"]),
        ("— ¿Qué? हिन्दी में", ["qué", "हिन्दी", "में"]),
        ("... !", []),
    ],
)
def test_words_of_a_line(line: str, normal: list[str]) -> None:
    words = words_of_line(line)
    assert [word.normal for word in words] == normal
    assert not words or joined(words) == line


@settings(deadline=None)
@given(st.text(max_size=60))
def test_words_are_the_line_again(line: str) -> None:
    words = words_of_line(line)
    assert not words or joined(words) == " ".join(line.split())
    assert all(word.normal and " " not in word.normal for word in words)


@pytest.mark.parametrize("kind", ["srt", "vtt"])
def test_subtitles_that_transcribe_writes_are_read(tmp_path: Path, kind: str) -> None:
    cues = [
        Cue(1000, 2500, "Hello there,\nyou & I --> now"),
        Cue(2500, 4000, "<i>and</i> then"),
        Cue(9000, 9900, "12"),
    ]
    path = tmp_path / f"a.{kind}"
    path.write_text((srt if kind == "srt" else vtt)(cues))
    words = read_words(path, 10.0)
    now = "-> now and" if kind == "srt" else "--> now <i>and</i>"  # .srt knows no escapes
    assert joined(words) == f"Hello there, you & I {now} then 12"
    assert [words[0].seconds, words[-1].seconds] == [1.75, 9.45]


def test_subtitles_of_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.srt"
    path.write_bytes(
        "\ufeff1\r\n00:00:01,000 --> 00:00:02,000 X1:40\r\n{\\an8}- One [door slams]\r\n\r\nmore of one\r\n\r\n2\r\n"
        "00:00:03,000 --> 00:00:04,000\r\n♪ two ♪\r\n3\r\n00:00:05,5 --> 00:00:06,0\r\nthree\r\n".encode()
    )
    assert [w.normal for w in read_words(path)] == ["one", "more", "of", "one", "two", "three"]
    path = tmp_path / "a.vtt"
    path.write_text(
        "WEBVTT - a title\n\nNOTE 00:01 --> later\nnot said\n\nSTYLE\n::cue { }\n\nintro\n"
        "00:01.000 --> 00:02.000 line:0\n<v Ann>One\ntwo</v>\n\n"
    )
    words = read_words(path)
    assert [w.normal for w in words] == ["one", "two"]
    assert words[0].seconds == 1.5


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.srt", "1\n00:00:05,000 --> 00:00:04,000\na\n", r"line 2.*00:00:05\.000 to 00:00:04\.000 ends before"),
        (
            "a.srt",
            "1\n00:00:05,000 --> 00:00:06,000\na\n\n2\n00:00:03,000 --> 00:00:07,000\nb\n",
            r"line 6.*00:00:03\.000.*begins before that of line 2, 00:00:05\.000",
        ),
        ("a.vtt", "WEBVTT\n\n01:00.000 --> 01:01.000\na\n", r"line 3.*behind the end of the recording, 00:00:30\.000"),
        ("a.srt", "1\n00:00:05 -> 00:00:06\na\n", "no subtitle"),
        ("a.srt", "1\n00:00:xx,000 --> 00:00:06,000\na\n", "line 2 has no two times"),
        ("a.txt", " \n... -\n", "no words"),
        ("a.txt", b"caf\xe9", r"no text in UTF-8 \(byte 3\)"),
        ("a.txt", b"a\0b", "zero bytes"),
    ],
)
def test_bad_texts_are_named(tmp_path: Path, name: str, content: str | bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=said):
        read_words(path, 30.0)


# ---- matching ------------------------------------------------------------------------------------------------------


def texts_of(words: int, seed: int) -> Callable[[int], list[str]]:
    """Return a source of texts whose words are as unequally frequent as those of a language."""
    rng = random.Random(seed)
    vocabulary = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(1, 8))) for _ in range(words)]
    weights = [1 / (i + 1) for i in range(words)]
    return lambda count: rng.choices(vocabulary, weights, k=count)


def test_a_long_text_with_errors_is_matched() -> None:
    rng, words = random.Random(0), texts_of(3000, 0)
    text = words(6000)
    heard, truth = [], []
    place = 0
    while place < len(text):
        if rng.random() < 0.002:
            heard, truth = heard + words(40), truth + [-1] * 40  # speech that has no text
        if rng.random() < 0.002:
            place += 100  # text that is not read
            continue
        chance = rng.random()
        if chance > 0.05:
            heard.append(text[place] if chance > 0.25 else text[place][:-1] + "z")
            truth.append(place)
        place += 1
    assert len(heard) * len(text) > 5 * CELLS
    found_H, truth_H = match(heard, text), np.array(truth)
    assert (np.diff(found_H[found_H >= 0]) > 0).all()
    assert (found_H == truth_H)[truth_H >= 0].mean() > 0.96
    assert (found_H >= 0)[truth_H < 0].mean() < 0.2


def test_times_of_subtitles_tell_equal_places_apart() -> None:
    text = ["yes", "no", "maybe"] * 3
    times_T = np.repeat([10.0, 100.0, 200.0], 3)
    assert match(text[:3], text, np.full(3, 100.0), times_T).tolist() == [3, 4, 5]
    unknown_T = np.full(9, np.nan)
    assert len(set(match(text[:3], text, np.full(3, 100.0), unknown_T).tolist()) - {-1}) == 3


def test_another_text_has_few_anchors() -> None:
    words = texts_of(3000, 1)
    text = words(5000)
    assert anchored_share(text[2000:2200], text) > 0.9
    assert anchored_share(words(200), text) < 0.02
    assert match([], text).tolist() == []
    assert match(["a"], []).tolist() == [-1]


def test_no_word_goes_to_two_stretches() -> None:
    """Both neighbours would take the third word, the second one gains more; a stretch between two others takes one."""
    word = words_of_line("a")[0]
    spans = [Span([word], [0], 0, 2, after=1), Span([word], [3], 3, 4, before=1)]
    judged: list[Judged | None] = [
        Judged(1, [Candidate(0, 2, 5, 1, 1), Candidate(0, 3, 4, 1, 1)]),
        Judged(1, [Candidate(3, 4, 9, 1, 1), Candidate(2, 4, 3, 1, 1)]),
    ]
    found = choose(spans, judged, 4)
    assert [(c.first, c.end) for c in found if c] == [(0, 2), (2, 4)]
    spans = [Span([word], [0], 0, 1), Span([word], [-1], 1, 1, after=2), Span([word], [3], 3, 4)]
    judged = [
        Judged(1, [Candidate(0, 1, 5, 1, 1)]),
        Judged(10, [Candidate(1, 2, 12, 1, 1), Candidate(1, 3, 30, 1, 1), Candidate(2, 3, 14, 1, 1)]),
        Judged(1, [Candidate(3, 4, 9, 1, 1)]),
    ]
    assert [(c.first, c.end) for c in choose(spans, judged, 4) if c] == [(0, 1), (1, 2), (3, 4)]


def test_a_text_fits_by_what_it_costs_against_what_was_heard() -> None:
    text = words_of_line("one two three")
    same, other = Span(words_of_line("One, two THREE"), [0, 1, 2], 0, 3), Span(words_of_line("one due"), [0, 1], 0, 3)
    assert fits(same, Judged(1, []), Candidate(0, 3, 90, 1, 1), text)
    for loss, heard_loss, fit in ((20, 1, True), (40, 1, False), (20, math.inf, False)):
        assert fits(other, Judged(heard_loss, []), Candidate(0, 3, loss, 1, 1), text) is fit


def test_places_are_cut_out_of_a_stream() -> None:
    audio_S = np.arange(1000, dtype=np.float32)
    places = [(0, 3), (3, 250), (600, 601), (990, 1000)]
    for size in (1, 7, 1000):
        parts = list(cut((audio_S[i : i + size] for i in range(0, 1000, size)), places))
        assert [part.tolist() for part in parts] == [audio_S[a:b].tolist() for a, b in places]


def test_rows_that_a_kill_cut_off_are_done_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"text": "caf\u00e9 \u2028 a"}, {"text": "\u00e9"}]
    Progress(path).add(rows)
    content = path.read_bytes()
    assert Progress(path).rows == rows
    for end in range(len(content) - 1, content.index(b"\n"), -1):  # also in the middle of a letter
        path.write_bytes(content[:end])
        assert Progress(path).rows == rows[:1]
    Progress(path).add(rows[1:])
    assert Progress(path).rows == rows


def test_long_stretches_are_decoded_in_smaller_batches() -> None:
    seconds = [1, 20, 3, 16, 8, 2, 7, 8, 5, 1, 8, 4]
    group = [Stretch(0, np.zeros(s * RATE, dtype=np.float32)) for s in seconds]
    found = list(batches_of(group, [i for i in range(len(group)) if i != 5], 4, RATE))
    assert sorted(i for own in found for i in own) == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
    assert [[seconds[i] for i in own] for own in found] == [[20], [16, 8], [8, 8, 7, 5], [4, 3, 1, 1]]
    assert [len(own) for own in batches_of(group, [1, 3], 1, RATE)] == [1, 1]


# ---- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[float, float, str]]]:
    """Two minutes of prompts with pauses and noise, and start, end and text of each.

    The texts are what the model hears in each prompt by itself, so that it hears them in the recording as well but for
    the noise, although it knows only synthetic voices.
    """
    from finetune.evaluation.long_audio import Chunk, Pieces
    from finetune.evaluation.recognise import evaluation_mode, recognise_chunks, text_of
    from finetune.models.loading import load_model

    rng = np.random.default_rng(0)
    rows = pq.read_table(next(VOICE_PROMPTS.glob("test-*.parquet"))).to_pylist()
    rows = [row for row in rows if row["language"] == "en" and row["duration"] > 1.2][:44]
    audio = [soundfile.read(io.BytesIO(row["audio"]["bytes"]), dtype="float32")[0] for row in rows]
    model = load_model(str(BASE), None)
    pieces = Pieces(model.tokenizer)
    with evaluation_mode(model):
        texts = [text_of(model, recognise_chunks(model, [Chunk(0, clip_S, 0)], pieces)[0]) for clip_S in audio]
    parts, places, length = [], [], 0
    for clip_S, text in zip(audio, texts, strict=True):
        pause = int(rng.uniform(0.5, 1.2) * RATE)
        parts += [np.zeros(pause, dtype=np.float32), clip_S]
        places.append(((length + pause) / RATE, (length + pause + len(clip_S)) / RATE, text))
        length += pause + len(clip_S)
    audio_S = np.concatenate([*parts, np.zeros(RATE, dtype=np.float32)])
    audio_S += 3e-4 * rng.standard_normal(len(audio_S)).astype(np.float32)
    path = tmp_path_factory.mktemp("recording") / "long.flac"
    soundfile.write(path, audio_S, RATE)
    return path, places


def clips_of(source: str) -> dict[str, tuple[str, np.ndarray]]:
    """Return text and samples by id, as training reads them."""
    return {
        batch.ids[i]: (batch.texts[i], as_float(batch.audio_BS[i, : int(batch.audio_lengths_B[i])]).numpy())
        for batch in read_epoch(make_stream(source, shuffle=False))
        for i in range(len(batch.ids))
    }


def run(recording: Path, text: Path, output: Path, *more: str) -> int:
    return main(["--model", str(BASE), "--audio", str(recording), "--text", str(text), "--output", str(output), *more])


def test_good_speech_comes_out_and_wrong_text_does_not(
    recording: tuple[Path, list[tuple[float, float, str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, places = recording
    wrong, missing, unread = {5, 17, 31}, {9, 24}, {13}
    lines = []
    for i, (_, _, text) in enumerate(places):
        lines.append(
            "" if i in missing else "this is something else altogether" if i in wrong else text.capitalize() + "."
        )
        if i in unread:
            lines.append("A footnote of several words that nobody has read aloud in this recording.")
    text_file = tmp_path / "text.txt"
    text_file.write_text("\n".join(lines))
    output = tmp_path / "out"
    assert run(path, text_file, output, "--shards", "parquet") == 0
    rows = read_lines(output / "manifest.jsonl")
    covered = [0.0] * len(places)
    for row in rows:
        start, end = row["offset"], row["offset"] + row["duration"]
        inside = [i for i, (a, b, _) in enumerate(places) if min(b, end) - max(a, start) > 0.1]
        for i in inside:
            covered[i] += (min(places[i][1], end) - max(places[i][0], start)) / (places[i][1] - places[i][0])
        spoken = " ".join(places[i][2] for i in inside).split()
        written = row["text"].lower().replace(".", "").split()
        assert set(written) <= set(spoken)
        assert "footnote" not in written
        assert 0 <= row["lowest_confidence"] <= row["confidence"] <= 1
        assert 0.5 <= row["duration"] <= 20
    bad = wrong | missing
    # Silence at a clip's own edges counts as part of it here.
    good = [share for i, share in enumerate(covered) if i not in bad]
    assert sum(good) / len(good) > 0.8
    assert max(covered[i] for i in bad) < 0.1
    left_out = read_lines(output / "left_out.jsonl")
    assert any(row["reason"] == "text that was not read" and "footnote" in row["text"] for row in left_out)
    summary = json.loads((output / "summary.json").read_text())
    words = sum(summary["left_out_words"].values()) + summary["clip_words"]
    assert words == summary["text_words"] == len(read_words(text_file))
    assert "text that was not read" in capsys.readouterr().out

    # Offsets and both kinds of shards are the same clips to training; another kind takes no more listening.
    as_parquet = tmp_path / "parquet"
    (output / "shards").rename(as_parquet)
    assert run(path, text_file, output, "--shards", "tar") == 0
    forms = (output / "manifest.jsonl", f"{output}/shards/*.tar", f"{as_parquet}/*.parquet")
    found = [clips_of(str(form)) for form in forms]
    assert [list(form) for form in found] == [[row["id"] for row in rows]] * 3
    for row in rows:
        texts, sounds = zip(*(form[row["id"]] for form in found), strict=True)
        assert texts == (row["text"],) * 3
        for sound_S in sounds[1:]:
            np.testing.assert_allclose(sound_S, sounds[0], atol=1e-4)

    # A job that was ended goes on where it was, from files that end in the middle of a line.
    again = tmp_path / "again"
    shutil.copytree(output, again)
    for name, lines_kept in (("heard.jsonl", 20), ("judged.jsonl", 5)):
        content = (output / name).read_text().splitlines(keepends=True)
        (again / name).write_text("".join(content[:lines_kept]) + content[lines_kept][:9])
    (again / "manifest.jsonl").unlink()
    assert run(path, text_file, again, "--shards", "parquet") == 0
    assert (again / "manifest.jsonl").read_text() == (output / "manifest.jsonl").read_text()
    assert run(path, text_file, again, "--max-seconds", "9") == 2
    assert "max_seconds (20.0, now 9.0)" in capsys.readouterr().err
    assert run(path, text_file, again, "--min-confidence", "1") == 1
    assert "no clip" in capsys.readouterr().out
    unsure = [r for r in read_lines(again / "left_out.jsonl") if r["reason"] == "confidence below --min-confidence"]
    assert sum(r["duration"] for r in unsure) > 0.9 * sum(r["duration"] for r in rows) - len(rows)
    assert not (again / "shards").exists()


def test_what_cannot_be_is_said_at_once(
    recording: tuple[Path, list[tuple[float, float, str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = recording
    text = tmp_path / "text.txt"
    text.write_text("the weather of the northern islands is said to be mild in spring and rough in winter " * 30)

    def refused(said: str, *more: str, audio: Path = path, output: str = "out") -> None:
        assert run(audio, text, tmp_path / output, *more) == 2
        assert said in capsys.readouterr().err

    refused("minutes of speech are not in text.txt", "--patience", "1")
    heard = read_lines(tmp_path / "out" / "heard.jsonl")
    assert len(heard) < 44  # not after all of it
    other = tmp_path / "other"
    other.mkdir()
    (other / "x").write_text("")
    refused("holds files that are not of this command", output="other")
    empty = tmp_path / "empty.wav"
    soundfile.write(empty, np.zeros(0), RATE)
    refused("the audio is empty", audio=empty, output="c")
    refused("there is no file", audio=tmp_path / "none.wav", output="d")
    silence = tmp_path / "silence.wav"
    soundfile.write(silence, np.zeros(3 * RATE), RATE)
    refused("hears no words", audio=silence, output="e")
    text.write_text("Добрый день. Это русский текст без единой латинской буквы.")
    refused("cannot write 9 of the 9 words", output="f")


def test_recordings_whose_clips_would_have_the_same_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("talks/a", "talks-a"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        soundfile.write(tmp_path / f"{name}.wav", np.zeros(RATE), RATE)
        (tmp_path / f"{name}.txt").write_text("one word")
    assert run(tmp_path, tmp_path, tmp_path / "out") == 2
    assert "talks-a.wav would have the same ids, talks-a-000000" in capsys.readouterr().err


def test_a_directory_takes_another_text_until_there_are_clips_and_never_another_sound(tmp_path: Path) -> None:
    audio, text, out = tmp_path / "a.wav", tmp_path / "a.txt", tmp_path / "out"
    soundfile.write(audio, np.zeros(RATE), RATE)

    def begin(words: str, *, renew: bool = False) -> set[str]:
        """Write another text and start; return which files of the earlier start are still there."""
        text.write_text(words)
        with opened(out, open_recording(audio, text), SegmentSettings(str(BASE)), renew=renew):
            return {path.name for path in out.iterdir() if not path.name.startswith(".")} - {"job.json"}

    assert begin("of another recording") == set()
    Progress(out / "heard.jsonl").add([{"text": "one"}])
    Progress(out / "judged.jsonl").add([{"loss": 1}])
    assert begin("of another recording") == {"heard.jsonl", "judged.jsonl"}
    assert begin("the right one") == {"heard.jsonl"}
    (out / "manifest.jsonl").touch()
    (out / "shards").mkdir()
    with pytest.raises(UserError, match="differs in text_sha256"):
        begin("a third one")
    assert begin("the right one") == {"heard.jsonl", "manifest.jsonl", "shards"}
    assert begin("a third one", renew=True) == {"heard.jsonl"}
    os.utime(audio, (1, 1))  # exported anew, with as many bytes
    with pytest.raises(UserError, match="differs in audio_time"):
        begin("a third one")
    assert begin("a third one", renew=True) == set()
    (out / "job.json").write_text("[1]")
    with pytest.raises(UserError, match="out cannot be used"):
        begin("a third one")


@pytest.mark.slow
def test_recordings_of_a_folder_are_cut_as_each_alone(
    recording: tuple[Path, list[tuple[float, float, str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, places = recording
    sound_S, _ = soundfile.read(path, dtype="float32")
    audio, texts = tmp_path / "audio", tmp_path / "texts"
    parts = {"a": places[:12], "talks/a": places[12:24], "talks/a/b": places[24:36]}
    for name, part in parts.items():
        for folder, suffix in ((audio, ".flac"), (texts, ".txt")):
            Path(f"{folder / name}{suffix}").parent.mkdir(parents=True, exist_ok=True)
        cut_S = sound_S[int(RATE * (part[0][0] - 0.5)) : int(RATE * (part[-1][1] + 0.5))]
        soundfile.write(audio / f"{name}.flac", cut_S, RATE)
        (texts / f"{name}.txt").write_text("\n".join(text for _, _, text in part))

    def cut(*more: str) -> int:
        return run(audio, texts, tmp_path / "out", *more)

    (texts / "talks/a/b.txt").rename(texts / "talks/a/c.txt")
    assert cut() == 2
    assert "no text for 1 of 3 recordings, such as" in capsys.readouterr().err
    (texts / "talks/a/c.txt").write_text("the weather of the northern islands is said to be mild in spring " * 9)
    (texts / "talks/a/c.txt").rename(texts / "talks/a/b.txt")
    assert cut("--max-failed", "0.3") == 1
    assert "1 of 3 clips failed" in capsys.readouterr().err
    assert cut("--shards", "parquet") == 0
    out = capsys.readouterr().out
    assert "2 of 3 recordings" in out
    assert "failed: talks/a/b: --text: the first" in out
    failed = read_lines(tmp_path / "out" / "failed.jsonl")
    assert [(row["id"], row["kind"]) for row in failed] == [("talks/a/b", "bad")]
    for name in ("a", "talks/a"):
        assert run(audio / f"{name}.flac", texts / f"{name}.txt", tmp_path / name.replace("/", "-")) == 0
    alone = [*read_lines(tmp_path / "a" / "manifest.jsonl"), *read_lines(tmp_path / "talks-a" / "manifest.jsonl")]
    rows = read_lines(tmp_path / "out" / "manifest.jsonl")
    assert [{**row, "id": ""} for row in rows] == [{**row, "id": ""} for row in alone]
    assert len({row["id"] for row in rows}) == len(rows) > 4
    assert set(clips_of(str(tmp_path / "out" / "recordings/**/*.parquet"))) == {row["id"] for row in rows}

    # A text that was mended and a new threshold are taken up, with the work that there is.
    folders = [tmp_path / "out" / "recordings" / f"{name}.flac" for name in parts]
    before = [(folder / "heard.jsonl").read_text() for folder in folders]
    (texts / "talks/a/b.txt").write_text("\n".join(text for _, _, text in parts["talks/a/b"]))
    assert cut("--min-seconds", "0.6", "--workers", "2") == 0
    assert "3 of 3 recordings" in capsys.readouterr().out
    assert not list((tmp_path / "out").glob(".work-*"))
    assert [(folder / "heard.jsonl").read_text() for folder in folders] == before
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert list(summary["recordings"]) == ["a", "talks/a", "talks/a/b"]
    rows = read_lines(tmp_path / "out" / "manifest.jsonl")
    assert summary["clips"] == len(rows) == sum(own["clips"] for own in summary["recordings"].values())
    assert min(row["duration"] for row in rows) >= 0.6
    left_out = read_lines(tmp_path / "out" / "left_out.jsonl")
    assert {row["recording"] for row in left_out} <= set(parts)
    assert cut("--max-seconds", "9") == 2
    assert "max_seconds (20.0, now 9.0)" in capsys.readouterr().err

    # A recording that was taken away, or that fails by now, leaves no clips behind.
    assert cut("--shards", "parquet") == 0
    shards = [folder / "shards" / "train-00000-of-00001.parquet" for folder in folders]
    assert sorted((tmp_path / "out").glob("recordings/**/*.parquet")) == sorted(shards)
    (audio / "talks/a.flac").unlink()
    (audio / "talks/a/b.flac").write_bytes(b"no sound")
    assert cut("--shards", "parquet", "--max-failed", "0.6") == 0
    rows = read_lines(tmp_path / "out" / "manifest.jsonl")
    assert {row["audio_filepath"] for row in rows} == {str(audio / "a.flac")}
    assert list((tmp_path / "out").glob("recordings/**/*.parquet")) == shards[:1]
    assert pq.read_table(shards[0])["id"].to_pylist() == [row["id"] for row in rows]
    assert [(folder / "heard.jsonl").read_text() for folder in folders] == before

    assert run(audio / "a.flac", texts / "a.txt", tmp_path / "b", "--workers", "2") == 2
    assert "name folders of these" in capsys.readouterr().err
    assert run(audio, texts / "a.txt", tmp_path / "b") == 2
    assert "a folder each" in capsys.readouterr().err
