"""Start, end and confidence of each token and word of a clip's given text, by the model's own alignment lattice.

B batch, S samples, T encoder frames, H width, U tokens of a text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from finetune.evaluation.long_audio import Pieces
from finetune.evaluation.recognise import encode_audio, evaluation_mode, frame_seconds
from finetune.losses.alignment import Alignment, align_ctc, align_transducer
from finetune.losses.dropin import ACTIVATION_OF
from finetune.models.nemo import chosen_head, ctc_head, ctc_log_probs, tdt_durations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from finetune.data.batch import Batch
    from finetune.models.protocols import AsrModel


@dataclass
class AlignedToken:
    """A token and its place in the audio."""

    id: int
    piece: str
    start_seconds: float
    end_seconds: float
    confidence: float
    """Probability of the token where it is said, given the audio and the text before it; low for a wrong one."""
    log_probability: float
    """The same as a logarithm, averaged over the alignments."""
    blank_log_probability: float
    """Summed log-probabilities of the blanks between the token before (or the beginning) and this one: speech that
    the text lacks makes them small."""


@dataclass
class AlignedWord:
    """A word and its place in the audio."""

    text: str
    start_seconds: float
    end_seconds: float
    confidence: float
    """That of its least probable token."""
    tokens: tuple[int, int]
    """Numbers of its first token and of the one behind its last."""


@dataclass
class AlignedClip:
    """A clip with the places of its words; none of them where no alignment exists, and the loss is inf."""

    id: str
    text: str
    language: str
    duration_seconds: float
    frames: int
    """Of the encoder."""
    loss: float = math.inf
    """-log P(text | audio), in nats."""
    tokens: list[AlignedToken] = field(default_factory=list)
    words: list[AlignedWord] = field(default_factory=list)
    last_blank_log_probability: float = 0.0
    """Of the blanks behind the last token, as `AlignedToken.blank_log_probability`."""

    @property
    def aligned(self) -> bool:
        return math.isfinite(self.loss)

    def gaps(self, least: float = 0.0) -> list[tuple[float, float]]:
        """Return start and end of the stretches without a word that last for at least so many seconds."""
        edges = [0.0, *(x for w in self.words for x in (w.start_seconds, w.end_seconds)), self.duration_seconds]
        return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b - a > least]


class Encoded(NamedTuple):
    """The encoder's outputs for a batch, to align with several texts."""

    enc_BHT: torch.Tensor
    enc_lengths_B: torch.Tensor


