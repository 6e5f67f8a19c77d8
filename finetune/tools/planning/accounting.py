"""An account of the tensors that a training step holds, by what they are for.

It sees every tensor that torch's operations make, on any device. It does not see what kernels keep for themselves
(cuDNN's workspace, arrays of numba) nor what compiled graphs allocate inside.

torch.distributed._tools.mem_tracker.MemTracker finds the same peaks to the byte (a test compares them), but makes a
step two to three times as slow, and its parts and its peak are fixed, where the plan needs parts of its own and a peak
for each phase. It is a private API, too.
"""

import collections
import weakref
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from finetune.strategies.optimizers import state_tensors, stored_tensors, unwrap_optimizer

PARTS = ("parameters", "gradients", "optimizer", "activations")


@runtime_checkable
class HasPartition(Protocol):
    """A parameter under ZeRO-3."""

    ds_tensor: torch.Tensor


class TensorAccount(TorchDispatchMode):
    """Counts the bytes of all live tensors while it is entered; each storage once, by its part.

    Parts: parameters (and buffers), gradients, optimizer (states), activations (all else that the step makes,
    temporaries included).

    Args:
        device_type: count tensors on such devices only; None counts all.

    Attributes:
        new: the part that new tensors are counted as.
    """

    def __init__(self, device_type: str | None = None):
        super().__init__()
        self.device_type = device_type
        self.parts: dict[str, int] = collections.Counter(dict.fromkeys(PARTS, 0))
        self.total = 0
        self.peak = 0
        self.parts_at_peak = dict(self.parts)
        self.new = "activations"
        self._part_of: dict[int, tuple[str, int]] = {}
        self._resize = torch.UntypedStorage.resize_

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Run what is compiled as it is: it would otherwise be compiled anew for the account, or not at all."""
        return True

    def __enter__(self) -> "TensorAccount":
        # FSDP frees and takes back gathered weights by resizing their storages, which is no operation and has no hook;
        # MemTracker replaces the method as well.
        self._resize = resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            self._count(storage, "parameters", move=True)

        torch.UntypedStorage.resize_ = counted  # pyright: ignore[reportAttributeAccessIssue]  # same signature
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def add(self, tensors: Iterable[torch.Tensor], part: str) -> None:
        """Count tensors that exist already, or move counted ones to another part."""
        for tensor in tensors:
            for inner in stored_tensors(tensor):
                self._count(inner.untyped_storage(), part, move=True)

    def _count(self, storage: torch.UntypedStorage, part: str, move: bool = False) -> None:
        if self.device_type is not None and storage.device.type != self.device_type:
            return
        key, size = storage._cdata, storage.nbytes()
        known = self._part_of.get(key)
        if known is None:
            weakref.finalize(storage, self._forget, key)
            self.total += size
        elif move or known[1] != size:
            self.parts[known[0]] -= known[1]
            self.total += size - known[1]
            part = part if move else known[0]
        else:
            return
        self._part_of[key] = (part, size)
        self.parts[part] += size
        self._update_peak()

    def _update_peak(self) -> None:
        if self.total > self.peak:
            self.peak, self.parts_at_peak = self.total, dict(self.parts)

    def _part_of_result(self, func: OpOverload, args: tuple[Any, ...], tensor: torch.Tensor) -> str:
        return self.new

    def _forget(self, key: int) -> None:
        part, size = self._part_of.pop(key)
        self.parts[part] -= size
        self.total -= size

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                part = self._part_of_result(func, args, leaf)
                for inner in stored_tensors(leaf):
                    self._count(inner.untyped_storage(), part)
        return result


class StepAccount:
    """Account for one training step: `with StepAccount(module, optimizer) as account: step()`.

    Afterwards `account.peak` holds the most bytes that were live at once, `account.parts_at_peak` their parts, and
    `account.parts` what is left after the step.

    Args:
        module: the model as it is trained.
        optimizer: its optimizer, also inside of Accelerate's or DeepSpeed's wrapper, after a step (with its states).
        device_type: as for TensorAccount.
        held: gradients of the step before, whose memory is kept between the steps: DDP's buckets.
        beside: weights beside the module's, such as a moving average, counted with the optimizer's states.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: Any,
        device_type: str | None = None,
        held: Iterable[torch.Tensor] = (),
        beside: Iterable[torch.Tensor] = (),
    ):
        self.module, self.optimizer, self.held, self.beside = module, optimizer, list(held), list(beside)
        self.account = TensorAccount(device_type)
        self.hooks: list[RemovableHandle] = []

    def __enter__(self) -> TensorAccount:
        account = self.account
        account.add(self.module.buffers(), "parameters")
        account.add((p.detach() for p in self.module.parameters()), "parameters")
        # ZeRO keeps partitions beside the module's own parameters: float32 copies, and shards of stage 3.
        groups = getattr(unwrap_optimizer(self.optimizer), "param_groups", [])
        account.add((p.detach() for group in groups for p in group["params"]), "parameters")
        account.add((p.ds_tensor for p in self.module.parameters() if isinstance(p, HasPartition)), "parameters")
        account.add(state_tensors(self.optimizer), "optimizer")
        account.add(self.beside, "optimizer")
        account.add(self.held, "gradients")
        for p in self.module.parameters():
            if p.requires_grad:
                self.hooks.append(p.register_post_accumulate_grad_hook(self._gradient))
                if p.grad is not None:
                    account.add([p.grad], "gradients")
        return account.__enter__()

    def _gradient(self, p: torch.Tensor) -> None:
        if p.grad is not None:
            self.account.add([p.grad], "gradients")

    def __exit__(self, *error: object) -> None:
        self.account.__exit__(*error)
        for hook in self.hooks:
            hook.remove()
