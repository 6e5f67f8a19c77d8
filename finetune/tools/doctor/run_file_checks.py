"""Checks of the chosen run: its strategy on this machine, its model and data, and the disk that it writes to."""

import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from finetune.config.compatibility import find_conflicts
from finetune.config.tokenizer_setting import tokenizer_setting
from finetune.errors import UserError
from finetune.models.huggingface.reading import is_hugging_face
from finetune.security.secrets import clean_urls
from finetune.strategies.strategy import engine_with, number_of_processes
from finetune.tools.doctor.findings import Line, Wanted, fault, ok, reason_of, warning
from finetune.tools.doctor.hub_access import cached_model, is_hub_data, is_hub_name
from finetune.tools.doctor.system import parameters_of

PROBE_MIB, CHUNK_MIB = 64, 16
PROBE_SECONDS = 4.0
SLOW_MIB_PER_SECOND = 50


def compatibility(wanted: Wanted) -> list[Line]:
    """The table of what excludes itself, with this machine's engine and GPUs."""
    if not wanted.chosen:
        return []
    name = "strategy " + "+".join(wanted.names) if wanted.names else "strategy"
    gpu = torch.cuda.is_available()
    engine = engine_with(wanted.engine, number_of_processes())
    conflicts = find_conflicts(wanted.config, engine, gpu)
    if conflicts:
        parts = [text.partition(" Instead: ") for text in conflicts]
        return [fault(True, name, text, instead[:1].upper() + instead[1:]) for text, _, instead in parts]
    t = wanted.config.training
    precision = "bf16" if t.bf16 else "fp16" if t.fp16 else "fp32"
    where = "on the GPU" if gpu else "on the CPU"
    return [ok(name, f"{t.optimizer}, engine {engine}, {precision} {where}: nothing excludes itself")]


def gpu_count(wanted: Wanted) -> list[Line]:
    """training.num_gpus, or a strategy for several GPUs, against the GPUs that are here."""
    if not wanted.chosen:
        return []
    count, asked = torch.cuda.device_count(), int(wanted.config.training.num_gpus)
    if asked > 1 and count and asked > count:
        found = f"training.num_gpus is {asked}, and there {'is' if count == 1 else 'are'} {count} here"
        return [
            fault(
                True,
                "GPUs",
                found,
                f"Set training.num_gpus={count} and raise training.gradient_accumulation_steps instead.",
            )
        ]
    if asked > 1 and not count:
        found = f"training.num_gpus is {asked} and there is none: {asked} processes would share this processor"
        return [warning("GPUs", found, "Set training.num_gpus=0 to try things out with one process.")]
    if wanted.engine == "ddp" and count < 2 and asked < 2:
        here = "one GPU" if count else "no GPU"
        return [
            warning(
                "GPUs",
                f"the strategy is for several GPUs, and there is {here}: one process trains alone",
                "Leave it out, or use --strategy recommended.",
            )
        ]
    return [ok("GPUs", f"{count} here, training.num_gpus {asked or 'not set'}")]


def model(wanted: Wanted) -> list[Line]:
    """Whether model.name is there. It is not loaded."""
    if wanted.config_file is None:
        return []
    name, tokenizer = str(wanted.config.model.name), tokenizer_setting(wanted.config).dir
    path = Path(name)
    inside = path / "model.nemo" if path.is_dir() else path
    if not inside.is_file() and is_hugging_face(path):
        size = sum(file.stat().st_size for file in path.glob("*.safetensors")) / 2**20
        remedy = "Only directories with safetensors files are read."
        found = f"{name}, Hugging Face format, {size:.1f} MiB of weights"
        return [ok("model", found) if size else fault(True, "model", f"{name} has no safetensors file", remedy)]
    if inside.suffix in (".nemo", ".yaml", ".yml"):
        if not inside.is_file():
            return [
                fault(
                    True,
                    "model",
                    f"there is no file {inside} (looked in {Path.cwd()})",
                    "Set model.name to a file that is there.",
                )
            ]
        lines = [ok("model", f"{inside}, {inside.stat().st_size / 2**20:.1f} MiB")]
        if tokenizer is not None and not (Path(tokenizer) / "tokenizer.model").is_file():
            found = f"there is no {Path(tokenizer) / 'tokenizer.model'}"
            lines.append(
                fault(inside.suffix != ".nemo", "tokenizer", found, "python -m finetune.tokenizer makes one.")
            )
        return lines
    if is_hub_name(name):
        cached = cached_model(name)
        return [ok("model", f"{name}, {'downloaded already' if cached else 'will be downloaded from the hub'}")]
    found = f"{name} is neither a .nemo file nor a directory with model.nemo or config.json, and no hub name"
    return [
        fault(True, "model", found, "Set model.name to a .nemo file or a name such as nvidia/parakeet-tdt-0.6b-v3.")
    ]


