"""Checks of what is installed: versions, decoders, and each optimizer library with one step."""

import io
import re
import time
import tomllib
from importlib import metadata

import numpy as np
import soundfile
import torch

from finetune.paths import ROOT
from finetune.tools.doctor.findings import Line, Wanted, fault, ok, reason_of, warning

INSTALL = "pip install -c constraints.txt -e ."
FORMATS = (
    ("WAV", "WAV", "PCM_16"),
    ("FLAC", "FLAC", "PCM_16"),
    ("Ogg Vorbis", "OGG", "VORBIS"),
    ("Ogg Opus", "OGG", "OPUS"),
    ("MP3", "MP3", None),
)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_versions() -> dict[str, str]:
    """Every installed distribution and its version."""
    found = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(_plain(name), distribution.version)
    return dict(sorted(found.items()))


def versions(wanted: Wanted) -> list[Line]:
    """What is installed against pyproject.toml, which says what has to be there, and constraints.txt, which says in what version."""
    there = installed_versions()
    try:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    except OSError:
        found = "pyproject.toml and constraints.txt do not lie beside the package"
        return [warning("packages", found, "Clone the repository and install it with pip install -e .")]
    required = [_plain(re.match(r"[\w.-]+", entry)[0]) for entry in project["dependencies"]]
    lines = []
    for name in ("torch", "nemo-toolkit", "accelerate"):
        if name in there:
            lines.append(ok(name, there[name] + (f" for CUDA {torch.version.cuda}" if name == "torch" else "")))
    lacking = [name for name in required if name not in there]
    if lacking:
        lines.append(fault(True, "packages", f"not installed: {', '.join(lacking)}", INSTALL))
    pinned = {_plain(n): v for n, _, v in (line.strip().partition("==") for line in pins) if v}
    # torch says its CUDA behind a plus
    other = [n for n, v in pinned.items() if n in there and there[n].split("+")[0] != v.split("+")[0]]
    if other:
        some = ", ".join(f"{n} {there[n]} instead of {pinned[n]}" for n in other[:6])
        rest = f" and {len(other) - 6} more" if len(other) > 6 else ""
        lines.append(warning("versions", f"not as tested (constraints.txt): {some}{rest}", INSTALL))
    else:
        lines.append(ok("versions", f"{len(pinned.keys() & there.keys())} packages as in constraints.txt"))
    return lines


