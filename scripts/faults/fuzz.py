"""Feed every reader with broken and hostile inputs: none may end without a message, hang, or eat the memory.

    python scripts/faults/fuzz.py --inputs 1000000 --output runs/fuzz [--seed 0] [--readers NAME ...] [--json FILE]
    python scripts/faults/fuzz.py --one READER NUMBER [--seed 0]          # one input again

Whole inputs (scripts/faults/fuzz_readers.py) are mutated: bits, bytes, pieces cut out, doubled, mixed with others',
and values of a list of extremes. Input N of a reader follows from seed, reader and N, so that a run goes on where it
was stopped, and an input can be had again. A failure is an exception that is none of the reader's refusals, more than
--seconds for an input, or more than --memory GiB: its bytes stay in OUTPUT/failures. Exit codes: 0 no failure, 1
failures, 2 bad arguments.
"""

import argparse
import collections
import contextlib
import datetime
import faulthandler
import functools
import json
import logging
import os
import platform
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE.parents[1]), str(_HERE)]

import fuzz_readers
from fuzz_readers import EXTREMES, Reader

from finetune.durable_files import write_json

AT_ONCE = 200  # inputs of a reader before the next one's turn
LONGEST = 150_000  # bytes of an input
VALUES: list[Any] = [
    None, True, False, 0, -1, 1.5, 2**63, -(2**70), 10**400, 1e308, float("nan"), float("inf"), "", "x", "\0",
    "\ud800", "\n\r\u2028", "\x1b]0;x\x07",
    "\u202eabc", "../../../etc/passwd", "/etc/passwd", "/dev/zero", "file:///etc/passwd",
    "reference://x::http://127.0.0.1/y", "s3://a:b@c/d", "é" * 500,
    "x " * 60_000, [], {}, [[]], {"a": {}}, [None], {"path": "/etc/passwd"}, {"bytes": None, "path": None},
    {"array": [1, "a"], "sampling_rate": "x"},
    {"array": [[0.5]] * 4, "sampling_rate": 10**12}, {"bytes": "text"}, "<script>alert(1)</script>", "${oc.env:HOME}",
    "1e999", "0x10", "true",
]  # fmt: skip
PACKAGES = (
    "torch",
    "nemo_toolkit",
    "PyYAML",
    "omegaconf",
    "pyarrow",
    "soundfile",
    "safetensors",
    "sentencepiece",
    "transformers",
)


TRACES: list[Any] = []
"""Where a traceback goes while stderr leads nowhere."""


class Hang(BaseException):
    """An input took too long; no reader's `except Exception` may swallow it."""


def mutated(seeds: list[bytes], rng: random.Random) -> bytes:
    """One of the whole inputs, changed in one to eight places."""
    seed = rng.choice(seeds)
    data = bytearray(seed)
    if rng.random() < 0.5 and (lines := _parsed(seed)):
        data = bytearray(b"\n".join(json.dumps(_changed(line, rng)).encode() for line in lines))
        if rng.random() < 0.8:
            return bytes(data[:LONGEST])
    for _ in range(rng.choice((1, 1, 2, 3, 5, 8))):
        at = rng.randrange(len(data) + 1)
        length = min(rng.choice((1, 1, 2, 4, 8, 30, 200)), len(data) - at)
        match rng.randrange(8):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(data):
                data[at] = rng.randrange(256)
            case 2:
                data[at:at] = rng.choice(EXTREMES)
            case 3:
                data[at : at + length] = rng.choice(EXTREMES)
            case 4:
                del data[at : at + length]
            case 5:
                data[at:at] = data[at : at + length] * rng.choice((1, 2, 20))
            case 6:
                other = rng.choice(seeds)
                start = rng.randrange(len(other) + 1)
                data[at : at + length] = other[start : start + rng.choice((1, 10, 100, 1000))]
            case 7:
                _replace_value(data, rng)
    return bytes(data[:LONGEST])


@functools.lru_cache(maxsize=1000)
def _parsed(seed: bytes) -> tuple[Any, ...]:
    """The values of JSON, or JSON lines; empty where it is none."""
    try:
        return tuple(json.loads(line) for line in seed.splitlines() if line.strip())
    except (ValueError, RecursionError):
        return ()


