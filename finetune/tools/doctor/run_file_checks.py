"""Checks of the chosen run: its strategy on this machine, its model and data, the hub, and the disk for its output."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from finetune.config.compatibility import find_conflicts
from finetune.config.tokenizer_setting import tokenizer_setting
from finetune.data.sources import MANIFEST_SUFFIXES, parse_sources
from finetune.data.tarred import expand_ranges
from finetune.errors import UserError
from finetune.models.huggingface.reading import cached_archive, cached_file, is_hugging_face
from finetune.models.nemo_archive import archive_of
from finetune.security.secrets import clean_text, clean_urls
from finetune.strategies.strategy import engine_with, number_of_processes
from finetune.tools.doctor.findings import Finding, Wanted, ok, problem, reason_of, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

PROBE_MIB, CHUNK_MIB = 64, 16
PROBE_SECONDS = 4.0
SLOW_MIB_PER_SECOND = 50
HUB_SECONDS = 4.0
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
DATA_KEYS = ("train", "rehearsal", "validation", "test", "guard")


def compatibility(wanted: Wanted) -> Iterator[Finding]:
    """Options that exclude each other, with this machine's engine and GPUs."""
    if not wanted.chosen:
        return
    name = "strategy " + "+".join(wanted.names) if wanted.names else "strategy"
    gpu = torch.cuda.is_available()
    engine = engine_with(wanted.engine, number_of_processes())
    conflicts = find_conflicts(wanted.config, engine, gpu)
    for text in conflicts:
        found, _, instead = text.partition(" Instead: ")
        yield problem(True, name, found, instead[:1].upper() + instead[1:])
    if not conflicts:
        t = wanted.config.training
        precision = "bf16" if t.bf16 else "fp16" if t.fp16 else "fp32"
        device = "GPU" if gpu else "CPU"
        yield ok(name, f"{t.optimizer}, engine {engine}, {precision} on the {device}: nothing excludes itself")


def gpu_count(wanted: Wanted) -> Iterator[Finding]:
    """training.num_gpus, or a strategy for several GPUs, against this machine's GPUs."""
    if not wanted.chosen:
        return
    count, asked = torch.cuda.device_count(), int(wanted.config.training.num_gpus)
    if asked > 1 and count and asked > count:
        found = f"training.num_gpus is {asked}, and there {'is' if count == 1 else 'are'} {count} here"
        remedy = f"Set training.num_gpus={count} and raise training.gradient_accumulation_steps instead."
        yield problem(True, "GPUs", found, remedy)
    elif asked > 1 and not count:
        found = f"training.num_gpus is {asked} and there is none: {asked} processes would share this processor"
        yield warning("GPUs", found, "Set training.num_gpus=0 to try things out with one process.")
    elif wanted.engine == "ddp" and count < 2 and asked < 2:
        here = "one GPU" if count else "no GPU"
        found = f"the strategy is for several GPUs, and there is {here}: one process trains alone"
        yield warning("GPUs", found, "Leave it out, or use --strategy recommended.")
    else:
        yield ok("GPUs", f"{count} here, training.num_gpus {asked or 'not set'}")


def model(wanted: Wanted) -> Iterator[Finding]:
    """Whether model.name exists. It is not loaded."""
    if wanted.config_file is None:
        return
    name, tokenizer = str(wanted.config.model.name), tokenizer_setting(wanted.config).dir
    path = Path(name)
    try:
        file = archive_of(path) or path
    except UserError as error:  # several of them
        yield problem(True, "model", str(error).removeprefix("model.name: "), "Set model.name to one of the files.")
        return
    if not file.is_file() and is_hugging_face(path):
        size = sum(part.stat().st_size for part in path.glob("*.safetensors")) / 2**20
        if size:
            yield ok("model", f"{name}, Hugging Face format, {size:.1f} MiB of weights")
        else:
            remedy = "Only directories with safetensors files are read."
            yield problem(True, "model", f"{name} has no safetensors file", remedy)
    elif file.suffix in (".nemo", ".yaml", ".yml"):
        if not file.is_file():
            found = f"there is no file {file} (looked in {Path.cwd()})"
            yield problem(True, "model", found, "Set model.name to an existing file.")
            return
        yield ok("model", f"{file}, {file.stat().st_size / 2**20:.1f} MiB")
        if tokenizer is not None and not (Path(tokenizer) / "tokenizer.model").is_file():
            found = f"there is no {Path(tokenizer) / 'tokenizer.model'}"
            yield problem(file.suffix != ".nemo", "tokenizer", found, "python -m finetune.tokenizer makes one.")
    elif _is_hub_model(name):
        state = "downloaded already" if _is_cached(name) else "will be downloaded from the hub"
        yield ok("model", f"{name}, {state}")
    else:
        found = f"{name} is neither a .nemo file nor a directory with model.nemo or config.json, and not a hub name"
        remedy = "Set model.name to a .nemo file or a name such as nvidia/parakeet-tdt-0.6b-v3."
        yield problem(True, "model", found, remedy)


