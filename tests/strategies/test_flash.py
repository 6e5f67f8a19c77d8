"""flashoptim's step in the backward pass. Its kernels need a GPU; the hooks are tried with its plain operations."""

import copy

import pytest
import torch

from finetune.errors import UserError
from finetune.strategies.flash import FlashAdamW, ReleasingAdamW, flash_adamw

PLAIN = {"quantize": False, "master_weight_bits": None, "fused": False, "betas": (0.9, 0.98), "eps": 1e-8}


def net_and_groups() -> tuple[torch.nn.Sequential, list[dict]]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    groups = [
        {"params": [net[0].weight, net[2].weight], "lr": 1e-2, "weight_decay": 0.1},
        {"params": [net[0].bias, net[2].bias], "lr": 1e-2, "weight_decay": 0.0},
    ]
    return net, groups


def steps(optimizer, net, first: int, last: int) -> list[float]:
    """Norms of the gradients; the learning rate changes with each step."""
    norms = []
    for step in range(first, last):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        net(x).square().sum().backward()
        if hasattr(optimizer, "clip_grad_norm_"):
            norms.append(float(optimizer.clip_grad_norm_(float("inf"))))
        else:
            norms.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def test_steps_in_the_backward_pass_equal_those_behind_it():
    net, groups = net_and_groups()
    expected = steps(FlashAdamW(groups, lr=1e-2, **PLAIN), net, 0, 6)
    released, groups = net_and_groups()
    norms = steps(ReleasingAdamW(groups, lr=1e-2, **PLAIN), released, 0, 6)
    assert norms == pytest.approx(expected, rel=1e-6)
    for ours, theirs in zip(released.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_no_gradient_is_left_behind_and_few_exist_at_a_time():
    net, groups = net_and_groups()
    ReleasingAdamW(groups, lr=1e-2, **PLAIN)
    alive = []
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda _: alive.append(sum(q.grad is not None for q in net.parameters())))
    net(torch.randn(5, 6)).sum().backward()
    assert all(p.grad is None for p in net.parameters())
    assert max(alive) <= 1


def test_a_loaded_state_is_stepped_with():
    """Loading makes new groups, whose learning rates the hooks have to see."""
    net, groups = net_and_groups()
    optimizer = ReleasingAdamW(groups, lr=1e-2, **PLAIN)
    steps(optimizer, net, 0, 3)
    saved, weights = copy.deepcopy((optimizer.state_dict(), net.state_dict()))
    steps(optimizer, net, 3, 6)
    again, groups = net_and_groups()
    again.load_state_dict(weights)
    optimizer = ReleasingAdamW(groups, lr=1e-2, **PLAIN)
    optimizer.load_state_dict(saved)
    steps(optimizer, again, 3, 6)
    for ours, theirs in zip(again.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_a_gradient_that_is_not_finite_ends_the_run():
    net, groups = net_and_groups()
    optimizer = ReleasingAdamW(groups, lr=1e-2, **PLAIN)
    (net(torch.ones(1, 6)).sum() * float("inf")).backward()
    with pytest.raises(UserError, match=r"not finite and has been stepped with.*training.optimizer=flash_adamw"):
        optimizer.clip_grad_norm_(1.0)


def test_refused_without_a_gpu():
    _, groups = net_and_groups()
    with pytest.raises(
        UserError, match=r"flash_adamw runs on CUDA GPUs only, the model is on the cpu. Take adamw_8bit"
    ):
        flash_adamw(groups, release=False, betas=(0.9, 0.98), eps=1e-8)
