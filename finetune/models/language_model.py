"""The directory of a language model: `python -m finetune.language_model` writes it, `--lm` reads it.

DIR/lm.arpa          n-grams of tokens as text, for NeMo's own programs too
DIR/lm.safetensors   the same as NeMo holds it, which is read at once
DIR/lm.json          order, counts, and whose tokens they are; written last, so that a directory is whole with it
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from finetune.durable_files import put_in_place, write_json
from finetune.errors import UserError
from finetune.models.fusion import language_model_of, language_model_tensors, read_arpa
from finetune.models.sentencepiece_model import tokenizer_of
from finetune.paths import near_path
from finetune.security.documents import parse_json

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from finetune.models.protocols import AsrModel
    from finetune.models.sentencepiece_model import SentencePieceModel

ARPA, TENSORS, ABOUT = "lm.arpa", "lm.safetensors", "lm.json"


def tokens_digest(tokenizer: SentencePieceModel) -> str:
    """Return what tells the tokens of one tokenizer from another's."""
    return hashlib.sha256("\n".join(p.piece for p in tokenizer.pieces).encode(errors="replace")).hexdigest()


def write_language_model(
    directory: Path, lines: Iterable[str], tokenizer: SentencePieceModel, about: dict[str, Any]
) -> None:
    """Write a directory.

    Args:
        lines: of the ARPA file.
        tokenizer: whose tokens they are.
        about: goes into lm.json; `order` is needed.
    """
    from safetensors.torch import save

    directory.mkdir(parents=True, exist_ok=True)
    (directory / ABOUT).unlink(missing_ok=True)
    aside = directory / f".{ARPA}.tmp"
    with aside.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line}\n" for line in lines)
    put_in_place(aside, directory / ARPA)
    model = read_arpa(directory / ARPA, len(tokenizer.pieces))
    aside = directory / f".{TENSORS}.tmp"
    aside.write_bytes(save(language_model_tensors(model)))
    put_in_place(aside, directory / TENSORS)
    write_json(
        directory / ABOUT, {**about, "tokens": len(tokenizer.pieces), "tokens_sha256": tokens_digest(tokenizer)}
    )


def read_language_model(path: Path, model: AsrModel, key: str = "--lm") -> Any:
    """Return NeMo's language model of such a directory, or of an ARPA file.

    Args:
        model: whose tokens it is to have.

    Raises:
        UserError: there is none, it cannot be read, or has another model's tokens.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tokenizer = tokenizer_of(model, key)
    if path.is_file():
        return read_arpa(path, len(tokenizer.pieces), key)
    if not path.is_dir():
        raise UserError(f"{key}: there is no file or directory {path}.{near_path(str(path))}")
    if not (path / ABOUT).is_file():
        raise UserError(
            f"{key}: {path} holds no {ABOUT}: it is no language model, or one that was not finished. "
            "python -m finetune.language_model makes one."
        )
    try:
        about = parse_json((path / ABOUT).read_text(encoding="utf-8"))
        if about["tokens_sha256"] != tokens_digest(tokenizer):
            raise UserError(
                f"{key}: {path} was made for a model with other tokens ({about['tokens']}; this one has "
                f"{len(tokenizer.pieces)}). Make one for this model: python -m finetune.language_model --model M ..."
            )
        return language_model_of(load_file(path / TENSORS), int(about["order"]), len(tokenizer.pieces))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{key}: {path} cannot be read: {type(error).__name__}: {error}. Make it anew.") from error