def _is_hub_model(name: str) -> bool:
    """Apply the rule of `finetune.models.loading.load_model`."""
    local = Path(name).suffix in (".yaml", ".yml", ".nemo") or os.path.exists(name)
    return not local and name.count("/") == 1 and not name.startswith((".", "/"))


def _is_cached(name: str) -> bool:
    return bool(cached_archive(name) or cached_file(name, "model.safetensors"))


def data(wanted: Wanted) -> Iterator[Finding]:
    """Whether each source exists. No utterance is read."""
    if wanted.config_file is None:
        return
    settings = wanted.config.data
    named = {f"data.{key}": getattr(settings, key) for key in DATA_KEYS}
    vocabulary = tokenizer_setting(wanted.config)
    if vocabulary.changes:
        named[vocabulary.key] = vocabulary.origin
    for name, value in named.items():
        if value is None:
            continue
        try:
            paths = _paths(value, name)
        except UserError as error:
            yield problem(True, name, str(error), "docs/data.md says what a source may be.")
            continue
        if gone := [path for path in paths if not _exists(path)]:
            some = ", ".join(gone[:3]) + (f" and {len(gone) - 3} more" if len(gone) > 3 else "")
            remedy = "Correct the path, or start from the folder that it is relative to."
            yield problem(True, name, f"not found: {some} (looked in {Path.cwd()})", remedy)
        else:
            remote = sum(map(_is_remote, paths))
            found = clean_urls(", ".join(paths[:3])) + (" ..." if len(paths) > 3 else "")
            yield ok(name, found + (f" ({remote} remote, not asked)" if remote else ""))
    lists = settings.leave_out or []
    for file in [lists] if isinstance(lists, str) else lists:
        if not os.path.isfile(file):
            yield problem(True, "data.leave_out", f"there is no file {file}", "python -m finetune.check writes one.")
    if settings.validation is None:
        found = "not set: nothing can tell whether the model gets better"
        yield warning("data.validation", found, "Name clips that are not trained on.")


def _paths(value: Any, key: str) -> list[str]:
    sources = parse_sources(value, key, "train")
    return [path for source in sources for path in (source.path, source.tarred_audio) if path]


def _is_hub_data(path: str) -> bool:
    """Apply the rule of `finetune.data.sources`."""
    local = path.endswith(MANIFEST_SUFFIXES) or path.startswith((".", "/", "~")) or path.count("/") > 1
    return not (local or "://" in path or any(c in path for c in "*?[{") or os.path.exists(path))


def _is_remote(path: str) -> bool:
    return "://" in path or _is_hub_data(path)


def _exists(path: str) -> bool:
    if _is_remote(path):
        return True
    if any(sign in path for sign in ("*", "?", "[", "{", "_OP_")):
        files = expand_ranges(path)
        return bool(files) and all(os.path.exists(file) for file in files)
    return os.path.exists(os.path.expanduser(path))


