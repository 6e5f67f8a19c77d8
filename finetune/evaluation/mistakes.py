"""What a model gets wrong: the words that it confuses, and its worst utterances with their audio. S samples."""

import base64
import functools
import io
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import jiwer
import numpy as np
import soundfile
import torch

LONGEST_AUDIO = 20.0  # seconds that are kept of an utterance
# Larger word tables are cut back to this, so that memory does not grow with the set; rare confusions may then be
# undercounted.
WORD_PAIRS = 20_000
LISTED = 100
# What all browsers play, the smallest first. FLAC takes every sample rate.
AUDIO_FORMATS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("audio/mpeg", {"format": "MP3", "subtype": "MPEG_LAYER_III", "compression_level": 0.9}),
    ("audio/ogg", {"format": "OGG", "subtype": "VORBIS"}),
    ("audio/flac", {"format": "FLAC", "subtype": "PCM_16"}),
)


def align(reference: str, hypothesis: str, words: jiwer.WordOutput | None) -> list[tuple[str, str]]:
    """Pairs of a reference and a hypothesis word; "" stands for a missing word.

    Args:
        reference, hypothesis: normalised texts.
        words: jiwer's alignment of them; None if the reference has no word.
    """
    theirs, ours = reference.split(), hypothesis.split()
    if words is None:
        return [("", word) for word in ours]
    pairs = []
    for chunk in words.alignments[0]:
        left = theirs[chunk.ref_start_idx : chunk.ref_end_idx]
        right = ours[chunk.hyp_start_idx : chunk.hyp_end_idx]
        pairs += list(zip(left or [""] * len(right), right or [""] * len(left), strict=True))
    return pairs


@dataclass
class Mistakes:
    """Confused words and the worst utterances, by word errors times WER, so that neither single words nor long texts
    prevail."""

    keep_clips: int
    sample_rate: int
    """Hz of the audio."""
    words: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Unequal word pairs of `align`."""
    clips: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self, clip: dict[str, Any], pairs: list[tuple[str, str]], errors: int, audio_S: torch.Tensor | None
    ) -> None:
        """Count one utterance with its pairs of `align`, and keep it if it is among the worst.

        Args:
            clip: id, language, reference, hypothesis.
            audio_S: float32 in [-1, 1] or int16, or None.
        """
        self.words.update(pair for pair in pairs if pair[0] != pair[1])
        self._shorten(2 * WORD_PAIRS)
        spoken = sum(bool(word) for word, _ in pairs)
        row = {**clip, "words": spoken, "word_errors": errors, "badness": errors * errors / max(spoken, 1)}
        full = len(self.clips) >= self.keep_clips
        if not errors or not self.keep_clips or (full and _order(row) > _order(self.clips[-1])):
            return
        row["pairs"] = pairs
        if audio_S is not None:
            row.update(
                seconds=len(audio_S) / self.sample_rate,
                heard_S=_as_int16(audio_S[: int(LONGEST_AUDIO * self.sample_rate)]),
            )
        self.clips = sorted([*self.clips, row], key=_order)[: self.keep_clips]

    def encode_audio(self) -> None:
        """Turn the samples of the kept utterances into data: URLs."""
        for clip in self.clips:
            heard_S = clip.pop("heard_S", None)
            if heard_S is not None:
                clip["audio"] = data_url(heard_S.tobytes(), self.sample_rate)

    def merge(self, other: "Mistakes") -> None:
        self.words.update(other.words)
        self._shorten(2 * WORD_PAIRS)
        self.clips = sorted(self.clips + other.clips, key=_order)[: self.keep_clips]

    def result(self) -> dict[str, Any]:
        """For errors-SPLIT.json: substitutions as [reference, hypothesis, n], deletions and insertions as [word, n],
        and clips."""
        found: dict[str, list[Any]] = {"substitutions": [], "deletions": [], "insertions": []}
        for (reference, hypothesis), n in sorted(self.words.items(), key=lambda item: (-item[1], item[0])):
            kind = "insertions" if not reference else "substitutions" if hypothesis else "deletions"
            if len(found[kind]) < LISTED:
                found[kind].append([word for word in (reference, hypothesis) if word] + [n])
        return {**found, "clips": self.clips}

    def _shorten(self, limit: int) -> None:
        if len(self.words) > limit:
            self.words = Counter(dict(self.words.most_common(WORD_PAIRS)))


def _order(clip: dict[str, Any]) -> tuple[float, str]:
    return -clip["badness"], clip["id"]


def _as_int16(audio_S: torch.Tensor) -> np.ndarray:
    """Copy as int16, which does not keep the batch alive."""
    if audio_S.dtype == torch.int16:
        return audio_S.cpu().numpy().copy()
    return (audio_S.float().clamp(-1, 1) * 32767).to(torch.int16).cpu().numpy()


# The worst clips of one evaluation are often those of the one before.
@functools.lru_cache(maxsize=64)
def data_url(samples: bytes, sample_rate: int) -> str | None:
    """Encode int16 samples as the data: URL of a small audio file; None if no format takes them."""
    samples_S = np.frombuffer(samples, np.int16)
    for kind, options in AUDIO_FORMATS:
        file = io.BytesIO()
        try:
            soundfile.write(file, samples_S, sample_rate, **options)
        except (soundfile.LibsndfileError, ValueError):  # an older library, or a rate that the format lacks
            continue
        return f"data:{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
    return None
