"""Checks of GPUs: driver, memory, allocator, NCCL, and the loss's own kernels run once."""

import datetime
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import torch

from finetune.tools.doctor.findings import Line, Wanted, fault, ok, reason_of, warning

# Oldest driver of Linux for each major version of CUDA, by CUDA's rule of minor version compatibility.
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
BF16_CAPABILITY = (8, 0)


def _driver() -> str | None:
    """Version of the NVIDIA driver; None without one."""
    kernel_module = Path("/proc/driver/nvidia/version")
    if kernel_module.is_file():
        found = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", kernel_module.read_text())
        if found:
            return found[1]
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.split()[0] if done.returncode == 0 and done.stdout.split() else None


def gpus(wanted: Wanted) -> list[Line]:
    """Each GPU, and the driver against torch's CUDA."""
    driver, cuda = _driver(), torch.version.cuda
    there = torch.cuda.is_available()
    lines = []
    if driver is not None and cuda is not None:
        oldest = OLDEST_DRIVER.get(int(cuda.split(".")[0]), 0)
        # NVIDIA's compatibility package lets older ones serve: what torch sees is what counts.
        if not there and int(driver.split(".")[0]) < oldest:
            found = f"{driver} is too old for torch's CUDA {cuda}, which needs {oldest} or newer"
            lines.append(fault(wanted.chosen, "driver", found, f"Install an NVIDIA driver {oldest} or newer."))
        elif there:
            lines.append(ok("driver", f"{driver}, which torch's CUDA {cuda} can use"))
    if not there:
        return [*lines, _no_gpu(driver)]
    for i in range(torch.cuda.device_count()):
        lines.append(_gpu(i, wanted))
    return lines


def _no_gpu(driver: str | None) -> Line:
    slow = "training runs on the CPU, which is for trying things out"
    if torch.version.cuda is None:
        return warning(
            "GPU",
            f"torch {torch.__version__} is built without CUDA; {slow}",
            "bash scripts/setup.sh installs one with CUDA",
        )
    if driver is None:
        return warning(
            "GPU", f"no NVIDIA driver; {slow}", "In a container: docker run --gpus all. Else install the driver."
        )
    try:
        torch.cuda.init()
        reason = "torch sees none"
    except (RuntimeError, AssertionError) as error:
        reason = reason_of(error)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    remedy = (
        f"CUDA_VISIBLE_DEVICES is {hidden!r}: unset it."
        if hidden is not None
        else "See what nvidia-smi says; restart the machine after a change of driver."
    )
    return warning("GPU", f"a driver, but no GPU that can be used ({reason}); {slow}", remedy)


def _gpu(i: int, wanted: Wanted) -> Line:
    properties = torch.cuda.get_device_properties(i)
    capability = (properties.major, properties.minor)
    free, total = (x / 2**30 for x in torch.cuda.mem_get_info(i))
    name = f"GPU {i}"
    said = f"{properties.name}, {free:.1f} of {total:.1f} GiB free, compute capability {capability[0]}.{capability[1]}"
    # A GPU runs code of its own major version with the same or a lower minor one.
    built = [tuple(map(int, m)) for a in torch.cuda.get_arch_list() for m in re.findall(r"sm_(\d+)(\d)", a)]
    if not any(major == capability[0] and minor <= capability[1] for major, minor in built):
        return fault(
            wanted.chosen,
            name,
            f"{said}; torch {torch.__version__} has no code for it",
            "Install a torch that is built for this GPU.",
        )
    if free < 0.9 * total:
        return warning(
            name,
            f"{said}: other processes hold the rest",
            "nvidia-smi names them; end them or choose another GPU by CUDA_VISIBLE_DEVICES.",
        )
    if wanted.chosen and wanted.config.training.bf16 and capability < BF16_CAPABILITY:
        return warning(
            name, f"{said}; bf16 is emulated below 8.0, slowly", "Set training.bf16=false and training.fp16=true."
        )
    return ok(name, said)


