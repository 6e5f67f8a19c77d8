"""The command that reads a data set and reports on it."""

import functools
import http.server
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from conftest import ROOT, read_lines, write_manifest
from stream_cases import RATE, ids, make_stream, read_epoch

from finetune.check import is_divided, main
from finetune.config.load import load_config
from finetune.data.batching import BatchLimits
from finetune.data.decode import decode_audio
from finetune.data.leave_out import LeaveOut
from finetune.data.quarantine import BadUtterance
from finetune.data.run_file import open_sources
from finetune.errors import UserError
from finetune.tools.data_check import inspection
from finetune.tools.data_check.doubts import doubt_about_file
from finetune.tools.data_check.inspection import estimate_padding
from finetune.tools.data_check.texts import Texts, findings, lines_about


@pytest.fixture
def spoiled(tmp_path: Path) -> Path:
    """Forty clips of 0.5 to 1.5 s, two languages; a missing file, an empty text, an id twice, a wrong duration."""
    random = np.random.default_rng(0)
    rows = []
    for i in range(40):
        samples_S = 0.1 * random.standard_normal(int(RATE * random.uniform(0.5, 1.5)))
        soundfile.write(tmp_path / f"{i}.flac", samples_S, RATE)
        rows.append(
            {
                "audio_filepath": f"{i}.flac",
                "id": f"c{i}",
                "text": f"text {i}",
                "lang": "en" if i % 4 else "fr",
                "duration": len(samples_S) / RATE,
            }
        )
    rows[3]["audio_filepath"] = "gone.flac"
    rows[5]["text"] = " "
    rows[7]["id"] = "c8"
    rows[9]["duration"] = 9.0
    return write_manifest(tmp_path / "m.jsonl", rows)


