"""Steps that were followed are cached: they depend on the layout, the options and the code alone."""

import functools
import hashlib
import json
import logging
import multiprocessing
import os
import queue
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import torch
from omegaconf import OmegaConf

from finetune.errors import UserError
from finetune.paths import ROOT
from finetune.tools.planning.follow import Follower, Kind
from finetune.tools.planning.layout import Layout
from finetune.tools.planning.memory import Step, StepMemory, measure

log = logging.getLogger(__name__)

REFUSED = "refused: "  # layout and options do not go together, which is cached too
WITHOUT_EFFECT = {"name", "tokenizer", "adapter", "spec_augment", "sigma", "omega", "activation_offload"}
FOLLOWED_CODE = ("tools/planning", "losses", "strategies", "models")


def cache_folder() -> Path:
    """$PARAKEET_FINETUNE_CACHE, else parakeet_finetune in the user's cache folder."""
    own = os.environ.get("PARAKEET_FINETUNE_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(own) if own else Path(home) / "parakeet_finetune"


@functools.cache
def _code() -> str:
    """Digest of everything that a followed step passes through."""
    digest = hashlib.sha256()
    for package in ("torch", "nemo_toolkit"):
        digest.update(f"{package} {metadata.version(package)}".encode())
    for folder in FOLLOWED_CODE:
        for file in sorted((ROOT / "finetune" / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def key_of(layout: Layout, kind: Kind, lengths: list[float], tokens_a_second: float) -> str:
    """Digest of all that a result depends on."""
    options = kind.options.model_dump(exclude=WITHOUT_EFFECT)
    what = [_code(), OmegaConf.to_container(layout.model), layout.layers, layout.tokens, options]
    what += [kind.precision, kind.releases, kind.cuda, lengths, tokens_a_second]
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:32]


def find(key: str) -> StepMemory | str | None:
    """Return a cached result."""
    try:
        found = json.loads((cache_folder() / "plan" / f"{key}.json").read_text(encoding="utf-8"))
        if isinstance(found, str):
            return found
        return StepMemory(**{**found, "steps": [Step(**step) for step in found["steps"]]})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def store(key: str, memory: StepMemory | str) -> None:
    """Cache a result, if the folder can be written."""
    file = cache_folder() / "plan" / f"{key}.json"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        aside = file.with_suffix(f".{os.getpid()}.tmp")
        aside.write_text(json.dumps(memory if isinstance(memory, str) else asdict(memory)), encoding="utf-8")
        os.replace(aside, file)
    except OSError as error:
        log.debug("the plan's cache cannot be written: %s", error)


def follow_all(
    layout: Layout,
    kinds: list[Kind],
    lengths: list[float],
    tokens_a_second: float,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, StepMemory | str]:
    """Return the memory of each kind by its key, or why it cannot be followed; follow the missing ones in parallel.

    Args:
        layout: the model's.
        kinds: what is trained how.
        lengths, tokens_a_second: of the clips and texts, as in `memory.measure`.
        progress: called with the number of kinds that are done, and of all.
    """
    by_key = {key_of(layout, kind, lengths, tokens_a_second): kind for kind in kinds}
    found: dict[str, StepMemory | str] = {key: memory for key in by_key if (memory := find(key)) is not None}
    missing = [key for key in by_key if key not in found]
    progress(0, len(missing))
    workers = min(os.cpu_count() or 1, len(missing), 8)
    if workers > 1 and not torch.cuda.is_initialized():
        from finetune.models.nemo import import_nemo

        import_nemo()  # once, before the processes fork
        shares = [[(key, by_key[key]) for key in missing[i::workers]] for i in range(workers)]
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        processes = [
            context.Process(target=_work, args=(layout, share, lengths, tokens_a_second, results)) for share in shares
        ]
        for process in processes:
            process.start()
        done = 0
        while done < len(missing):
            alive = any(process.is_alive() for process in processes)
            try:
                key, result = results.get(timeout=1.0)
            except queue.Empty:
                if alive:
                    continue
                break  # one was killed, most likely for its memory
            found[key] = result
            done += 1
            progress(done, len(missing))
        for key in missing:
            found.setdefault(key, "the process that followed it was killed (is there memory enough on this machine?)")
        for process in processes:
            process.join()
    elif missing:
        follower = Follower(layout)
        for done, key in enumerate(missing):
            found[key] = _follow(follower, by_key[key], lengths, tokens_a_second)
            progress(done + 1, len(missing))
    for key in missing:
        memory = found[key]
        if isinstance(memory, StepMemory) or memory.startswith(REFUSED):
            store(key, memory)
    return found


def _work(
    layout: Layout,
    share: list[tuple[str, Kind]],
    lengths: list[float],
    tokens_a_second: float,
    results: "multiprocessing.Queue[tuple[str, StepMemory | str]]",
) -> None:
    torch.set_num_threads(1)
    follower: Follower | None = None
    for key, kind in share:
        try:
            follower = follower or Follower(layout)
            result: StepMemory | str = _follow(follower, kind, lengths, tokens_a_second)
        except Exception as error:
            result = _reason(error)
        results.put((key, result))


def _follow(follower: Follower, kind: Kind, lengths: list[float], tokens_a_second: float) -> StepMemory | str:
    try:
        return measure(follower, kind, follower.layout.layers, lengths, tokens_a_second)
    except Exception as error:  # such as an operation that fake tensors do not have
        log.debug("cannot be followed", exc_info=True)
        return _reason(error)


def _reason(error: Exception) -> str:
    if isinstance(error, UserError):
        return f"{REFUSED}{' '.join(str(error).split())}"
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
