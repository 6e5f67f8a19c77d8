"""`--dry-run`: go or no-go for each part of a run, without touching a run that is there."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from conftest import read_lines, write_manifest

PARTS = [
    *("configuration", "sources", "overlap", "model", "tokenizer", "what is left", "clips", "engine", "evaluation"),
    *("worst batch", "checkpoint", "model file", "time"),
]


def parts(folder: Path) -> dict:
    return {part["part"]: part for part in json.loads((folder / "dry_run.json").read_text())["parts"]}


@pytest.fixture
def tried(run_train, capsys):
    """Calls train.py, which has to end with this exit code; returns what it says."""

    def run(exit_code, *arguments):
        code = run_train(*arguments)
        said = capsys.readouterr().err
        assert code == exit_code, said
        return said

    return run


def test_go_beside_a_run_that_is_there(tried, tiny_run, tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("a: run\n")
    said = tried(0, *tiny_run(training={"max_steps": 500}), "--dry-run", "--strategy", "adamw_8bit")
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "config.yaml", "dry_run.json"]
    assert (run / "config.yaml").read_text() == "a: run\n"
    found = parts(run)
    assert list(found) == PARTS
    assert found["sources"]["rows"] == {"train": 24, "validation": 24, "test": 24}
    assert (found["tokenizer"]["texts"], found["tokenizer"]["texts_lost"]) == (24, 0)
    assert found["tokenizer"]["tokens_per_second"] > 1
    assert found["clips"]["decoded"] == 24
    assert set(found["evaluation"]["wer"]) == {"validation", "test"}
    assert found["worst batch"]["peak_gib"] > 0
    assert found["checkpoint"]["checkpoint_bytes"] > 100_000
    assert found["time"]["hours"]["training"] == pytest.approx(500 * found["time"]["seconds_per_step"] / 3600)
    assert re.search(r"500 steps in (\d+ h )?(\d+ min )?[\d.]+ (s|min), validation [\d.]+ (s|min)", said), said
    assert "0.0 h" not in said
    assert str(run / "dry_run" / "x")[:-2] + "/" not in said  # nothing that is gone is named
    for words in ("AdamW8bit", "equal weights, optimizer state and progress", "GO after", "holds a run"):
        assert words in said


def test_all_that_is_wrong_with_the_data_is_said_at_once(tried, tiny_run, clips, tmp_path):
    rows = read_lines(clips / "manifest.jsonl")
    for row in rows:
        row["audio_filepath"] = str(clips / row["audio_filepath"])
    for row in rows[:6]:
        row["text"] = "漢字 " + row["text"]
    for row in rows[6:10]:
        row["audio_filepath"] = "gone.flac"
    manifest = write_manifest(tmp_path / "bad.jsonl", rows)
    said = tried(1, *tiny_run(data={"train": str(manifest)}, training={"max_steps": 3}), "--dry-run")
    found = parts(tmp_path / "run")
    assert [name for name, part in found.items() if not part["go"]] == ["tokenizer", "clips", "time"]
    assert list(found) == PARTS
    assert "cannot write 6 of 24 texts" in said
    assert "漢 6x" in said
    assert "the tokenizer has no piece for '字漢' (model.tokenizer.extend_from=DATA gives it pieces)" in said
    assert "14 of 24 clips decoded" in said
    assert ", 10 unusable: 6 with characters the tokenizer lacks (such as" in said
    assert "4 without a file (such as" in said
    assert "training on 14 of 24 clips" in said
    assert "10 clips would go to quarantine, which ends a run above data.max_bad_fraction=0.05" in said
    assert "% of the audio is left out" in said
    assert "dry_run/" not in said  # a folder that is gone by then
    assert "NO-GO" in said


@pytest.mark.slow
def test_a_worst_batch_that_does_not_fit(tried, tiny_run, tmp_path, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("finetune.training.trainer.Trainer._optimizer_step", full)
    tried(1, *tiny_run(data={"test": None}), "--dry-run")
    found = parts(tmp_path / "run")
    assert [name for name, part in found.items() if not part["go"]] == ["worst batch"]
    for words in ("the longest clips: 4 clips of up to 1.4 s", "--strategy gradient_checkpointing"):
        assert words in found["worst batch"]["said"]
    assert found["model file"]["go"]
    assert "time" not in found


def test_a_checkpoint_that_does_not_come_back(tried, tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr("finetune.training.trainer.Trainer._resume", lambda *_: None)
    tried(1, *tiny_run(data={"test": None, "validation": None}), "--dry-run")
    assert "other weights and optimizer state and progress" in parts(tmp_path / "run")["checkpoint"]["said"]


def test_a_stage_of_a_plan_is_tried_with_its_own_settings(tried, tiny_run, tmp_path, monkeypatch):
    configs = []
    monkeypatch.setattr("finetune.tools.preflight.dry_run.dry_run", lambda config, *_: configs.append(config) or 0)
    stages = [{"max_samples": 4}, {"max_samples": 12, "training": {"learning_rate": 0.5}}]
    arguments = tiny_run(training={"stages": stages})
    tried(0, *arguments, "--dry-run")
    tried(0, *arguments, "--dry-run", "--stage", "2")
    assert [config.data.max_samples for config in configs] == [4, 12]
    assert configs[1].training.learning_rate == 0.5
    assert configs[1].training.output_dir == str(tmp_path / "run" / "stage-2")
    # Stage 1 has left no model yet.
    assert configs[1].model.name == yaml.safe_load((tmp_path / "RUN.yaml").read_text())["model"]["name"]
    assert "has stages 1 to 2" in tried(2, *arguments, "--dry-run", "--stage", "3")


@pytest.mark.parametrize(
    "arguments", [["--dry-run", "--smoke", "5"], ["--smoke", "0"], ["--smoke", "many"], ["--dry-run", "--stage", "1"]]
)
def test_what_does_not_go_together(run_train, tiny_run, arguments, capsys):
    assert run_train(*tiny_run(), *arguments) == 2
    assert "error: " in capsys.readouterr().err
