"""Checks of the machine: Python, memory, limits, compilers, and the port where processes meet."""

import importlib.machinery
import importlib.util
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import psutil
import torch

from finetune.models.huggingface.reading import is_hugging_face
from finetune.tools.doctor.findings import Line, Wanted, fault, ok, reason_of, warning

OPEN_FILES = 4096
SHARED_MEMORY_GIB = 1.0
MAIN_PORT = 29500  # of the launchers
SOURCE = "#include <Python.h>\n#include <omp.h>\nint threads() { return omp_get_max_threads() + (Py_IsInitialized() ? 0 : 1); }\n"


def python(wanted: Wanted) -> list[Line]:
    """The interpreter and the system."""
    version = ".".join(map(str, sys.version_info[:3]))
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        return [
            fault(True, "Python", version, "Install Python 3.11 or 3.12 and make .venv anew: bash scripts/setup.sh")
        ]
    if sys.platform != "linux":
        return [warning("Python", f"{version} on {sys.platform}", "This project is tested on Linux only.")]
    return [ok("Python", f"{version}, {sys.executable}")]


def memory(wanted: Wanted) -> list[Line]:
    """Processors and memory of the host, and what the control group leaves of it."""
    total, free = psutil.virtual_memory().total / 2**30, psutil.virtual_memory().available / 2**30
    limit = _cgroup_limit()
    said = f"{os.cpu_count()} processors, {free:.1f} of {total:.1f} GiB free"
    if limit is not None and limit < total:
        said += f", limited to {limit:.1f} GiB by the control group"
        free = min(free, limit)
    offloads = wanted.chosen and (wanted.engine.endswith("_offload") or wanted.optimizer.startswith("cpu_offload"))
    parameters = parameters_of(str(wanted.config.model.name)) if offloads else None
    # float32 weights, gradients and two states, each 4 bytes
    if parameters and 16 * parameters / 2**30 > free:
        need = f"{16 * parameters / 2**30:.0f} GiB"
        return [
            warning(
                "memory",
                f"{said}; the offloaded optimizer takes about {need}",
                "Free memory, or use a strategy without offload.",
            )
        ]
    if free < 4:
        return [warning("memory", said, "Free memory: loading NeMo and a small model takes about 3 GiB.")]
    return [ok("memory", said)]


def _cgroup_limit() -> float | None:
    """GiB that the control group allows; None without one."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        return int(text) / 2**30 if text.isdigit() and int(text) < 2**60 else None
    return None


def parameters_of(model: str) -> float | None:
    """Parameters of a model, from the size of its .nemo file or from a hub name such as parakeet-tdt-0.6b-v3; None: not known."""
    path = Path(model) / "model.nemo" if Path(model).is_dir() else Path(model)
    if path.suffix == ".nemo" and path.is_file():
        return path.stat().st_size / 4
    if is_hugging_face(Path(model)):
        size = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
        half = re.search(r'"(torch_)?dtype": "b?float16"', (Path(model) / "config.json").read_text(encoding="utf-8"))
        return size / (2 if half else 4)
    size = re.search(r"(\d+(?:\.\d+)?)b(?![a-z])", model.rsplit("/", 1)[-1])
    return float(size[1]) * 1e9 if size and not path.exists() else None


def limits(wanted: Wanted) -> list[Line]:
    """Open files, locked memory, and the shared memory through which workers hand over batches."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    lines = [ok("open files", f"up to {soft}")]
    if 0 <= soft < OPEN_FILES:
        lines = [
            warning(
                "open files",
                f"up to {soft} (hard limit {most}); shards, workers and sockets of a large run need more",
                f"ulimit -n {OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, 65536)} in the shell that starts the training"
                + (
                    f", after raising nofile in /etc/security/limits.conf to {OPEN_FILES}"
                    if 0 <= hard < OPEN_FILES
                    else ""
                ),
            )
        ]
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    several = torch.cuda.device_count() > 1
    if locked != resource.RLIM_INFINITY and several:
        remedy = "ulimit -l unlimited (memlock in /etc/security/limits.conf; docker run --ulimit memlock=-1)"
        found = (
            f"up to {locked // 1024} KiB; NCCL over InfiniBand locks more, and CUDA's own pinned memory does not count"
        )
        lines.append(warning("locked memory", found, remedy))
    else:
        said = "unlimited" if locked == resource.RLIM_INFINITY else f"up to {locked // 1024} KiB"
        lines.append(
            ok("locked memory", f"{said} (matters to NCCL over InfiniBand; CUDA's pinned memory does not count)")
        )
    lines.append(_shared_memory(wanted))
    return lines


