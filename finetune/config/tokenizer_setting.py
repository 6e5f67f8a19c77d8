"""`model.tokenizer` of the run file: a directory, or how the vocabulary is grown or replaced."""

from dataclasses import dataclass, fields
from typing import Any

from omegaconf import OmegaConf

from finetune.errors import UserError

NEW_PIECES = ("new_characters", "all")
SMALLEST_GROWTH = 64


@dataclass(frozen=True)
class TokenizerSetting:
    """What `model.tokenizer` says."""

    dir: str | None = None
    """Directory with `tokenizer.model`, for a NeMo model YAML without a tokenizer of its own."""
    extend_from: Any = None
    """What is appended comes from here: a data set (or a list), a tokenizer directory, a .model or a .txt file."""
    replace_with: Any = None
    """The same, for a vocabulary in place of the model's."""
    size: int | None = None
    """Pieces that are appended at most, or pieces of the new vocabulary."""
    pieces: str = "new_characters"
    """Which pieces may be appended: those with a character that the tokenizer lacks, or all."""
    coverage: float | None = None
    """Share of the texts' characters that get pieces."""

    @property
    def changes(self) -> bool:
        """Whether the model's vocabulary becomes another one."""
        return self.extend_from is not None or self.replace_with is not None

    @property
    def origin(self) -> Any:
        """What the new pieces come from."""
        return self.extend_from if self.extend_from is not None else self.replace_with

    @property
    def key(self) -> str:
        """The key that names it, for messages."""
        return f"model.tokenizer.{'extend_from' if self.extend_from is not None else 'replace_with'}"

    def most_pieces(self, before: int) -> int:
        """How many pieces the vocabulary has at most after the change.

        Args:
            before: pieces of the model's vocabulary.
        """
        if self.extend_from is not None:
            return before + (self.size or default_growth(before))
        return (self.size or before) if self.replace_with is not None else before


def default_growth(before: int) -> int:
    """Pieces that are appended at most where no size is set: an eighth of the vocabulary."""
    return max(SMALLEST_GROWTH, before // 8)


def tokenizer_setting(config: Any) -> TokenizerSetting:
    """`model.tokenizer` of a run's configuration."""
    value = config.model.tokenizer
    return parse_tokenizer(OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value)


def changes_vocabulary(config: Any) -> bool:
    """Whether `model.tokenizer` asks for another vocabulary, right or wrong as its other keys may be."""
    value = config.model.tokenizer
    value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    return isinstance(value, dict) and any(value.get(key) is not None for key in ("extend_from", "replace_with"))


def parse_tokenizer(value: Any, key: str = "model.tokenizer") -> TokenizerSetting:
    """What `model.tokenizer` says.

    Args:
        value: None, a directory, or a mapping, as plain Python.
        key: its name, for messages.

    Raises:
        UserError: unknown keys, or values that they cannot have.
    """
    if value is None or isinstance(value, str):
        return TokenizerSetting(dir=value)
    known = [f.name for f in fields(TokenizerSetting)]
    if not isinstance(value, dict):
        raise UserError(f"{key}: a directory, or a mapping of {', '.join(known)} is expected, found {value!r}.")
    unknown = sorted(set(value) - set(known))
    if unknown:
        raise UserError(f"{key}: unknown keys {', '.join(map(str, unknown))}; known are {', '.join(known)}.")
    value = {name: given for name, given in value.items() if given is not None}
    setting = TokenizerSetting(**value)
    if setting.dir is not None and not isinstance(setting.dir, str):
        raise UserError(f"{key}.dir: a directory is expected, found {setting.dir!r}.")
    if setting.extend_from is not None and setting.replace_with is not None:
        raise UserError(f"{key}: extend_from keeps the vocabulary and replace_with does not. Set one of them.")
    if not setting.changes and set(value) - {"dir"}:
        raise UserError(
            f"{key}: set extend_from or replace_with; {', '.join(sorted(set(value) - {'dir'}))} alone says nothing."
        )
    if setting.changes and not setting.origin:
        raise UserError(
            f"{setting.key}: a data set, a tokenizer or a text file is expected, found {setting.origin!r}."
        )
    size = setting.size
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise UserError(f"{key}.size: a number of pieces from 1 on is expected, found {size!r}.")
    if setting.pieces not in NEW_PIECES:
        raise UserError(f"{key}.pieces: one of {', '.join(NEW_PIECES)} is expected, found {setting.pieces!r}.")
    if setting.replace_with is not None and "pieces" in value:
        raise UserError(
            f"{key}.pieces: it chooses what extend_from appends; replace_with takes all pieces. Leave it out."
        )
    share = setting.coverage
    if share is not None and (not isinstance(share, int | float) or isinstance(share, bool) or not 0.9 <= share <= 1):
        raise UserError(f"{key}.coverage: a share of the characters from 0.9 to 1 is expected, found {share!r}.")
    return setting
