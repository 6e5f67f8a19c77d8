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

from finetune.data.audio_blocks import read_blocks
from finetune.evaluation.long_audio import Chunk, chunks_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    import numpy as np

    from finetune.tools.serving.models import Served

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
    found: Future[Any] = field(default_factory=Future)
    """What the model's `recognise` returns for it."""


class Batcher:
    """Decodes chunks with the models that it holds, the oldest first, and with it what waits for the same model and
    language, up to `batch_size` chunks.

    One thread decodes: two models on one device gain nothing from doing so at once. Close it, or use it as a context
    manager.
    """

    def __init__(self, models: Mapping[str, Served], batch_size: int):
        self.models, self.batch_size = dict(models), batch_size
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

    def submit(self, model: str, language: str | None, chunk: Chunk) -> Future[Any]:
        """Queue a chunk; the future has what the model's `recognise` returns for it.

        Raises:
            Cancelled: the batcher is closed.
        """
        waiting = Waiting(model, language, chunk)
        with self._changed:
            if self._closed:
                raise Cancelled
            self._waiting.append(waiting)
            self._changed.notify()
        return waiting.found

    def transcribe(
        self, model: str, file: str, language: str | None, longest_seconds: float, cancelled: threading.Event
    ) -> dict[str, Any]:
        """Transcribe a file of any length; return the model's `row` of it.

        Raises:
            BadUtterance: it cannot be decoded.
            TooLong: it is longer than `longest_seconds`; found where it exceeds them, not at its beginning.
            Cancelled: `cancelled` was set meanwhile, or the batcher was closed.
        """
        served = self.models[model]
        samples = 0

        def blocks() -> Iterator[np.ndarray]:
            nonlocal samples
            for block_S in read_blocks(file, served.rate):
                samples += len(block_S)
                if samples > longest_seconds * served.rate:
                    raise TooLong
                yield block_S

        ahead: deque[tuple[Chunk, Future[Any]]] = deque()
        joined = served.begin()

        def await_oldest() -> None:
            chunk, found = ahead.popleft()
            served.add(joined, chunk, found.result())

        try:
            for chunk in chunks_of(blocks(), served.cutting):
                if cancelled.is_set():
                    raise Cancelled
                ahead.append((chunk, self.submit(model, language, chunk)))
                if len(ahead) == CHUNKS_AHEAD:
                    await_oldest()
            while ahead:
                await_oldest()
        finally:
            for _, found in ahead:
                found.cancel()
        return served.row(joined, samples)

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
                batch = [w for w in batch if w.found.set_running_or_notify_cancel()]
                if batch:
                    return batch

    def _decode(self) -> None:
        with ExitStack() as modes:
            for model in self.models.values():
                modes.enter_context(model.decoding())
            while batch := self._next_batch():
                self._decode_batch(batch)
        with self._changed:
            for waiting in self._waiting:
                if waiting.found.set_running_or_notify_cancel():
                    waiting.found.set_exception(Cancelled())
            self._waiting.clear()

    def _decode_batch(self, batch: list[Waiting]) -> None:
        """Decode chunks together; where that fails, one by one, so that one request does not fail the others."""
        name, language = batch[0].model, batch[0].language
        try:
            found = self.models[name].recognise([w.chunk for w in batch], language)
            if len(found) != len(batch):
                raise RuntimeError(f"{len(found)} results for {len(batch)} chunks")
        except Exception as error:
            if len(batch) > 1:
                log.warning("%d chunks could not be decoded together, now one by one: %s", len(batch), error)
                for waiting in batch:
                    self._decode_batch([waiting])
            else:
                batch[0].found.set_exception(error)
            return
        for waiting, result in zip(batch, found, strict=True):
            waiting.found.set_result(result)