def _shared_memory(wanted: Wanted) -> Line:
    path = Path("/dev/shm")
    if not path.is_dir():
        return warning(
            "/dev/shm", "there is none; workers cannot hand batches over", "Set training.dataloader_num_workers=0."
        )
    usage = shutil.disk_usage(path)
    said = f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"
    workers = int(wanted.config.training.dataloader_num_workers)
    if usage.free / 2**30 < SHARED_MEMORY_GIB and workers:
        return warning(
            "/dev/shm",
            f"{said}; workers hand batches over through it, and a full one kills them with a bus error",
            "docker run --shm-size=8g (Kubernetes: an emptyDir of medium Memory at /dev/shm), or training.dataloader_num_workers=0",
        )
    return ok("/dev/shm", said)


def compilers(wanted: Wanted) -> list[Line]:
    """The C++ compiler, tried on a source with Python's and OpenMP's headers, ninja, and nvcc where there is a GPU."""
    needed = wanted.needs("compiler")
    lines = [_try_compiler(needed)]
    ninja = shutil.which("ninja")
    if ninja is None:
        remedy = "source .venv/bin/activate (ninja lies in .venv/bin), or pip install -c constraints.txt ninja"
        found = "not on PATH; DeepSpeed's operations are built with it"
        lines.append(fault(wanted.needs("deepspeed") and not _compiled("cpu_adam").is_file(), "ninja", found, remedy))
    else:
        lines.append(ok("ninja", ninja))
    lines.append(_cuda_compiler(wanted))
    return lines


