"""Checks of DeepSpeed and what compiles at run time: compilers, locks of killed compilations, compiled operations."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from finetune.config.optimizers import TORCHAO
from finetune.tools.doctor.findings import Finding, Wanted, ok, problem, reason_of, warning
from finetune.tools.doctor.packages import INSTALL

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = """#include <Python.h>
#include <omp.h>
int threads() { return omp_get_max_threads() + (Py_IsInitialized() ? 0 : 1); }
"""


def deepspeed(wanted: Wanted) -> Iterator[Finding]:
    """DeepSpeed can be imported."""
    try:
        import deepspeed as package
    except Exception as error:
        # It needs CUDA_HOME if torch is built for CUDA.
        toolkit = f"Set CUDA_HOME to the folder of the CUDA toolkit {torch.version.cuda}."
        remedy = toolkit if "CUDA" in str(error) else INSTALL
        yield problem(wanted.deepspeed, "deepspeed", f"cannot be imported: {reason_of(error)}", remedy)
    else:
        yield ok("deepspeed", f"{package.__version__}, imported")


def compilers(wanted: Wanted) -> Iterator[Finding]:
    """The C++ compiler on a source with Python's and OpenMP's headers, ninja, and nvcc if there is a GPU."""
    compiled = wanted.optimizer in (*TORCHAO, "adamw_compiled") or (wanted.chosen and wanted.config.model.compile)
    yield _cpp_compiler(wanted.deepspeed or bool(compiled))
    ninja = shutil.which("ninja")
    if ninja is None:
        remedy = "source .venv/bin/activate (ninja is in .venv/bin), or pip install -c constraints.txt ninja"
        needed = wanted.deepspeed and not _compiled("cpu_adam").is_file()
        yield problem(needed, "ninja", "not on PATH; DeepSpeed's operations are built with it", remedy)
    else:
        yield ok("ninja", ninja)
    yield _cuda_compiler(wanted)


def _cpp_compiler(needed: bool) -> Finding:
    name, compiler = "C++ compiler", os.environ.get("CXX") or "g++"
    install = "Debian/Ubuntu: sudo apt install g++ python3-dev"
    if shutil.which(compiler) is None:
        found = f"no {compiler} on PATH; DeepSpeed's CPU optimizer and torch.compile need one"
        return problem(needed, name, found, install)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "try.cpp"
        source.write_text(SOURCE, encoding="utf-8")
        command = [compiler, "-shared", "-fPIC", "-fopenmp", f"-I{sysconfig.get_path('include')}", str(source)]
        try:
            done = _output_of(*command, "-o", str(source.with_suffix(".so")))
        except (OSError, subprocess.TimeoutExpired) as error:
            return problem(needed, name, f"{compiler} does not run: {reason_of(error)}", install)
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        found = f"{compiler} fails on a source with Python.h and omp.h: {reason.replace(folder + '/', '')}"
        return problem(needed, name, found, install)
    version = _output_of(compiler, "-dumpfullversion", "-dumpversion").stdout.strip()
    return ok(name, f"{compiler} {version}, a source with Python.h and OpenMP compiled")


def _output_of(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def _cuda_compiler(wanted: Wanted) -> Finding:
    gpu, ours = torch.cuda.is_available(), torch.version.cuda or "none"
    needed = gpu and wanted.cpu_adam and not _compiled("cpu_adam").is_file()
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = str(Path(home) / "bin" / "nvcc") if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(nvcc).is_file():
        if not gpu:
            return ok("nvcc", "not there, and not needed without a GPU")
        remedy = f"Install the CUDA toolkit {ours} and set CUDA_HOME to its folder."
        return problem(needed, "nvcc", "not there; DeepSpeed builds its operations with it", remedy)
    release = re.search(r"release (\d+\.\d+)", _output_of(nvcc, "--version").stdout)
    theirs = release[1] if release else "?"
    if gpu and theirs.split(".")[0] != ours.split(".")[0]:
        found = f"{nvcc} is CUDA {theirs}, torch is for {ours}; DeepSpeed refuses to build with another major version"
        return problem(needed, "nvcc", found, f"Set CUDA_HOME to a toolkit {ours}.")
    return ok("nvcc", f"CUDA {theirs}, {nvcc}")


def _extensions() -> Path:
    """The folder in which torch keeps compiled operations for this Python and CUDA."""
    cuda = "cpu" if torch.version.cuda is None else "cu" + torch.version.cuda.replace(".", "")
    default = Path.home() / ".cache" / "torch_extensions" / f"py{sys.version_info[0]}{sys.version_info[1]}_{cuda}"
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or default)


def _compiled(name: str) -> Path:
    """The compiled operation, whether it exists or not."""
    return _extensions() / name / f"{name}.so"


def deepspeed_locks(wanted: Wanted) -> Iterator[Finding]:
    """Locks of killed compilations, for which every later start would wait forever without a message."""
    locks = sorted(_extensions().glob("*/lock"))
    for lock in locks:
        holder = _holder(lock)
        if holder is None:
            found = f"{lock} was left by a compilation that was killed; DeepSpeed would wait for it forever"
            yield problem(wanted.deepspeed, "compile lock", found, f"rm {lock}")
        else:
            yield warning("compile lock", f"{lock}: process {holder} compiles now", "Wait for it to end.")
    if not locks:
        yield ok("compile lock", "none left by a killed compilation of DeepSpeed's operations")


def _holder(path: Path) -> int | None:
    """A process that has the file open, as far as this user can see."""
    real = str(path.resolve())
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(file.path == real for file in process.open_files()):
                return process.pid
    return None


def cpu_adam(wanted: Wanted) -> Iterator[Finding]:
    """Load DeepSpeed's optimizer on the host, if it is compiled."""
    name, path = "DeepSpeed CPU Adam", _compiled("cpu_adam")
    if not path.is_file():
        yield ok(name, "not compiled yet; the first start with ZeRO offload does it, in about a minute")
        return
    try:
        loader = importlib.machinery.ExtensionFileLoader("cpu_adam", str(path))
        spec = importlib.util.spec_from_loader("cpu_adam", loader)
        assert spec is not None
        loader.exec_module(importlib.util.module_from_spec(spec))
    except ImportError as error:
        remedy = f"rm -r {path.parent}, so that it is compiled anew"
        yield problem(wanted.cpu_adam, name, f"{path} does not load: {reason_of(error)}", remedy)
    else:
        yield ok(name, f"compiled and loaded: {path}")
