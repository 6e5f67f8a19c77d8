"""What is uploaded: the model's files and the run's records, each without what is private."""

import json
import re
from collections.abc import Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf.errors import OmegaConfBaseException

from finetune.errors import UserError
from finetune.security.documents import first_line
from finetune.security.secrets import TOKENS, without_texts
from finetune.tools.publishing.exports import NEVER, Export
from finetune.tools.publishing.facts import Facts
from finetune.tools.publishing.private import clean_file, private_parts, publishable, write_cleaned_nemo
from finetune.tools.report.read import json_lines

NOT_UPLOADED = {"README.md", ".gitattributes", ".gitignore", "training_args.bin"}
NO_TEXTS = {".bin", ".ckpt", ".model", ".nemo", ".npz", ".onnx", ".data", ".pt", ".safetensors"}
LONGEST_TEXT = 50_000_000  # bytes
RECORDS = "training"
"""Folder of the run's records in the repository."""


@dataclass
class Upload:
    """The files of one upload by their paths in the repository, and what was done to them."""

    files: dict[str, Path | bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def size(self, name: str) -> int:
        """Return a file's bytes."""
        content = self.files[name]
        return len(content) if isinstance(content, bytes) else content.stat().st_size

    def add_nemo(self, source: Path, name: str, secrets: Set[str]) -> None:
        """Add the .nemo, under the name by which NeMo's from_pretrained looks for it."""
        self.files[f"{name}.nemo"] = source
        if found := private_parts(source, secrets):
            what = f"a copy of {source.name} without local paths is uploaded ({', '.join(found)})"
            self.notes.append(f"{name}.nemo: {what}")

    def copy_private_nemo(self, folder: Path, secrets: Set[str]) -> None:
        """Put a cleaned copy in place of a .nemo with private parts; only an upload takes the time for it."""
        for name, source in self.files.items():
            if isinstance(source, Path) and source.suffix == ".nemo" and private_parts(source, secrets):
                write_cleaned_nemo(source, folder / name, secrets)
                self.files[name] = folder / name

    def add_folder(self, folder: Path, what: str, needed: str, base: str | None, secrets: Set[str]) -> None:
        """Add the files of a Hugging Face or PEFT directory.

        Args:
            what: for messages.
            needed: the file without which it is no such directory.
            base: name of the base model on the Hub, for the keys that name it.
            secrets: values that are removed wherever they stand.

        Raises:
            UserError: it is no such directory, or a configuration in it cannot be read.
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
            self.files[name] = path
            if path.suffix not in (".json", ".yaml", ".yml", ".model"):
                continue
            try:
                cleaned = clean_file(path.name, path.read_bytes(), secrets, base)
            except (OSError, ValueError, RecursionError, OmegaConfBaseException) as error:
                raise UserError(f"{path} cannot be read: {first_line(error)}.") from error
            if cleaned:
                self.files[name] = cleaned[0]
                self.notes.append(f"{name}: without local names and paths ({', '.join(cleaned[1])})")
        if left_out:
            self.notes.append(f"not uploaded of {folder.name}: {', '.join(left_out)}")

    def add_export(self, export: Export) -> None:
        """Add the files of an export for another runtime that its report names, in a folder of their own; of others
        that were put there since, such as hotwords, a note tells."""
        left_out = []
        for path in sorted(path for path in export.directory.rglob("*") if path.is_file()):
            name = path.relative_to(export.directory).as_posix()
            if name in export.files:
                self.files[f"{export.name}/{name}"] = path
            elif path.name not in NEVER:
                left_out.append(name)
        if left_out:
            self.notes.append(f"not uploaded of {export.name}, as its report does not name it: {', '.join(left_out)}")

    def add_records(self, facts: Facts) -> None:
        """Add the run's configuration, summary, environment and evaluations, without texts of clips."""
        run = facts.run
        rows = [publishable(row, secrets=facts.secrets) for row in json_lines(run.folder / "evaluations.jsonl")]
        texts = {
            "config.yaml": run.config
            and yaml.safe_dump(without_texts(run.config), sort_keys=False, allow_unicode=True),
            "summary.json": run.summary and _json(run.summary, indent=2),
            "environment.json": run.environment and _json(run.environment, indent=2),
            "evaluations.jsonl": "".join(map(_json, rows)),
        }
        self.files |= {f"{RECORDS}/{name}": text.encode() for name, text in texts.items() if text}

    def check_texts(self, secrets: Set[str]) -> None:
        """Look into every text for the last time: a token, a known secret, this machine's home or working directory.

        Raises:
            UserError: one of these is in a file.
        """
        places = [re.escape(str(path)) for path in (Path.home(), Path.cwd()) if path != Path("/")]
        place = re.compile(rf"(?<![\w.-])(?:{'|'.join(places) or '(?!)'})(?![\w-])")
        for name, content in self.files.items():
            if isinstance(content, Path):
                if content.suffix in NO_TEXTS or content.stat().st_size > LONGEST_TEXT:
                    continue
                content = content.read_bytes()
            text = content.decode("utf-8", errors="replace")
            if holds_token(text) or any(secret in text for secret in secrets):
                raise UserError(
                    f"{name} holds what looks like a token or password; nothing was uploaded. Take it out of the file."
                )
            if place.search(text):
                raise UserError(
                    f"{name} names a folder of this machine; nothing was uploaded. Take it out of the file."
                )


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(without_texts(value), indent=indent, ensure_ascii=False, default=str) + "\n"


def holds_token(text: str) -> bool:
    """Return whether a token of a well-known form is in a text."""
    return TOKENS.search(text) is not None
