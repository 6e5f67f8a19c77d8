"""What was followed once is kept: following depends on the layout, the options and the code alone."""

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
from typing import Any

import torch
from omegaconf import OmegaConf

from finetune.errors import UserError
from finetune.paths import ROOT
from finetune.tools.planning.follow import Follower, Kind
from finetune.tools.planning.layout import Layout
from finetune.tools.planning.memory import Step, StepMemory, measure

log = logging.getLogger(__name__)

REFUSED = "refused: "  # the layout and the options do not go together, which another try does not change
FOLLOWED_CODE = ("tools/planning", "losses", "strategies", "models")


def cache_folder() -> Path:
    """$PARAKEET_FINETUNE_CACHE, else parakeet_finetune in the user's cache folder."""
    own = os.environ.get("PARAKEET_FINETUNE_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(own) if own else Path(home) / "parakeet_finetune"


@functools.cache
def _code() -> str:
    """Of everything that a followed step goes through."""
    digest = hashlib.sha256()
    for package in ("torch", "nemo_toolkit"):
        digest.update(f"{package} {metadata.version(package)}".encode())
    for folder in FOLLOWED_CODE:
        for file in sorted((ROOT / "finetune" / folder).glob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def key_of(layout: Layout, kind: Kind, lengths: list[float], tokens_a_second: float) -> str:
    """Says by what a result is determined."""
    options = kind.options.model_dump()
    for name in (
        "name",
        "tokenizer",
        "adapter",
        "spec_augment",
        "sigma",
        "omega",
        "activation_offload",
    ):  # no effect on what is followed
        options.pop(name, None)
    what = [_code(), OmegaConf.to_container(layout.model), layout.layers, layout.tokens, options]
    what += [kind.precision, kind.releases, kind.cuda, lengths, tokens_a_second]
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:32]


def find(key: str) -> StepMemory | str | None:
    """A result of an earlier time."""
    try:
        found = json.loads((cache_folder() / "plan" / f"{key}.json").read_text(encoding="utf-8"))
        if isinstance(found, str):
            return found
        return StepMemory(**{**found, "steps": [Step(**step) for step in found["steps"]]})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def keep(key: str, memory: StepMemory | str) -> None:
    """Keeps a result; a folder that cannot be written is done without."""
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
    """Memory of each kind by its key, or why it cannot be followed; the missing ones are followed side by side.

    Args:
        progress: told how many of how many are done.
    """
    by_key = {key_of(layout, kind, lengths, tokens_a_second): kind for kind in kinds}
    found: dict[str, StepMemory | str] = {key: memory for key in by_key if (memory := find(key)) is not None}
    missing = [key for key in by_key if key not in found]
    progress(0, len(missing))
    workers = min(os.cpu_count() or 1, len(missing), 8)
    if workers > 1 and not torch.cuda.is_initialized():
        from finetune.models.nemo import import_nemo

        import_nemo()  # once, before the processes part
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
                break  # one was killed, by the kernel for its memory most likely
            found[key] = result
            done += 1
            progress(done, len(missing))
        for key in missing:
            found.setdefault(key, "the process that followed it was killed (is there memory enough on this machine?)")
        for process in processes:
            process.join()
    else:
        follower = Follower(layout) if missing else None
        for done, key in enumerate(missing):
            found[key] = _follow(follower, by_key[key], lengths, tokens_a_second)
            progress(done + 1, len(missing))
    for key in missing:
        if isinstance(found[key], StepMemory) or found[key].startswith(REFUSED):
            keep(key, found[key])
    return found


def _work(
    layout: Layout, share: list[tuple[str, Kind]], lengths: list[float], tokens_a_second: float, results: Any
) -> None:
    torch.set_num_threads(1)
    follower: Any = None
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