def test_the_report(spoiled: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "check"
    arguments = [
        "--data",
        str(spoiled),
        "--output-dir",
        str(out),
        "--workers",
        "2",
        "--json",
        str(tmp_path / "figures.json"),
    ]
    assert main(arguments) == 0
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found == json.loads((out / "check.json").read_text())
    assert (found["rows"], found["clips"], found["bad"], found["duplicate_ids"]) == (40, 37, 2, 1)
    assert found["filtered"] == {"empty_text": 1}
    assert found["problems"] == {"without a file": 1, "of another length than the row says": 1}
    assert found["clips_by_language"] == {"en": 27, "fr": 10}
    seconds = sum(soundfile.info(spoiled.parent / f"{i}.flac").duration for i in range(40) if i not in (3, 5, 9))
    assert found["hours"] == pytest.approx(seconds / 3600, rel=1e-6)
    assert sum(found["histograms"]["seconds"]["counts"]) == 37
    assert found["padding"]["by duration"] < found["padding"]["at random"]
    assert {line["id"] for line in read_lines(out / "problems.jsonl") if "id" in line} == {"c3", "c9"}
    problems = {line["source"]: line["reason"] for line in read_lines(out / "problems.jsonl")}
    assert problems[f"{spoiled} line 9"] == "duplicate_id"
    assert len(problems) == 3
    page = (out / "report.html").read_text()
    assert "data:image/png;base64," in page
    assert "there is no file" in page
    said = capsys.readouterr().out
    assert "40 rows, 37 clips" in said
    assert "        1  without a text, such as c5\n" in said
    assert f"        1  bad, such as c3: there is no file {spoiled.parent / 'gone.flac'}\n" in said
    assert "        1  bad, such as c9: the row says 9.00 s, the audio has " in said


def test_training_leaves_out_what_the_check_has_found(spoiled: Path, tmp_path: Path) -> None:
    main(["--data", str(spoiled), "--output-dir", str(tmp_path / "check"), "--workers", "1"])
    leave_out = LeaveOut(str(tmp_path / "check" / "problems.jsonl"), "data.leave_out")
    batches = read_epoch(make_stream(str(spoiled), leave_out=leave_out, check_durations=True, workers=1))
    assert [q for b in batches for q in b.quarantined] == []
    filtered = sum((Counter(b.filtered) for b in batches), Counter())
    assert filtered == {"duplicate_id": 1, "in_leave_out": 2, "empty_text": 1}
    assert sorted(ids(batches)) == sorted({f"c{i}" for i in range(40)} - {"c3", "c5", "c7", "c9"})


def test_equal_paths_in_two_folders_are_no_duplicates(tmp_path: Path) -> None:
    manifests = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        soundfile.write(tmp_path / folder / "0.wav", np.zeros(RATE), RATE)
        rows = [{"audio_filepath": "0.wav", "text": "a"}]
        manifests.append(str(write_manifest(tmp_path / folder / "m.jsonl", rows)))
    main(["--data", *manifests, "--output-dir", str(tmp_path / "check"), "--workers", "1"])
    assert read_lines(tmp_path / "check" / "problems.jsonl") == []


@pytest.mark.slow
def test_a_check_that_was_finished_reads_everything_again(spoiled: Path, tmp_path: Path) -> None:
    arguments = ["--data", str(spoiled), "--output-dir", str(tmp_path / "check"), "--workers", "1"]
    main(arguments)
    soundfile.write(spoiled.parent / "gone.flac", np.zeros(RATE), RATE)
    main([*arguments, "--overwrite"])
    assert {p.get("id") for p in read_lines(tmp_path / "check" / "problems.jsonl")} == {"c9", None}
    assert "without a file" not in json.loads((tmp_path / "check" / "check.json").read_text())["problems"]


@pytest.mark.timeout(900)
def test_a_process_that_is_killed_ends_the_check(
    spoiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(inspection, "read_samples", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    assert main(["--data", str(spoiled), "--output-dir", str(tmp_path / "check"), "--workers", "2"]) == 1
    assert re.search(rf"a process was killed.*at {spoiled} line \d+.*fewer --workers", capsys.readouterr().err)


@pytest.mark.timeout(300)
def test_an_interrupted_check_goes_on(tmp_path: Path, capsys: Any) -> None:
    """Ctrl-C at a terminal reaches the worker, too, which waits for audio here."""
    for i in range(2):
        soundfile.write(tmp_path / f"{i}.wav", np.full(RATE, i / 2), RATE)
    asked, released = threading.Event(), threading.Event()

    class Late(http.server.SimpleHTTPRequestHandler):
        def send_head(self) -> Any:
            asked.set()
            released.wait()
            return super().send_head()

    late = functools.partial(Late, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), late) as server:
        threading.Thread(target=server.serve_forever).start()
        here = write_manifest(tmp_path / "here.jsonl", [{"audio_filepath": "0.wav", "text": "a"}])
        row = {"audio_filepath": f"http://127.0.0.1:{server.server_port}/1.wav", "text": "b"}
        arguments = ["--data", str(here), str(write_manifest(tmp_path / "there.jsonl", [row])), "--workers", "1"]
        arguments += ["--output-dir", str(tmp_path / "check")]
        process = subprocess.Popen(
            [sys.executable, "-m", "finetune.check", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        assert asked.wait(200)
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate()[1]
        released.set()
        assert main(arguments) == 0
        server.shutdown()
    assert process.returncode == 130
    assert said.splitlines()[-1] == "interrupted: 1 of 2 shards are read; the same line goes on there"
    assert "Traceback" not in said
    printed = capsys.readouterr()
    assert "goes on: 1 of 2 shards have been read before" in printed.err
    assert "2 rows, 2 clips" in printed.out
    assert (
        printed.out.splitlines()[-1]
        == f"next: parakeet-finetune split --data {shlex.join(arguments[1:3])} --output DIR"
    )


def test_parts_of_one_file_are_no_duplicates(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "long.wav", np.random.default_rng(0).uniform(-0.1, 0.1, 4 * RATE), RATE)
    rows = [{"audio_filepath": "long.wav", "offset": i, "duration": 1.0, "text": "a"} for i in (0, 1, 2, 1)]
    manifest = write_manifest(tmp_path / "m.jsonl", rows)
    main(["--data", str(manifest), "--output-dir", str(tmp_path / "check"), "--workers", "1"])
    assert [p["source"] for p in read_lines(tmp_path / "check" / "problems.jsonl")] == [f"{manifest} line 4"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"source": "other.jsonl line 3", "reason": "x"}\n', "names rows of other.jsonl, but data.train reads"),
        ('{"source": "a line 3"}\nwords\n', "line 2 of .* is no"),
        ("[1]\n", "line 1 of .* is no"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_list_that_cannot_be_used(tiny_run: Any, tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "list.jsonl").write_text(content)
    run_file = tiny_run(data={"leave_out": str(tmp_path / "list.jsonl")})[1]
    config, _ = load_config(Path(run_file), [], [])
    with pytest.raises(UserError, match=f"data.leave_out.*{message}"):
        open_sources(config)


@pytest.mark.slow
def test_a_check_goes_on_where_it_was_and_begins_anew_for_other_data(
    spoiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "check"
    arguments = ["--data", str(spoiled), "--output-dir", str(out), "--workers", "1", "--overwrite"]
    began = []
    read_all = inspection.read_all

    def read(*given: Any) -> list[Path]:
        began.append((out / "parts" / "of.txt").read_text())
        return read_all(*given)

    monkeypatch.setattr(inspection, "read_all", read)
    main(arguments)
    parts = sorted((out / "parts").glob("*.json"))
    (out / "parts" / "of.txt").write_text(began[0])  # as if it had been interrupted before its end
    whole = json.loads((out / "check.json").read_text())
    times = {p: p.stat().st_mtime_ns for p in parts}
    parts[0].unlink()
    main(arguments)
    assert json.loads((out / "check.json").read_text()) == whole
    assert {p for p in parts if p.stat().st_mtime_ns == times[p]} == set(parts[1:])
    write_manifest(spoiled, read_lines(spoiled)[:10])
    main(arguments)
    assert json.loads((out / "check.json").read_text())["rows"] == 10


def test_with_a_run_file_its_filters_and_its_model(tiny_run: Any, tmp_path: Path, capsys: Any) -> None:
    run_file = tiny_run(data={"filters": {"max_tokens": 4}, "max_duration": 1.0})[1]
    assert main(["--config", run_file, "--output-dir", str(tmp_path / "check"), "--workers", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"next: parakeet-finetune plan --config {run_file}"
    found = json.loads((tmp_path / "check" / "check.json").read_text())
    assert found["filtered"]["more_than_max_tokens"] > 0
    assert found["rows"] == found["clips"] + sum(found["filtered"].values())


def test_too_many_bad_clips_are_a_bad_verdict(tmp_path: Path, capsys: Any) -> None:
    rows = [{"audio_filepath": f"{i}.flac", "text": "a"} for i in range(10)]
    manifest = write_manifest(tmp_path / "m.jsonl", rows)
    assert main(["--data", str(manifest), "--output-dir", str(tmp_path / "check")]) == 1
    assert main(["--data", str(tmp_path / "none.jsonl"), "--output-dir", str(tmp_path / "other")]) == 2
    assert "there is no manifest" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2


def test_estimated_padding() -> None:
    same = [[5.0, 20]] * 100
    assert estimate_padding(same, BatchLimits(clips=8), 64) == {"by duration": 0.0, "at random": 0.0}
    mixed = [[1.0 + i % 10, 20] for i in range(400)]
    found = estimate_padding(mixed, BatchLimits(clips=8), 200)
    assert found["by duration"] < 0.1 < 0.3 < found["at random"]


LOST = [
    ("non so se sar? pronto", "it"),
    ("perch?no", "it"),
    ("Questa \u00c3\u00a8 la citt\u00c3\u00a0", "it"),
    ("caf\ufffd", "it"),
    ("p\u0430gina", "it"),  # a Cyrillic letter
    ("<unk> ciao", "it"),
    ("PREMI IL TASTO", "it"),
    ("ho 3 gatti", "it"),
    ("ho cinque gatti", "it"),
    ("Come stai? Bene, grazie.", "it"),
    ("Really? Yes, of course: OK.", "en"),
]


@pytest.fixture
def lost_accents(tmp_path: Path) -> Path:
    soundfile.write(tmp_path / "a.flac", 0.1 * np.random.default_rng(0).standard_normal(2 * RATE), RATE)
    rows = [
        {"audio_filepath": "a.flac", "id": f"c{i}", "text": text, "lang": language}
        for i, (text, language) in enumerate(LOST)
    ]
    return write_manifest(tmp_path / "lost.jsonl", rows)


def test_what_looks_wrong_in_texts_is_on_the_screen(lost_accents: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "check"
    arguments = ["--data", str(lost_accents), "--output-dir", str(out), "--workers", "1"]
    assert main([*arguments, "data.text_normalization=basic"]) == 0
    said = capsys.readouterr().out
    for line in (
        "texts it: 10, of ",
        "        2  texts with '?' inside or in place of letters: perch?no",
        "        1  texts with UTF-8 that was read as Latin-1: Questa \u00c3\u00a8 la citt\u00c3",
        "        1  texts with U+FFFD, a character that was lost: caf\ufffd",
        "        1  texts with two scripts in one word: p\u0430gina",
        "        1  texts with markup: <unk> ciao",
        "        1  texts with capitals only: PREMI IL TASTO",
        "        1  texts with digits, beside 1 with number words: ho 3 gatti | ho cinque gatti",
        "characters that data.text_normalization takes out: ? 3 ",
    ):
        assert line in said, said
    english = said.split("texts en: ")[1].split("rows, ")[0]
    assert "texts with" not in english
    found = json.loads((out / "check.json").read_text())["texts"]
    assert (found["it"]["texts"], found["en"]["texts"]) == (10, 1)
    assert found["it"]["characters"]["?"] == 3
    assert found["it"]["examples"]["\ufffd"] == "caf\ufffd"
    assert "caf\ufffd" in (out / "report.html").read_text(encoding="utf-8")


def test_suspicious_clips_are_named(tmp_path: Path, capsys: Any) -> None:
    """They are trained on, and listed so that data.leave_out can take them."""
    noise = 0.1 * np.random.default_rng(0).standard_normal(2 * RATE)
    texts = ["Well said", "nothing heard", "much too much text for a tenth of a second", "Perch?no", "the end is gone"]
    texts += ["Conserv? dans", "Not cut off but piped"]
    for i in range(7):
        samples_S = 0.0 * noise if i == 1 else noise[: RATE // 5] if i == 2 else noise
        soundfile.write(tmp_path / f"{i}.wav", samples_S, RATE)
    whole = (tmp_path / "4.wav").read_bytes()
    (tmp_path / "4.wav").write_bytes(whole[: len(whole) // 2])
    piped = bytearray((tmp_path / "6.wav").read_bytes())
    piped[4:8] = b"\x24\xf0\xff\x7f"  # as SoX writes it, which does not know the length
    (tmp_path / "6.wav").write_bytes(piped)
    rows = [{"id": f"c{i}", "audio_filepath": f"{i}.wav", "text": text} for i, text in enumerate(texts)]
    rows.append({"id": "gone", "audio_filepath": "gone.wav", "text": "no file"})
    manifest, out = write_manifest(tmp_path / "m.jsonl", rows), tmp_path / "check"
    os.mkfifo(tmp_path / "pipe.wav")
    write_manifest(tmp_path / "pipe.jsonl", [{"audio_filepath": "pipe.wav", "text": "never comes"}])
    assert main(["--data", str(tmp_path / "pipe.jsonl"), "--output-dir", str(tmp_path / "p"), "--workers", "1"]) == 1
    main(["--data", str(manifest), "--output-dir", str(out), "--workers", "1"])
    said = capsys.readouterr().out
    assert "        1  silent clips, such as c1: -120 dB of full scale\n" in said
    assert "        1  clips with more than 30 characters a second, such as c2: 42 characters in 0.20 s are " in said
    half = f"{len(whole) // 2:,} of {len(whole):,} bytes are there"
    assert f"        1  files that are cut off, such as c4: {half}\n" in said
    without = f"parakeet-finetune split --data {manifest} --output DIR --leave-out {out}/suspicious.jsonl\n"
    assert f"5 suspicious clips, with reasons: {out}/suspicious.jsonl. Correct them; or, to train without" in said
    assert without in said
    listed = {line["id"]: line["reason"] for line in read_lines(out / "suspicious.jsonl")}
    assert set(listed) == {"gone", "c1", "c2", "c3", "c4", "c5"}
    assert listed["c3"] == "the text has '?' inside or in place of letters"
    assert listed["c5"] == "the text has '?' before a small letter"
    assert "cut off" in (out / "report.html").read_text()
    for _ in range(2):  # what is left out stays in the list that is written over
        leave_out = f"data.leave_out={out / 'suspicious.jsonl'}"
        arguments = ["--data", str(manifest), "--output-dir", str(out), "--workers", "1", "--overwrite"]
        assert main([*arguments, leave_out]) == 0
        assert "suspicious clip" not in capsys.readouterr().out
    stream = make_stream(str(manifest), leave_out=LeaveOut(str(out / "suspicious.jsonl"), "data.leave_out"))
    assert sorted(ids(read_epoch(stream))) == ["c0", "c6"]


@pytest.mark.parametrize(
    ("form", "subtype"),
    [("MP3", None), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("FLAC", None), ("WAV", None), ("AIFF", None)],
)
def test_files_that_are_cut_off(form: str, subtype: str | None, tmp_path: Path) -> None:
    """As a file and as bytes; FLAC that is cut off cannot be decoded."""
    sound = io.BytesIO()
    soundfile.write(sound, 0.1 * np.random.default_rng(0).standard_normal(4 * RATE), RATE, subtype, format=form)
    tag = b"ID3\x03\0\0\0\0\x01\0" + bytes(128)
    for head in (b"", tag) if form == "MP3" else (b"",):
        whole = head + sound.getvalue()
        for share in (1.0, 0.9, 0.5):
            part = whole[: int(share * len(whole))]
            (tmp_path / "a").write_bytes(part)
            for audio in ("a", {"bytes": part}):
                try:
                    seconds = len(decode_audio(audio, RATE, str(tmp_path))) / RATE
                except BadUtterance:
                    assert (form, share < 1) == ("FLAC", True)
                    continue
                said = [kind for kind, _ in doubt_about_file(audio, str(tmp_path), seconds)]
                assert said == ["files that are cut off"] * (share < 1), share


def test_what_follows_a_check_is_said(clips: Path, corpus: Path, tmp_path: Path) -> None:
    for data, divided in (
        (str(clips), False),
        (str(clips / "manifest.jsonl"), False),
        (str(corpus / "shards"), True),
        (str(corpus / "shards" / "data" / "train-*.parquet"), True),
        ("owner/name", True),
        ("s3://bucket/all.jsonl", True),
    ):
        assert is_divided(data) == divided, data
    (tmp_path / "validation.jsonl").write_text("")
    (tmp_path / "train.jsonl").write_text("")
    assert is_divided(str(tmp_path / "train.jsonl"))


def test_rare_characters_have_an_example() -> None:
    texts = Texts()
    for _ in range(400):
        texts.add("questa parola", "none")
    texts.add("l'unica \u0301", "none")
    lines = list(lines_about("it", texts, 1))
    assert lines[0].startswith("texts it: 401, of 15 characters: a 1,201 ")
    assert "        1  '  in: l'unica" in [line[: len("        1  '  in: l'unica")] for line in lines]
    assert any(line.startswith("        1  U+0301 COMBINING ACUTE ACCENT  in: ") for line in lines)
    merged = Texts()
    merged.merge(json.loads(json.dumps(texts.as_json())))
    merged.merge(json.loads(json.dumps(texts.as_json())))
    assert (merged.texts, merged.characters["q"], merged.examples["'"]) == (802, 800, texts.examples["'"])


@pytest.mark.parametrize(
    "text",
    [
        "What? No.",
        "Comment \u00e7a va ? Bien",
        "OK",
        "\u201cCAF\u00c9\u201d b",
        "\u00c9t\u00e9\u2026 oui",
        "Что? Да",
        "l'\u00e9t\u00e9",
        "le chat du voisin en sept.",
        "du bist da",
        "iki rytojaus",
        "voi siete pronti, ho sete",
    ],
)
def test_nothing_is_wrong_with_these(text: str) -> None:
    assert list(findings(text)) == []


def test_a_question_mark_before_a_small_letter_is_wrong_where_sentences_begin_with_capitals() -> None:
    texts = Texts()
    for text in ("come stai? bene", "perch?no"):
        texts.add(text, "none")
    lost = "'?' inside or in place of letters"
    assert texts.suspicious() == [(lost, 1, "perch?no")]
    texts.add("Non so se sar? pronto", "none")
    assert texts.suspicious() == [(lost, 3, "perch?no")]


@pytest.mark.slow
def test_the_advice_of_a_problem_is_taken_by_the_same_command(
    tiny_model: Path, clips: Path, tmp_path: Path, capsys: Any
) -> None:
    rows = [
        {**row, "audio_filepath": str(clips / row["audio_filepath"])} for row in read_lines(clips / "manifest.jsonl")
    ]
    for row in rows:
        row["text"] = row["text"].capitalize()
    manifest = write_manifest(tmp_path / "capitals.jsonl", rows)
    arguments = [
        "--data",
        str(manifest),
        "--model",
        str(tiny_model),
        "--workers",
        "1",
        "--output-dir",
        str(tmp_path / "check"),
    ]
    assert main(arguments) == 1
    assert "  bad, such as " in capsys.readouterr().out
    reason = read_lines(tmp_path / "check" / "problems.jsonl")[0]["reason"]
    advice = re.search(r"\((data\.text_normalization=basic)\)", reason)
    assert advice, reason
    assert main([*arguments, "--overwrite", advice[1]]) == 0
    rows[0]["text"] = "ça ñ"
    write_manifest(manifest, rows)
    assert main([*arguments, "--overwrite", advice[1]]) == 0
    reason = read_lines(tmp_path / "check" / "problems.jsonl")[0]["reason"]
    assert reason == "the tokenizer has no piece for 'ñ' (model.tokenizer.extend_from=DATA gives it pieces)"
    capsys.readouterr()
    assert main([*arguments, "--overwrite", advice[1], f"model.tokenizer.extend_from={manifest}"]) == 0
    assert read_lines(tmp_path / "check" / "problems.jsonl") == []
    assert "old > new" not in capsys.readouterr().err  # the table of the vocabulary


def test_an_earlier_result_is_not_written_over_unasked(
    spoiled: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--data", str(spoiled), "--output-dir", str(tmp_path / "check"), "--workers", "1"]
    assert main(arguments) == 0
    result = tmp_path / "check" / "check.json"
    before = result.stat().st_mtime_ns
    assert main(arguments) == 2
    assert "holds the result of a check. --overwrite replaces it" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    for answer, code in (("n", 2), ("y", 0)):
        monkeypatch.setattr("builtins.input", lambda _, answer=answer: answer)
        assert main(arguments) == code
        assert (result.stat().st_mtime_ns == before) == (code == 2)
    assert main([*arguments, "--overwrite", "data.max_durations=1"]) == 2
    assert "unknown key data.max_durations" in capsys.readouterr().err


def test_settings_without_a_run_file(spoiled: Path, tmp_path: Path, capsys: Any) -> None:
    arguments = ["--output-dir", str(tmp_path / "check"), "--workers", "1", "--data", str(spoiled)]
    main([*arguments, "data.max_duration=1", "data.filters.alphabet_before_normalization=tex 123"])
    said = capsys.readouterr().out
    assert re.search(r"\n +\d+  longer than data.max_duration 1 s, such as c\d+\n", said)
    assert "with characters outside data.filters.alphabet_before_normalization, such as c4\n" in said


def test_options_that_would_be_ignored_and_a_result_that_cannot_be_written(
    spoiled: Path, tmp_path: Path, capsys: Any
) -> None:
    for option in ("--split", "--model", "--tokenizer"):
        with pytest.raises(SystemExit):
            main(["--config", "RUN.yaml", option, "x"])
        assert f"{option} goes with --data" in capsys.readouterr().err
    arguments = ["--data", str(spoiled), "--workers", "1", "--output-dir"]
    assert main([*arguments, str(tmp_path / "check"), "--json", str(tmp_path / "none" / "c.json")]) == 1
    assert f"error: --json: {tmp_path}/none/c.json cannot be written" in capsys.readouterr().err
    assert main([*arguments, str(spoiled / "check")]) == 1
    assert f"error: --output-dir: {spoiled}/check cannot be written" in capsys.readouterr().err


@pytest.mark.slow
def test_a_cluster_finds_what_this_machine_finds(spoiled: Path, tmp_path: Path) -> None:
    for name, more in (("here", ["--workers", "1"]), ("cluster", ["--engine", "ray"])):
        main(["--data", str(spoiled), "--output-dir", str(tmp_path / name), *more])
    for file in ("problems.jsonl", "suspicious.jsonl"):
        assert (tmp_path / "here" / file).read_text() == (tmp_path / "cluster" / file).read_text()


def test_options_of_a_cluster_go_with_it(spoiled: Path, capsys: Any) -> None:
    assert main(["--data", str(spoiled), "--address", "auto"]) == 2
    assert "--address is of a Ray cluster: add --engine ray" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--data", str(spoiled), "--engine", "ray", "--workers", "2"])
    assert "--workers is of --engine local" in capsys.readouterr().err
