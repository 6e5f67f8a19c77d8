"""Features that the workers compute: the same losses, also after a resume, and batches that can be cut."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import read_lines
from safetensors.torch import load_file

from finetune.models.loading import load_model
from finetune.models.nemo_archive import save_nemo

# All that draws random numbers is on but dither, as the tiny model has it: its draws come from elsewhere.
DATA = {"validation": None, "test": None, "augment": {"speed": 0.5, "gain": 0.5}, "shuffle_buffer_size": 8}
TRAINING = {"max_steps": 4, "save_steps": 2, "eval_on_start": False, "dataloader_num_workers": 1}

Start = Callable[..., list[float]]


@pytest.fixture
def start(run_train: Callable[..., int], tiny_run: Callable[..., list[str]], tmp_path: Path) -> Start:
    """Trains into tmp_path/NAME and returns the losses."""

    def run(name: str, features: str, observe: Any = None, model: Path | None = None, **training: Any) -> list[float]:
        settings = {**TRAINING, "output_dir": str(tmp_path / name), **training}
        named = {"name": str(model)} if model else {}
        arguments = tiny_run(model=named, data={**DATA, "features": features}, training=settings)
        assert run_train(*arguments, observe=observe) == 0
        return [row["loss"] for row in read_lines(tmp_path / name / "metrics.jsonl")]

    return run


@pytest.mark.slow
def test_losses_are_those_of_features_in_the_model(start: Start) -> None:
    """In a worker or in this process, which then cuts each batch as it does where memory runs out."""
    in_model = start("model", "model")
    assert len(set(in_model)) == TRAINING["max_steps"]
    assert start("worker", "workers") == in_model

    sizes = []

    def watch(trainer: Any) -> None:
        from finetune.data.batch import cut
        from finetune.models.features import log_mel

        for batch in trainer.stream.batches():
            for part in cut(batch, 2):
                mel_BFT, lengths_B = log_mel(trainer.model.preprocessor, part.audio_BS.float(), part.audio_lengths_B)
                assert torch.equal(part.mel_lengths_B, lengths_B)
                torch.testing.assert_close(part.mel_BFM, mel_BFT[:, :, : part.mel_BFM.size(2)], rtol=1e-5, atol=1e-5)
                sizes.append(len(part.ids))
        trainer.stream.positions, trainer.stream.next_worker = {}, 0

    assert start("here", "workers", watch, dataloader_num_workers=0) == in_model
    assert (sum(sizes), max(sizes)) == (24, 2)


@pytest.mark.slow
def test_dither_of_workers_is_the_same_after_a_resume(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    noisy = load_model(str(tiny_model))
    noisy.cfg.preprocessor.dither = 0.01
    save_nemo(noisy, tmp_path / "noisy.nemo")
    unbroken = start("unbroken", "workers", model=tmp_path / "noisy.nemo")
    assert start("quiet", "workers") != unbroken
    shutil.copytree(tmp_path / "unbroken", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step-00000004")
    resumed = start("resumed", "workers", model=tmp_path / "noisy.nemo", resume_from_checkpoint=True)
    assert resumed == unbroken
    weights = [
        load_file(tmp_path / run / "checkpoints" / "step-00000004" / "model.safetensors")
        for run in ("unbroken", "resumed")
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
