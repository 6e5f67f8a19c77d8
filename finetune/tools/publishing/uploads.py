"""What is uploaded: the model's files and the run's records, each without what is private."""

import json
import re
from collections.abc import Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from finetune.errors import UserError
from finetune.security.secrets import TOKENS
from finetune.tools.publishing.facts import Facts
from finetune.tools.publishing.private import clean_in_folder, private_parts, publishable, write_cleaned_nemo
from finetune.tools.report.read import json_lines

NOT_UPLOADED = {"README.md", ".gitattributes", ".gitignore", "training_args.bin"}
TEXTS = {"pairs", "reference", "hypothesis", "text", "samples_shown", "transcript"}
"""Keys of evaluations that hold what was said in clips."""
NO_TEXTS = {".bin", ".ckpt", ".model", ".nemo", ".npz", ".onnx", ".pt", ".safetensors"}
LONGEST_TEXT = 50_000_000  # bytes
RECORDS = "training"
"""Folder of the run's records in the repository."""


@dataclass
class Upload:
    """The files of one upload by their paths in the repository, and what was done to them."""

    files: dict[str, Path | bytes] = field(default_factory=dict)
    to_clean: dict[str, Path] = field(default_factory=dict)
    """.nemo files of which a cleaned copy is uploaded; `finish` makes the copy."""
    notes: list[str] = field(default_factory=list)

    def size(self, name: str) -> int:
        """Return a file's bytes."""
        content = self.files[name]
        return len(content) if isinstance(content, bytes) else content.stat().st_size

    def finish(self, folder: Path, secrets: Set[str]) -> None:
        """Make the copies that are uploaded in place of files with private parts."""
        for name, source in self.to_clean.items():
            copy = folder / name
            write_cleaned_nemo(source, copy, secrets)
            self.files[name] = copy
        self.to_clean = {}


def add_nemo(upload: Upload, source: Path, name: str, secrets: Set[str]) -> None:
    """Add the .nemo, under the name by which NeMo's from_pretrained looks for it."""
    upload.files[f"{name}.nemo"] = source
    found = private_parts(source, secrets)
    if found:
        upload.to_clean[f"{name}.nemo"] = source
        upload.notes.append(
            f"{name}.nemo: a copy of {source.name} without local paths is uploaded ({', '.join(found)})"
        )


def add_folder(upload: Upload, folder: Path, what: str, needed: str, base: str | None, secrets: Set[str]) -> None:
    """Add the files of a Hugging Face or PEFT directory.

    Args:
        what: for messages.
        needed: the file without which it is no such directory.
        base: name of the base model on the Hub, for the keys that name it.
        secrets: values that go wherever they stand.

    Raises:
        UserError: it is no such directory, or two files would have one name.
    """
    if not (folder / needed).is_file():
        raise UserError(f"{what}: {folder} holds no {needed}.")
    left_out = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        is_hidden = any(part.startswith(".") for part in name.split("/"))
        if path.name in NOT_UPLOADED or path.suffix == ".nemo" or is_hidden:
            left_out.append(name)
            continue
        if name in upload.files:
            raise UserError(f"{what}: {name} would be uploaded twice.")
        cleaned = clean_in_folder(path, base, secrets)
        upload.files[name] = path if cleaned is None else cleaned[0]
        if cleaned is not None:
            upload.notes.append(f"{name}: without local names and paths ({', '.join(cleaned[1])})")
    if left_out:
        upload.notes.append(f"not uploaded of {folder.name}: {', '.join(left_out)}")


def add_records(upload: Upload, folder: Path, facts: Facts) -> None:
    """Add the run's configuration, summary, environment and evaluations, without private parts and texts of clips."""
    rows = (publishable(row, secrets=facts.secrets) for row in json_lines(folder / "evaluations.jsonl"))
    texts = {
        "config.yaml": yaml.safe_dump(_without_texts(facts.config), sort_keys=False, allow_unicode=True)
        if facts.config
        else "",
        "summary.json": _json(facts.summary, indent=2) if facts.summary else "",
        "environment.json": _json(facts.environment, indent=2) if facts.environment else "",
        "evaluations.jsonl": "".join(map(_json, rows)),
    }
    upload.files |= {f"{RECORDS}/{name}": text.encode() for name, text in texts.items() if text}


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(_without_texts(value), indent=indent, ensure_ascii=False, default=str) + "\n"


def _without_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_texts(inner) for key, inner in value.items() if key not in TEXTS}
    return [_without_texts(inner) for inner in value] if isinstance(value, list) else value


def check_texts(upload: Upload, secrets: Set[str]) -> None:
    """Look into every text for the last time: a token, a known secret, or this machine's home or working directory.

    Raises:
        UserError: one of these is in a file.
    """
    places = [re.escape(str(path)) for path in (Path.home(), Path.cwd()) if path != Path("/")]
    place = re.compile(rf"(?<![\w.-])(?:{'|'.join(places)})(?![\w-])") if places else None
    for name, content in upload.files.items():
        if isinstance(content, Path) and (content.suffix in NO_TEXTS or content.stat().st_size > LONGEST_TEXT):
            continue
        text = (content if isinstance(content, bytes) else content.read_bytes()).decode("utf-8", errors="replace")
        if holds_token(text) or any(secret in text for secret in secrets):
            raise UserError(
                f"{name} holds what looks like a token or password; nothing was uploaded. Take it out of the file."
            )
        if place is not None and place.search(text):
            raise UserError(f"{name} names a folder of this machine; nothing was uploaded. Take it out of the file.")


def holds_token(text: str) -> bool:
    """Return whether a token of a well-known form is in a text."""
    return TOKENS.search(text) is not None
