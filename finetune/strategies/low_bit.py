"""Optimizers whose states are kept in 8 or 4 bits: bitsandbytes (arXiv 2110.02861) and torchao."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from finetune.config.optimizers import BITSANDBYTES, TORCHAO, gpu_lacks_fp8
from finetune.errors import UserError

log = logging.getLogger(__name__)

BETAS, EPS = (0.9, 0.98), 1e-8
LION_BETAS = (0.9, 0.99)


def bitsandbytes_optimizer(name: str, groups: list[dict[str, Any]], args: dict[str, Any]) -> torch.optim.Optimizer:
    """Make bitsandbytes' optimizer with 8-bit block-wise states; 32-bit AdamW with a warning where it cannot run.

    Groups with `embedding` True keep 32-bit states unless `embeddings_32bit` is False.
    """
    lion = name == "lion_8bit"
    args = {"betas": LION_BETAS, **args} if lion else {"betas": BETAS, "eps": EPS, **args}
    wide = args.pop("embeddings_32bit", True)
    try:
        import bitsandbytes as bnb

        kind = getattr(bnb.optim, BITSANDBYTES[name])
        _try_step(kind, groups[0]["params"][0].device)
    except Exception as error:
        log.warning(
            "%s cannot be used here (%s: %s); training goes on with 32-bit AdamW, whose state is %s. `bash "
            "scripts/install_8bit_optimizer.sh` installs and checks bitsandbytes.",
            BITSANDBYTES[name],
            type(error).__name__,
            str(error).strip().partition("\n")[0],
            "eight times as large, and which wants higher learning rates" if lion else "four times as large",
        )
        betas = BETAS if lion else args["betas"]
        return torch.optim.AdamW(groups, fused=True, betas=betas, eps=args.get("eps", EPS))
    return _with_own_step(kind, wide)(groups, **args)


def _try_step(kind: type, device: torch.device) -> None:
    """Step once on a scratch tensor: bitsandbytes imports on machines where its kernels do not run."""
    scratch = torch.nn.Parameter(torch.ones(8192, device=device))
    scratch.grad = torch.ones_like(scratch)
    kind([scratch], lr=1e-3).step()


def _with_own_step(kind: type, wide: bool) -> type:
    """Return the optimizer class with 32-bit states for embeddings, whose rows see few and large gradients, and with a
    step that does not wait for the GPU after each parameter.

    bitsandbytes' own way to the former, GlobalOptimManager, keeps overrides by group and position for the whole
    process, other optimizers included. Its step waits 650 times for a 0.6 B model; its kernels run on the default
    stream, behind the backward pass, so that only states that are paged between GPU and host have to be waited for.
    """

    def get_config(self: Any, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        config = kind.get_config(self, gindex, pindex, group)
        if wide and group.get("embedding"):
            config["optim_bits"] = 32
        return config

    @torch.no_grad()
    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.initialized:
            self.check_overrides()
            self.to_gpu()
            self.initialized = True
        for g, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                if p.grad is not None:
                    if not self.state[p]:
                        self.init_state(group, p, g, i)
                    self.prefetch_state(p)
                    self.update_step(group, p, g, i)
        if self.is_paged and torch.cuda.is_available():
            torch.cuda.synchronize()
        return loss

    return type(kind.__name__, (kind,), {"get_config": get_config, "step": step})


def torchao_optimizer(name: str, groups: list[dict[str, Any]], args: dict[str, Any]) -> torch.optim.Optimizer:
    """Make torchao's AdamW with quantised states (adamw_bf16_ao: in the parameters' type).

    Its step is compiled, which takes 6 to 25 s at first. bf16 parameters are rounded stochastically, so that updates
    smaller than their resolution count on average.

    Raises:
        UserError: FP8 on a GPU that has none.
    """
    if name == "adamw_fp8_ao" and groups[0]["params"][0].is_cuda and gpu_lacks_fp8():
        found = ".".join(map(str, torch.cuda.get_device_capability()))
        raise UserError(
            f"adamw_fp8_ao needs a GPU of compute capability 8.9 or more, this one has {found}. Take adamw_8bit_ao."
        )
    import torchao.optim

    narrow = any(p.dtype == torch.bfloat16 for group in groups for p in group["params"])
    kind = getattr(torchao.optim, TORCHAO[name])
    kind = _with_own_levels(kind) if name == "adamw_4bit_ao" else kind
    return kind(groups, bf16_stochastic_round=narrow, **args)


# The 16 levels of 4-bit states, as shares of the largest value of a block.
FIRST_MOMENT_LEVELS = [k / 7 for k in range(-7, 0)] + [k / 8 for k in range(9)]
SECOND_MOMENT_LEVELS = [(k / 16) ** 1.25 for k in range(1, 17)]


def _with_own_levels(kind: type) -> type:
    """Return torchao's 4-bit AdamW with other levels, with which it learns as fast as with 32-bit states.

    torchao takes the levels of arXiv 2309.01507 without the paper's rank-1 normalisation: the second moment on a
    linear scale, whose smallest level is a 16th of the block's largest value, so that most weights move too slowly;
    and the first moment on one that is coarse where it matters. Here the first moment's levels are even and the second
    moment's a little denser near zero. With squares there, weights would move too fast: 1.25 lies between.
    """
    from torchao.optim.subclass_4bit import OptimState4bit

    def zeros(p: torch.Tensor, signed: bool, block_size: int) -> torch.Tensor:
        state = OptimState4bit.zeros(p.shape, signed, block_size, p.device, dtype=p.dtype)
        levels = FIRST_MOMENT_LEVELS if signed else SECOND_MOMENT_LEVELS
        state.qmap.copy_(torch.tensor(levels, device=p.device))
        return state

    return type(kind.__name__, (kind,), {"_subclass_zeros": staticmethod(zeros)})
