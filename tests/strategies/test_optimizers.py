"""Optimizers as strategies: equal curves where the mathematics is the same, small states where that is the point."""

import json
import shutil
from typing import Any

import pytest
import torch
from conftest import DETERMINISTIC, ONLY_TRAIN, read_lines, slow
from safetensors.torch import load_file

from finetune.config.optimizers import BITSANDBYTES
from finetune.strategies import low_bit
from finetune.strategies.optimizers import (
    build_optimizer,
    describe_optimizer,
    optimizer_in_words,
    parameter_groups,
    rates_in_words,
)


class Net(torch.nn.Module):
    """Encoder, decoder and joint by name, with matrices of 8-bit size, an embedding, and tensors too small for it."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = torch.nn.Embedding(300, 64)
        self.encoder = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.LayerNorm(256))
        self.joint = torch.nn.Linear(256, 300)

    def forward(self, tokens_N: torch.Tensor) -> torch.Tensor:
        return self.joint(torch.relu(self.encoder(self.decoder(tokens_N))))


@pytest.fixture
def without_compiler():
    """torchao's step as it stands, without a minute of compilation."""
    with torch._dynamo.config.patch(disable=True):
        yield


def train(
    name: str, steps: int = 200, args: dict[str, Any] | None = None, rate: float = 3e-3
) -> tuple[list[float], dict[str, Any]]:
    """Losses of a small classifier under an optimizer, and the optimizer's description.

    The learning rate is 0 in the first step, as where a warm-up begins, and falls from its peak afterwards.
    """
    torch.manual_seed(0)
    net = Net()
    optimizer = build_optimizer(name, parameter_groups(net, {}, rate, 0.01), args or {})
    targets_N = torch.randint(0, 300, (300,), generator=torch.Generator().manual_seed(1))
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            now = rate * (1 - step / steps) if step else 0.0
            group["lr"] = group["lr"].fill_(now) if isinstance(group["lr"], torch.Tensor) else now
        tokens_N = torch.randint(0, 300, (64,), generator=torch.Generator().manual_seed(step))
        loss = torch.nn.functional.cross_entropy(net(tokens_N), targets_N[tokens_N])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, describe_optimizer(optimizer)


def test_each_implementation_is_the_one_that_it_names():
    flags = {
        name: [
            build_optimizer(name, parameter_groups(Net(), {}, 1e-3, 0.01), {}).param_groups[0].get(flag)
            for flag in ("fused", "foreach")
        ]
        for name in ("adamw", "adamw_foreach", "adamw_loop")
    }
    assert flags == {"adamw": [True, None], "adamw_foreach": [None, True], "adamw_loop": [None, False]}
    paged = build_optimizer("paged_adamw_8bit", parameter_groups(Net(), {}, 1e-3, 0.01), {})
    assert paged.is_paged
    assert not build_optimizer("adamw_8bit", parameter_groups(Net(), {}, 1e-3, 0.01), {}).is_paged


@pytest.mark.parametrize("name", ["adamw_foreach", "adamw_loop", slow("adamw_compiled")])
def test_the_same_mathematics(name):
    expected, _ = train("adamw", 40)
    losses, told = train(name, 40)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < 0.8 * expected[0]
    assert told["optimizer"] == ("CompiledAdamW" if name == "adamw_compiled" else "AdamW")


@pytest.mark.slow
def test_schedules_do_not_compile_the_step_anew():
    from torch._dynamo.utils import counters

    train("adamw_compiled", 3)
    counters.clear()
    torch._dynamo.reset()
    train("adamw_compiled", 12)
    assert counters["stats"]["unique_graphs"] <= 2  # the first step makes the states


@pytest.mark.parametrize(
    ("name", "bytes_per_parameter", "dtype"),
    [
        ("adamw_8bit", 2.2, "uint8"),
        ("paged_adamw_8bit", 2.2, "uint8"),
        ("adamw_8bit_ao", 2.2, "uint8"),
        ("adamw_4bit_ao", 1.2, "uint8"),
        ("adamw_fp8_ao", 2.2, "float8_e4m3fn"),
    ],
)
def test_bytes_of_low_bit_states(without_compiler, name, bytes_per_parameter, dtype):
    args = {"embeddings_32bit": False} if name in BITSANDBYTES else {}
    _, told = train(name, 2, args)
    parameters = sum(p.numel() for p in Net().parameters())
    assert told["optimizer_state_bytes"] / parameters < bytes_per_parameter
    assert told["optimizer_state_dtypes"][dtype] > 0.8 * told["optimizer_state_bytes"]


