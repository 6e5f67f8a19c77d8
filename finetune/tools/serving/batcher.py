"""Decode the chunks of all requests together, on one thread.

S samples.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from finetune.evaluation.long_audio import CHUNK_SECONDS, Chunk, Cutting, Pieces, Stitcher, Token, chunks_of
from finetune.evaluation.recognise import evaluation_mode, frame_seconds, recognise_chunks
from finetune.tools.transcription.files import Transcript, row_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from finetune.models.protocols import AsrModel

log = logging.getLogger(__name__)

CHUNKS_AHEAD = 4
"""Chunks of one request that wait or are decoded at a time: what a long recording holds, and takes from others."""


class Cancelled(Exception):
    """The client has gone, or the server ends."""


class TooLong(Exception):
    """A recording longer than the server takes."""


@dataclass
class Waiting:
    """A chunk to decode."""

    model: str
    language: str | None
    chunk: Chunk
    tokens: Future[list[Token]] = field(default_factory=Future)


class Batcher:
    """Decodes chunks with the models that it holds, the oldest first, and with it what waits for the same model and
    language, up to `batch_size` chunks.

    One thread decodes: two models on one device gain nothing from doing so at once. Close it, or use it as a context
    manager.
    """

    def __init__(self, models: Mapping[str, AsrModel], batch_size: int):
        self.models, self.batch_size = dict(models), batch_size
        self._pieces = {name: Pieces(model.tokenizer) for name, model in self.models.items()}
        self._waiting: deque[Waiting] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._decode, name="decoding", daemon=True)
        self._thread.start()

    def __enter__(self) -> Batcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread; what still waits is cancelled."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def submit(self, model: str, language: str | None, chunk: Chunk) -> Future[list[Token]]:
        """Queue a chunk; the future has its tokens.

        Raises:
            Cancelled: the batcher is closed.
        """
        waiting = Waiting(model, language, chunk)
        with self._changed:
            if self._closed:
                raise Cancelled
            self._waiting.append(waiting)
            self._changed.notify()
        return waiting.tokens

    def transcribe(
        self, model: str, file: str, language: str | None, longest_seconds: float, cancelled: threading.Event
    ) -> dict[str, Any]:
        """Transcribe a file of any length, with words and segments as `finetune.tools.transcription.files` gives them.

        Raises:
            BadUtterance: it cannot be decoded.
            TooLong: it is longer than `longest_seconds`; found where it exceeds them, not at its beginning.
            Cancelled: `cancelled` was set meanwhile, or the batcher was closed.
        """
        served = self.models[model]
        rate = served.preprocessor._sample_rate
        cutting = Cutting.of_seconds(rate, frame_seconds(served), CHUNK_SECONDS)
        transcript = Transcript(file, Stitcher(cutting))
        ahead: deque[tuple[Chunk, Future[list[Token]]]] = deque()

        def add_oldest() -> None:
            chunk, tokens = ahead.popleft()
            transcript.stitcher.add(chunk, tokens.result())

        try:
            for chunk in chunks_of(transcript.blocks(rate), cutting):
                if cancelled.is_set():
                    raise Cancelled
                if transcript.samples > longest_seconds * rate:
                    raise TooLong
                ahead.append((chunk, self.submit(model, language, chunk)))
                if len(ahead) == CHUNKS_AHEAD:
                    add_oldest()
            while ahead:
                add_oldest()
        finally:
            for _, tokens in ahead:
                tokens.cancel()
        return row_of(served, transcript, timestamps=True)

    def _next_batch(self) -> list[Waiting]:
        """Wait for chunks; return those of the next batch, none at the end."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return []
                first = self._waiting[0]
                kind = (first.model, first.language)
                batch: list[Waiting] = []
                others: deque[Waiting] = deque()
                for waiting in self._waiting:
                    alike = (waiting.model, waiting.language) == kind
                    (batch if alike and len(batch) < self.batch_size else others).append(waiting)
                self._waiting = others
                batch = [w for w in batch if w.tokens.set_running_or_notify_cancel()]
                if batch:
                    return batch

    def _decode(self) -> None:
        with ExitStack() as modes:
            for model in self.models.values():
                modes.enter_context(evaluation_mode(model))
            while batch := self._next_batch():
                self._decode_batch(batch)
        with self._changed:
            for waiting in self._waiting:
                if waiting.tokens.set_running_or_notify_cancel():
                    waiting.tokens.set_exception(Cancelled())
            self._waiting.clear()

    def _decode_batch(self, batch: list[Waiting]) -> None:
        """Decode chunks together; where that fails, one by one, so that one request does not fail the others."""
        name, language = batch[0].model, batch[0].language
        try:
            found = recognise_chunks(self.models[name], [w.chunk for w in batch], self._pieces[name], language)
        except Exception as error:
            if len(batch) > 1:
                log.warning("%d chunks could not be decoded together, now one by one: %s", len(batch), error)
                for waiting in batch:
                    self._decode_batch([waiting])
            else:
                batch[0].tokens.set_exception(error)
            return
        for waiting, tokens in zip(batch, found, strict=True):
            waiting.tokens.set_result(tokens)
