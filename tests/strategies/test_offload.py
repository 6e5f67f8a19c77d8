"""The adapter around torchao's CPU offload, against a stand-in for it that needs no GPU: everything lies on the CPU,
the copies are real."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finetune.errors import UserError
from finetune.strategies.offload import OffloadedAdamW, offloaded_adamw


class StandIn:
    """torchao's CPUOffloadOptimizer as far as the adapter knows it: an optimizer a parameter, on copies taken when it
    is made."""

    def __init__(self, groups: list[dict[str, Any]], *, offload_gradients: bool, **options: Any):
        self.queue, self.param_d2h_map, self.optim_dict, self.d_param_groups, self.d_opt = {}, {}, {}, [], None
        self.minimal_size = 64

        def arrived(p: torch.Tensor) -> None:
            self.param_d2h_map[p].grad.copy_(p.grad)
            self.queue.pop(p, None)
            self.queue[p] = SimpleNamespace(synchronize=lambda: None)
            if offload_gradients:
                p.grad = None

        for group in groups:
            rest = {k: v for k, v in group.items() if k != "params"}
            small = [p for p in group["params"] if p.numel() < self.minimal_size]
            for p in group["params"]:
                if p.numel() >= self.minimal_size:
                    host = p.detach().clone()
                    host.grad = torch.zeros_like(host)
                    self.param_d2h_map[p] = host
                    self.optim_dict[p] = torch.optim.AdamW([{"params": host, **rest}], **options)
                    p.register_post_accumulate_grad_hook(arrived)
            if small:
                self.d_param_groups.append({"params": small, **rest})
        if self.d_param_groups:
            self.d_opt = torch.optim.AdamW(self.d_param_groups, **options)

    def step(self) -> None:
        if self.d_opt is not None:
            self.d_opt.step()
        with torch.no_grad():
            for p in self.queue:
                self.optim_dict[p].step()
                p.copy_(self.param_d2h_map[p])
        self.queue.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.param_d2h_map:
            p.grad = None
        if self.d_opt is not None:
            self.d_opt.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        found = {"offloaded": [o.state_dict() for o in self.optim_dict.values()]}
        return found | ({"on-device": self.d_opt.state_dict()} if self.d_opt else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for optimizer, saved in zip(self.optim_dict.values(), state["offloaded"], strict=True):
            optimizer.load_state_dict(saved)
        if self.d_opt:
            self.d_opt.load_state_dict(state["on-device"])


def make_net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))


def groups_of(net: torch.nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in net.parameters() if p.ndim > 1]
    biases = [p for p in net.parameters() if p.ndim == 1]
    return [
        {"params": matrices, "lr": 1e-2, "weight_decay": 0.1, "name": "a"},
        {"params": biases, "lr": 2e-2, "weight_decay": 0.0, "name": "b"},
    ]


def train(net: Any, optimizer: Any, steps: range, accumulate: int = 1) -> list[tuple[float, float]]:
    """Losses and gradient norms under clipping and a falling learning rate."""
    found = []
    for step in steps:
        g = torch.Generator().manual_seed(step)
        for group, rate in zip(optimizer.param_groups, (1e-2, 2e-2)):
            group["lr"] = rate / (1 + step)
        for x, y in zip(
            torch.randn(4, 16, generator=g).chunk(accumulate), torch.randn(4, 8, generator=g).chunk(accumulate)
        ):
            loss = (net(x) - y).pow(2).mean() * 4 / accumulate
            loss.backward()
        clip = getattr(optimizer, "clip_grad_norm_", None)
        norm = clip(0.5) if clip else torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), float(norm)))
    return found


@pytest.mark.parametrize(("offload_gradients", "accumulate"), [(False, 1), (False, 2), (True, 1)])
def test_clipping_schedules_and_accumulation_equal_adamw(offload_gradients, accumulate):
    plain, offloaded = make_net(), make_net()
    expected = train(plain, torch.optim.AdamW(groups_of(plain), betas=(0.9, 0.98)), range(10), accumulate)
    optimizer = OffloadedAdamW(groups_of(offloaded), StandIn, offload_gradients=offload_gradients, betas=(0.9, 0.98))
    actual = train(offloaded, optimizer, range(10), accumulate)
    for a, e in zip(actual, expected, strict=True):
        assert a == pytest.approx(e, rel=1e-5)
    assert expected[0][1] > 0.5, "clipping has to be at work"
    for a, e in zip(offloaded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-7)


def test_a_checkpoint_brings_back_states_and_weights():
    import copy

    whole = make_net()
    optimizer = OffloadedAdamW(groups_of(whole), StandIn)
    train(whole, optimizer, range(5))
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    expected = train(whole, optimizer, range(5, 10))
    again = make_net()
    optimizer = OffloadedAdamW(
        groups_of(again), StandIn
    )  # takes its copies of the weights here, before they are loaded
    again.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert train(again, optimizer, range(5, 10)) == expected
    for a, e in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(a, e)


def test_a_skipped_step_leaves_nothing_behind():
    net = make_net()
    optimizer = OffloadedAdamW(groups_of(net), StandIn)
    before = [p.detach().clone() for p in net.parameters()]
    (net(torch.randn(2, 16)).sum() * float("nan")).backward()
    optimizer.zero_grad()
    optimizer.step()
    assert all(torch.equal(a, e) for a, e in zip(net.parameters(), before, strict=True))


def test_states_are_found_by_parameter():
    net = make_net()
    optimizer = OffloadedAdamW(groups_of(net), StandIn)
    assert not any(optimizer.state.values())
    train(net, optimizer, range(1))
    assert set(optimizer.state) == set(net.parameters())


def test_without_a_gpu_it_is_refused():
    with pytest.raises(UserError, match=r"the model is on the cpu. Take adamw or adamw_8bit"):
        offloaded_adamw(groups_of(make_net()), offload_gradients=False)
