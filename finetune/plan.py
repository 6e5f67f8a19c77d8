"""Predict memory and time of every strategy, before anything runs.

No GPU is needed, no weights are read. Exit codes: 0 a strategy fits, 1 none does, 2 bad arguments or configuration.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.durable_files import write_json
from finetune.errors import UserError
from finetune.logs import print_error, set_up_logging

if TYPE_CHECKING:
    from finetune.config.schema import RunConfig
    from finetune.tools.planning.gpus import Card
    from finetune.tools.planning.prediction import Data, Row

EXAMPLES = """examples:
  python -m finetune.plan --config RUN.yaml --gpu-memory 24GB --gpus 4 --json plan.json --picture plan.png
  python -m finetune.plan --config finetune/configs/parakeet_tdt_0.6b_v3.yaml --gpu a100-80gb"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m finetune.plan",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, required=True, help="run file")
    parser.add_argument("--strategy", action="append", default=[], metavar="NAME", help="combined, as one more row")
    parser.add_argument("--strategies", metavar="A,B+C", help="these in place of all")
    parser.add_argument("--gpu", help="such as a100-80gb (default: the one in this machine)")
    parser.add_argument("--gpu-memory", metavar="SIZE", help="such as 24GB, for a card that is not in the list")
    parser.add_argument("--gpus", type=int, default=1, help="how many")
    parser.add_argument("--check", type=Path, help="folder of finetune.check: lengths and hours of the data")
    parser.add_argument("--hours", type=float, help="audio of the whole data set")
    parser.add_argument("--mean-seconds", type=float, help="mean length of the clips")
    parser.add_argument("--tokens-per-second", type=float, help="of the texts (default: 5)")
    parser.add_argument("--json", type=Path, help="write the plan there too")
    parser.add_argument("--picture", type=Path, help="write stacked bars against the card's memory there (PNG or SVG)")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings that replace those of the run file"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Make a plan and print it; return the exit code."""
    set_up_logging()
    logging.getLogger("finetune").setLevel(logging.WARNING)
    started = time.perf_counter()
    try:
        a = make_parser().parse_intermixed_args(argv)
        if a.gpus < 1:
            raise UserError("--gpus: at least 1.")
        if a.gpu and a.gpu_memory:
            raise UserError("--gpu and --gpu-memory both name a card; give one of them.")

        from finetune.config.load import load_config
        from finetune.strategies.strategy import resolve_strategy
        from finetune.tools.planning.gpus import card_here, card_named, card_with_memory
        from finetune.tools.planning.prediction import all_combinations, as_json, make_plan, recommend

        card = card_named(a.gpu) if a.gpu else card_with_memory(a.gpu_memory) if a.gpu_memory else card_here()
        if not card.is_gpu:
            print("no GPU here: this plan is for the processor. For a GPU elsewhere: --gpu NAME or --gpu-memory SIZE")
        resolve_strategy(a.strategy)  # names that there are not
        config, _ = load_config(a.config, a.strategy, a.overrides)
        data = _data(a, config)
        rows = make_plan(
            a.config, a.overrides, all_combinations(a.strategy, a.strategies), card, a.gpus, data, progress=_progress
        )
        recommended, why = recommend(rows, card, a.gpus)
        print(_table(rows, card, a.gpus, data, recommended, why))
        print(f"{time.perf_counter() - started:.0f} s")
        if a.json:
            write_json(a.json, as_json(rows, card, a.gpus, data, recommended, why))
        if a.picture:
            from finetune.tools.planning.picture import draw

            draw(rows, card, a.picture)
        return 0 if recommended and any(row.fits for row in rows) else 1
    except UserError as error:
        print_error(error)
        return error.exit_code


