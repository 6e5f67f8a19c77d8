"""Exported directories in use: by transcribe and evaluate, by the program beside them, by sherpa-onnx's server."""

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
from conftest import ROOT
from export_cases import heard_by_the_server, write_release

BASE = ROOT / "examples" / "base" / "fastconformer_tdt_3m.nemo"


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> SimpleNamespace:
    """The small base model for both runtimes, with what is written beside it and a report with its files."""
    folder = tmp_path_factory.mktemp("exports")
    for to in ("onnx", "sherpa"):
        write_release(BASE, folder / to, to)
    return SimpleNamespace(folder=folder)


def transcribed(capsys: Any, *arguments: object) -> tuple[int, list[dict[str, Any]], str]:
    from finetune.transcribe import main

    capsys.readouterr()
    code = main([str(a) for a in arguments])
    said = capsys.readouterr()
    return code, [json.loads(line) for line in said.out.splitlines()], said.err


def test_transcribe_gives_the_texts_of_the_model(case, clips, capsys):
    files = sorted(clips.glob("*.flac"))[:8]
    code, rows, _ = transcribed(capsys, "--model", case.folder / "onnx", *files)
    assert code == 0
    assert rows == transcribed(capsys, "--model", BASE, "--device", "cpu", *files)[1]
    assert len({row["text"] for row in rows}) > 4


@pytest.mark.slow
def test_long_files_are_cut_at_silence(case, clips, tmp_path, capsys):
    """Two clips with a second of silence between them have the texts of both, each recognised by itself."""
    first, second = (soundfile.read(f, dtype="float32")[0] for f in sorted(clips.glob("*.flac"))[:2])
    silence = np.zeros(16000, dtype=np.float32)
    soundfile.write(tmp_path / "long.wav", np.concatenate([first, silence, second]), 16000, subtype="FLOAT")
    chunk = (len(first) + 8000) / 16000 + 0.3
    code, [row], _ = transcribed(
        capsys, "--model", case.folder / "onnx", tmp_path / "long.wav", "--chunk", max(chunk, 1)
    )
    assert code == 0
    assert row["duration"] == pytest.approx((len(first) + len(second)) / 16000 + 1, abs=1e-3)
    from finetune.evaluation.long_audio import chunks_of
    from finetune.tools.export.runtimes import load_exported
    from finetune.tools.export.using import cut_at_silence

    audio = soundfile.read(tmp_path / "long.wav", dtype="float32")[0]
    pieces = [p.audio_S for p in chunks_of(iter([audio]), cut_at_silence(16000, max(chunk, 1)))]
    assert len(pieces) >= 2
    assert sum(map(len, pieces)) == len(audio)
    texts = load_exported(case.folder / "onnx").texts(pieces)
    assert row["text"] == " ".join(filter(None, texts))


def test_a_file_that_cannot_be_read_is_an_error_of_its_own(case, clips, tmp_path, capsys):
    (tmp_path / "no.wav").write_bytes(b"no audio")
    good = sorted(clips.glob("*.flac"))[0]
    code, rows, said = transcribed(capsys, "--model", case.folder / "onnx", tmp_path / "no.wav", good)
    assert code == 1
    assert "no.wav" in said
    assert "error" in rows[0]
    assert rows[1]["text"]


def test_names_of_files_may_come_from_standard_input(case, clips, capsys, monkeypatch):
    files = sorted(clips.glob("*.flac"))[:2]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{file}\n" for file in files)))
    code, rows, _ = transcribed(capsys, "--model", case.folder / "onnx", "-")
    assert code == 0
    assert [row["file"] for row in rows] == [str(file) for file in files]


@pytest.mark.parametrize("option", [
    ["--timestamps"], ["--overlap", "1"], ["--streaming"], ["--attention", "local"], ["--head", "ctc"],
    ["--language", "en"], ["--device", "cuda"],
])  # fmt: skip
def test_options_that_a_runtime_cannot_follow_are_refused(case, clips, capsys, option):
    file = sorted(clips.glob("*.flac"))[0]
    code, rows, said = transcribed(capsys, "--model", case.folder / "onnx", file, *option)
    assert code == 2
    assert not rows
    assert f"error: {option[0]}: " in said
    assert "is an export: " in said


def test_evaluate_counts_as_for_the_model(case, clips, tmp_path, capsys):
    from finetune.evaluate import main

    results = []
    for name in (BASE, case.folder / "onnx"):
        file = tmp_path / f"{name.name}.json"
        data = ["--data", str(clips / "manifest.jsonl"), "--json", str(file), "--workers", "0", "--device", "cpu"]
        assert main(["--model", str(name), *data, "--batch-size", "1", "--max-samples", "8"]) == 0
        results.append(json.loads(file.read_text()))
    one, other = results
    assert other["runtime"].startswith("onnx-asr ")
    assert other["dtype"] == "fp32"
    for key in ("wer", "cer", "wer_interval", "clips", "words", "by_language", "audio_seconds", "head"):
        assert one[key] == other[key], key
    compared = ["--model", str(BASE), "--against", str(case.folder / "onnx"), "--data", str(clips / "manifest.jsonl")]
    assert (
        main(
            [
                *compared,
                "--batch-size",
                "1",
                "--max-samples",
                "8",
                "--workers",
                "0",
                "--json",
                str(tmp_path / "both.json"),
            ]
        )
        == 0
    )
    assert json.loads((tmp_path / "both.json").read_text())["difference"] == 0
    capsys.readouterr()
    assert main(["--model", str(case.folder / "onnx"), *data, "--dtype", "bfloat16"]) == 2
    assert "--dtype: " in capsys.readouterr().err


