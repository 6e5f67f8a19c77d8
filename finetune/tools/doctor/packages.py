"""Checks of the installation: versions, decoders, and one step of each optimizer library."""

from __future__ import annotations

import io
import re
import time
import tomllib
from importlib import metadata
from typing import TYPE_CHECKING

import numpy as np
import soundfile
import torch

from finetune.config.optimizers import BITSANDBYTES, TORCHAO, gpu_lacks_fp8
from finetune.data.decode import decode_audio
from finetune.paths import ROOT
from finetune.tools.doctor.findings import Finding, Wanted, ok, problem, reason_of, warning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INSTALL = "pip install -c constraints.txt -e ."
FORMATS = (
    ("WAV", "WAV", "PCM_16"),
    ("FLAC", "FLAC", "PCM_16"),
    ("Ogg Vorbis", "OGG", "VORBIS"),
    ("Ogg Opus", "OGG", "OPUS"),
    ("MP3", "MP3", None),
)


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_versions() -> dict[str, str]:
    """Every installed distribution and its version."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        if name := distribution.metadata["Name"]:
            found.setdefault(_normalized(name), distribution.version)
    return dict(sorted(found.items()))


def versions(wanted: Wanted) -> Iterator[Finding]:
    """Compare what is installed with pyproject.toml (what has to be there) and constraints.txt (in which version)."""
    installed = installed_versions()
    try:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    except OSError:
        found = "pyproject.toml and constraints.txt are not beside the package"
        yield warning("packages", found, "Clone the repository and install it with pip install -e .")
        return
    for name in ("torch", "nemo-toolkit", "accelerate"):
        if name in installed:
            yield ok(name, installed[name] + (f" for CUDA {torch.version.cuda}" if name == "torch" else ""))
    required = [_normalized(re.split(r"[^\w.-]", entry)[0]) for entry in project["dependencies"]]
    if lacking := [name for name in required if name not in installed]:
        yield problem(True, "packages", f"not installed: {', '.join(lacking)}", INSTALL)
    pinned = {_normalized(n): v for n, _, v in (line.strip().partition("==") for line in pins) if v}
    # torch's version ends with its CUDA version behind a plus.
    other = [n for n, v in pinned.items() if n in installed and installed[n].split("+")[0] != v.split("+")[0]]
    if other:
        some = ", ".join(f"{n} {installed[n]} instead of {pinned[n]}" for n in other[:6])
        rest = f" and {len(other) - 6} more" if len(other) > 6 else ""
        yield warning("versions", f"not as tested (constraints.txt): {some}{rest}", INSTALL)
    else:
        yield ok("versions", f"{len(pinned.keys() & installed.keys())} packages as in constraints.txt")


def decoders(wanted: Wanted) -> Iterator[Finding]:
    """Write half a second of a tone in each format, and read it as training does."""
    rate = 16_000
    tone_S = 0.3 * np.sin(2 * np.pi * 440 * np.arange(rate // 2) / rate)
    good, bad = [], []
    for name, kind, subtype in FORMATS:
        try:
            file = io.BytesIO()
            soundfile.write(file, tone_S, rate, format=kind, subtype=subtype)
            decoded_S = decode_audio({"bytes": file.getvalue(), "path": None}, rate)
            scale = 32768.0 if decoded_S.dtype == np.int16 else 1.0
            energy = np.square(np.asarray(decoded_S, dtype=np.float64) / scale).sum() / np.square(tone_S).sum()
            if not 0.8 < energy < 1.2:  # lossy formats add some silence; the tone's energy stays
                raise ValueError("the decoded tone is not the one that was encoded")
            good.append(name)
        except Exception as error:
            bad.append(f"{name} ({reason_of(error)})")
    found = f"{', '.join(good) or 'none'} (libsndfile {soundfile.__libsndfile_version__})"
    if bad:
        remedy = "pip install --force-reinstall -c constraints.txt soundfile brings a libsndfile with all of them"
        yield problem(not good, "decoders", f"{found}; not {', '.join(bad)}", remedy)
    else:
        yield ok("decoders", found)


def _try_step(
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], dtype: torch.dtype = torch.float32
) -> None:
    """Take one step, where training would, on a parameter that is large enough for 8-bit states."""
    parameter = torch.nn.Parameter(torch.ones(64, 256, device=DEVICE, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    make([parameter]).step()
    if not bool((parameter != 1).all()):
        raise RuntimeError("the step changed nothing")


def bitsandbytes(wanted: Wanted) -> Iterator[Finding]:
    """One step of the chosen optimizer of bitsandbytes."""
    name = wanted.optimizer if wanted.optimizer in BITSANDBYTES else "adamw_8bit"
    started = time.perf_counter()
    try:
        import bitsandbytes as package

        _try_step(lambda parameters: getattr(package.optim, BITSANDBYTES[name])(parameters, lr=1e-3))
    except Exception as error:
        found = f"{BITSANDBYTES[name]} fails on {DEVICE}: {reason_of(error)}; {name} would train with 32-bit AdamW, "
        found += "whose states are several times as large"
        yield warning("bitsandbytes", found, "bash scripts/install_8bit_optimizer.sh installs and checks it")
        return
    seconds, version = time.perf_counter() - started, metadata.version("bitsandbytes")
    yield ok("bitsandbytes", f"{version}, {BITSANDBYTES[name]} stepped on {DEVICE} in {seconds:.1f} s")


def torchao(wanted: Wanted) -> Iterator[Finding]:
    """One step of the chosen optimizer of torchao, without compiling it."""
    name = wanted.optimizer if wanted.optimizer in TORCHAO else "adamw_8bit_ao"
    needed = wanted.optimizer in TORCHAO or wanted.optimizer.startswith("cpu_offload")
    if name == "adamw_fp8_ao" and gpu_lacks_fp8():
        remedy = "Use --strategy adamw_8bit_ao, whose states are as small."
        yield problem(needed, "torchao", "this GPU has no FP8", remedy)
        return
    try:
        import torchao.optim as optimizers

        # Compiling the step takes 6 to 25 s; the compiler has its own check.
        with torch.compiler.set_stance("force_eager"):
            _try_step(lambda parameters: getattr(optimizers, TORCHAO[name])(parameters, lr=1e-3))
    except Exception as error:
        yield problem(needed, "torchao", f"{TORCHAO[name]} fails on {DEVICE}: {reason_of(error)}", INSTALL)
        return
    found = f"{metadata.version('torchao')}, {TORCHAO[name].lstrip('_')} stepped on {DEVICE}, not compiled"
    yield ok("torchao", f"{found} (training compiles it at its first step)")


def flashoptim(wanted: Wanted) -> Iterator[Finding]:
    """One step of FlashAdamW on a GPU."""
    needed = wanted.optimizer.startswith("flash_adamw")
    try:
        from flashoptim import FlashAdamW

        version = metadata.version("flashoptim")
        if DEVICE == "cpu":
            found = f"{version} is installed, but its kernels run on CUDA GPUs only"
            yield problem(needed, "flashoptim", found, "Use --strategy bf16_full, or a machine with a GPU.")
            return
        _try_step(lambda p: FlashAdamW(p, lr=0.1, master_weight_bits=24), torch.bfloat16)
        yield ok("flashoptim", f"{version}, FlashAdamW stepped on {DEVICE}")
    except Exception as error:
        yield problem(needed, "flashoptim", f"FlashAdamW fails on {DEVICE}: {reason_of(error)}", INSTALL)
