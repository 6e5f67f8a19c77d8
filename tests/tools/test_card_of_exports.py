"""Exports in the model card: measured, in folders of their own, without what is private."""

import json
from pathlib import Path
from typing import Any

import pytest
from sharing_cases import REPO, card_in, copied

pytest_plugins = ["sharing_fixtures"]
SECRET_TEXT = "a sentence of a private clip"


def made_export(directory: Path, **changes: Any) -> Path:
    """A directory as the gate leaves it, of 100 clips of which 97 have the original's text."""
    from finetune.tools.export.gate.report import hashes_of

    directory.mkdir(parents=True)
    (directory / "encoder-model.int8.onnx").write_bytes(b"a graph")
    (directory / "vocab.txt").write_text("a 0\n<blk> 1\n", encoding="utf-8")
    (directory / "export.html").write_text(SECRET_TEXT)
    nemo = {"name": "NeMo", "runtime": "NeMo 3.0.0", "wer": 0.1, "wer_interval": [0.08, 0.12], "rtfx": 20.0}
    nemo |= {"disk_bytes": 12e6, "peak_bytes": 1.2e9, "start_seconds": 9.0}
    own = {**nemo, "name": "onnx-asr", "runtime": "onnx-asr 0.12.0", "wer": 0.104, "equal": 97, "disk_bytes": 4e6}
    own |= {"difference": 0.004, "difference_interval": [-0.001, 0.009], "rtfx": 80.04}
    report = {
        "passed": True, "reason": "texts differ", "runtime": "onnx-asr", "precision": "int8", "clips": 100,
        "threads": 2, "machine": {"processor": "A Processor"}, "sides": [nemo, own], "files": hashes_of(directory),
        "differing": [{"reference": SECRET_TEXT}], "data": "/home/alice/calls",
    }  # fmt: skip
    (directory / "export.json").write_text(json.dumps({**report, **changes}))
    return directory


def test_given_exports_are_uploaded_and_measured_in_the_card(finished_run, hub, push, tmp_path):
    given = made_export(tmp_path / "onnx_int8")
    (given / "hotwords.txt").write_text("a private customer", encoding="utf-8")
    arguments = ("--model", finished_run, "--repo", REPO, "--base-licence", "mit", "--export", given)
    code, shown, error = push(*arguments)
    assert code == 0, error
    section = card_in(shown).partition("## Exports")[2].partition("\n## ")[0]
    assert "For onnx-asr 0.12.0, int8, in the folder onnx\\_int8" in section
    assert "97 of 100 validation clips" in section
    assert "WER differs by 0.40 (-0.10 to 0.90) points" in section
    assert "| onnx-asr 0.12.0 | 10.40 (8.00 to 12.00) | 80.0 | 4.0 | 1,200.0 | 9.0 |" in section
    assert "on 2 thread(s) of A Processor" in section
    assert push(*arguments, "--yes")[0] == 0
    files = hub.repositories[REPO].branches["main"].files
    assert files["onnx_int8/encoder-model.int8.onnx"] == b"a graph"
    assert "onnx_int8/vocab.txt" in files
    assert "onnx_int8/hotwords.txt" not in files, "the gate has not seen it"
    assert "not uploaded of onnx_int8, as its report does not name it: hotwords.txt" in shown
    assert not [name for name in files if name.endswith(("export.json", "export.html"))]
    for name, content in files.items():
        assert SECRET_TEXT.encode() not in content, name
        assert b"alice/calls" not in content, name


def test_exports_that_lie_beside_the_model_are_told_and_not_uploaded(finished_run, push, tmp_path):
    run = copied(finished_run, tmp_path / "run")
    made_export(run / "beside")
    made_export(run / "refused", passed=False)
    made_export(run / "of_another_model", model_sha256="0" * 64)
    (run / "foreign").mkdir()
    (run / "foreign" / "export.json").write_text("[]")
    _, shown, _ = push("--model", run, "--repo", REPO, "--base-licence", "mit")
    card = card_in(shown)
    assert card.count("For onnx-asr 0.12.0, int8 (not in this repository)") == 1
    assert "beside/" not in shown.partition("README.md:")[0]
    assert "## Exports" not in card_in(push("--model", finished_run, "--repo", REPO, "--base-licence", "mit")[1])


@pytest.mark.parametrize(("changes", "said"), [
    ({"passed": False, "reason": "texts differ on 3 clips"}, "was not kept: texts differ on 3 clips"),
    ({"files": {"vocab.txt": {"bytes": 1, "sha256": ""}}}, "vocab.txt is another"),
    ({"sides": []}, "has no figures"),
    ({"model_sha256": "0" * 64, "model": "runs/other"}, "is of another model, runs/other. Export"),
])  # fmt: skip
def test_exports_that_did_not_pass_or_were_changed_are_refused(finished_run, push, tmp_path, changes, said):
    given = made_export(tmp_path / "bad", **changes)
    code, _, error = push("--model", finished_run, "--repo", REPO, "--base-licence", "mit", "--export", given)
    assert code == 2
    assert said in error
    code, _, error = push(
        "--model", finished_run, "--repo", REPO, "--base-licence", "mit", "--export", tmp_path / "no"
    )
    assert code == 2
    assert "holds no export.json" in error
