"""Checks of GPUs: driver, memory, allocator, NCCL, and the loss's own kernels."""

from __future__ import annotations

import datetime
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.cuda import nccl
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not in __all__

from finetune.config.allocator import allocator_of_environment, allocator_settings
from finetune.losses import fused_tdt_loss
from finetune.tools.doctor.findings import Finding, Wanted, ok, problem, reason_of, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

# Oldest Linux driver for each major version of CUDA, by CUDA's rule of minor version compatibility.
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
BF16_CAPABILITY = (8, 0)
GROUP_TIMEOUT = datetime.timedelta(seconds=20)


def _driver() -> str | None:
    """Version of the NVIDIA driver, if there is one."""
    kernel_module = Path("/proc/driver/nvidia/version")
    text = kernel_module.read_text() if kernel_module.is_file() else ""
    found = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", text)
    return found[1] if found else None


def gpus(wanted: Wanted) -> Iterator[Finding]:
    """Each GPU, and the driver against torch's CUDA."""
    driver, cuda = _driver(), torch.version.cuda
    if not torch.cuda.is_available():
        oldest = OLDEST_DRIVER.get(int(cuda.split(".")[0]), 0) if cuda else 0
        if driver is not None and int(driver.split(".")[0]) < oldest:
            found = f"{driver} is too old for torch's CUDA {cuda}, which needs {oldest} or newer"
            yield problem(wanted.chosen, "driver", found, f"Install an NVIDIA driver {oldest} or newer.")
        yield _no_gpu(driver)
        return
    if driver is not None:  # NVIDIA's compatibility package makes older drivers work, too
        yield ok("driver", f"{driver}, which torch's CUDA {cuda} can use")
    for i in range(torch.cuda.device_count()):
        yield _gpu(i, wanted)


def _no_gpu(driver: str | None) -> Finding:
    slow = "training runs on the CPU, which is for trying things out"
    if torch.version.cuda is None:
        remedy = "bash scripts/setup.sh installs one with CUDA"
        return warning("GPU", f"torch {torch.__version__} is built without CUDA; {slow}", remedy)
    if driver is None:
        remedy = "In a container: docker run --gpus all. Else install the driver."
        return warning("GPU", f"no NVIDIA driver; {slow}", remedy)
    try:
        torch.cuda.init()
        reason = "torch sees none"
    except (RuntimeError, AssertionError) as error:
        reason = reason_of(error)
    remedy = "See what nvidia-smi says; restart the machine after a change of driver."
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        remedy = f"CUDA_VISIBLE_DEVICES is {hidden!r}: unset it."
    return warning("GPU", f"a driver, but no GPU that can be used ({reason}); {slow}", remedy)


def _gpu(i: int, wanted: Wanted) -> Finding:
    properties = torch.cuda.get_device_properties(i)
    major, minor = capability = (properties.major, properties.minor)
    free, total = (x / 2**30 for x in torch.cuda.mem_get_info(i))
    name = f"GPU {i}"
    found = f"{properties.name}, {free:.1f} of {total:.1f} GiB free, compute capability {major}.{minor}"
    # A GPU runs code of its own major version with the same or a lower minor one.
    built = [m.groups() for arch in torch.cuda.get_arch_list() for m in re.finditer(r"sm_(\d+)(\d)", arch)]
    if not any(int(built_major) == major and int(built_minor) <= minor for built_major, built_minor in built):
        found += f"; torch {torch.__version__} has no code for it"
        return problem(wanted.chosen, name, found, "Install a torch that is built for this GPU.")
    if free < 0.9 * total:
        remedy = "nvidia-smi names them; end them or choose another GPU by CUDA_VISIBLE_DEVICES."
        return warning(name, f"{found}: other processes hold the rest", remedy)
    if wanted.chosen and wanted.config.training.bf16 and capability < BF16_CAPABILITY:
        remedy = "Set training.bf16=false and training.fp16=true."
        return warning(name, f"{found}; bf16 is emulated below 8.0, slowly", remedy)
    return ok(name, found)


