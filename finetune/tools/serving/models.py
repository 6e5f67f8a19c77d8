"""What a server decodes with: a model of NeMo's, or an exported one in its runtime."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

from finetune.evaluation.long_audio import CHUNK_SECONDS, Chunk, Cutting, Pieces, Stitcher, Token
from finetune.evaluation.recognise import evaluation_mode, frame_seconds, recognise_chunks
from finetune.models.prompts import check_language, prompt_slots
from finetune.tools.export.runtimes import SherpaOnnxOnline
from finetune.tools.export.using import cut_at_silence, texts_of_chunks
from finetune.tools.transcription.files import Transcript, row_of
from finetune.tools.transcription.words import enable_timestamps

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from finetune.models.protocols import AsrModel
    from finetune.tools.export.runtimes import Exported


class Served(Protocol):
    """A model behind a server.

    Attributes:
        rate: of its audio, in Hz.
        cutting: how recordings become chunks.
        has_times: whether rows have words and segments.
    """

    rate: int
    cutting: Cutting
    has_times: bool

    def decoding(self) -> AbstractContextManager[None]:
        """Return the context in which a thread calls `recognise`."""
        ...

    def language(self, asked: str | None) -> str | None:
        """Return the language that `recognise` takes for the one that a client asks for.

        Raises:
            UserError: the model has prompts, and none for it.
        """
        ...

    def recognise(self, chunks: list[Chunk], language: str | None) -> list[Any]:
        """Decode chunks together; `add` takes what it returns for each."""
        ...

    def begin(self) -> Any:
        """Return what holds a recording in progress."""
        ...

    def add(self, joined: Any, chunk: Chunk, found: Any) -> None:
        """Add the next chunk of a recording to it."""
        ...

    def row(self, joined: Any, samples: int) -> dict[str, Any]:
        """Return the recording's duration in seconds, text, and words and segments if the model has times."""
        ...


class ServedModel:
    """A model of NeMo's; it keeps times from here on."""

    has_times = True

    def __init__(self, model: AsrModel):
        enable_timestamps(model)
        self.model, self.pieces = model, Pieces(model.tokenizer)
        self.rate = model.preprocessor._sample_rate
        self.cutting = Cutting.of_seconds(self.rate, frame_seconds(model), CHUNK_SECONDS)

    def decoding(self) -> AbstractContextManager[None]:
        return evaluation_mode(self.model)

    def language(self, asked: str | None) -> str | None:
        if asked is None or not prompt_slots(self.model):
            return None
        check_language(self.model, asked, "language")
        return asked

    def recognise(self, chunks: list[Chunk], language: str | None) -> list[Any]:
        return recognise_chunks(self.model, chunks, self.pieces, language)

    def begin(self) -> Stitcher:
        return Stitcher(self.cutting)

    def add(self, joined: Stitcher, chunk: Chunk, found: list[Token]) -> None:
        joined.add(chunk, found)

    def row(self, joined: Stitcher, samples: int) -> dict[str, Any]:
        return row_of(self.model, Transcript("", joined, samples), timestamps=True)


class ServedExport:
    """An exported model in its runtime."""

    has_times = False

    def __init__(self, exported: Exported):
        self.exported, self.rate = exported, exported.sample_rate
        # An online recogniser's states go on from the beginning of a recording to its end.
        self.cutting = cut_at_silence(self.rate, None if isinstance(exported, SherpaOnnxOnline) else CHUNK_SECONDS)

    def decoding(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def language(self, asked: str | None) -> str | None:
        return None

    def recognise(self, chunks: list[Chunk], language: str | None) -> list[Any]:
        return texts_of_chunks(self.exported, (chunk.audio_S for chunk in chunks), len(chunks))

    def begin(self) -> list[str]:
        return []

    def add(self, joined: list[str], chunk: Chunk, found: str) -> None:
        joined.append(found)

    def row(self, joined: list[str], samples: int) -> dict[str, Any]:
        return {"duration": round(samples / self.rate, 3), "text": " ".join(filter(None, joined))}
