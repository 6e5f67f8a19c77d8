"""Filters that leave utterances out of the training, each counted under its name. S samples, C channels."""

import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from finetune.config.mappings import Mapping, parse_mapping

FULL_SCALE = 0.999


class FilteredUtterance(Exception):
    """An utterance left out by a filter: counted, not an error. The text is the filter's name."""


class Filters(Mapping):
    """Bounds of `data.filters`, or of `filters` of a source, which override them. None: no such filter."""

    min_duration: float | None = None
    """Seconds."""
    max_duration: float | None = None
    """Seconds."""
    min_characters_per_second: float | None = None
    max_characters_per_second: float | None = None
    max_tokens: float | None = None
    """Target tokens of an utterance."""
    alphabet: str | None = None
    """Characters that texts may have after normalisation, besides white space."""
    alphabet_before_normalization: str | None = None
    """Characters that texts may have as they are in the data, besides white space."""
    min_level: float | None = None
    """Root mean square in dB of full scale; silence lies below -60."""
    max_clipped: float | None = None
    """Share of the samples at full scale."""
    min_sample_rate: float | None = None
    """Hz, of the file."""
    max_channels: float | None = None
    """Of the file."""

    def check_duration(self, seconds: float) -> None:
        """Raise FilteredUtterance for audio that is too short or too long."""
        if self.min_duration is not None and seconds < self.min_duration:
            raise FilteredUtterance("shorter_than_min_duration")
        if self.max_duration is not None and seconds > self.max_duration:
            raise FilteredUtterance("longer_than_max_duration")

    def check_written(self, text: str) -> None:
        """Raise FilteredUtterance for a text that has other characters before it is normalised."""
        allowed = self.alphabet_before_normalization
        if allowed is not None and not set("".join(text.split())) <= set(allowed):
            raise FilteredUtterance("outside_alphabet_before_normalization")

    def check_text(self, text: str, tokens: int) -> None:
        """Raise FilteredUtterance for a normalised text with other characters or too many tokens."""
        if self.alphabet is not None and not set(text) <= {*self.alphabet, " "}:
            raise FilteredUtterance("outside_alphabet")
        if self.max_tokens is not None and tokens > self.max_tokens:
            raise FilteredUtterance("more_than_max_tokens")

    def check_pace(self, characters: int, seconds: float) -> None:
        """Raise FilteredUtterance for a text that is too short or too long for its audio."""
        pace = characters / max(seconds, 1e-3)
        if self.min_characters_per_second is not None and pace < self.min_characters_per_second:
            raise FilteredUtterance("fewer_than_min_characters_per_second")
        if self.max_characters_per_second is not None and pace > self.max_characters_per_second:
            raise FilteredUtterance("more_than_max_characters_per_second")

    @property
    def on_samples(self) -> bool:
        """Whether `check_samples` computes with the samples."""
        return self.min_level is not None or self.max_clipped is not None

    def check_samples(self, samples_SC: np.ndarray, rate: int) -> None:
        """Raise FilteredUtterance for too low a rate (Hz), too many channels, silence or clipping.

        `samples_SC` are (S,) or (S, C) as in the file; float32 where `on_samples`.
        """
        if self.min_sample_rate is not None and rate < self.min_sample_rate:
            raise FilteredUtterance("below_min_sample_rate")
        if self.max_channels is not None and samples_SC.ndim == 2 and samples_SC.shape[1] > self.max_channels:
            raise FilteredUtterance("more_than_max_channels")
        if self.min_level is not None and level(samples_SC) < self.min_level:
            raise FilteredUtterance("below_min_level")
        if self.max_clipped is not None and float(np.mean(np.abs(samples_SC) >= FULL_SCALE)) > self.max_clipped:
            raise FilteredUtterance("more_than_max_clipped")


OF_NO_BOUND = {
    "empty_text": "without a text",
    "more_tokens_than_frames": "with more tokens than their encoder frames can carry",
    "outside_alphabet": "with characters outside data.filters.alphabet",
    "outside_alphabet_before_normalization": "with characters outside data.filters.alphabet_before_normalization",
    "duplicate_id": "with an id that came before, by data.leave_out",
    "in_leave_out": "listed in data.leave_out",
}


def in_words(reason: str, filters: Iterable[Filters]) -> str:
    """Say why utterances are left out: "longer than data.max_duration 40 s".

    Args:
        reason: the text of a FilteredUtterance.
        filters: of the sources; the bound is named where they agree on it.
    """
    bound = re.search(r"(min|max)_\w+$", reason)
    if bound is None:
        return OF_NO_BOUND.get(reason, reason.replace("_", " "))
    values = {getattr(f, bound[0]) for f in filters}
    value = f"{values.pop():g}" if len(values) == 1 and None not in values else "of their source"
    than = reason[: bound.start()].replace("_", " ")
    if bound[0].endswith("_duration"):
        return f"{than}data.{bound[0]} {value}{' s' if value[0].isdigit() else ''}"
    return f"{'' if than.startswith('below') else 'with '}{than}data.filters.{bound[0]} {value}"


def level(samples_SC: np.ndarray) -> float:
    """Return the root mean square of samples of any shape in dB of full scale; -300 for silence."""
    power = float(np.mean(np.square(samples_SC, dtype=np.float64))) if samples_SC.size else 0.0
    return 10 * float(np.log10(max(power, 1e-30)))


def parse_filters(value: Any, key: str, base: Filters | None = None) -> Filters:
    """Parse a mapping of the run file, or None, over the bounds of `base`; `key` names it in messages.

    Raises:
        UserError: an unknown name, or a bound of the wrong type.
    """
    own = parse_mapping(Filters, value or {}, key)
    return (base or Filters()).model_copy(update=own.model_dump(exclude_unset=True))