def _changed(value: Any, rng: random.Random) -> Any:
    """A JSON value of which a part is another one, is lost, or has another name."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        found = dict(value)
        key = rng.choice(list(found))
        match rng.randrange(8):
            case 0:
                del found[key]
            case 1:
                found[rng.choice((key.upper(), "", "_target_", "\ud800", "x" * 3000))] = found.pop(key)
            case _:
                found[key] = _changed(found[key], rng)
        return found
    if isinstance(value, list) and value and rng.random() < 0.7:
        found = list(value)
        i = rng.randrange(len(found))
        found[i] = _changed(found[i], rng)
        return found * rng.choice((1, 1, 1, 3))
    return rng.choice(VALUES)


def _replace_value(data: bytearray, rng: random.Random) -> None:
    """Puts an extreme in the place of what stands between two signs of JSON or YAML."""
    signs = [i for i, byte in enumerate(data) if byte in b":,[]{}\n"]
    if len(signs) > 1:
        i = rng.randrange(len(signs) - 1)
        data[signs[i] + 1 : signs[i + 1]] = rng.choice(EXTREMES)


def input_of(reader: Reader, seeds: list[bytes], number: int, seed: int) -> bytes:
    """Input `number` of a reader."""
    return mutated(seeds, random.Random(f"{seed}/{reader.name}/{number}"))


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise Hang where Python code computes longer, whatever else runs on the machine.

    What waits, or hangs in a library's own code, ends the process with a traceback after a minute for each second.
    """

    def ring(*_: Any) -> None:
        raise Hang(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGPROF, ring)
    faulthandler.dump_traceback_later(60 * seconds, exit=True, file=TRACES[-1] if TRACES else sys.__stderr__)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGPROF, before)


def try_input(reader: Reader, data: bytes, folder: Path, seconds: float) -> tuple[str, str]:
    """What becomes of an input: "accepted", "refused" or "failed", and a traceback.

    Args:
        folder: that the reader may write into.
        seconds: that it may take.
    """
    try:
        with time_limit(seconds):
            reader.read(data, folder)
    except reader.refusals as error:
        return ("refused", "") if str(error).strip() else ("failed", "a refusal without a message")
    except (Exception, Hang):
        return "failed", traceback.format_exc()
    return "accepted", ""