def test_clips_longer_than_a_chunk_are_cut_in_an_evaluation_too(case, clips, tmp_path):
    from conftest import write_manifest

    from finetune.evaluation.dataset import EvaluationSettings
    from finetune.tools.export.using import evaluate_exported

    audio = [soundfile.read(f, dtype="float32")[0] for f in sorted(clips.glob("*.flac"))[:3]]
    soundfile.write(tmp_path / "long.wav", np.concatenate(audio), 16000)
    manifest = write_manifest(tmp_path / "m.jsonl", [{"audio_filepath": "long.wav", "text": "a b", "id": "long"}])
    kept: list[Any] = []
    settings = EvaluationSettings([str(manifest)], chunk=1.0, workers=0, resamples=0)
    result = evaluate_exported(str(case.folder / "onnx"), settings, keep=kept)
    assert result["clips"] == 1
    assert result["audio_seconds"] == pytest.approx(sum(map(len, audio)) / 16000)
    assert kept[0].hypothesis


# ---- directories that are no export, or another --------------------------------------------------------------------


def test_changed_files_are_refused(case, clips, tmp_path, capsys):
    import shutil

    changed = tmp_path / "changed"
    shutil.copytree(case.folder / "onnx", changed)
    file = sorted(clips.glob("*.flac"))[0]
    assert transcribed(capsys, "--model", changed, file)[0] == 0
    lines = (changed / "vocab.txt").read_text(encoding="utf-8").split("\n")
    lines[1], lines[2] = lines[2], lines[1]
    (changed / "vocab.txt").write_text("\n".join(lines), encoding="utf-8")
    code, rows, said = transcribed(capsys, "--model", changed, file)
    assert code == 2
    assert not rows
    assert "is not the export that was checked: vocab.txt is another" in said
    assert "--check" in said
    (changed / "example.py").unlink()
    assert "example.py is gone" in transcribed(capsys, "--model", changed, file)[2]
    (changed / "export.json").unlink()  # as of others: nothing to compare with
    assert transcribed(capsys, "--model", changed, file)[0] == 0


def test_a_report_alone_is_no_model(tmp_path, clips, capsys):
    report = {"passed": False, "reason": "texts differ on 3 of 24 clips", "files": {}}
    (tmp_path / "export.json").write_text(json.dumps(report))
    code, _, said = transcribed(capsys, "--model", tmp_path, sorted(clips.glob("*.flac"))[0])
    assert code == 2
    assert "holds only the report of an export that was not kept: texts differ on 3 of 24 clips" in said
    (tmp_path / "export.json").write_text("{")
    assert "cannot be read" in transcribed(capsys, "--model", tmp_path, sorted(clips.glob("*.flac"))[0])[2]


def test_a_runtime_that_is_not_installed_names_the_extra(case, clips, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx_asr", None)
    code, _, said = transcribed(capsys, "--model", case.folder / "onnx", sorted(clips.glob("*.flac"))[0])
    assert code == 2
    assert "onnx-asr cannot be imported" in said
    assert "[export]" in said


# ---- beside the model ----------------------------------------------------------------------------------------------


def wav_of(clips: Path, folder: Path) -> Path:
    audio, rate = soundfile.read(sorted(clips.glob("*.flac"))[3], dtype="float32")
    soundfile.write(folder / "clip.wav", audio, rate, subtype="PCM_16")
    return folder / "clip.wav"


@pytest.mark.parametrize("to", ["onnx", "sherpa"])
def test_the_example_runs_with_the_runtime_alone(case, clips, tmp_path, to):
    from finetune.tools.export.runtimes import load_exported

    wav = wav_of(clips, tmp_path)
    program = case.folder / to / "example.py"
    done = subprocess.run(
        [sys.executable, "-I", program, wav], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    audio = soundfile.read(wav, dtype="float32")[0]
    assert done.stdout.strip() == load_exported(case.folder / to).texts([audio])[0].strip() != ""
    assert "finetune" not in program.read_text(encoding="utf-8")


def test_the_server_of_the_readme_answers_its_client(case, clips, tmp_path):
    from finetune.tools.export.runtimes import load_exported

    wav = wav_of(clips, tmp_path)
    heard = json.loads(heard_by_the_server(case.folder / "sherpa", wav, tmp_path))
    audio = soundfile.read(wav, dtype="float32")[0]
    assert heard["text"].strip() == load_exported(case.folder / "sherpa").texts([audio])[0].strip()
