"""`model.tokenizer` of the run file: a directory, or how the vocabulary is extended or replaced."""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from finetune.config.mappings import Mapping, parse_mapping
from finetune.config.schema import RunConfig
from finetune.errors import UserError

Pieces = Literal["new_characters", "all"]
NEW_PIECES: tuple[str, ...] = get_args(Pieces)
SMALLEST_GROWTH = 64


class TokenizerSetting(Mapping):
    """What `model.tokenizer` asks for.

    Attributes:
        dir: directory with `tokenizer.model`, for a NeMo model YAML without a tokenizer of its own.
        extend_from: where appended pieces come from: a data set (or a list), a tokenizer directory, a .model or a
            .txt file.
        replace_with: the same, for a vocabulary in place of the model's.
        size: pieces appended at most, or pieces of the new vocabulary; None: see `default_growth`.
        pieces: which pieces may be appended: those with a character that the tokenizer lacks, or all.
        coverage: share of the texts' characters that get pieces.
    """

    dir: str | None = None
    extend_from: Any = None
    replace_with: Any = None
    size: Annotated[int, Field(ge=1)] | None = None
    pieces: Pieces = "new_characters"
    coverage: Annotated[float, Field(ge=0.9, le=1)] | None = None

    @property
    def changes(self) -> bool:
        """Whether the model's vocabulary changes."""
        return self.extend_from is not None or self.replace_with is not None

    @property
    def origin(self) -> Any:
        """What the new pieces come from."""
        return self.extend_from if self.extend_from is not None else self.replace_with

    @property
    def key(self) -> str:
        """The key that names the origin, for messages."""
        return f"model.tokenizer.{'extend_from' if self.extend_from is not None else 'replace_with'}"

    def most_pieces(self, before: int) -> int:
        """Return how many pieces the vocabulary has at most after the change.

        Args:
            before: pieces of the model's vocabulary.
        """
        if self.extend_from is not None:
            return before + (self.size or max(before, default_growth(before)))
        return (self.size or before) if self.replace_with is not None else before


def default_growth(before: int) -> int:
    """Return how many pieces are appended at most if no size is set, an eighth of the vocabulary. Where letters of a
    new script are heard, it is as many as the vocabulary has."""
    return max(SMALLEST_GROWTH, before // 8)


def tokenizer_setting(config: RunConfig) -> TokenizerSetting:
    """Return `model.tokenizer` of a run's configuration."""
    return parse_tokenizer(config.model.tokenizer)


def changes_vocabulary(config: RunConfig) -> bool:
    """Return whether `model.tokenizer` asks for another vocabulary, whatever its other keys say."""
    value = config.model.tokenizer
    return isinstance(value, dict) and any(value.get(key) is not None for key in ("extend_from", "replace_with"))


def parse_tokenizer(value: Any, key: str = "model.tokenizer") -> TokenizerSetting:
    """Return what `model.tokenizer` asks for: None, a directory, or a mapping.

    Raises:
        UserError: unknown keys, or values that they cannot have.
    """
    if value is None or isinstance(value, str):
        return TokenizerSetting(dir=value)
    if not isinstance(value, dict):
        known = ", ".join(TokenizerSetting.model_fields)
        raise UserError(f"{key}: expected a directory, or a mapping of {known}, found {value!r}.")
    value = {name: given for name, given in value.items() if given is not None}
    setting = parse_mapping(TokenizerSetting, value, key)
    if setting.extend_from is not None and setting.replace_with is not None:
        raise UserError(f"{key}: extend_from keeps the vocabulary and replace_with does not. Set one of them.")
    if not setting.changes and set(value) - {"dir"}:
        others = ", ".join(sorted(set(value) - {"dir"}))
        raise UserError(f"{key}: {others} alone has no effect. Set extend_from or replace_with as well.")
    if setting.changes and not setting.origin:
        raise UserError(f"{setting.key}: expected a data set, a tokenizer or a text file, found {setting.origin!r}.")
    if setting.replace_with is not None and "pieces" in value:
        raise UserError(
            f"{key}.pieces: it chooses what extend_from appends; replace_with takes all pieces. Leave it out."
        )
    return setting