class Aligner:
    """Aligns texts with audio by one head of a model: the one that decodes (`finetune.models.nemo.set_head`).

    Args:
        model: in any mode; it is put into evaluation mode for each call.
        language: for the prompt of a prompt model; None: each clip's own.
        joint_memory_budget: MiB for a block of joint outputs; None chooses by device.
    """

    def __init__(self, model: AsrModel, *, language: str | None = None, joint_memory_budget: int | None = None):
        self.model, self.language = model, language
        self.budget = None if joint_memory_budget is None else joint_memory_budget * 2**20
        self.pieces = Pieces(model.tokenizer)
        self.frame_seconds = frame_seconds(model)
        self.rate = model.preprocessor._sample_rate

    def align(self, batch: Batch) -> list[AlignedClip]:
        """Align the clips of a batch with their tokens, which its stream encoded."""
        if not batch.ids:
            return []
        lengths = batch.token_lengths_B.tolist()
        tokens = [row[:u] for row, u in zip(batch.tokens_BU.tolist(), lengths, strict=True)]
        return self.align_tokens(self.encode(batch), batch, tokens, batch.texts)

    def encode(self, batch: Batch) -> Encoded:
        """Return what the encoder makes of a batch's audio."""
        languages = batch.languages if self.language is None else [self.language] * len(batch.ids)
        with evaluation_mode(self.model):
            return Encoded(*encode_audio(self.model, batch.audio_BS, batch.audio_lengths_B, languages))

    def align_tokens(
        self, encoded: Encoded, batch: Batch, tokens: Sequence[Sequence[int]], texts: Sequence[str]
    ) -> list[AlignedClip]:
        """Align other texts with the same audio.

        Args:
            encoded: of the batch, by `encode`.
            tokens: ids of each text, by the model's tokenizer.
        """
        found = self._alignments(encoded, tokens)
        clips = []
        for i, alignment in enumerate(found):
            clip = AlignedClip(
                batch.ids[i],
                texts[i],
                batch.languages[i],
                int(batch.audio_lengths_B[i]) / self.rate,
                int(encoded.enc_lengths_B[i]),
            )
            if alignment is not None:
                self._fill(clip, tokens[i], alignment)
            clips.append(clip)
        return clips

    def _alignments(self, encoded: Encoded, tokens: Sequence[Sequence[int]]) -> list[Alignment | None]:
        model, (enc_BHT, enc_lengths_B) = self.model, encoded
        token_lengths_B = torch.tensor([len(ids) for ids in tokens])
        tokens_BU = torch.zeros(len(tokens), max(int(token_lengths_B.max()), 1), dtype=torch.long)
        for row_U, ids in zip(tokens_BU, tokens, strict=True):
            row_U[: len(ids)] = torch.tensor(ids, dtype=torch.long)
        with evaluation_mode(model), torch.autocast(enc_BHT.device.type, enabled=False):
            if chosen_head(model) == "ctc":
                head = ctc_head(model)
                assert head is not None
                return align_ctc(ctc_log_probs(head, enc_BHT), tokens_BU, enc_lengths_B, token_lengths_B)
            on_device = tokens_BU.to(enc_BHT.device), token_lengths_B.to(enc_BHT.device)
            pred_BHU, _, _ = model.decoder(targets=on_device[0], target_length=on_device[1])
            last = model.joint.joint_net[-1]
            return align_transducer(
                model.joint.project_encoder(enc_BHT.transpose(1, 2)),
                model.joint.project_prednet(pred_BHU.transpose(1, 2)),
                last.weight,
                last.bias,
                tokens_BU,
                enc_lengths_B,
                token_lengths_B,
                durations=tdt_durations(model),
                activation=ACTIVATION_OF[type(model.joint.joint_net[0])],
                joint_memory_budget=self.budget,
            )

    def _fill(self, clip: AlignedClip, ids: Sequence[int], alignment: Alignment) -> None:
        """Put loss, tokens and words into a clip."""
        clip.loss = alignment.loss
        clip.last_blank_log_probability = float(alignment.blank_log_p_P[-1])
        start_U, end_U = self._times(clip, alignment)
        pieces = self.model.tokenizer.ids_to_tokens(list(ids)) if ids else []
        clip.tokens = [
            AlignedToken(id_, piece, float(start), float(end), math.exp(log_p), float(log_p), float(blanks))
            for id_, piece, start, end, log_p, blanks in zip(
                ids, pieces, start_U, end_U, alignment.log_p_U, alignment.blank_log_p_P[:-1], strict=True
            )
        ]
        words = clip.text.split()
        groups = self._words(ids)
        if len(groups) != len(words):  # a script without blanks, or a tokenizer that writes them in its own way
            decode = self.model.decoding.decode_tokens_to_str_with_strip_punctuation
            words = [decode(list(ids[a:b])).strip() for a, b in groups]
        for word, (a, b) in zip(words, groups, strict=True):
            own = clip.tokens[a:b]
            spoken = [t for t in own if not self.pieces.kind(t.id)[1]] or own
            start, end = own[0].start_seconds, max(t.end_seconds for t in spoken)
            clip.words.append(AlignedWord(word, start, end, min(t.confidence for t in spoken), (a, b)))

    def _words(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """Return first token and the one behind the last of each word."""
        firsts = [u for u, id_ in enumerate(ids) if u == 0 or self.pieces.kind(id_)[0]]
        return list(zip(firsts, [*firsts[1:], len(ids)], strict=True)) if firsts else []

    def _times(self, clip: AlignedClip, alignment: Alignment) -> tuple[np.ndarray, np.ndarray]:
        """Return start and end of each token in seconds."""
        start_U = alignment.mean_U * self.frame_seconds
        end_U = start_U + np.maximum(alignment.duration_U, 1) * self.frame_seconds
        end_U[:-1] = np.minimum(end_U[:-1], start_U[1:])
        return start_U.clip(0, clip.duration_seconds), end_U.clip(0, clip.duration_seconds)