def allocator(wanted: Wanted) -> list[Line]:
    """Settings of the GPU's memory allocator."""
    theirs = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF")
    ours = wanted.config.training.cuda_alloc_conf if wanted.chosen else None
    counts = theirs or ours or ""
    said = (
        f"{counts!r} from {'the environment' if theirs else 'training.cuda_alloc_conf'}" if counts else "torch's own"
    )
    if not torch.cuda.is_available():
        return [ok("allocator", f"{said}; no effect without a GPU")]
    if re.search(r"expandable_segments\s*:\s*true", counts, re.IGNORECASE):
        return [ok("allocator", said)]
    return [
        warning(
            "allocator",
            f"{said}; lengths of clips change from batch to batch, and memory gets fragmented without expandable segments",
            "training.cuda_alloc_conf=expandable_segments:True, or export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        )
    ]


def process_groups(wanted: Wanted) -> list[Line]:
    """A process group of this one process, with each backend that a run here would take."""
    lines = []
    gpu = torch.cuda.is_available()
    needed = wanted.needs("processes")
    if not torch.distributed.is_available():
        return [fault(needed, "process group", "torch is built without torch.distributed", "bash scripts/setup.sh")]
    for backend in ("nccl", "gloo") if gpu else ("gloo",):
        version = ".".join(map(str, torch.cuda.nccl.version())) if backend == "nccl" else ""
        name = {"nccl": "NCCL", "gloo": "gloo"}[backend]
        started = time.perf_counter()
        try:
            _reduce_alone(backend, "cuda" if backend == "nccl" else "cpu")
        except Exception as error:
            remedy = {
                "gloo": "The host name has to stand in /etc/hosts; or export GLOO_SOCKET_IFNAME=lo on a single machine.",
                "nccl": "export NCCL_DEBUG=INFO and look at its first warning; on a single machine NCCL_SOCKET_IFNAME=lo often helps.",
            }[backend]
            mine = needed and (backend == "nccl") == gpu
            lines.append(
                fault(
                    mine, name, f"{version} cannot add up a tensor in one process: {reason_of(error)}".strip(), remedy
                )
            )
            continue
        seconds = time.perf_counter() - started
        lines.append(ok(name, f"{version} added up a tensor in a group of one process in {seconds:.1f} s".strip()))
    if not gpu:
        lines.append(ok("NCCL", "not tried: without a GPU processes meet over gloo"))
    elif torch.cuda.device_count() > 1:
        lines.append(_peers())
    return lines


def _reduce_alone(backend: str, device: str) -> None:
    if torch.distributed.is_initialized():
        raise RuntimeError("this process is in a group already; start the doctor without a launcher")
    store, patience = torch.distributed.HashStore(), datetime.timedelta(seconds=20)
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1, timeout=patience)
    try:
        ones = torch.ones(1024, device=device)
        torch.distributed.all_reduce(ones)
        if float(ones.sum()) != 1024:
            raise RuntimeError(f"the sum of 1024 ones is {float(ones.sum())}")
    finally:
        torch.distributed.destroy_process_group()


def _peers() -> Line:
    count = torch.cuda.device_count()
    apart = [
        (i, j) for i in range(count) for j in range(count) if i != j and not torch.cuda.can_device_access_peer(i, j)
    ]
    if apart:
        found = f"GPUs {apart[0][0]} and {apart[0][1]} do not reach each other's memory; gradients go through the host, more slowly"
        return warning(
            "peer access",
            found,
            "Choose GPUs of one NVLink or PCIe switch by CUDA_VISIBLE_DEVICES (nvidia-smi topo -m).",
        )
    return ok("peer access", f"each of {count} GPUs reaches the others' memory")


def loss_kernels(wanted: Wanted) -> list[Line]:
    """The transducer loss forward and backward on a few frames: Triton's kernels on a GPU, numba's on the CPU."""
    from finetune.losses import fused_tdt_loss

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
        loss.backward()
        value = float(loss)
    except Exception as error:
        remedy = "bash scripts/setup.sh installs the versions that fit; a GPU needs a C compiler for Triton as well (sudo apt install gcc)."
        return [fault(True, "loss", f"the transducer loss fails on {device}: {reason_of(error)}", remedy)]
    if not (value > 0 and torch.isfinite(enc_BTH.grad).all()):
        return [fault(True, "loss", f"the transducer loss on {device} is {value}", "bash scripts/setup.sh")]
    seconds = time.perf_counter() - started
    return [ok("loss", f"forward and backward on {device} with {kernels}'s kernels in {seconds:.1f} s")]