def hub(wanted: Wanted) -> Iterator[Finding]:
    """Whether the hub answers, and whether there is a token; never which."""
    from huggingface_hub import constants, get_token

    needed = _wanted_from_hub(wanted)
    what = f"the run file takes {', '.join(needed)} from it" if needed else "nothing of this run needs it"
    switched = [name for name in OFFLINE if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")]
    if switched and needed:
        remedy = f"unset {' '.join(switched)}, or give local paths."
        yield problem(True, "hub", f"switched off by {', '.join(switched)}; {what}", remedy)
    elif switched:
        yield ok("hub", f"switched off by {', '.join(switched)}; {what}")
    elif error := _request_head(constants.ENDPOINT):
        found = f"{clean_text(constants.ENDPOINT)} does not answer ({clean_text(error)}); {what}"
        remedy = "Check network and proxy (HTTPS_PROXY), or give local paths and export HF_HUB_OFFLINE=1."
        yield problem(bool(needed), "hub", found, remedy)
    else:
        yield ok("hub", f"{clean_text(constants.ENDPOINT)} answers; {what}")
    has_token = get_token() is not None
    none = "none; only private and gated repositories need one"
    yield ok("hub token", "one is set (its value is never shown)" if has_token else none)


def _wanted_from_hub(wanted: Wanted) -> list[str]:
    """What the run file takes from the hub, without models that are in the cache."""
    if wanted.config_file is None:
        return []
    name = str(wanted.config.model.name)
    found = [name] if _is_hub_model(name) and not _is_cached(name) else []
    for value in filter(None, (getattr(wanted.config.data, key) for key in DATA_KEYS)):
        with contextlib.suppress(UserError):  # which the check of the data tells
            found += [path for path in _paths(value, "data") if _is_hub_data(path) or path.startswith("hf://")]
    return list(dict.fromkeys(found))


def _request_head(url: str) -> str:
    """Request the head of a page; return the error, or nothing if any answer came in time."""
    result = [f"no answer within {HUB_SECONDS:.0f} s"]

    def request() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=HUB_SECONDS):
                result[0] = ""
        except urllib.error.HTTPError as error:
            result[0] = "" if error.code < 500 else reason_of(error)
        except Exception as error:
            result[0] = reason_of(error)

    # A thread, because looking up a host name has no timeout of its own.
    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(HUB_SECONDS + 0.5)
    return result[0]


def output_disk(wanted: Wanted) -> Iterator[Finding]:
    """Room at output_dir for what the run writes, and the speed of writing and reading there."""
    given = wanted.config_file is not None
    target = Path(wanted.config.training.output_dir) if given else Path.cwd()
    folder = target.absolute()
    while not folder.exists():
        folder = folder.parent
    name = "training.output_dir" if given else "disk here"
    try:
        wrote, read = _disk_speed(folder)
    except OSError as error:
        remedy = "Name a directory that you may write to as training.output_dir."
        yield problem(given, name, f"{folder} cannot be written: {reason_of(error)}", remedy)
        return
    free = shutil.disk_usage(folder).free / 2**30
    found = f"{target}: {free:.1f} GiB free, writes {wrote:.0f} MiB/s, reads {read:.0f} MiB/s"
    need = _room(wanted) if given else None
    if need and need > free:
        remedy = "Name a larger disk as training.output_dir, or keep fewer checkpoints: training.save_total_limit=1"
        yield problem(True, name, f"{found}; model and checkpoints take about {need:.1f} GiB", remedy)
    elif min(wrote, read) < SLOW_MIB_PER_SECOND:
        remedy = "Use a local disk, and larger training.save_steps."
        yield warning(name, f"{found}; slow, and each checkpoint waits for it", remedy)
    else:
        yield ok(name, found + (f"; the run takes about {need:.1f} GiB" if need else ""))


def _room(wanted: Wanted) -> float | None:
    """GiB for model.nemo and checkpoints while one more is written than is kept; None for a model of unknown size."""
    parameters = parameters_of(str(wanted.config.model.name))
    # AdamW's checkpoint: weights and two states, 4 bytes each. The best model is kept as weights and as model.nemo.
    kept = max(int(wanted.config.training.save_total_limit), 1)
    return parameters * (12 * (kept + 1) + 8) / 2**30 if parameters else None


def parameters_of(model: str) -> float | None:
    """Parameters of a model, by the size of its file or by a hub name such as parakeet-tdt-0.6b-v3; None: unknown."""
    path = Path(model)
    with contextlib.suppress(UserError):  # `model` reports it
        if (archive := archive_of(path)) is not None:
            return archive.stat().st_size / 4
    if is_hugging_face(path):
        size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        half = re.search(r'"(torch_)?dtype": "b?float16"', (path / "config.json").read_text(encoding="utf-8"))
        return size / (2 if half else 4)
    size = re.search(r"(\d+(?:\.\d+)?)b(?![a-z])", model.rsplit("/", 1)[-1])
    return float(size[1]) * 1e9 if size and not path.exists() else None


def _disk_speed(folder: Path) -> tuple[float, float]:
    """MiB/s of writing (to the disk itself) and of reading up to 64 MiB, each for four seconds at most."""
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
            # Otherwise what was just written would come from memory.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            started, count = time.perf_counter(), 0
            while time.perf_counter() - started < PROBE_SECONDS and file.read(CHUNK_MIB * 2**20):
                count += CHUNK_MIB
            read = count / max(time.perf_counter() - started, 1e-6)
    finally:
        path.unlink(missing_ok=True)
    return wrote, read
