"""Start, end and confidence of each token and word of a clip's given text, by the model's own alignment lattice.

B batch, S samples, T encoder frames, H width, U tokens of a text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from finetune.data.decode import as_float
from finetune.data.filters import FilteredUtterance
from finetune.data.normalization import normalization_for, normalize_text
from finetune.data.quarantine import BadUtterance
from finetune.data.utterances import text_encoder
from finetune.evaluation.long_audio import Pieces
from finetune.evaluation.recognise import encode_audio, evaluation_mode, frame_seconds
from finetune.evaluation.word_edges import quiet_frames, word_edges
from finetune.losses.alignment import Alignment, align_ctc, align_transducer
from finetune.losses.dropin import ACTIVATION_OF
from finetune.models.nemo import chosen_head, ctc_head, ctc_log_probs, pieces_of, tdt_durations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from finetune.data.batch import Batch
    from finetune.models.protocols import AsrModel


SHIFT = 0.35
"""Encoder frames from the beginning of the frame that emits a word's first token to the beginning of the word
(docs/align.md says how it was measured)."""


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
    """Geometric mean over its tokens of the probability of a token and the blanks before it, punctuation left out."""
    tokens: tuple[int, int]
    """Numbers of its first token and of the one behind its last."""
    emitted_seconds: float
    """Where it begins by the lattice alone, before pauses are looked for."""


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
    best_loss: float = math.inf
    """The same of the best path alone."""
    tokens: list[AlignedToken] = field(default_factory=list)
    words: list[AlignedWord] = field(default_factory=list)
    last_blank_log_probability: float = 0.0
    """Of the blanks behind the last token, as `AlignedToken.blank_log_probability`."""

    moved_frames: list[float] = field(default_factory=list)
    """Encoder frames by which pauses moved the words behind them; their median is what the aligner's `shift` lacks."""

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
        normalization: of texts before they are tokenised (`finetune.data.normalization`); words stay as they are
            written. None: `basic` where the vocabulary has no capitals, else `none`.
        shift: encoder frames by which sounds begin behind the frame that emits them.
        joint_memory_budget: MiB for a block of joint outputs; None chooses by device.
    """

    def __init__(
        self,
        model: AsrModel,
        *,
        language: str | None = None,
        normalization: str | None = None,
        shift: float = SHIFT,
        joint_memory_budget: int | None = None,
    ):
        self.model, self.language, self.shift = model, language, shift
        self.budget = None if joint_memory_budget is None else joint_memory_budget * 2**20
        self.pieces = Pieces(model.tokenizer)
        self.normalization = normalization or normalization_of(model)
        self._ids = text_encoder(model.tokenizer)
        self.frame_seconds = frame_seconds(model)
        self.rate = model.preprocessor._sample_rate

    def tokens_of(self, text: str) -> list[int]:
        """Return the tokens of a text, for a stream that makes batches to align.

        Raises:
            FilteredUtterance: nothing is left of it; BadUtterance: the tokenizer has no piece for a character.
        """
        text = normalize_text(text, self.normalization)
        if not text:
            raise FilteredUtterance("empty_text")
        try:
            return self._ids(text)
        except BadUtterance as reason:
            raise BadUtterance(str(reason).replace("data.text_normalization=", "--normalization ")) from None

    def align(self, batch: Batch) -> list[AlignedClip]:
        """Align the clips of a batch with their tokens, which its stream encoded, by `tokens_of` or of texts that it
        normalised itself."""
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
                audio_S = as_float(batch.audio_BS[i, : int(batch.audio_lengths_B[i])]).numpy()
                self._fill(clip, audio_S, tokens[i], alignment)
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

    def _fill(self, clip: AlignedClip, audio_S: np.ndarray, ids: Sequence[int], alignment: Alignment) -> None:
        """Put loss, tokens and words into a clip."""
        clip.loss, clip.best_loss = alignment.loss, alignment.best_loss
        clip.last_blank_log_probability = float(alignment.blank_log_p_P[-1])
        if not ids:
            return
        time_U = ((alignment.mean_U + self.shift) * self.frame_seconds).clip(0, clip.duration_seconds)
        words = self._words(clip.text, ids)
        first_W = [a for _, a, _ in words]
        spoken = [[u for u in range(a, b) if not self.pieces.kind(ids[u])[1]] or [a] for _, a, b in words]
        starts_W, ends_W, behind_pause_W = word_edges(
            time_U[first_W],
            time_U[[own[-1] for own in spoken]],
            quiet_frames(audio_S, self.rate),
            clip.duration_seconds,
        )
        clip.moved_frames = ((starts_W - time_U[first_W])[behind_pause_W] / self.frame_seconds).tolist()
        confidence_U = np.exp(alignment.log_p_U)
        with_blanks_U = alignment.log_p_U + alignment.blank_log_p_P[:-1]
        pieces = self.model.tokenizer.ids_to_tokens(list(ids))
        for (text, a, b), own, start, end in zip(words, spoken, starts_W, ends_W, strict=True):
            edges = [start, *time_U[a + 1 : b].clip(start, end), end]
            clip.tokens += [
                AlignedToken(
                    ids[u],
                    pieces[u],
                    float(edges[u - a]),
                    float(edges[u - a + 1]),
                    float(confidence_U[u]),
                    float(alignment.log_p_U[u]),
                    float(alignment.blank_log_p_P[u]),
                )
                for u in range(a, b)
            ]
            confidence = math.exp(with_blanks_U[own].mean())
            clip.words.append(AlignedWord(text, float(start), float(end), confidence, (a, b), float(time_U[a])))

    def _words(self, text: str, ids: Sequence[int]) -> list[tuple[str, int, int]]:
        """Return each word with its first token and the one behind its last: as the text has it, or as its tokens
        spell it where they divide the text otherwise."""
        firsts = [u for u, id_ in enumerate(ids) if u == 0 or self.pieces.kind(id_)[0]]
        groups = list(zip(firsts, [*firsts[1:], len(ids)], strict=True))
        words = text.split()
        parts = [len(normalize_text(word, self.normalization).split()) for word in words]
        if sum(parts) != len(groups):
            decode = self.model.decoding.decode_tokens_to_str_with_strip_punctuation
            return [(decode(list(ids[a:b])).strip(), a, b) for a, b in groups]
        found: list[tuple[str, int, int]] = []
        unspoken: list[str] = []
        for word, n in zip(words, parts, strict=True):
            if n:
                own, groups = groups[:n], groups[n:]
                found.append((" ".join([*unspoken, word]), own[0][0], own[-1][1]))
                unspoken = []
            elif found:  # a dash
                found[-1] = (f"{found[-1][0]} {word}", *found[-1][1:])
            else:
                unspoken.append(word)
        return found


def normalization_of(model: AsrModel) -> str:
    """Return `basic` for a model whose vocabulary has no capitals, and so no punctuation to speak of, else `none`."""
    return normalization_for(pieces_of(model))