def test_the_state_in_words():
    weights = [torch.nn.Parameter(torch.ones(500_000, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    optimizer = torch.optim.AdamW(weights)
    assert optimizer_in_words(optimizer) == "AdamW: no state"
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    words = "AdamW: 6.0 MB of state (4.0 MB float32, 2.0 MB bfloat16) on the CPU"
    assert optimizer_in_words(optimizer) == words


def test_lion_keeps_one_8bit_state():
    losses, told = train("lion_8bit", rate=3e-4)
    assert losses[-1] < 0.5 * losses[0]
    parameters = sum(p.numel() for p in Net().parameters())
    embedding = Net().decoder.weight.numel()
    assert told["optimizer_state_bytes"] < 1.1 * (parameters - embedding) + 4.1 * embedding


def test_embeddings_keep_32_bits_in_bitsandbytes():
    _, wide = train("adamw_8bit", 2)
    _, narrow = train("adamw_8bit", 2, {"embeddings_32bit": False})
    embedding = Net().decoder.weight.numel()
    assert wide["optimizer_state_dtypes"]["float32"] - narrow["optimizer_state_dtypes"]["float32"] == pytest.approx(
        8 * embedding, rel=0.02
    )


@pytest.mark.parametrize("name", ["adamw_8bit", "lion_8bit"])
def test_bitsandbytes_steps_alike_without_waiting_after_each_parameter(name, monkeypatch):
    bnb = pytest.importorskip("bitsandbytes")

    def train_net(make) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = Net()
        optimizer = make([{"params": list(net.parameters()), "lr": 1e-3, "weight_decay": 0.1}])
        for _ in range(3):
            for p in net.parameters():
                p.grad = torch.sin(1e3 * p.detach())
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    args = {"adamw_8bit": {"betas": low_bit.BETAS, "eps": low_bit.EPS}, "lion_8bit": {"betas": low_bit.LION_BETAS}}
    expected = train_net(lambda groups: getattr(bnb.optim, BITSANDBYTES[name])(groups, **args[name]))

    def waits(_: torch.Tensor) -> None:
        raise AssertionError("a step that waits for the GPU after each parameter")

    optimizer = build_optimizer(name, [{"params": list(Net().parameters()), "lr": 1e-3}], {})
    monkeypatch.setattr("bitsandbytes.optim.optimizer.sync_gpu", waits)
    for a, e in zip(train_net(lambda groups: type(optimizer)(groups, **args[name])), expected, strict=True):
        assert torch.equal(a, e)


def test_block_size_of_torchao(without_compiler):
    _, large = train("adamw_8bit_ao", 2)
    _, small = train("adamw_8bit_ao", 2, {"block_size": 64})
    assert small["optimizer_state_bytes"] > 1.03 * large["optimizer_state_bytes"]


@pytest.mark.parametrize(
    "name", [slow("adamw_compiled"), slow("adamw_4bit_ao"), "paged_adamw_8bit", slow("lion_8bit")]
)
def test_a_run_resumes_exactly(request, run_train, tiny_run, tmp_path, name):
    """The optimizer's file of a checkpoint restores states, tensors of learning rates and quantised ones included."""
    if name != "adamw_compiled":
        request.getfixturevalue("without_compiler")
    training = {"max_steps": 6, "save_steps": 3, "save_total_limit": 0, "eval_on_start": False}
    arguments = tiny_run(model=DETERMINISTIC, data=ONLY_TRAIN, training=training)
    assert run_train(*arguments, "--strategy", name) == 0
    whole = read_lines(tmp_path / "run" / "metrics.jsonl")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    assert run_train(*arguments, "--strategy", name, "training.resume_from_checkpoint=true") == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["resumed_from"] == 3
    for ours, theirs in zip(read_lines(tmp_path / "run" / "metrics.jsonl"), whole, strict=True):
        assert (ours["loss"], ours["grad_norm"], ours["learning_rate"]) == (
            theirs["loss"],
            theirs["grad_norm"],
            theirs["learning_rate"],
        )


# ---- lower rates below ---------------------------------------------------------------------------------------------


class Deep(torch.nn.Module):
    """Four Conformer layers by name, what is below them, and a head."""

    def __init__(self) -> None:
        super().__init__()
        layers = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)) for _ in range(4)]
        self.encoder = torch.nn.ModuleDict(
            {"pre_encode": torch.nn.Linear(4, 4), "layers": torch.nn.ModuleList(layers)}
        )
        self.decoder, self.joint = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8)


