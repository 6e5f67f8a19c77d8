"""The project's optimizers by name in NeMo's `setup_optimization`, with NeMo's schedules on top."""

import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from conftest import read_lines

from finetune.config.optimizers import BITSANDBYTES, TORCHAO
from finetune.strategies.nemo_registry import WIDE, register_optimizers
from finetune.strategies.optimizers import describe_optimizer

PEAK = 3e-3
SCHED = {"name": "CosineAnnealing", "warmup_steps": 2, "max_steps": 8, "min_lr": 1e-5}


@pytest.fixture
def empty_registry() -> Iterator[None]:
    """NeMo's registry without this project's names, which are global to the process; as it was afterwards."""
    from finetune.models.nemo import import_nemo

    import_nemo()
    from nemo.core.config.optimizers import AVAILABLE_OPTIMIZER_PARAMS
    from nemo.core.optim.optimizers import AVAILABLE_OPTIMIZERS

    registries = (AVAILABLE_OPTIMIZERS, AVAILABLE_OPTIMIZER_PARAMS)
    before = [dict(r) for r in registries]
    for registry in registries:
        for name in (*BITSANDBYTES, *TORCHAO):
            registry.pop(name, None)
            registry.pop(name + "_params", None)
    yield
    for registry, known in zip(registries, before, strict=True):
        registry.clear()
        registry.update(known)


@pytest.fixture
def model(empty_registry: None, make_tiny_model: Callable[..., Path]) -> Any:
    """The tiny NeMo model without dropout and SpecAugment, in training mode."""
    from finetune.models.loading import load_model
    from finetune.models.nemo import prepare_for_training

    loaded = load_model(str(make_tiny_model(dropout=0.0)))
    prepare_for_training(loaded, spec_augment=False, dropout=0.0, freeze_batchnorm=True)
    return loaded


