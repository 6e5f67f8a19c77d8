"""What trackers get of a run, and that none of them ends one."""

import json
from typing import Any

import pytest
import soundfile
from conftest import read_lines


def test_tensorboard_has_numbers_texts_and_audio(run_train, tiny_run, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tiny_run(training={"report_to": "tensorboard", "eval_steps": 1, "max_steps": 2})
    assert run_train(*run) == 0
    folders = {file.parent for file in (tmp_path / "run").rglob("events.out.tfevents.*")}
    everything = {"audio": 0, "tensors": 0, "scalars": 0}
    accumulators = [EventAccumulator(str(folder), size_guidance=everything).Reload() for folder in folders]
    events = max(accumulators, key=lambda found: len(found.Tags()["scalars"]))  # the others hold the settings
    tags = events.Tags()
    rows = read_lines(tmp_path / "run" / "metrics.jsonl")
    named = {f"train/{name}" for name, value in rows[0].items() if isinstance(value, float | int)} - {"train/step"}
    assert named | {"train/learning_rates/encoder", "validation/wer", "validation/cer", "validation/wer/en"} <= {
        *tags["scalars"]
    }
    assert [e.value for e in events.Scalars("train/loss")] == pytest.approx([r["loss"] for r in rows])
    evaluations = read_lines(tmp_path / "run" / "evaluations.jsonl")
    wers = [r["wer"] for r in evaluations if r["split"] == "validation" and r["language"] is None and "model" not in r]
    assert [e.value for e in events.Scalars("validation/wer")] == pytest.approx(wers)
    heard = [tag for tag in tags["audio"] if tag.startswith("validation/audio/")]
    assert len(heard) == 3
    audio = events.Audio(heard[0])
    assert len(audio) == 1, "the audio does not change"
    assert audio[0].sample_rate == 16000
    texts = [tag for tag in tags["tensors"] if "samples" in tag]
    assert any(tag.startswith("validation/samples") for tag in texts)
    table = events.Tensors(next(tag for tag in texts if tag.startswith("validation/samples")))
    assert len(table) == 3
    assert "| id | language | reference | hypothesis |" in table[0].tensor_proto.string_val[0].decode()


@pytest.mark.slow
def test_wandb_has_samples_and_audio(run_train, tiny_run, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    run = tiny_run(data={"test": None}, training={"report_to": "wandb", "eval_steps": 2, "max_steps": 2})
    assert run_train(*run) == 0
    media = next((tmp_path / "wandb").glob("offline-run-*")) / "files" / "media"
    tables = [json.loads(f.read_text()) for f in sorted(media.rglob("samples_*.table.json"))]
    assert {tuple(table["columns"]) for table in tables} == {("id", "language", "reference", "hypothesis")}
    audio = sorted(media.rglob("*.wav"))
    assert len(audio) == 3, "the audio does not change"
    assert soundfile.info(audio[0]).samplerate == 16000


@pytest.mark.slow
def test_a_tracker_that_fails_ends_no_run(run_train, tiny_run, tmp_path, capsys, monkeypatch):
    from accelerate.tracking import TensorBoardTracker
    from torch.utils.tensorboard import SummaryWriter

    called: list[str] = []

    def fails(name: str) -> Any:
        def call(*_: Any, **__: Any) -> None:
            called.append(name)
            raise OSError(28, f"No space left for {name}")

        return call

    monkeypatch.setattr(SummaryWriter, "add_audio", fails("audio"))
    run = tiny_run(training={"report_to": "tensorboard", "eval_steps": 1, "max_steps": 3})
    assert run_train(*run) == 0
    warned = [line for line in capsys.readouterr().err.splitlines() if "tensorboard took no" in line]
    assert len(warned) == 1
    assert "sample audio" in warned[0]
    assert "OSError: [Errno 28] No space left for audio" in warned[0]
    # Validation, test and the best model's evaluation came later: not one more call.
    assert called == ["audio"]

    monkeypatch.setattr(SummaryWriter, "add_text", fails("text"))
    monkeypatch.setattr(TensorBoardTracker, "log", fails("numbers"))
    monkeypatch.setattr(TensorBoardTracker, "finish", fails("end"))
    called.clear()
    assert run_train(*run, "training.overwrite_output_dir=true") == 0
    assert sorted(called) == ["audio", "end", "numbers", "text"]
    assert capsys.readouterr().err.count("tensorboard took no") == 4
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 3


def test_trackers_get_no_passwords_of_the_run_file():
    from finetune.config.schema import RunConfig
    from finetune.training.run import flat_settings

    run = {
        "data": {
            "train": "https://me:hunter22@example.org/a?sig=abcdef",
            "validation": [{"path": "b", "token": "geheim12"}],
        }
    }
    training = {"output_dir": "o", "learning_rate": 0.001}
    flat = flat_settings(RunConfig.model_validate({"model": {"name": "m"}, **run, "training": training}))
    assert flat["training.learning_rate"] == 0.001
    assert "example.org/a" in flat["data.train"]
    assert not any(word in str(flat) for word in ("hunter22", "abcdef", "geheim12"))
