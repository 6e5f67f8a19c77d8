"""evaluate, transcribe and export, as a user calls them."""

import io
import json
import re

import jiwer
import numpy as np
import pytest
import soundfile
import torch
from conftest import read_lines


def transcribe(capsys, *arguments: object) -> tuple[int, list[dict]]:
    from finetune.transcribe import main

    code = main([str(a) for a in arguments])
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_export_is_restored_by_plain_nemo_with_equal_texts(tiny_model, clips, tmp_path, capsys):
    from finetune.export import main

    assert main(["--model", str(tiny_model), "--to", "nemo", "--output", str(tmp_path)]) == 0
    assert "read again and equal" in capsys.readouterr().out
    files = [str(f) for f in sorted(clips.glob("*.flac"))[:6]]
    code, rows = transcribe(capsys, "--model", tmp_path / "model.nemo", *files)
    assert code == 0
    from nemo.collections.asr.models import ASRModel

    plain = ASRModel.restore_from(str(tmp_path / "model.nemo"), map_location="cpu")
    theirs = plain.transcribe(files, batch_size=3, verbose=False)
    assert [r["text"] for r in rows] == [" ".join(h.text.split()) for h in theirs]
    assert any(r["text"] for r in rows)


def test_a_broken_export_is_not_kept(tiny_model, tmp_path, monkeypatch, capsys):
    from finetune.export import main
    from finetune.models.nemo_archive import save_nemo
    from finetune.tools.export import nemo

    def damaged(model, path):
        with torch.no_grad():
            model.joint.enc.bias.add_(1.0)
        save_nemo(model, path)
        with torch.no_grad():
            model.joint.enc.bias.sub_(2.0)

    monkeypatch.setattr(nemo, "save_nemo", damaged)
    assert main(["--model", str(tiny_model), "--output", str(tmp_path)]) == 1
    assert not (tmp_path / "model.nemo").exists()
    assert "not the same model" in capsys.readouterr().err


def test_long_stereo_audio_at_another_rate_with_timestamps(tiny_model, clips, tmp_path, capsys):
    parts = [soundfile.read(f)[0] for f in sorted(clips.glob("*.flac"))]
    speech_S = np.concatenate([np.concatenate([p, np.zeros(8000)]) for p in parts] * 2)
    stereo_SC = np.stack([speech_S, speech_S], axis=1)[::2]  # every second sample of 16 kHz
    path = tmp_path / "long.wav"
    soundfile.write(path, stereo_SC, 8000)
    seconds = len(stereo_SC) / 8000
    assert seconds > 40
    code, rows = transcribe(capsys, "--model", tiny_model, path, "--timestamps", "--longest", "8", "--batch-size", "3")
    assert code == 0
    assert rows[0]["duration"] == pytest.approx(seconds, abs=0.01)
    words = rows[0]["words"]
    assert len(words) > 5
    assert " ".join(w["word"] for w in words).split() == rows[0]["text"].split()
    starts = [w["start"] for w in words]
    assert starts == sorted(starts)
    assert all(0 <= w["start"] <= w["end"] <= seconds + 0.2 for w in words)
    assert starts[-1] > seconds - 10


def test_nothing_is_said_where_files_are_written(tiny_model, clips, tmp_path, capsys):
    files = sorted(clips.glob("*.flac"))[:2]
    kinds = ("srt", "vtt", "txt", "json")
    from finetune.transcribe import main

    said = ["--format", ",".join(kinds), "--output", tmp_path / "out"]
    assert main([str(a) for a in ("--model", tiny_model, *files, *said)]) == 0
    out, err = capsys.readouterr()
    assert out == re.sub(r"\r[^\r\n]*", "", err) == ""  # a slow machine shows the bar, which ends as a blank line
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        f"{f.stem}.{k}" for f in files for k in kinds
    )


def test_paths_from_standard_input_and_a_missing_file(tiny_model, clips, monkeypatch, capsys):
    good = sorted(clips.glob("*.flac"))[0]
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{good}\nno/such/file.wav\n\n"))
    code, rows = transcribe(capsys, "--model", tiny_model, "-")
    assert code == 1
    assert rows[0]["file"] == str(good)
    assert "text" in rows[0]
    assert "there is no file" in rows[1]["error"]


def test_standard_input_among_named_files(tiny_model, clips, monkeypatch, capsys):
    first, second, third = (str(path) for path in sorted(clips.glob("*.flac"))[:3])
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{second}\n"))
    code, rows = transcribe(capsys, "--model", tiny_model, first, "-", third)
    assert code == 0
    assert [row["file"] for row in rows] == [first, second, third]


def test_a_device_that_is_not_there(tiny_model, clips, capsys):
    from finetune.evaluate import main as evaluate
    from finetune.transcribe import main as transcribe_files

    file = str(sorted(clips.glob("*.flac"))[0])
    for device in ("cuda:77", "abacus"):
        for command in (
            lambda d: transcribe_files(["--model", str(tiny_model), file, "--device", d]),
            lambda d: evaluate(["--model", str(tiny_model), "--data", str(clips / "manifest.jsonl"), "--device", d]),
        ):
            assert command(device) == 2
            said = capsys.readouterr().err
            assert said.count("error:") == 1
            assert f"--device: {device} cannot be used" in said
            assert "This machine has cpu" in said


def test_evaluate_equals_jiwer_over_its_own_utterances(tiny_model, clips, tmp_path, capsys):
    from finetune.evaluate import main

    result, utterances = tmp_path / "out" / "result.json", tmp_path / "utterances.jsonl"
    arguments = [
        "--model",
        tiny_model,
        "--data",
        clips / "manifest.jsonl",
        "--json",
        result,
        "--utterances",
        utterances,
    ]
    assert main([str(a) for a in arguments]) == 0
    told, rows = json.loads(result.read_text()), read_lines(utterances)
    assert told["clips"] == len(rows) == 24
    from finetune.data.normalization import normalize_text

    texts = [[normalize_text(r[k], "basic") for r in rows] for k in ("reference", "hypothesis")]
    assert told["wer"] == pytest.approx(jiwer.wer(*texts))
    assert told["cer"] == pytest.approx(jiwer.cer(*texts))
    assert set(told["by_language"]) == {"en", "fr"}
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()[:4]] == ["language", "en", "fr", "all"]
    assert err.rpartition("\r")[2] == "", "no progress bar stays"


def test_evaluate_names_a_wrong_model_and_a_wrong_data_set(tiny_model, clips, capsys):
    from finetune.evaluate import main

    assert main(["--model", "no/such.nemo", "--data", str(clips / "manifest.jsonl")]) == 2
    assert "no/such.nemo" in capsys.readouterr().err
    assert main(["--model", str(tiny_model), "--data", "no/such/manifest.jsonl"]) == 2
    assert "no/such/manifest.jsonl" in capsys.readouterr().err
