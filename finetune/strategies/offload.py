"""Optimizer states and step on the CPU for one GPU: an adapter around torchao's CPUOffloadOptimizer.

torchao runs one optimizer per parameter, stepped on a host copy of the weight while the gradients of others still
arrive. It has no parameter groups that a schedule could set, no clipping (the gradients that matter are on the host),
and takes its host copies when it is made, so that the next step would undo weights loaded later. This adapter adds all
three.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import _foreach_mul_, _foreach_norm  # pyright: ignore[reportPrivateImportUsage]  # no public name

from finetune.errors import UserError


class OffloadedAdamW(torch.optim.Optimizer):
    """AdamW with its states in host memory, and gradients and master copies in pinned memory.

    Args:
        groups: parameter groups on a GPU.
        make_inner: (groups, **options) -> torchao's CPUOffloadOptimizer, or a stand-in with its attributes.
        offload_gradients: free each gradient on the GPU as soon as it has been copied; no accumulation.
        options: betas, eps.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        make_inner: Callable[..., Any],
        *,
        offload_gradients: bool = False,
        **options: Any,
    ):
        self.offload_gradients = offload_gradients
        self.inner: Any = None
        super().__init__([dict(g) for g in groups], {"lr": groups[0]["lr"], "weight_decay": 0.0, **options})
        inner_groups = [
            {k: v for k, v in g.items() if k in ("params", "lr", "weight_decay")} for g in self.param_groups
        ]
        self.inner = make_inner(inner_groups, offload_gradients=offload_gradients, **options)

    def _gradients(self) -> list[torch.Tensor]:
        """Return the gradients that the step will use: on the host if offloaded, on the GPU for small parameters."""
        for copied in self.inner.queue.values():
            copied.synchronize()
        found = [self.inner.param_d2h_map[p].grad for p in self.inner.queue]
        for group in self.inner.d_param_groups:
            found += [p.grad for p in group["params"] if p.grad is not None]
        return found

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their 2-norm is at most `max_norm`; return the norm before."""
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for grad in self._gradients():
            by_device.setdefault(grad.device, []).append(grad)
        norms = [torch.stack(_foreach_norm(grads)).norm().cpu() for grads in by_device.values()]
        norm = torch.stack(norms).norm() if norms else torch.zeros(())
        scale = float((max_norm / (norm + 1e-6)).clamp(max=1.0))
        if scale < 1.0:
            for grads in by_device.values():
                _foreach_mul_(grads, scale)
        return norm

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure is not None else None
        settings = {}
        for group in self.param_groups:
            shared = {k: v for k, v in group.items() if k in ("lr", "weight_decay", "betas", "eps")}
            settings |= dict.fromkeys(group["params"], shared)
        for p, optimizer in self.inner.optim_dict.items():
            optimizer.param_groups[0].update(settings[p])
        for group in self.inner.d_opt.param_groups if self.inner.d_opt is not None else ():
            group.update(settings[group["params"][0]])
        self.inner.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none=True)
        self.inner.queue.clear()  # gradients of a step that was skipped must not be stepped with later

    @property
    def state(self) -> dict[Any, Any]:
        """The state by GPU parameter, wherever it is."""
        if self.inner is None:
            return {}
        found = {p: state for p, own in self.inner.optim_dict.items() for state in own.state.values()}
        return found | (dict(self.inner.d_opt.state) if self.inner.d_opt is not None else {})

    @state.setter
    def state(self, value: Any) -> None:
        """Ignore the empty one that torch's constructor sets."""

    def state_dict(self) -> dict[str, Any]:
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        return {"inner": self.inner.state_dict(), "groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the states, and take the host copies from the weights again, which have to be loaded before."""
        for group, saved in zip(self.param_groups, state["groups"], strict=True):
            group.update(saved)
        self.inner.load_state_dict(state["inner"])
        self.take_weights()

    @torch.no_grad()
    def take_weights(self) -> None:
        """Copy the weights into the host's master copies; without it the next step would undo a load."""
        for p, p_host in self.inner.param_d2h_map.items():
            p_host.copy_(p)


def offloaded_adamw(groups: list[dict[str, Any]], *, offload_gradients: bool, **options: Any) -> OffloadedAdamW:
    """Make torchao's optimizer with its adapter.

    Raises:
        UserError: the parameters are not on a CUDA GPU.
    """
    device = groups[0]["params"][0].device
    if device.type != "cuda":
        raise UserError(
            "training.optimizer: offloading moves the optimizer from a GPU to the host, but the model is on the "
            f"{device.type}. Take adamw or adamw_8bit."
        )
    from torchao.optim import CPUOffloadOptimizer

    return OffloadedAdamW(groups, CPUOffloadOptimizer, offload_gradients=offload_gradients, **options)
