"""The optimizers that `training.optimizer` may name: their families and their options."""

from typing import Annotated, Literal, get_args

from pydantic import ConfigDict, Field, StrictBool
from typing_extensions import TypedDict

Optimizer = Literal[
    "adamw",
    "adamw_foreach",
    "adamw_loop",
    "adamw_compiled",
    "adamw_8bit",
    "paged_adamw_8bit",
    "lion_8bit",
    "adamw_8bit_ao",
    "adamw_4bit_ao",
    "adamw_fp8_ao",
    "adamw_bf16_ao",
    "cpu_offload_ao",
    "cpu_offload_gradients_ao",
    "flash_adamw",
    "flash_adamw_gradient_release",
]
OPTIMIZERS: tuple[str, ...] = get_args(Optimizer)

BITSANDBYTES = {"adamw_8bit": "AdamW8bit", "paged_adamw_8bit": "PagedAdamW8bit", "lion_8bit": "Lion8bit"}
"""Name -> class of bitsandbytes.optim."""
TORCHAO = {
    "adamw_8bit_ao": "AdamW8bit",
    "adamw_4bit_ao": "AdamW4bit",
    "adamw_fp8_ao": "AdamWFp8",
    "adamw_bf16_ao": "_AdamW",
}
"""Name -> class of torchao.optim."""

FP8_CAPABILITY = (8, 9)
"""Compute capability from which on a GPU converts to float8 in hardware."""


class OptimizerArgs(TypedDict, total=False):
    """The values of `training.optimizer_args`; which of them an optimizer has stands in ALLOWED_ARGS."""

    __pydantic_config__ = ConfigDict(extra="allow", allow_inf_nan=False)  # type: ignore[misc]  # pydantic's own way

    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)]
    eps: Annotated[float, Field(gt=0)]
    min_8bit_size: Annotated[int, Field(ge=1)]
    block_size: Annotated[int, Field(ge=1)]
    embeddings_32bit: StrictBool


ALLOWED_ARGS: dict[str, set[str]] = {
    name: {"betas", "eps"} | ({"min_8bit_size", "embeddings_32bit"} if name in BITSANDBYTES else set())
    for name in OPTIMIZERS
}
ALLOWED_ARGS["lion_8bit"] -= {"eps"}
for _name in ("adamw_8bit_ao", "adamw_4bit_ao", "adamw_fp8_ao"):
    ALLOWED_ARGS[_name] |= {"block_size"}


def gpu_lacks_fp8() -> bool:
    """Return whether there is a CUDA GPU and it does not compute with FP8."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() < FP8_CAPABILITY