def allocator(wanted: Wanted) -> Iterator[Finding]:
    """Settings of the GPU's memory allocator."""
    environment, gpu = allocator_of_environment(), torch.cuda.is_available()
    setting = environment or (wanted.chosen and allocator_settings(wanted.config.training, gpu)) or ""
    origin = "the environment" if environment else "the run file"
    found = f"{setting!r} from {origin}" if setting else "torch's own"
    if not gpu:
        yield ok("allocator", f"{found}; no effect without a GPU")
    elif re.search(r"expandable_segments\s*:\s*true", setting, re.IGNORECASE):
        yield ok("allocator", found)
    else:
        found += "; batches of changing lengths fragment memory without expandable segments"
        value = "expandable_segments:True"
        remedy = f"training.cuda_alloc_conf={value}, or export PYTORCH_CUDA_ALLOC_CONF={value}"
        yield warning("allocator", found, remedy)


def process_groups(wanted: Wanted) -> Iterator[Finding]:
    """A process group of this one process, with each backend that a run here would use."""
    gpu, needed = torch.cuda.is_available(), wanted.engine != "none"
    if not torch.distributed.is_available():
        yield problem(needed, "process group", "torch is built without torch.distributed", "bash scripts/setup.sh")
        return
    if gpu:
        remedy = "export NCCL_DEBUG=INFO and read its first warning; on one machine NCCL_SOCKET_IFNAME=lo often helps."
        yield _process_group("nccl", f"NCCL {'.'.join(map(str, nccl.version()))}", needed, remedy)
    remedy = "The host name has to be in /etc/hosts; or export GLOO_SOCKET_IFNAME=lo on a single machine."
    yield _process_group("gloo", "gloo", needed and not gpu, remedy)
    if not gpu:
        yield ok("NCCL", "not tried: without a GPU processes communicate over gloo")


def _process_group(backend: str, version: str, needed: bool, remedy: str) -> Finding:
    """Sum a tensor in a process group of one."""
    name, started = version.split()[0], time.perf_counter()
    try:
        if torch.distributed.is_initialized():
            raise RuntimeError("this process is in a group already; start the doctor without a launcher")
        torch.distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=GROUP_TIMEOUT)
        try:
            ones = torch.ones(1024, device="cuda" if backend == "nccl" else "cpu")
            torch.distributed.all_reduce(ones)
            if float(ones.sum()) != 1024:
                raise RuntimeError(f"the sum of 1024 ones is {float(ones.sum())}")
        finally:
            torch.distributed.destroy_process_group()
    except Exception as error:
        return problem(needed, name, f"{version} cannot add up a tensor in one process: {reason_of(error)}", remedy)
    seconds = time.perf_counter() - started
    return ok(name, f"{version} added up a tensor in a group of one process in {seconds:.1f} s")


def loss_kernels(wanted: Wanted) -> Iterator[Finding]:
    """The transducer loss forward and backward on a few frames: Triton's kernels on a GPU, numba's on the CPU."""
    device, kernels = ("cuda", "Triton") if torch.cuda.is_available() else ("cpu", "numba")
    random = torch.Generator().manual_seed(0)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(device).requires_grad_()

    B, T, U, H, V = 2, 20, 5, 16, 32
    started = time.perf_counter()
    try:
        enc_BTH, pred_BUH, weight_OH = values(B, T, H), values(B, U + 1, H), values(V + 1 + 5, H)
        targets_BU = torch.randint(V, (B, U), generator=random).to(device)
        lengths = (torch.tensor([T, T - 3], device=device), torch.tensor([U, U - 2], device=device))
        loss = fused_tdt_loss(enc_BTH, pred_BUH, weight_OH, None, targets_BU, *lengths)
        (gradient_BTH,) = torch.autograd.grad(loss, enc_BTH)
        if not loss.item() > 0 or not gradient_BTH.isfinite().all():
            raise ArithmeticError(f"it is {loss.item()}")
    except Exception as error:
        remedy = "bash scripts/setup.sh installs the versions that fit; on a GPU Triton needs a C compiler as well "
        remedy += "(sudo apt install gcc)."
        yield problem(True, "loss", f"the transducer loss fails on {device}: {reason_of(error)}", remedy)
        return
    seconds = time.perf_counter() - started
    yield ok("loss", f"forward and backward on {device} with {kernels}'s kernels in {seconds:.1f} s")
