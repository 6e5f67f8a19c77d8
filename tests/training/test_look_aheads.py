"""Runs of streaming models: the draws of look-aheads are equal on all ranks and after a resume, the settings stay."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DETERMINISTIC, ONLY_TRAIN, read_lines
from launching import BIN, TRAIN, curve, start, summary
from safetensors.torch import load_file

from finetune.models.loading import load_model
from finetune.models.nemo_archive import read_config, save_nemo

Archive = Callable[[str], str]


@pytest.fixture
def archive(archive_of: Callable[..., Path]) -> Archive:
    return lambda name: str(archive_of(name))


@pytest.mark.parametrize("family", ["streaming", "unified"])
def test_resumed_equals_unbroken_and_the_settings_stay(archive, run_train, tiny_run, tmp_path, capfd, family):
    model = {"name": archive(family)}
    training = {"max_steps": 6, "save_steps": 2, "save_total_limit": 0}
    data = {"validation": None, "test": None}
    arguments = tiny_run(model=model, data=data, training={**training, "output_dir": str(tmp_path / "unbroken")})
    assert run_train(*arguments) == 0
    shutil.copytree(tmp_path / "unbroken", tmp_path / "resumed")
    for step in (4, 6):
        shutil.rmtree(tmp_path / "resumed" / "checkpoints" / f"step-{step:08d}")
    (tmp_path / "resumed" / "summary.json").unlink()
    training |= {"resume_from_checkpoint": True, "output_dir": str(tmp_path / "resumed")}
    assert run_train(*tiny_run(model=model, data=data, training=training)) == 0
    assert summary(tmp_path / "resumed")["resumed_from"] == 2
    assert curve(tmp_path / "resumed") == curve(tmp_path / "unbroken")
    last = "checkpoints/step-00000006/model.safetensors"
    unbroken, resumed = (load_file(tmp_path / run / last) for run in ("unbroken", "resumed"))
    assert all(torch.equal(unbroken[name], resumed[name]) for name in unbroken)
    expected = {
        "streaming": "draws its attention context: [70, 13] 25%, [70, 6] 25%, [70, 1] 25%, [70, 0] 25%; "
        "evaluations use [70, 13]",
        "unified": "a unified model: 30% of the steps see whole recordings",
    }
    assert expected[family] in capfd.readouterr().err
    published, trained = read_config(Path(archive(family))), read_config(tmp_path / "unbroken" / "model.nemo")
    assert trained["encoder"] == published["encoder"]
    assert trained["loss"] == published["loss"]


def test_a_share_of_the_steps_sees_chunks(archive, run_train, tiny_run, tmp_path):
    losses: dict[Any, Any] = {}
    for share in (0.0, 1.0):
        training = {"max_steps": 3, "output_dir": str(tmp_path / str(share))}
        model = {**DETERMINISTIC, "name": archive("unified"), "streaming_share": share}
        assert run_train(*tiny_run(model=model, data=ONLY_TRAIN, training=training)) == 0
        losses[share] = [row["loss"] for row in read_lines(tmp_path / str(share) / "metrics.jsonl")]
    assert all(a != b for a, b in zip(losses[0.0], losses[1.0], strict=True))


@pytest.mark.slow
def test_two_ranks_draw_what_one_process_draws(archive, run_train, tiny_run, tmp_path):
    quiet = load_model(archive("streaming"))
    quiet.cfg.preprocessor.dither = 0.0  # each rank would draw its own
    save_nemo(quiet, tmp_path / "quiet.nemo")
    model = {**DETERMINISTIC, "name": str(tmp_path / "quiet.nemo")}
    settings = {"max_steps": 8}
    one = {**settings, "dataloader_num_workers": 2, "gradient_accumulation_steps": 2}
    arguments = tiny_run(model=model, data=ONLY_TRAIN, training={**one, "output_dir": str(tmp_path / "one")})
    assert run_train(*arguments) == 0
    arguments = tiny_run(model=model, data=ONLY_TRAIN, training={**settings, "dataloader_num_workers": 1})
    start([str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2", TRAIN, *arguments, "--strategy", "ddp"])
    assert summary(tmp_path / "run")["world_size"] == 2
    for ours, theirs in zip(curve(tmp_path / "run"), curve(tmp_path / "one"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