def rates_of(model: torch.nn.Module, groups: list[dict[str, Any]]) -> dict[str, float]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)]: group["lr"] for group in groups for parameter in group["params"]}


def test_lower_layers_have_lower_rates():
    model = Deep()
    groups = parameter_groups(model, {"encoder": 1e-3, "joint": 3e-3}, 2e-3, 0.01, layer_decay=0.5)
    rates = rates_of(model, groups)
    assert len(rates) == len(list(model.parameters()))
    for layer in range(4):
        own = [rate for name, rate in rates.items() if name.startswith(f"encoder.layers.{layer}.")]
        assert own == pytest.approx([1e-3 * 0.5 ** (3 - layer)] * 4)
    assert rates["encoder.pre_encode.weight"] == pytest.approx(1e-3 * 0.5**4)
    assert (rates["decoder.weight"], rates["joint.weight"]) == (2e-3, 3e-3)
    decayed = {name for group in groups if group["weight_decay"] for name in rates_of(model, [group])}
    assert decayed == {name for name, parameter in model.named_parameters() if parameter.ndim > 1}
    words = "below the layers 6.25e-05, layers 0 to 3 0.000125 to 0.001, decoder 0.002, joint 0.003"
    assert rates_in_words(groups) == f"peak learning rates: {words}"


def test_with_frozen_layers_depth_counts_from_the_top():
    model = Deep()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith("encoder.") or ".layers.3." in name)
    groups = parameter_groups(model, {}, 1e-3, 0.01, layer_decay=0.5)
    assert set(rates_of(model, groups).values()) == {1e-3}
    assert rates_in_words(groups) == "peak learning rates: layer 3 0.001, decoder 0.001, joint 0.001"


def test_without_a_decay_the_groups_are_as_ever():
    names = [group["name"] for group in parameter_groups(Deep(), {}, 1e-3, 0.01)]
    assert names == ["encoder", "encoder_no_decay", "decoder_embedding", "joint", "joint_no_decay"]


@pytest.mark.slow
def test_a_run_with_lower_rates_below_moves_the_lower_layers_less_and_resumes(run_train, tiny_run, tmp_path, capsys):
    """0.01 a layer: the subsampling hardly moves in a few steps of Adam, which is blind to the gradient's size."""
    training = {"max_steps": 4, "save_steps": 2, "save_total_limit": 0, "eval_on_start": False, "layer_decay": 0.01}
    training |= {"lr_scheduler_type": "constant", "warmup_ratio": 0.0, "weight_decay": 0.0}
    arguments = tiny_run(model=DETERMINISTIC, data=ONLY_TRAIN, training=training)
    before: dict[str, torch.Tensor] = {}

    def keep(trainer: Any) -> None:
        before.update({name: p.detach().clone() for name, p in trainer.model.named_parameters()})

    assert run_train(*arguments, observe=keep) == 0
    said = "peak learning rates: below the layers 1e-07, layers 0 to 1 1e-05 to 0.001, decoder 0.001, joint 0.001"
    assert "".join(capsys.readouterr()).count(said) == 1
    run = tmp_path / "run"
    after = load_file(run / "checkpoints" / "step-00000004" / "model.safetensors")

    def moved(start: str) -> float:
        return max(float((after[f"nemo.{n}"] - t).abs().max()) for n, t in before.items() if n.startswith(start))

    assert moved("encoder.pre_encode") < 5e-7
    assert 5e-6 < moved("encoder.layers.0.") < 5e-5
    assert moved("encoder.layers.1.") > 1e-3
    whole = read_lines(run / "metrics.jsonl")
    assert whole[0]["learning_rates"]["encoder"] == pytest.approx(1e-3)
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    assert run_train(*arguments, "training.resume_from_checkpoint=true") == 0
    assert [row["loss"] for row in read_lines(run / "metrics.jsonl")] == [row["loss"] for row in whole]
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    assert run_train(*arguments, "training.resume_from_checkpoint=true", "training.layer_decay=1") == 0
    told = "".join(capsys.readouterr())
    assert "trained was everything, at a rate of its own for each layer, is everything" in told