def data(wanted: Wanted) -> list[Line]:
    """Whether each source is there. No clip is read."""
    if wanted.config_file is None:
        return []
    from finetune.data.sources import parse_sources
    from finetune.data.tarred import expand_ranges

    lines = []
    vocabulary = tokenizer_setting(wanted.config)
    named = {f"data.{key}": getattr(wanted.config.data, key) for key in ("train", "validation", "test", "guard")}
    for name, value in (named | ({vocabulary.key: vocabulary.origin} if vocabulary.changes else {})).items():
        if value is None:
            continue
        try:
            sources = parse_sources(
                value, name, "validation" if name in ("data.validation", "data.test", "data.guard") else "train"
            )
        except UserError as error:
            lines.append(fault(True, name, str(error), "docs/data.md says what a source may be."))
            continue
        paths = [path for s in sources for path in (s.path, s.tarred_audio) if path]
        gone = [path for path in paths if not _is_there(path, expand_ranges)]
        if gone:
            some = ", ".join(gone[:3]) + (f" and {len(gone) - 3} more" if len(gone) > 3 else "")
            lines.append(
                fault(
                    True,
                    name,
                    f"not found: {some} (looked in {Path.cwd()})",
                    "Mend the path, or start from the folder that it is meant from.",
                )
            )
        else:
            remote = sum("://" in path or is_hub_data(path) for path in paths)
            lines.append(
                ok(
                    name,
                    f"{clean_urls(', '.join(paths[:3]))}{' ...' if len(paths) > 3 else ''}"
                    + (f" ({remote} remote, not asked)" if remote else ""),
                )
            )
    if wanted.config.data.leave_out and not os.path.isfile(wanted.config.data.leave_out):
        lines.append(
            fault(
                True,
                "data.leave_out",
                f"there is no file {wanted.config.data.leave_out}",
                "python -m finetune.check writes one.",
            )
        )
    if wanted.config.data.validation is None:
        lines.append(
            warning(
                "data.validation",
                "not set: nothing can tell whether the model gets better",
                "Name clips that are not trained on.",
            )
        )
    return lines


def _is_there(path: str, expand_ranges: Any) -> bool:
    if "://" in path or is_hub_data(path):
        return True
    if any(sign in path for sign in ("*", "?", "[", "{", "_OP_")):
        files = expand_ranges(path)
        return bool(files) and all(os.path.exists(file) for file in files)
    return os.path.exists(os.path.expanduser(path))


def output_disk(wanted: Wanted) -> list[Line]:
    """Room at output_dir for what the run leaves, and the speed of writing and reading there."""
    given = wanted.config_file is not None
    target = Path(wanted.config.training.output_dir) if given else Path.cwd()
    folder = target.absolute()
    while not folder.exists():
        folder = folder.parent
    name = "training.output_dir" if given else "disk here"
    try:
        wrote, read = _disk_speed(folder)
    except OSError as error:
        return [
            fault(
                given,
                name,
                f"{folder} cannot be written: {reason_of(error)}",
                "Name a directory that you may write to as training.output_dir.",
            )
        ]
    free = shutil.disk_usage(folder).free / 2**30
    said = f"{target}: {free:.1f} GiB free, writes {wrote:.0f} MiB/s, reads {read:.0f} MiB/s"
    lines = []
    need = _room(wanted) if given else None
    if need and need > free:
        remedy = "Name a larger disk as training.output_dir, or keep fewer checkpoints: training.save_total_limit=1"
        lines.append(fault(True, name, f"{said}; model and checkpoints take about {need:.1f} GiB", remedy))
    elif min(wrote, read) < SLOW_MIB_PER_SECOND:
        lines.append(
            warning(
                name,
                f"{said}; slow, and each checkpoint waits for it",
                "Use a local disk, and larger training.save_steps.",
            )
        )
    else:
        lines.append(ok(name, said + (f"; the run takes about {need:.1f} GiB" if need else "")))
    t = wanted.config.training
    if given and (target / "config.yaml").is_file() and not t.resume_from_checkpoint and not t.overwrite_output_dir:
        remedy = "Continue it with training.resume_from_checkpoint=true, or name another directory."
        lines.append(warning(name, f"{target} holds another run; training refuses to overwrite it", remedy))
    return lines


def _room(wanted: Wanted) -> float | None:
    """GiB for model.nemo and the checkpoints at the time when one more is written than is kept; None where the size is not known."""
    parameters = parameters_of(str(wanted.config.model.name))
    if parameters is None:
        return None
    # AdamW's checkpoint: weights and two states, 4 bytes each. The best model is kept as weights and as model.nemo.
    kept = max(int(wanted.config.training.save_total_limit), 1)
    return parameters * (12 * (kept + 1) + 8) / 2**30


def _disk_speed(folder: Path) -> tuple[float, float]:
    """MiB/s of writing (to the disk itself) and of reading up to 64 MiB, each for four seconds at most.

    Raises:
        OSError: the folder cannot be written.
    """
    path = folder / f".doctor-{os.getpid()}.tmp"
    chunk = os.urandom(CHUNK_MIB * 2**20)
    try:
        started, written = time.perf_counter(), 0
        with path.open("wb", buffering=0) as file:
            while written < PROBE_MIB and time.perf_counter() - started < PROBE_SECONDS:
                file.write(chunk)
                os.fsync(file.fileno())
                written += CHUNK_MIB
            wrote = written / (time.perf_counter() - started)
        with path.open("rb", buffering=0) as file:
            # What was just written would come from memory.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            started, count = time.perf_counter(), 0
            while time.perf_counter() - started < PROBE_SECONDS and file.read(CHUNK_MIB * 2**20):
                count += CHUNK_MIB
            read = count / max(time.perf_counter() - started, 1e-6)
    finally:
        path.unlink(missing_ok=True)
    return wrote, read
