"""An account of the tensors that a training step holds, by what they are for.

It sees every tensor that torch's operations make, on whatever device. It does not see what kernels keep for themselves (cuDNN's
workspace, arrays of numba) nor what compiled graphs allocate inside.
"""

import collections
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from finetune.strategies.optimizers import state_tensors, stored_tensors, unwrap_optimizer

PARTS = ("parameters", "gradients", "optimizer", "activations")


class TensorAccount(TorchDispatchMode):
    """Counts the bytes of all live tensors while it is entered; each storage once, by its part.

    Parts: parameters (and buffers), gradients, optimizer (states), activations (all else that the step makes, temporaries
    included).

    Args:
        device_type: count tensors on such devices only; None counts all.

    Attributes:
        new: the part that tensors which a step makes are counted as.
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
        self._resize: Any = None

    def __enter__(self) -> "TensorAccount":
        # FSDP frees and takes back gathered weights through their storages, which is no operation on a tensor.
        self._resize = resize = torch.UntypedStorage.resize_

        def seen(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            self._count_storage(storage, "parameters", move=True)
            return result

        torch.UntypedStorage.resize_ = seen
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def add(self, tensors: Iterable[torch.Tensor], part: str) -> None:
        """Counts tensors that exist already, or gives counted ones to another part."""
        for tensor in tensors:
            for inner in stored_tensors(tensor):
                self._count(inner, part, move=True)

    def _count(self, tensor: torch.Tensor, part: str, move: bool = False) -> None:
        self._count_storage(tensor.untyped_storage(), part, move)

    def _count_storage(self, storage: Any, part: str, move: bool) -> None:
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
        self._look_for_a_peak()

    def _look_for_a_peak(self) -> None:
        if self.total > self.peak:
            self.peak, self.parts_at_peak = self.total, dict(self.parts)

    def _part_of_result(self, func: Any, args: Any, tensor: torch.Tensor) -> str:
        return self.new

    def _forget(self, key: int) -> None:
        part, size = self._part_of.pop(key)
        self.parts[part] -= size
        self.total -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                part = self._part_of_result(func, args, leaf)
                for inner in stored_tensors(leaf):
                    self._count(inner, part)
        return result


class StepAccount:
    """A context in which one training step is followed: `with StepAccount(module, optimizer) as account: step()`.

    Afterwards `account.peak` holds the most bytes that were live at once, `account.parts_at_peak` their parts, and
    `account.parts` what is left when the step is over.

    Args:
        module: the model as it is trained.
        optimizer: its optimizer, after a step (its states have to exist).
        device_type: as for TensorAccount.
        held: gradients of the step before, whose memory is kept between the steps: DDP's buckets.
        averages: a moving average of the weights, counted with the optimizer's states.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: Any,
        device_type: str | None = None,
        held: Iterable[torch.Tensor] = (),
        averages: Iterable[torch.Tensor] = (),
    ):
        self.module, self.optimizer, self.held, self.averages = module, optimizer, list(held), list(averages)
        self.account = TensorAccount(device_type)
        self.hooks: list[Any] = []
        self.restore_step: Callable[[], None] | None = None

    def __enter__(self) -> TensorAccount:
        account = self.account
        account.add(self.module.buffers(), "parameters")
        account.add((p.detach() for p in self.module.parameters()), "parameters")
        account.add(self._weights_of_the_engine(), "parameters")
        account.add(state_tensors(self.optimizer), "optimizer")
        account.add(self.averages, "optimizer")
        account.add(self.held, "gradients")
        for p in self.module.parameters():
            if p.requires_grad:
                self.hooks.append(p.register_post_accumulate_grad_hook(self._gradient))
                if p.grad is not None:
                    account.add([p.grad], "gradients")
        self._pause_in_compiled_steps()
        return account.__enter__()

    def _pause_in_compiled_steps(self) -> None:
        """A compiled step would be compiled anew for the account, which cannot see into it, and dynamo may fail at that."""
        optimizer = unwrap_optimizer(self.optimizer)
        if not any(
            "torchao" in kind.__module__ or kind.__name__ == "CompiledAdamW" for kind in type(optimizer).__mro__
        ):
            return
        step = optimizer.step
        self.restore_step = (
            partial(setattr, optimizer, "step", step)
            if "step" in vars(optimizer)
            else partial(delattr, optimizer, "step")
        )

        def unseen(*args: Any, **kwargs: Any) -> Any:
            self.account.__exit__(None, None, None)
            try:
                return step(*args, **kwargs)
            finally:
                self.account.__enter__()

        optimizer.step = unseen

    def _weights_of_the_engine(self) -> list[torch.Tensor]:
        """Partitions that ZeRO keeps beside the module's own parameters: float32 copies, and shards of stage 3."""
        groups = getattr(unwrap_optimizer(self.optimizer), "param_groups", [])
        copies = [p.detach() for group in groups for p in group["params"]]
        return copies + [p.ds_tensor for p in self.module.parameters() if hasattr(p, "ds_tensor")]

    def _gradient(self, p: torch.Tensor) -> None:
        if p.grad is not None:
            self.account.add([p.grad], "gradients")

    def __exit__(self, *error: Any) -> None:
        self.account.__exit__(*error)
        for hook in self.hooks:
            hook.remove()
        if self.restore_step is not None:
            self.restore_step()
