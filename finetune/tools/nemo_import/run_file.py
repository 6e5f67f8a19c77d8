"""A NeMo fine-tuning YAML, or a config.yaml of another script, as a run file.

Each value that has a counterpart gets a comment with where it came from; each key that has none is listed, with the
reason where it is known. What NeMo does where a key is not set, and this project does otherwise, is written out.
"""

import difflib
import fnmatch
import tempfile
import textwrap
from pathlib import Path

import yaml

from finetune.config.load import REQUIRED, load_config, schema_fields
from finetune.errors import UserError
from finetune.tools.nemo_import import nemo, similar
from finetune.tools.nemo_import.reasons import LAYOUT_SECTIONS, REASONS
from finetune.tools.nemo_import.source import NOT_SET, RESOLVER, Import, read_source


def import_config(file: Path, overrides: list[str]) -> Import:
    """Return the settings of a file, what of it is left, and what has to be filled in.

    Raises:
        UserError: neither NeMo's YAML nor a config.yaml with `model:`, `data:` and `training:`.
    """
    imported = read_source(file, overrides)
    tree = imported.tree
    try:
        if "trainer" in tree or ("training" not in tree and nemo.is_nemo(tree)):
            nemo.translate(imported)
        elif {"model", "data", "training"} & tree.keys():
            similar.translate(imported)
    except (TypeError, ValueError, AttributeError) as error:
        why = f"a value is of another kind than NeMo reads there ({error})"
        raise UserError(f"{file}: {why}. Numbers have to be numbers, and sections mappings.") from error
    if not imported.settings and not imported.to_fill:
        raise UserError(
            f"{file}: neither NeMo's `trainer:` and `model.train_ds`, nor `model:`, `data:` or `training:` of a run "
            "file. Give the YAML that a training was started with."
        )
    for key in REQUIRED:
        if key not in imported.settings:
            imported.set(key, NOT_SET, "to fill in")
            imported.to_fill.setdefault(key, "")
    _list_the_rest(imported)
    return imported


def _list_the_rest(imported: Import) -> None:
    """List every key that nothing has used yet and that says something."""
    own = {key.rsplit(".", 1)[-1]: key for key in reversed(schema_fields())}
    for key, value in imported.leaves.items():
        if key in imported.used or value is None or value == {}:
            continue
        if isinstance(value, str) and RESOLVER.search(value):
            imported.left[key] = f"{value} is known to Hydra only"
            continue
        why = next((reason for pattern, reason in REASONS if fnmatch.fnmatchcase(key, pattern)), "")
        if not why:
            near = difflib.get_close_matches(key.rsplit(".", 1)[-1], own, n=1, cutoff=0.75)
            why = f"near it: {own[near[0]]}" if near else ""
        imported.left[key] = why


def as_yaml(imported: Import) -> str:
    """Return the run file, in the order of the schema, with a comment beside each value."""
    lines = [f"# Made from {imported.file.name} by finetune.import_nemo; docs/configuration.md lists all keys."]
    section = ""
    for key in schema_fields():
        if key not in imported.settings:
            continue
        top, name = key.split(".", 1)
        if top != section:
            lines += ["", f"{top}:"] if section else [f"{top}:"]
            section = top
        value, comment = imported.settings[key]
        flow = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True, sort_keys=False)
        flow = flow.removesuffix("...\n").strip()
        if len(flow) <= 80:
            text = f"  {name}: {flow}"
            lines.append(f"{text:<50}  # {comment}" if comment else text)
        else:
            block = yaml.safe_dump({name: value}, width=110, allow_unicode=True, sort_keys=False)
            lines += [f"  # {comment}"] if comment else []
            lines.append(textwrap.indent(block, "  ").rstrip())
    return "\n".join(lines) + "\n"


def left_over(imported: Import) -> list[str]:
    """Return lines with all keys without a counterpart, those of one reason or of one part of the layout together."""
    sections: dict[str, list[str]] = {}
    reasons: dict[str, list[str]] = {}
    for key, why in imported.left.items():
        parts = key.split(".")
        section = ".".join(parts[:2])
        if section in LAYOUT_SECTIONS and len(parts) > 2 and (not why or why.startswith("near it")):
            sections.setdefault(section, []).append(".".join(parts[2:]))
        else:
            reasons.setdefault(why, []).append(key)
    lines = [f"{', '.join(keys)}: {why}" if why else ", ".join(keys) for why, keys in reasons.items()]
    return lines + [f"{s} ({', '.join(names)}): {LAYOUT_SECTIONS[s]}" for s, names in sections.items()]


def refusal(text: str, output: Path | None) -> str | None:
    """Return why training would refuse the run file; None where it takes it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            load_config(path, [], [])
        except UserError as error:
            return str(error).replace(str(path), str(output or "the run file"))
    return None


def start_line(imported: Import, run_file: str) -> str:
    """Return the line that starts the training."""
    processes = imported.processes
    arguments = f"--config {run_file}" + "".join(f" --strategy {name}" for name in imported.strategies)
    if imported.nodes > 1:
        count = processes if processes > 0 else "GPUS_OF_A_NODE"
        nodes = f"--nnodes {imported.nodes} --nproc_per_node {count} --rdzv_backend c10d"
        return f"torchrun {nodes} --rdzv_endpoint FIRST_NODE:29500 finetune/train.py {arguments}"
    return f"{f'NUM_PROCESSES={processes} ' if processes > 1 else ''}bash scripts/run_training.sh {arguments}"
