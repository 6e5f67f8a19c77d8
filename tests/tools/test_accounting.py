"""The account of a step's tensors: exact where the bytes are known, and smaller where a strategy makes it so."""

from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from finetune.tools.planning.accounting import StepAccount, TensorAccount

WIDTH, ROWS, LAYERS = 64, 256, 6


class Stack(torch.nn.Module):
    """Linear layers with activations that are large beside the weights."""

    def __init__(self, checkpointed: bool = False):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH))
            for _ in range(LAYERS)
        )
        self.checkpointed = checkpointed
        self.register_buffer("scale", torch.ones(100))

    def forward(self, x_BH: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x_BH = checkpoint(layer, x_BH, use_reentrant=False) if self.checkpointed else layer(x_BH)
        return x_BH.square().mean()


def account_of(stack: Stack, optimizer: torch.optim.Optimizer) -> TensorAccount:
    """The account of the second step; the first makes the optimizer's states."""
    x_BH = torch.randn(ROWS, WIDTH)
    for step in range(2):
        with StepAccount(stack, optimizer) as account:
            stack(x_BH).backward()
            if step == 1:
                held = dict(account.parts)
            optimizer.step()
            optimizer.zero_grad()
    account.before_step = held
    return account


def test_parts_are_exact():
    stack = Stack()
    account = account_of(stack, torch.optim.AdamW(stack.parameters(), foreach=False))
    weights = 4 * sum(p.numel() for p in stack.parameters())
    tensors = len(list(stack.parameters()))
    assert account.parts_at_peak["parameters"] == weights + 400
    assert account.parts_at_peak["optimizer"] == 2 * weights + 4 * tensors  # each has a step of its own
    assert account.before_step["gradients"] == weights
    assert account.parts["gradients"] == 0
    assert account.peak == sum(account.parts_at_peak.values())


def test_activations_are_all_that_autograd_keeps():
    """At the end of the forward pass: two outputs of linear layers and one of the GELU, and the input's square."""
    stack = Stack()
    optimizer = torch.optim.SGD(stack.parameters())
    x_BH = torch.randn(ROWS, WIDTH)
    with StepAccount(stack, optimizer) as account:
        loss = stack(x_BH)
        kept = account.parts["activations"]
    assert kept == pytest.approx(3 * LAYERS * x_BH.nbytes, rel=0.1)
    del loss
    assert account.parts["activations"] < x_BH.nbytes


def test_checkpointing_shows():
    torch.manual_seed(0)
    peaks = {}
    for checkpointed in (False, True):
        stack = Stack(checkpointed)
        account = account_of(stack, torch.optim.SGD(stack.parameters()))
        peaks[checkpointed] = account.parts_at_peak["activations"]
    assert peaks[True] < 0.6 * peaks[False]


def test_views_and_updates_in_place_count_once():
    with TensorAccount() as account:
        x = torch.zeros(1000)
        y = x[10:].view(-1)
        y += 1
        assert account.total == 4000
        del x
        assert account.total == 4000
        del y
        assert account.total == 0
    assert account.peak == 4000


def test_storages_that_are_freed_and_taken_back():
    """As FSDP does with gathered weights."""
    x = torch.zeros(1000)
    with TensorAccount() as account:
        account.add([x], "parameters")
        x.untyped_storage().resize_(0)
        assert account.total == 0
        x.untyped_storage().resize_(4000)
        assert account.parts["parameters"] == account.total == 4000
    resize = torch.UntypedStorage.resize_
    x.untyped_storage().resize_(0)
    assert account.total == 4000, "the account is over"
    assert resize is torch.UntypedStorage.resize_


def test_gradients_that_are_held_between_steps():
    """As DDP holds its buckets: there from the beginning, and once."""
    stack = Stack()
    optimizer = torch.optim.SGD(stack.parameters())
    weights = 4 * sum(p.numel() for p in stack.parameters())
    bucket = torch.zeros(weights // 4)
    with StepAccount(stack, optimizer, held=[bucket[:10], bucket[10:]]) as account:
        stack(torch.randn(ROWS, WIDTH))
        assert account.parts["gradients"] == weights


def test_compiled_steps_are_not_compiled_for_the_account():
    compiled = []

    def backend(graph, example_inputs):
        compiled.append(graph)
        return graph.forward

    class CompiledSGD(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                descend(p.detach(), p.grad)

    @torch.compile(backend=backend, fullgraph=True, dynamic=False)
    def descend(p, grad):
        p.sub_(0.1 * grad)

    layer = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = CompiledSGD(layer.parameters())
    for accounted in (False, True, True):
        before = layer.weight.detach().clone()
        with StepAccount(layer, optimizer) if accounted else nullcontext():
            layer(torch.randn(4, WIDTH)).sum().backward()
            optimizer.step()
        assert not torch.equal(layer.weight, before)
        optimizer.zero_grad()
    assert len(compiled) == 1


@pytest.mark.parametrize("checkpointed", [False, True])
def test_peaks_equal_those_of_torchs_own_tracker(checkpointed):
    from torch.distributed._tools.mem_tracker import MemTracker

    stack = Stack(checkpointed)
    optimizer = torch.optim.AdamW(stack.parameters(), foreach=False)
    account = account_of(stack, optimizer)
    tracker = MemTracker()
    tracker.track_external(stack, optimizer)
    x_BH = torch.randn(ROWS, WIDTH)
    with tracker:
        stack(x_BH).backward()
        optimizer.step()
        optimizer.zero_grad()
    (peaks,) = tracker.get_tracker_snapshot("peak").values()
    assert account.peak == peaks["Total"]


def test_one_kind_of_device_only():
    with TensorAccount("cuda") as account:
        x = torch.zeros(1000)
    assert account.peak == 0
    assert x.numel() == 1000