@pytest.fixture
def batch(clips: Path, model: Any) -> tuple[torch.Tensor, ...]:
    """Four real clips: audio (B, S), samples (B,), tokens (B, U), token counts (B,)."""
    rows = read_lines(clips / "manifest.jsonl")[:4]
    audio = [torch.from_numpy(soundfile.read(clips / r["audio_filepath"], dtype="float32")[0]) for r in rows]
    tokens = [torch.tensor(model.tokenizer.text_to_ids(r["text"].lower())) for r in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    lengths = [torch.tensor([len(x) for x in xs]) for xs in (audio, tokens)]
    return pad(audio, batch_first=True), lengths[0], pad(tokens, batch_first=True), lengths[1]


def options(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "lr": PEAK, "betas": [0.9, 0.98], "weight_decay": 1e-3, "sched": dict(SCHED), **more}


def train(model: Any, batch: tuple[torch.Tensor, ...], steps: int = 4) -> tuple[list[float], list[float]]:
    """Losses and learning rates of NeMo's optimizer and schedule on one batch."""
    from finetune.models.loss_module import LossModule

    trained, optimizer, scheduler = (
        LossModule(model).train(),
        model._optimizer,
        model._scheduler["scheduler"],
    )
    losses, rates = [], []
    for _ in range(steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        loss = trained(*batch).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses, rates


def assert_the_schedule_ran(rates: list[float]) -> None:
    """Two steps of warm-up, then a fall."""
    assert rates[0] < rates[1] < rates[2]
    assert max(rates) == pytest.approx(PEAK, rel=0.1)
    assert rates[3] < rates[2]


def test_unknown_before_and_known_after(model):
    with pytest.raises(ValueError, match="Cannot resolve optimizer 'adamw_8bit'"):
        model.setup_optimization(options("adamw_8bit"))
    names = register_optimizers()
    assert names == register_optimizers(model), "a second call changes nothing"
    assert set(names) == {*BITSANDBYTES, *TORCHAO}
    for name in names:
        optimizer, scheduler = model.setup_optimization(options(name))
        assert type(optimizer).__name__ == {**BITSANDBYTES, **TORCHAO}[name]
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.98)
        assert optimizer.param_groups[0]["weight_decay"] == 1e-3
        assert type(scheduler["scheduler"]).__name__ == "CosineAnnealing"


@pytest.mark.parametrize("name", list(BITSANDBYTES))
def test_bitsandbytes_trains_under_nemo(model, batch, name):
    register_optimizers(model)
    model.setup_optimization(options(name))
    losses, rates = train(model, batch)
    assert losses[-1] < losses[0]
    assert_the_schedule_ran(rates)
    states = model._optimizer.state
    assert states[model.decoder.prediction.embed.weight]["state1"].dtype == torch.float32
    assert states[model.encoder.layers[0].feed_forward1.linear1.weight]["state1"].dtype == torch.uint8
    assert describe_optimizer(model._optimizer)["optimizer_state_dtypes"]["uint8"] > 0


@pytest.mark.slow
def test_torchao_trains_under_nemo(model, batch):
    lstm = model.decoder.prediction.dec_rnn.lstm
    model.requires_grad_(False)  # each shape is compiled for seconds
    lstm.weight_ih_l0.requires_grad_(True)
    lstm.weight_hh_l0.requires_grad_(True)
    register_optimizers(model)
    model.setup_optimization(options("adamw_8bit_ao", block_size=128))
    losses, rates = train(model, batch)
    assert losses[-1] < losses[0]
    assert_the_schedule_ran(rates)
    assert set(model._optimizer.state) == {lstm.weight_ih_l0, lstm.weight_hh_l0}
    assert model._optimizer.state[lstm.weight_ih_l0]["exp_avg"].codes.dtype == torch.uint8


def test_without_the_model_embeddings_are_as_any_matrix(model, batch):
    register_optimizers()
    model.setup_optimization(options("adamw_8bit"))
    train(model, batch, 1)
    assert not hasattr(model.decoder.prediction.embed.weight, WIDE)
    assert model._optimizer.state[model.decoder.prediction.embed.weight]["state1"].dtype == torch.uint8


def test_defaults_of_the_configuration_form_with_args(model):
    register_optimizers()
    for name, expected in (("adamw_8bit", (0.9, 0.98)), ("lion_8bit", (0.9, 0.99)), ("adamw_4bit_ao", (0.9, 0.98))):
        args = {"name": "auto", "params": {"weight_decay": 0.2}}
        optimizer, _ = model.setup_optimization({"name": name, "lr": PEAK, "args": args})
        group = optimizer.param_groups[0]
        assert (float(group["lr"]), group["weight_decay"]) == pytest.approx((PEAK, 0.2))
        assert tuple(group["betas"]) == expected


def test_unknown_options_are_named(model):
    from finetune.errors import UserError

    register_optimizers()
    with pytest.raises(UserError, match="adamw_8bit has no option momentum"):
        model.setup_optimization(options("adamw_8bit", momentum=0.9))


def test_groups_of_nemo_keep_their_rates(model):
    from omegaconf import open_dict

    with open_dict(model.cfg):
        model.cfg.optim_param_groups = {"encoder": {"lr": 1e-4}}
    register_optimizers(model)
    optimizer, _ = model.setup_optimization({"name": "adamw_8bit", "lr": PEAK})
    rate = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
    assert {rate[id(p)] for p in model.encoder.parameters()} == {1e-4}
    assert {rate[id(p)] for p in (*model.decoder.parameters(), *model.joint.parameters())} == {PEAK}


def test_a_foreign_optimizer_of_that_name_stays(model, caplog):
    from nemo.core.optim.optimizers import AVAILABLE_OPTIMIZERS

    caplog.set_level(logging.WARNING)  # NeMo's import raises the level of every handler
    AVAILABLE_OPTIMIZERS["lion_8bit"] = torch.optim.SGD
    register_optimizers()
    assert AVAILABLE_OPTIMIZERS["lion_8bit"] is torch.optim.SGD
    assert "NeMo already has another optimizer lion_8bit" in caplog.text


def test_without_bitsandbytes_it_says_so_and_trains_with_32_bits(model, batch, monkeypatch, caplog):
    caplog.set_level(logging.WARNING)  # NeMo's import raises the level of every handler
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    register_optimizers(model)
    model.setup_optimization(options("adamw_8bit"))
    assert "AdamW8bit cannot be used here" in caplog.text
    losses, rates = train(model, batch)
    assert losses[-1] < losses[0]
    assert_the_schedule_ran(rates)
    assert describe_optimizer(model._optimizer)["optimizer"] == "AdamW"


def test_lightning_trains_with_it(model, clips, tmp_path):
    """NeMo's whole way: its data loader and training step, optimizer and schedule out of its configuration."""
    from lightning.pytorch import Trainer
    from omegaconf import OmegaConf, open_dict

    from finetune.losses import use_in_nemo

    rows = read_lines(clips / "manifest.jsonl")
    for row in rows:
        row["audio_filepath"] = str(clips / row["audio_filepath"])
    manifest = tmp_path / "manifest.json"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    register_optimizers(model)
    trainer = Trainer(
        max_steps=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=str(tmp_path),
    )  # fmt: skip
    model.set_trainer(trainer)
    data = {
        "manifest_filepath": str(manifest),
        "sample_rate": 16000,
        "batch_size": 4,
        "shuffle": False,
        "num_workers": 0,
    }
    model.setup_training_data(OmegaConf.create(data))
    with open_dict(model.cfg):
        model.cfg.optim = options("adamw_8bit")
        model.cfg.optim.sched.max_steps = 4
    model.setup_optimization(model.cfg.optim)
    use_in_nemo(model)
    before = model.joint.enc.weight.detach().clone()
    trainer.fit(model)
    (optimizer,) = trainer.optimizers
    assert trainer.global_step == 4
    assert optimizer.state[model.encoder.layers[0].feed_forward1.linear1.weight]["state1"].dtype == torch.uint8
    assert float(optimizer.param_groups[0]["lr"]) < 0.1 * PEAK, "at the end of the cosine"
    assert not torch.equal(model.joint.enc.weight, before)
