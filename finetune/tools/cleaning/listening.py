"""What a model says of clips: the text that it hears, and how probable the given text and its variants are.

Each clip is heard as it is, slower and faster. A model that was trained on a label may have it by heart; it recognises
the clip by its very sound, less so at another speed, and all likelihoods are means over the three.

B clips, S samples, T encoder frames, U tokens of a text, N texts.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import soxr
import torch

from finetune.data.batch import Batch
from finetune.data.batching import BatchLimits
from finetune.data.decode import as_float
from finetune.data.normalization import normalization_for
from finetune.data.options import StreamOptions
from finetune.data.utterances import text_encoder
from finetune.evaluation.recognise import decode_encoded, encode_audio, evaluation_mode, frame_seconds
from finetune.models.loading import load_option, move_to_device
from finetune.models.loss_module import LossModule
from finetune.models.nemo import pieces_of, set_head
from finetune.models.prompts import check_language, prompt_slots
from finetune.tools.cleaning.edits import Edit, edits_of, split_words
from finetune.tools.cleaning.energy import energy_of

if TYPE_CHECKING:
    from finetune.tools.jobs.clips import Clips

SPEEDS = (1.0, 0.87, 1.15)
IMPOSSIBLE = 50.0  # nats a token, of a text that has more tokens than the audio has room for
TEXTS_AT_ONCE = 64
LONGEST_SECONDS = 40.0


@dataclass(frozen=True)
class ListenerSettings:
    """What the scores depend on beside the data."""

    model: str
    tokenizer: str | None = None
    head: str | None = None
    language: str | None = None
    """For the prompt of a prompt model; None: each clip's own."""
    batch_size: int = 16
    device: str | None = None
    """None: the GPU, where the worker's process has one."""

    def __call__(self) -> Listener:
        return Listener(self)


