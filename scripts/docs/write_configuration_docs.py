"""Write docs/configuration.md from the run file's schema, and the tables of strategies in docs/.

--check only compares.
"""

import json
import sys
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field
from pathlib import Path

from omegaconf import MISSING

from finetune.config.compatibility import RULES
from finetune.config.load import schema_fields
from finetune.paths import ACCELERATE_CONFIGS, strategy_names

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "bench"))

from compare_strategies_report import spread

PAGE = ROOT / "docs" / "configuration.md"
STRATEGIES = ROOT / "docs" / "strategies.md"
BENCHMARKS = ROOT / "docs" / "benchmarks" / "README.md"
MEASURED = ROOT / "docs" / "benchmarks" / "strategies_cpu.json"
INTRODUCTION = """# The run file

Written by `python scripts/docs/write_configuration_docs.py` from `finetune/config/schema.py`; do not edit.

A run file is YAML with the sections `model`, `data` and `training`. Strategies (`--strategy NAME`) are laid over it,
then `key=value` arguments such as `training.max_steps=100`. A source under `data` is a path or name, or a mapping with
`path`, `split`, `name`, `revision`, `language`, `weight`, `audio_column`, `text_column`, `language_column` and
`id_column`.
"""


def default_of(field: Field) -> str:
    value = field.default_factory() if field.default_factory is not NO_DEFAULT else field.default
    if value == MISSING:
        return "(required)"
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return str(value)


def type_of(field: Field) -> str:
    return (field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))).replace(
        "typing.", ""
    )


def page() -> str:
    """The whole page."""
    lines, section = [INTRODUCTION], ""
    for key, field in schema_fields().items():
        if key.split(".")[0] != section:
            section = key.split(".")[0]
            lines.append(f"\n## {section}\n\n| key | type | default | unit | meaning |\n|---|---|---|---|---|")
        choices = field.metadata["choices"]
        meaning = field.metadata["help"] + (f" One of {', '.join(f'`{c}`' for c in choices)}." if choices else "")
        kind = str(type_of(field)).replace("|", "or")
        lines.append(f"| `{key}` | {kind} | {default_of(field)} | {field.metadata['unit']} | {meaning} |")
    return "\n".join(lines) + "\n\n## What excludes what\n\n" + compatibility_table()


def compatibility_table() -> str:
    """The table of finetune.config.compatibility."""
    lines = ["| | and | because | instead |", "|---|---|---|---|"]
    lines += [f"| {r.first} | {r.second} | {r.reason} | {r.instead} |" for r in RULES]
    return "\n".join(lines) + "\n"


def strategy_table() -> str:
    """Each strategy with the first line of its Accelerate file."""
    lines = ["| strategy | what it is |", "|---|---|"]
    for name in strategy_names():
        first = (ACCELERATE_CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
        lines.append(f"| `{name}` | {first.removeprefix('# ')} |")
    return "\n".join(lines) + "\n"


def measured_table() -> str:
    """What scripts/bench/compare_strategies.py measured on the small model."""
    found = json.loads(MEASURED.read_text(encoding="utf-8"))
    where, rows = found["machine"], found["rows"]
    base = rows[0]
    lines = [
        f"Measured on {where['gpu'] or where['cpu']}, {where['threads']} threads, torch {where['torch']}, "
        f"{where['date']}: `{found['command']}`. Memory is the account of one process's tensors in a step. "
        f"{spread(base)} Smaller differences in time mean nothing.",
        "",
        "| strategy | processes | peak MiB | of that activations "
        "| bytes of state a parameter | time a step | loss | WER |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lacking = []
    for row in rows:
        if "reason" in row:
            lacking.append(f"`{row['name']}`")
            continue
        wer = "" if row["wer"] is None else f"{row['wer']:.3f}"
        peak, activations = row["peak_bytes"] / 2**20, row["parts_bytes"]["activations"] / 2**20
        time, loss = row["seconds_per_step"] / base["seconds_per_step"], 100 * (row["loss"] / base["loss"] - 1)
        lines.append(
            f"| `{row['name']}` | {row['processes']} | {peak:.0f} | {activations:.0f} | "
            f"{row['optimizer_bytes_per_parameter']:.2f} | {time:.2f} | {loss:+.2f} % | {wer} |"
        )
    if lacking:
        lines += ["", f"Need a GPU: {', '.join(lacking)}."]
    return "\n".join(lines) + "\n"


def with_table(path: Path, mark: str, table: str) -> str:
    """Return a document with the table between its marks written anew."""
    begin = f"<!-- {mark}: written by scripts/docs/write_configuration_docs.py -->\n"
    end = f"<!-- end of {mark} -->\n"
    before, rest = path.read_text(encoding="utf-8").split(begin)
    return before + begin + table + end + rest.split(end)[1]


def main() -> int:
    """Command line."""
    made = {
        PAGE: page(),
        STRATEGIES: with_table(STRATEGIES, "strategies", strategy_table()),
        BENCHMARKS: with_table(BENCHMARKS, "measured", measured_table()),
    }
    if "--check" in sys.argv:
        old = [str(path) for path, text in made.items() if path.read_text(encoding="utf-8") != text]
        if old:
            print(f"{' and '.join(old)}: not up to date; run python {sys.argv[0]}", file=sys.stderr)
        return 1 if old else 0
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
