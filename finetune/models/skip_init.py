"""Networks whose weights a file brings are built without drawing random ones, which takes longer than the file."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import init
from torch.overrides import TorchFunctionMode


class SkipInit(TorchFunctionMode):
    """Within it, what fills a tensor with random numbers leaves it as it is: whatever its memory holds.

    Every parameter has to be loaded afterwards. torch's `skip_init` is for a module, and not for what NeMo builds of a
    configuration; on the meta device NeMo's filterbanks and positions, which no file brings, would be lost.
    """

    FILLS = frozenset({
        torch.Tensor.uniform_, torch.Tensor.normal_, init.uniform_, init.normal_, init.trunc_normal_, init.orthogonal_,
        init.xavier_uniform_, init.xavier_normal_, init.kaiming_uniform_, init.kaiming_normal_,
    })  # fmt: skip

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self.FILLS:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))
