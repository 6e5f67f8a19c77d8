"""What a model says of clips: the text that it hears, and how probable the given text and its variants are.

B clips, S samples, H width, T encoder frames, U tokens of a text, N texts.
"""

from __future__ import annotations

import math
import random
import zlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from finetune.data.normalization import normalize_text
from finetune.data.quarantine import BadUtterance
from finetune.data.utterances import text_encoder
from finetune.evaluation.recognise import decode_encoded, encode_audio, evaluation_mode, frame_seconds
from finetune.models.loss_module import LossModule
from finetune.models.nemo import pieces_of
from finetune.tools.cleaning.edits import edits_of, split_words
from finetune.tools.cleaning.energy import energy_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from finetune.models.protocols import AsrModel

IMPOSSIBLE = 100.0  # nats a token, of a text that has more tokens than the audio has room for
TEXTS_AT_ONCE = 64


@dataclass(frozen=True)
class Clip:
    """A labelled clip at the model's sample rate."""

    source: str
    """Place of its row, as `data.leave_out` takes it."""
    id: str
    language: str
    text: str
    """As the row has it."""
    audio_S: np.ndarray


class Listener:
    """Listens to batches of clips with one model.

    Beside the text that is heard and the likelihood of the given one, each clip gets three probes, errors that are
    made on purpose: a word less, a word more, and the text of another clip of the batch. They show what the scores of
    bad labels look like on these data by this model.

    Args:
        nemo_model: on its device; its chosen head judges.
        normalization: of texts before they are tokenised; None: `basic` where the vocabulary has no capitals.
        seed: of the probes.
    """

    def __init__(self, nemo_model: AsrModel, normalization: str | None = None, seed: int = 0):
        self.model, self.seed = nemo_model, seed
        self.normalization = normalization or normalization_of(nemo_model)
        self.loss = LossModule(nemo_model, sigma=0.0, omega=0.0, fastemit_lambda=0.0)
        self.encode = text_encoder(nemo_model.tokenizer)
        self.frame_seconds = frame_seconds(nemo_model)

    def listen(self, clips: Sequence[Clip]) -> list[dict[str, Any]]:
        """Return a dictionary of numbers and texts for each clip; one whose text the tokenizer cannot write has
        `unjudged` with the reason instead."""
        texts = [normalize_text(clip.text, self.normalization) for clip in clips]
        with evaluation_mode(self.model):
            audio_BS, lengths_B = pad([torch.from_numpy(clip.audio_S) for clip in clips])
            languages = [clip.language for clip in clips]
            enc_BHT, enc_lengths_B = encode_audio(self.model, audio_BS, lengths_B, languages)
            hypotheses = decode_encoded(self.model, enc_BHT, enc_lengths_B)
            found, wanted = [], []
            for i, (clip, hypothesis) in enumerate(zip(clips, hypotheses, strict=True)):
                row = self._heard(clip, texts[i], hypothesis, int(enc_lengths_B[i]))
                found.append(row)
                try:
                    wanted.append(self._texts(i, row, texts, hypothesis))
                except BadUtterance as reason:
                    row["unjudged"] = str(reason)
                    wanted.append([])
            self._fill_losses(found, wanted, enc_BHT, enc_lengths_B)
        return found

    def losses(self, clips: Sequence[Clip], texts: Sequence[str]) -> list[float]:
        """Return -log P(text | audio) in nats, of one text for each clip."""
        with evaluation_mode(self.model):
            audio_BS, lengths_B = pad([torch.from_numpy(clip.audio_S) for clip in clips])
            encoded = encode_audio(self.model, audio_BS, lengths_B, [clip.language for clip in clips])
            return self._losses([self.encode(text) for text in texts], list(range(len(clips))), *encoded)

    def _heard(self, clip: Clip, text: str, hypothesis: Any, frames: int) -> dict[str, Any]:
        rate = self.model.preprocessor._sample_rate
        stamps = hypothesis.timestamp
        starts = stamps["timestep"] if isinstance(stamps, dict) else stamps
        times = [float(start) * self.frame_seconds for start in starts] if starts is not None else []
        energy = asdict(energy_of(clip.audio_S, rate, times))
        row = {"source": clip.source, "id": clip.id, "language": clip.language, "text": text}
        row |= {"heard": " ".join(hypothesis.text.split()), "seconds": len(clip.audio_S) / rate, "frames": frames}
        return row | {name: round(value, 3) for name, value in energy.items()}

    def _texts(
        self, i: int, row: dict[str, Any], texts: list[str], hypothesis: Any
    ) -> list[tuple[str, dict[str, Any], list[int]]]:
        """Return the texts whose losses are wanted of a clip: where each goes in the row, and its tokens."""
        given = split_words(texts[i])
        tokens = self.encode(texts[i])
        row["tokens"] = len(tokens)
        wanted = [("loss", row, tokens), ("heard_loss", row, [int(token) for token in hypothesis.y_sequence])]
        row["heard_tokens"] = len(wanted[-1][2])
        row["edits"] = []
        for edit in edits_of(given, split_words(row["heard"])):
            entry: dict[str, Any] = {"kind": edit.kind, "start": edit.start, "end": edit.end, "words": edit.words}
            row["edits"].append(entry)
            wanted.append(("loss", entry, self.encode(edit.applied_to(given))))
        draw = random.Random(zlib.crc32(row["source"].encode()) + self.seed)
        row["probes"] = probes = {}
        others = [j for j in range(len(texts)) if texts[j] != texts[i] and texts[j]]
        if len(given) > 1:
            out = draw.randrange(len(given))
            wanted.append(("missing", probes, self.encode(" ".join(given[:out] + given[out + 1 :]))))
        if others and given:
            put = draw.choice(texts[draw.choice(others)].split())
            place = draw.randint(0, len(given))
            wanted.append(("not_said", probes, self.encode(" ".join([*given[:place], put, *given[place:]]))))
            alike = min(others, key=lambda j: (abs(len(texts[j]) - len(texts[i])), draw.random()))
            other = self.encode(texts[alike])
            probes["other_tokens"] = len(other)
            wanted.append(("other", probes, other))
        return wanted

    def _fill_losses(
        self,
        found: list[dict[str, Any]],
        wanted: list[list[tuple[str, dict[str, Any], list[int]]]],
        enc_BHT: torch.Tensor,
        enc_lengths_B: torch.Tensor,
    ) -> None:
        entries = [(i, entry) for i, texts in enumerate(wanted) for entry in texts]
        losses = self._losses([entry[2] for _, entry in entries], [i for i, _ in entries], enc_BHT, enc_lengths_B)
        for (_, (name, into, _)), loss in zip(entries, losses, strict=True):
            into[name] = round(loss, 4)

    def _losses(
        self, tokens: list[list[int]], clip_N: list[int], enc_BHT: torch.Tensor, enc_lengths_B: torch.Tensor
    ) -> list[float]:
        """Return the losses of N texts, each under the encoder outputs of one of the clips; texts of like length are
        computed together."""
        losses = [0.0] * len(tokens)
        order = sorted(range(len(tokens)), key=lambda n: (clip_N[n], len(tokens[n])))
        for first in range(0, len(order), TEXTS_AT_ONCE):
            part = order[first : first + TEXTS_AT_ONCE]
            texts_NU, lengths_N = pad([torch.tensor(tokens[n], dtype=torch.int64) for n in part])
            if not texts_NU.size(1):
                texts_NU = texts_NU.new_zeros(len(part), 1)
            rows = torch.tensor([clip_N[n] for n in part], device=enc_BHT.device)
            frames_N = enc_lengths_B[rows]
            enc_NHT = enc_BHT[rows, :, : int(frames_N.max())]
            texts_NU, lengths_N = texts_NU.to(enc_BHT.device), lengths_N.to(enc_BHT.device)
            with torch.autocast(enc_BHT.device.type, enabled=False):
                loss_N = self.loss.losses_of(enc_NHT, frames_N, texts_NU, lengths_N).tolist()
            for n, loss in zip(part, loss_N, strict=True):
                losses[n] = loss if math.isfinite(loss) else IMPOSSIBLE * max(len(tokens[n]), 1)
        return losses


def pad(rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad 1-D tensors with zeros to (B, longest); return their lengths too."""
    lengths_B = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True), lengths_B


def normalization_of(model: AsrModel) -> str:
    """Return how texts are written for a model: `basic` where no piece of its vocabulary has a capital."""
    return "none" if any(c.isupper() for piece in pieces_of(model) for c in piece) else "basic"
