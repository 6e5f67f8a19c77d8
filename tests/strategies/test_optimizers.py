"""Optimizers as strategies: equal curves where the mathematics is the same, small states where that is the point."""

import json
import shutil
from typing import Any

import pytest
import torch
from conftest import DETERMINISTIC, ONLY_TRAIN, read_lines

from finetune.config.optimizers import BITSANDBYTES
from finetune.strategies import low_bit
from finetune.strategies.optimizers import build_optimizer, describe_optimizer, optimizer_in_words, parameter_groups


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


@pytest.mark.parametrize("name", ["adamw_foreach", "adamw_loop", "adamw_compiled"])
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
    "name", [pytest.param("adamw_compiled", marks=pytest.mark.slow), "adamw_4bit_ao", "paged_adamw_8bit", "lion_8bit"]
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
