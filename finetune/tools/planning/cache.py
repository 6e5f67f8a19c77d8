"""Steps that were followed are cached: they depend on the layout, the options and the code alone."""

import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf

from finetune.data.worker_lifetime import begin_task_process, task_processes
from finetune.errors import UserError
from finetune.models.nemo import import_nemo
from finetune.paths import ROOT
from finetune.tools.planning.follow import Follower, Kind
from finetune.tools.planning.layout import Layout
from finetune.tools.planning.memory import StepMemory, measure

log = logging.getLogger(__name__)

CANNOT = "cannot be followed here: "  # begins reasons that are not cached: another machine or version may do
WITHOUT_EFFECT = {
    *("name", "tokenizer", "adapter", "spec_augment", "sigma", "omega", "streaming_share", "activation_offload"),
}
FOLLOWED_CODE = ("tools/planning", "losses", "strategies", "models")
MOST_WORKERS = 8


def cache_folder() -> Path:
    """Return $PARAKEET_FINETUNE_CACHE, else parakeet_finetune in the user's cache folder."""
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
        arrays = {name: np.array(found[name]) for name in ("peaks_L2PN", "work_LW")}
        return StepMemory(**{**found, **arrays})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def store(key: str, memory: StepMemory | str) -> None:
    """Cache a result, if the folder can be written."""
    file = cache_folder() / "plan" / f"{key}.json"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        aside = file.with_suffix(f".{os.getpid()}.tmp")
        values = memory if isinstance(memory, str) else asdict(memory)
        aside.write_text(json.dumps(values, default=np.ndarray.tolist), encoding="utf-8")
        os.replace(aside, file)
    except OSError as error:
        log.debug("the plan's cache cannot be written: %s", error)


def follow_all(
    layout: Layout,
    kinds: list[Kind],
    lengths: list[float],
    tokens_a_second: float,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[StepMemory | str]:
    """Return the memory of each kind, or why it cannot be followed; follow those that are not cached in parallel.

    Args:
        layout: the model's.
        kinds: what is trained how.
        lengths, tokens_a_second: of the clips and texts, as in `memory.measure`.
        progress: called with the number of kinds that are done, and of all.
    """
    keys = [key_of(layout, kind, lengths, tokens_a_second) for kind in kinds]
    found = {key: memory for key in keys if (memory := find(key)) is not None}
    missing = {key: kind for key, kind in zip(keys, kinds) if key not in found}
    progress(0, len(missing))
    for done, (key, memory) in enumerate(_follow_missing(layout, missing, lengths, tokens_a_second), 1):
        found[key] = memory
        if isinstance(memory, StepMemory) or not memory.startswith(CANNOT):
            store(key, memory)
        progress(done, len(missing))
    return [found[key] for key in keys]


def _follow_missing(
    layout: Layout, missing: dict[str, Kind], lengths: list[float], tokens_a_second: float
) -> Iterator[tuple[str, StepMemory | str]]:
    if not missing:
        return
    import_nemo()  # once, before the processes fork
    # NeMo's preprocessor asks the GPU where there is one, which a fork may not.
    if torch.cuda.is_available() or not _a_fork_can_follow():
        for key, kind in missing.items():
            yield key, _follow(layout, kind, lengths, tokens_a_second)
        _follower.cache_clear()
        return
    workers = min(os.cpu_count() or 1, len(missing), MOST_WORKERS)
    with task_processes(workers, _begin) as pool:  # even for one: its autograd threads would forbid later forks
        futures = {pool.submit(_follow, layout, kind, lengths, tokens_a_second): key for key, kind in missing.items()}
        for future in as_completed(futures):
            try:
                yield futures[future], future.result()
            except BrokenProcessPool:
                reason = f"{CANNOT}the process that did was killed (is there memory enough on this machine?)"
                yield futures[future], reason


def _a_fork_can_follow() -> bool:
    """Whether autograd works in a forked process: not once it has started threads here, as after fake tensors."""
    with task_processes(1, _begin) as pool:
        try:
            return pool.submit(_autograd_works).result()
        except BrokenProcessPool:
            return True  # the processes that follow say what is wrong


def _autograd_works() -> bool:
    try:
        torch.ones(1, requires_grad=True).backward()
    except RuntimeError:
        return False
    return True


def _begin(parent: int) -> None:
    begin_task_process(parent)
    torch.set_num_threads(1)


_follower = functools.lru_cache(maxsize=1)(Follower)


def _follow(layout: Layout, kind: Kind, lengths: list[float], tokens_a_second: float) -> StepMemory | str:
    try:
        return measure(_follower(layout), kind, lengths, tokens_a_second)
    except UserError as error:  # layout and options do not go together
        return " ".join(str(error).split())
    except Exception as error:  # such as an operation that fake tensors do not have
        log.debug("cannot be followed", exc_info=True)
        return f"{CANNOT}{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