def _try_compiler(needed: bool) -> Line:
    compiler = os.environ.get("CXX") or "g++"
    who = "DeepSpeed's CPU optimizer and torch.compile"
    install = "Debian/Ubuntu: sudo apt install g++ python3-dev"
    if shutil.which(compiler) is None:
        return fault(needed, "C++ compiler", f"no {compiler} on PATH; {who} need one", install)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "try.cpp"
        source.write_text(SOURCE, encoding="utf-8")
        include = sysconfig.get_path("include")
        command = [
            compiler,
            "-shared",
            "-fPIC",
            "-fopenmp",
            f"-I{include}",
            str(source),
            "-o",
            str(source.with_suffix(".so")),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return fault(needed, "C++ compiler", f"{compiler} does not run: {reason_of(error)}", install)
    if done.returncode:
        reason = next((x for x in done.stderr.splitlines() if "error" in x), done.stderr[:200]).replace(
            folder + "/", ""
        )
        return fault(
            needed, "C++ compiler", f"{compiler} fails on a source with Python.h and omp.h: {reason}", install
        )
    version = subprocess.run(
        [compiler, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True, check=False
    )
    return ok("C++ compiler", f"{compiler} {version.stdout.strip()}, a source with Python.h and OpenMP compiled")


def _cuda_compiler(wanted: Wanted) -> Line:
    gpu = torch.cuda.is_available()
    needed = gpu and wanted.needs("cpu_adam") and not _compiled("cpu_adam").is_file()
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = str(Path(home) / "bin" / "nvcc") if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(nvcc).is_file():
        if not gpu:
            return ok("nvcc", "not there, and not needed without a GPU")
        found = "not there; DeepSpeed builds its operations with it"
        return fault(
            needed, "nvcc", found, f"Install the CUDA toolkit {torch.version.cuda} and set CUDA_HOME to its folder."
        )
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    release = re.search(r"release (\d+)\.(\d+)", said)
    theirs, ours = release[0].split()[1] if release else "?", torch.version.cuda or "none"
    if gpu and theirs.split(".")[0] != ours.split(".")[0]:
        found = f"{nvcc} is CUDA {theirs}, torch is for {ours}; DeepSpeed refuses to build with another major version"
        return fault(needed, "nvcc", found, f"Set CUDA_HOME to a toolkit {ours}.")
    return ok("nvcc", f"CUDA {theirs}, {nvcc}")


# ---- DeepSpeed's compiled operations -------------------------------------------------------------------------------


def extension_roots() -> list[Path]:
    """Where torch keeps what it compiled: the folder that is named, else one for each Python and CUDA."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    if named:
        return [Path(named)]
    return [path for path in (Path.home() / ".cache" / "torch_extensions").glob("*") if path.is_dir()]


def _compiled(name: str) -> Path:
    """The compiled operation of this Python and CUDA, whether it is there or not."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    cuda = "cpu" if torch.version.cuda is None else "cu" + torch.version.cuda.replace(".", "")
    default = Path.home() / ".cache" / "torch_extensions" / f"py{sys.version_info[0]}{sys.version_info[1]}_{cuda}"
    return (Path(named) if named else default) / name / f"{name}.so"


def deepspeed_locks(wanted: Wanted) -> list[Line]:
    """Locks that a killed compilation left: each later start would wait for them for ever, without a word."""
    found = []
    for root in extension_roots():
        for lock in sorted(root.glob("*/lock")):
            holder = _holder(lock)
            if holder is None:
                needed = wanted.needs("deepspeed")
                text = f"{lock} was left by a compilation that was killed; DeepSpeed waits for it for ever, without a word"
                found.append(fault(needed, "compile lock", text, f"rm {lock}"))
            else:
                found.append(warning("compile lock", f"{lock}: process {holder} compiles now", "Wait for it to end."))
    return found or [ok("compile lock", "none left by a killed compilation of DeepSpeed's operations")]


def _holder(path: Path) -> int | None:
    """A process that has the file open; None where there is none that this user may see."""
    try:
        wanted = path.stat()
    except OSError:  # gone in the meantime
        return os.getpid()
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            for entry in folder.iterdir():
                there = entry.stat()
                if (there.st_dev, there.st_ino) == (wanted.st_dev, wanted.st_ino):
                    return int(folder.parent.name)
        except OSError:
            continue
    return None


def cpu_adam(wanted: Wanted) -> list[Line]:
    """DeepSpeed's optimizer on the host: loaded where it is compiled."""
    path = _compiled("cpu_adam")
    if not path.is_file():
        return [
            ok("DeepSpeed CPU Adam", "not compiled yet; the first start with ZeRO offload does it, in about a minute")
        ]
    try:
        loader = importlib.machinery.ExtensionFileLoader("cpu_adam", str(path))
        loader.exec_module(importlib.util.module_from_spec(importlib.util.spec_from_loader("cpu_adam", loader)))
    except ImportError as error:
        found = f"{path} does not load: {reason_of(error)}"
        return [
            fault(
                wanted.needs("cpu_adam"),
                "DeepSpeed CPU Adam",
                found,
                f"rm -r {path.parent}, so that it is compiled anew",
            )
        ]
    return [ok("DeepSpeed CPU Adam", f"compiled and loaded: {path}")]


# ---- the port ------------------------------------------------------------------------------------------------------


def main_port(wanted: Wanted) -> list[Line]:
    """The port where the processes of a run meet."""
    port = int(os.environ.get("MASTER_PORT", MAIN_PORT))
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            return [ok("port", f"{port} is free")]
        except OSError as error:
            reason = str(error)
    with socket.socket() as other:
        other.bind(("", 0))
        free = other.getsockname()[1]
    remedy = f"accelerate launch --main_process_port {free}, torchrun --master_port {free}, or deepspeed --master_port {free}"
    return [
        warning(
            "port", f"{port} cannot be used ({reason}), most likely by another run; one process needs none", remedy
        )
    ]