def run(
    readers: list[Reader], inputs: int, output: Path, seed: int = 0, seconds: float = 5.0, memory_gib: float = 4.0
) -> dict[str, Any]:
    """Feed the readers in turn until `inputs` are done, earlier calls with the same output and seed included.

    Returns:
        By reader: inputs, accepted, refused, failed, seconds; the largest memory; the places of failures.
    """
    state_file = output / "state.json"
    state = json.loads(state_file.read_text()) if state_file.is_file() else {"seed": seed, "readers": {}}
    if state["seed"] != seed:
        raise SystemExit(f"{state_file} is of seed {state['seed']}; name another --output.")
    (output / "failures").mkdir(parents=True, exist_ok=True)
    whole = sum(reader.share for reader in readers)
    seeds = {reader.name: reader.seeds() for reader in readers}
    empty = {"inputs": 0, "accepted": 0, "refused": 0, "failed": 0, "seconds": 0.0}
    rows = {reader.name: state["readers"].setdefault(reader.name, dict(empty)) for reader in readers}
    # What the address space may grow by: a reader that asks for more gets a MemoryError, which is a failure.
    limits = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + int(memory_gib * 2**30), limits[1]))
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=base))
    try:
        for reader in readers:  # what it imports is not the first input's fault
            with contextlib.suppress(Exception):
                reader.read(seeds[reader.name][0], folder)
        while (done := sum(row["inputs"] for row in rows.values())) < inputs:
            # The reader that is furthest behind its share.
            reader = min(readers, key=lambda r: rows[r.name]["inputs"] / r.share)
            row = rows[reader.name]
            own = folder / str(readers.index(reader))
            own.mkdir(exist_ok=True)
            began = time.perf_counter()
            for number in range(
                row["inputs"], row["inputs"] + min(AT_ONCE, inputs - done, max(reader.share * inputs // whole, 1))
            ):
                data = input_of(reader, seeds[reader.name], number, seed)
                result, trace = try_input(reader, data, own, seconds)
                row["inputs"] += 1
                row[result] += 1
                if result == "failed":
                    keep_failure(output, reader, number, data, trace)
            row["seconds"] += time.perf_counter() - began
            write_json(state_file, state)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        shutil.rmtree(folder, ignore_errors=True)
    return {"readers": rows, "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


def keep_failure(output: Path, reader: Reader, number: int, data: bytes, trace: str) -> None:
    """Keeps an input that failed, and how."""
    name = f"{''.join(c if c.isalnum() else '-' for c in reader.name)}-{number}"
    (output / "failures" / f"{name}.bin").write_bytes(data)
    (output / "failures" / f"{name}.txt").write_text(trace, encoding="utf-8", errors="backslashreplace")


def kinds_of_failure(output: Path) -> collections.Counter[str]:
    """How often failures ended with the same line at the same place."""
    found: collections.Counter[str] = collections.Counter()
    for file in sorted((output / "failures").glob("*.txt")):
        lines = file.read_text(encoding="utf-8").splitlines()
        places = [line.strip() for line in lines if line.strip().startswith("File ")]
        found[f"{places[-1] if places else ''}: {lines[-1][:150]}"] += 1
    return found


def table(rows: dict[str, dict[str, Any]]) -> str:
    """By reader."""
    heads = ("inputs", "accepted", "refused", "failed")
    lines = [f"{'reader':30}" + "".join(f"{head:>11}" for head in heads) + f"{'a second':>11}"]
    total = {head: sum(row[head] for row in rows.values()) for head in (*heads, "seconds")}
    for name, row in [*rows.items(), ("all", total)]:
        rate = row["inputs"] / row["seconds"] if row["seconds"] else 0
        lines.append(f"{name:30}" + "".join(f"{row[head]:>11,}" for head in heads) + f"{rate:>11,.0f}")
    return "\n".join(lines)


def report(found: dict[str, Any], seed: int, seconds: float, memory_gib: float) -> dict[str, Any]:
    """The result with what it was got with, for docs/benchmarks."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "",
    )
    rows = {name: {**row, "seconds": round(row["seconds"], 1)} for name, row in found["readers"].items()}
    return {
        "command": " ".join(["python", "scripts/faults/fuzz.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "processor": model,
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "seed": seed,
        "seconds_an_input_at_most": seconds,
        "memory_gib_at_most": memory_gib,
        "inputs": sum(row["inputs"] for row in rows.values()),
        "failed": sum(row["failed"] for row in rows.values()),
        "peak_rss_gib": round(found["peak_rss_gib"], 2),
        "readers": rows,
    }


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/faults/fuzz.py", description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000, metavar="N", help="in all, earlier calls included")
    parser.add_argument("--output", type=Path, default=Path("runs/fuzz"), metavar="DIR", help="state and failures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--readers", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--seconds", type=float, default=5.0, help="of computing that an input may take")
    parser.add_argument("--memory", type=float, default=4.0, metavar="GIB", help="that the process may grow by")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the table, with machine and versions")
    parser.add_argument("--one", nargs=2, metavar=("READER", "NUMBER"), help="read one input again, and show it")
    arguments = parser.parse_args(argv)
    known = [reader.name for reader in fuzz_readers.READERS]
    for name in [*(arguments.readers or []), *(arguments.one or [])[:1]]:
        if name not in known:
            parser.error(f"there is no reader {name!r}; there are {', '.join(known)}")
    return arguments


@contextlib.contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Silence warnings, logs and what decoders written in C print; a hang's traceback goes to where errors went."""
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    traces = os.fdopen(kept, "w")
    TRACES.append(traces)
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)
        TRACES.remove(traces)
        os.dup2(kept, 2)
        traces.close()
        os.close(null)


def main(argv: list[str] | None = None) -> int:
    """Runs it; returns the exit code."""
    arguments = parse_arguments(argv)
    readers = [r for r in fuzz_readers.READERS if not arguments.readers or r.name in arguments.readers]
    if arguments.one:
        reader = next(r for r in readers if r.name == arguments.one[0])
        data = input_of(reader, reader.seeds(), int(arguments.one[1]), arguments.seed)
        with tempfile.TemporaryDirectory() as folder:
            result, trace = try_input(reader, data, Path(folder), arguments.seconds)
        print(f"{data!r}\n{result}\n{trace}")
        return 1 if result == "failed" else 0
    with _quiet_libraries():
        found = run(readers, arguments.inputs, arguments.output, arguments.seed, arguments.seconds, arguments.memory)
    print(table(found["readers"]))
    for what, times in kinds_of_failure(arguments.output).most_common():
        print(f"{times} x {what}")
    if arguments.json:
        write_json(arguments.json, report(found, arguments.seed, arguments.seconds, arguments.memory))
    return 1 if any(row["failed"] for row in found["readers"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