@dataclass
class Listener:
    """A worker of the job: listens to the clips of a shard with one model."""

    settings: ListenerSettings

    def __post_init__(self) -> None:
        s = self.settings
        device = s.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.model = move_to_device(load_option(s.model, s.tokenizer), device)
        set_head(self.model, s.head, s.model)
        if s.language is not None:
            check_language(self.model, s.language)
        self.rate = self.model.preprocessor._sample_rate
        self.loss = LossModule(self.model, sigma=0.0, omega=0.0, fastemit_lambda=0.0)
        self.encode = text_encoder(self.model.tokenizer)
        limits = BatchLimits(clips=s.batch_size, seconds=s.batch_size * LONGEST_SECONDS)
        self.options = StreamOptions(
            limits,
            self.rate,
            text_normalization=normalization_for(pieces_of(self.model)),
            keep_empty_text=True,
            prompts=prompt_slots(self.model) if s.language is None else {},
        )

    def process(self, clips: Clips) -> Iterator[dict[str, Any]]:
        """Yield a dictionary of scores for each clip (`listen`)."""
        for batch, entries in clips.batches(self.options, self.encode):
            yield from self.listen(batch, [entry.place for entry in entries])

    def listen(self, batch: Batch, places: Sequence[str]) -> list[dict[str, Any]]:
        """Return of each clip of a batch what stands about it:

        source, id, language, text (as the model writes it), heard, duration (seconds), tokens; level, head, tail and
        unheard (`Energy`); loss and heard_loss: -log P of the given and of the heard text, in nats; edits: by how
        much each edit lowers the loss (gain); other: the loss a token of another clip's text, to show what a wrong
        text looks like.
        """
        given = [split_words(text) for text in batch.texts]
        lengths = batch.token_lengths_B.tolist()
        tokens = [row[:u] for row, u in zip(batch.tokens_BU.tolist(), lengths, strict=True)]
        encoded, heard = [], []
        for speed in SPEEDS:
            view = at_speed(batch, speed)
            encoded.append(self._encode(view))
            with evaluation_mode(self.model):
                heard.append(decode_encoded(self.model, *encoded[-1]))
        edits: list[list[Edit]] = []
        for i, words in enumerate(given):
            views = [split_words(" ".join(of_view[i].text.split())) for of_view in heard]
            edits.append(list(dict.fromkeys(edit for view in views for edit in edits_of(words, view))))
        others = [self._other_text(i, batch, tokens) for i in range(len(given))]
        variants = [
            *((i, tokens[i]) for i in range(len(given))),
            *((i, other) for i, other in enumerate(others)),
            *((i, self.encode(edit.applied_to(given[i]))) for i, found in enumerate(edits) for edit in found),
        ]
        owners = [i for i, _ in variants]
        views = [self._losses([ids for _, ids in variants], owners, *view) for view in encoded]
        own = [
            self._losses([[int(token) for token in h.y_sequence] for h in of_view], range(len(given)), *view)
            for of_view, view in zip(heard, encoded, strict=True)
        ]
        losses, own_losses = np.mean(views, axis=0), np.mean(own, axis=0)
        rest = iter(losses[2 * len(given) :].tolist())
        rows = []
        for i, place in enumerate(places):
            row = self._row(batch, i, place, heard[0][i])
            loss = float(losses[i])
            row |= {"tokens": len(tokens[i]), "loss": round(loss, 3), "heard_loss": round(float(own_losses[i]), 3)}
            row["other"] = round(float(losses[len(given) + i]) / max(len(others[i]), 1), 4) if others[i] else None
            row["edits"] = [{**asdict(edit), "gain": round(loss - next(rest), 3)} for edit in edits[i]]
            rows.append(row)
        return rows

    def losses(self, batch: Batch, texts: Sequence[str], clip_N: Sequence[int]) -> list[float]:
        """Return -log P(text | audio) of N texts in nats, each under one of the clips of a batch."""
        tokens = [self.encode(text) for text in texts]
        views = [self._encode(at_speed(batch, speed)) for speed in SPEEDS]
        return np.mean([self._losses(tokens, clip_N, *view) for view in views], axis=0).tolist()

    def _encode(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        own = self.settings.language
        languages = batch.languages if own is None else [own] * len(batch.ids)
        with evaluation_mode(self.model):
            return encode_audio(self.model, batch.audio_BS, batch.audio_lengths_B, languages)

    def _row(self, batch: Batch, i: int, place: str, hypothesis: Any) -> dict[str, Any]:
        stamps = hypothesis.timestamp
        starts = stamps["timestep"] if isinstance(stamps, dict) else stamps
        times = [] if starts is None else [float(start) * frame_seconds(self.model) for start in starts]
        audio_S = batch.audio_BS[i, : int(batch.audio_lengths_B[i])].numpy()
        energy = asdict(energy_of(audio_S, self.rate, times))
        row = {"source": place, "id": batch.ids[i], "language": batch.languages[i], "text": batch.texts[i]}
        row |= {"heard": " ".join(hypothesis.text.split()), "duration": round(len(audio_S) / self.rate, 3)}
        return row | {name: round(value, 3) for name, value in energy.items()}

    def _other_text(self, i: int, batch: Batch, tokens: list[list[int]]) -> list[int]:
        """Return the tokens of the text of like length of another clip of the batch; none where there is no other."""
        others = [j for j in range(len(tokens)) if batch.texts[j] != batch.texts[i] and tokens[j]]
        draw = random.Random(zlib.crc32(batch.ids[i].encode()))
        return (
            tokens[min(others, key=lambda j: (abs(len(tokens[j]) - len(tokens[i])), draw.random()))] if others else []
        )

    def _losses(
        self, tokens: list[list[int]], clip_N: Sequence[int], enc_BHT: torch.Tensor, enc_lengths_B: torch.Tensor
    ) -> list[float]:
        """Return the losses of N texts, each under the encoder outputs of one of the clips."""
        losses = [0.0] * len(tokens)
        order = sorted(range(len(tokens)), key=lambda n: (clip_N[n], len(tokens[n])))
        with evaluation_mode(self.model), torch.autocast(enc_BHT.device.type, enabled=False):
            for first in range(0, len(order), TEXTS_AT_ONCE):
                part = order[first : first + TEXTS_AT_ONCE]
                lengths_N = torch.tensor([len(tokens[n]) for n in part], device=enc_BHT.device)
                texts_NU = torch.zeros(len(part), max(int(lengths_N.max()), 1), dtype=torch.int64)
                for row_U, n in zip(texts_NU, part, strict=True):
                    row_U[: len(tokens[n])] = torch.tensor(tokens[n], dtype=torch.int64)
                rows = torch.tensor([clip_N[n] for n in part], device=enc_BHT.device)
                enc_NHT = enc_BHT[rows, :, : int(enc_lengths_B[rows].max())]
                loss_N = self.loss.losses_of(enc_NHT, enc_lengths_B[rows], texts_NU.to(enc_BHT.device), lengths_N)
                for n, loss in zip(part, loss_N.tolist(), strict=True):
                    losses[n] = loss if math.isfinite(loss) else IMPOSSIBLE * max(len(tokens[n]), 1)
        return losses


def at_speed(batch: Batch, speed: float) -> Batch:
    """Return the batch as it sounds so many times as fast, with its pitch."""
    if speed == 1.0:
        return batch
    audio_BS = as_float(batch.audio_BS)
    changed = [
        torch.from_numpy(soxr.resample(audio_BS[i, :length].numpy(), 1000 * speed, 1000))
        for i, length in enumerate(batch.audio_lengths_B.tolist())
    ]
    lengths_B = torch.tensor([len(audio_S) for audio_S in changed])
    return replace(
        batch, audio_BS=torch.nn.utils.rnn.pad_sequence(changed, batch_first=True), audio_lengths_B=lengths_B
    )