def decoders(wanted: Wanted) -> list[Line]:
    """Half a second of a tone in each format, written and read again as training reads it."""
    from finetune.data.decode import decode_audio

    rate = 16_000
    tone_S = 0.3 * np.sin(2 * np.pi * 440 * np.arange(rate // 2) / rate)
    good, bad = [], []
    for name, kind, subtype in FORMATS:
        try:
            file = io.BytesIO()
            soundfile.write(file, tone_S, rate, format=kind, subtype=subtype)
            decoded_S = decode_audio({"bytes": file.getvalue(), "path": None}, rate)
            # Lossy formats add some silence around it; the tone's energy stays.
            if (
                not 0.8
                < np.square(np.asarray(decoded_S, dtype=np.float64)).sum()
                / np.square(tone_S).sum()
                / (32768.0**2 if decoded_S.dtype == np.int16 else 1.0)
                < 1.2
            ):
                raise ValueError("the decoded tone is not the one that was encoded")
            good.append(name)
        except Exception as error:
            bad.append(f"{name} ({reason_of(error)})")
    said = f"{', '.join(good) or 'none'} (libsndfile {soundfile.__libsndfile_version__})"
    if bad:
        remedy = "pip install --force-reinstall -c constraints.txt soundfile brings a libsndfile with all of them"
        return [fault(not good, "decoders", f"{said}; not {', '.join(bad)}", remedy)]
    return [ok("decoders", said)]


def _scratch(device: str, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    """A parameter with a gradient, large enough for 8-bit states."""
    parameter = torch.nn.Parameter(torch.ones(64, 256, device=device, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    return parameter


def optimizers(wanted: Wanted) -> list[Line]:
    """bitsandbytes, torchao and flashoptim, each with one step where training would take it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [_bitsandbytes(wanted, device), _torchao(wanted, device), _flashoptim(wanted, device)]


def _bitsandbytes(wanted: Wanted, device: str) -> Line:
    from finetune.config.optimizers import BITSANDBYTES

    name = wanted.optimizer if wanted.needs("bitsandbytes") else "adamw_8bit"
    started = time.perf_counter()
    try:
        import bitsandbytes

        parameter = _scratch(device)
        getattr(bitsandbytes.optim, BITSANDBYTES[name])([parameter], lr=1e-3).step()
        if not bool((parameter != 1).all()):
            raise RuntimeError("the step changed nothing")
    except Exception as error:
        found = f"{BITSANDBYTES[name]} fails on {device}: {reason_of(error)}; {name} would train with 32-bit AdamW, whose states are several times as large"
        return warning("bitsandbytes", found, "bash scripts/install_8bit_optimizer.sh installs and checks it")
    seconds = time.perf_counter() - started
    return ok(
        "bitsandbytes",
        f"{metadata.version('bitsandbytes')}, {BITSANDBYTES[name]} stepped on {device} in {seconds:.1f} s",
    )


def _torchao(wanted: Wanted, device: str) -> Line:
    from finetune.config.optimizers import TORCHAO, gpu_lacks_fp8

    name = wanted.optimizer if wanted.optimizer in TORCHAO else "adamw_8bit_ao"
    needed = wanted.needs("torchao")
    if name == "adamw_fp8_ao" and gpu_lacks_fp8():
        return fault(
            needed, "torchao", "this GPU has no FP8", "Use --strategy adamw_8bit_ao, whose states are as small."
        )
    try:
        import torchao.optim

        parameter = _scratch(device)
        # Compiling the step takes 6 to 25 s; the compiler has a line of its own.
        with torch.compiler.set_stance("force_eager"):
            getattr(torchao.optim, TORCHAO[name])([parameter], lr=1e-3).step()
        if not bool((parameter != 1).all()):
            raise RuntimeError("the step changed nothing")
    except Exception as error:
        return fault(needed, "torchao", f"{TORCHAO[name]} fails on {device}: {reason_of(error)}", INSTALL)
    found = f"{metadata.version('torchao')}, {TORCHAO[name].lstrip('_')} stepped on {device}, not compiled (training compiles it at its first step)"
    return ok("torchao", found)


def _flashoptim(wanted: Wanted, device: str) -> Line:
    needed = wanted.needs("flashoptim")
    try:
        from flashoptim import FlashAdamW

        version = metadata.version("flashoptim")
    except Exception as error:
        return fault(needed, "flashoptim", f"cannot be imported: {reason_of(error)}", INSTALL)
    if device == "cpu":
        found = f"{version} is installed, but its kernels run on CUDA GPUs only"
        return fault(needed, "flashoptim", found, "Use --strategy bf16_full, or a machine with a GPU.")
    try:
        parameter = _scratch(device, torch.bfloat16)
        FlashAdamW([parameter], lr=0.1, master_weight_bits=24).step()
        if not bool((parameter != 1).all()):
            raise RuntimeError("the step changed nothing")
    except Exception as error:
        return fault(needed, "flashoptim", f"FlashAdamW fails on {device}: {reason_of(error)}", INSTALL)
    return ok("flashoptim", f"{version}, FlashAdamW stepped on {device}")


def deepspeed(wanted: Wanted) -> list[Line]:
    """DeepSpeed, imported."""
    try:
        import deepspeed as package
    except Exception as error:
        # It wants CUDA_HOME where torch is built for CUDA.
        remedy = (
            f"Set CUDA_HOME to the folder of the CUDA toolkit {torch.version.cuda}."
            if "CUDA" in str(error)
            else INSTALL
        )
        return [fault(wanted.needs("deepspeed"), "deepspeed", f"cannot be imported: {reason_of(error)}", remedy)]
    return [ok("deepspeed", f"{package.__version__}, imported")]