def _data(a: argparse.Namespace, config: RunConfig) -> Data:
    """What is known of the clips: from the check, from the command line, else from the run file's bounds alone."""
    from finetune.tools.planning.prediction import TOKENS_A_SECOND, Data

    longest, mean, hours, tokens = config.data.max_duration, None, None, TOKENS_A_SECOND
    if a.check is not None:
        file = a.check / "check.json" if a.check.is_dir() else a.check
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            hours, mean = found["hours"], 3600 * found["hours"] / max(found["clips"], 1)
            seconds = _last_with_clips(found["histograms"]["seconds"])
            a_clip = _mean_of(found["histograms"]["tokens"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"--check: {file} is no result of a data check ({error}). Make one: python -m finetune.check --data D "
                f"--output-dir {a.check}"
            ) from error
        longest = min(longest, seconds or longest)
        tokens = a_clip / mean if a_clip and mean else tokens
    hours = a.hours if a.hours is not None else hours
    mean = a.mean_seconds or mean or longest / 2
    tokens = a.tokens_per_second or tokens
    return Data(float(longest), float(min(mean, longest)), hours, float(tokens))


def _last_with_clips(histogram: dict[str, Any]) -> float | None:
    """Upper bound of the last bin that holds any."""
    counts = histogram["counts"]
    width = (histogram["to"] - histogram["from"]) / len(counts)
    last = max((i for i, n in enumerate(counts) if n), default=None)
    return None if last is None else histogram["from"] + (last + 1) * width


def _mean_of(histogram: dict[str, Any]) -> float | None:
    """Mean by the middles of the bins."""
    counts = histogram["counts"]
    width = (histogram["to"] - histogram["from"]) / len(counts)
    middles = [histogram["from"] + (i + 0.5) * width for i in range(len(counts))]
    total = sum(counts)
    return sum(n * x for n, x in zip(counts, middles)) / total if total else None


def _progress(done: int, of: int) -> None:
    """A line that is written over on a terminal."""
    if of and sys.stderr.isatty():
        end = "\r\033[K" if done == of else ""
        print(f"\r\033[Kfollowing steps: {done} of {of}{end}", end="", file=sys.stderr, flush=True)


def _table(rows: list[Row], card: Card, gpus: int, data: Data, recommended: str | None, why: str) -> str:
    """Return what is printed."""
    from finetune.tools.planning.gpus import GIB

    unit, scale = ("GiB", 1.0) if max((r.peak_memory_gib or 0 for r in rows), default=0) >= 1 else ("MiB", 1024.0)
    known = any(row.seconds_per_step is not None for row in rows)
    heads = [
        "strategy", "fits", f"peak {unit}", "weights", "grads", "states", "encoder", "loss", "temp", "clips",
        "most clips", "most s", *(["s/step", "hours"] if known else []),
    ]  # fmt: skip
    lines = []
    # The recommended one first, then from the least memory to the most.
    order = sorted(rows, key=lambda r: (r.strategy != recommended, r.peak_memory_gib or 0))
    for row in order:
        if row.fits is None:
            continue
        parts = [
            f"{row.parts_gib[p] * scale:.1f}"
            for p in ("parameters", "gradients", "optimizer", "encoder", "joint", "temporary")
        ]
        time_columns = [_significant(row.seconds_per_step), _significant(row.hours)] if known else []
        lines.append(
            [
                ("> " if row.strategy == recommended else "  ") + row.strategy + ("" if row.followed else " *"),
                "yes" if row.fits else "no",
                f"{row.peak_memory_gib * scale:.1f}",
                *parts,
                str(row.batch) + ("" if row.batch_seconds == data.longest else f" x {row.batch_seconds:g} s"),
                str(row.max_batch),
                _number(row.max_batch_duration, 0),
                *time_columns,
            ]
        )
    widths = [max(len(line[i]) for line in [heads, *lines]) for i in range(len(heads))]

    def text(line: list[str]) -> str:
        return "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:]))]
        ).rstrip()

    memory = f"{card.usable / GIB:.1f} of {card.memory / GIB:.1f} GiB can be used"
    out = [
        f"{gpus} x {card.name}, {memory}; clips up to {data.longest:g} s, {data.mean:.1f} s on average, "
        f"{data.tokens_a_second:g} tokens a second",
        "",
        text(heads),
        *(text(line) for line in lines),
    ]
    missing = [row for row in rows if row.fits is None]
    if missing:
        out += ["", "not for this card or run:", *(f"  {row.strategy}: {row.reason}" for row in missing)]
    out += [
        "",
        "clips: of one forward pass of one GPU, as the run file says, of the longest length unless another is given; "
        "most clips: as many as fit; most s: audio of a batch that fits whatever the "
        "length of its clips (data.batch_duration)",
    ]
    if any(not row.followed for row in rows if row.fits is not None):
        out.append("*: followed on one GPU, and cut up or moved away by the engine's rules")
    if known:
        out.append("times are estimates from the card's published rates, not measured; hours: one pass over the data")
    if recommended:
        row = next(r for r in rows if r.strategy == recommended)
        smaller = "" if row.fits else f" training.per_device_train_batch_size={row.max_batch}"
        out += ["", f"take {recommended}: {why}", f"  {row.command}{smaller}"]
        bounds = ", ".join(f"{n} of {s} s" for s, n in row.max_batch_by_seconds.items())
        out.append(f"  clips that fit by length: {bounds} (training.auto_batch: true makes such batches by itself)")
        out.append("  gradual validation: training.stages begins with a part of the data (docs/full_dataset.md)")
    else:
        out += ["", f"no recommendation: {why}"]
    return "\n".join(out)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _significant(value: float | None) -> str:
    """Two digits that count; estimates have no more."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 10 else f"{float(f'{value:.2g}'):g}"


if __name__ == "__main__":
    sys.exit(main())
