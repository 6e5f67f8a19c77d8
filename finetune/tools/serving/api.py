"""OpenAI's API for transcriptions over models of this project, and a page that records and compares.

What clients of that API send for other models and this one has no use for (prompt, temperature) is ignored; what would
change the answer and is not there (stream) is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.datastructures import Headers, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from finetune.data.quarantine import BadUtterance
from finetune.errors import UserError
from finetune.security.safe_text import one_line
from finetune.tools.report.page import environment
from finetune.tools.serving.batcher import Batcher, Cancelled, TooLong
from finetune.tools.transcription.subtitles import cues_of, srt, vtt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import Any

    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from finetune.tools.serving.models import Served

log = logging.getLogger(__name__)

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
ANY_MODEL = "whisper-1"
"""A name that many clients send whatever the server holds: the first model."""
FORM_BYTES = 64 * 1024
"""Room in a request for what is not audio."""
MEGABYTE = 2**20
COPY_BYTES = MEGABYTE
DISCONNECT_SECONDS = 0.5
"""How often a request is asked whether its client is still there."""


@dataclass(frozen=True)
class ServingLimits:
    """What the server takes."""

    requests: int = 32
    """Requests that are uploaded, wait or are decoded at a time; one more is answered with 503."""
    megabytes: float = 25.0
    """Of an uploaded file, as OpenAI's."""
    minutes: float = 240.0
    """Of a recording."""


class ApiError(Exception):
    """What a client did wrong, or the server cannot do now."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def response(self) -> JSONResponse:
        """Return it in the form of OpenAI's errors."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        headers = {"Retry-After": "1"} if self.status == 503 else None
        return JSONResponse({"error": error}, self.status, headers)


class LimitBody:
    """Refuses bodies above a number of bytes: at once where they say their length, else where they exceed it."""

    def __init__(self, app: ASGIApp, most: int, megabytes: float):
        self.app, self.most = app, most
        self.error = ApiError(413, f"The file has more than {megabytes:g} MB.", param="file", code="file_too_large")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        told = Headers(scope=scope).get("content-length", "")
        if told.isdigit() and int(told) > self.most:
            await self.error.response()(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.most:
                raise self.error
            return message

        await self.app(scope, counted, send)


def make_app(batcher: Batcher, limits: ServingLimits, api_key: str | None = None) -> Starlette:
    """Return the application; models have the names that `batcher` gives them.

    Args:
        api_key: has to be sent as `Authorization: Bearer KEY` to all of /v1/.
    """
    places = threading.BoundedSemaphore(limits.requests)
    threads = ThreadPoolExecutor(limits.requests, thread_name_prefix="request")
    begun = int(time.time())

    def describe(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": begun, "owned_by": "parakeet-finetune"}

    def check_key(request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if api_key and not secrets.compare_digest(given.encode(), api_key.encode()):
            raise ApiError(
                401, "The API key is missing or wrong: send Authorization: Bearer KEY.", code="invalid_api_key"
            )

    def model_name(asked: str) -> str:
        if asked == ANY_MODEL and asked not in batcher.models:
            return next(iter(batcher.models))
        if asked not in batcher.models:
            names = ", ".join(batcher.models)
            message = f"There is no model {one_line(asked)!r}; this server has {names}."
            raise ApiError(404, message, param="model", code="model_not_found")
        return asked

    async def models(request: Request) -> Response:
        check_key(request)
        return JSONResponse({"object": "list", "data": [describe(name) for name in batcher.models]})

    async def one_model(request: Request) -> Response:
        check_key(request)
        return JSONResponse(describe(model_name(request.path_params["name"])))

    async def transcriptions(request: Request) -> Response:
        check_key(request)
        if not places.acquire(blocking=False):
            raise ApiError(503, f"{limits.requests} requests are in work, which is all; try again.", code="overloaded")
        try:
            return await answer(request)
        finally:
            places.release()

    async def answer(request: Request) -> Response:
        if "multipart/form-data" not in request.headers.get("content-type", ""):
            raise ApiError(400, "Send multipart/form-data with the fields file and model.")
        try:
            async with request.form(max_files=1, max_fields=32) as form:
                upload = form.get("file")
                if not isinstance(upload, UploadFile):
                    raise ApiError(400, "The field file is missing: the audio, as a file.", param="file")
                fields = {key: str(value) for key, value in form.items() if not isinstance(value, UploadFile)}
                granularities = [str(g) for g in form.getlist("timestamp_granularities[]")]
                asked = read_fields(fields, granularities)
                name = model_name(asked.model)
                check_times(batcher.models[name], asked)
                language = prompt_language(batcher.models[name], asked.language)
                with tempfile.TemporaryDirectory(prefix="parakeet-") as folder:
                    # libsndfile takes the format of raw audio from the name, so it gets none from the client.
                    file = os.path.join(folder, "audio")
                    with open(file, "wb") as copy:
                        while block := await upload.read(COPY_BYTES):
                            copy.write(block)
                    row = await transcribe(request, name, file, language)
        except (MultiPartException, HTTPException) as error:
            message = getattr(error, "message", None) or getattr(error, "detail", "")
            raise ApiError(400, f"The form cannot be read: {one_line(message)}") from error
        return written(row, asked)

    async def transcribe(request: Request, name: str, file: str, language: str | None) -> dict[str, Any]:
        cancelled = threading.Event()
        began = time.perf_counter()
        work = asyncio.get_running_loop().run_in_executor(
            threads, batcher.transcribe, name, file, language, limits.minutes * 60, cancelled
        )
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=DISCONNECT_SECONDS)
                if not work.done() and await request.is_disconnected():
                    cancelled.set()
                    log.info("%s: the client has gone", name)
                    break
            row = await work
        except BadUtterance as reason:
            why = one_line(str(reason)).replace(file, "the file").rstrip(".")
            raise ApiError(400, f"{why}. WAV, FLAC, MP3 and Ogg can be read.", param="file") from reason
        except TooLong as error:
            message = f"The recording is longer than {limits.minutes:g} minutes."
            raise ApiError(400, message, param="file", code="audio_too_long") from error
        except Cancelled as error:
            raise ApiError(503, "The server ends, or the client has gone.") from error
        finally:
            cancelled.set()  # also where this request is cancelled from outside
        seconds = time.perf_counter() - began
        log.info("%s: %.1f s of audio in %.2f s", name, row["duration"], seconds)
        return {**row, "seconds": seconds}

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok", "models": list(batcher.models)})

    async def page(_: Request) -> Response:
        policy = (
            "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
            "media-src blob:; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
        )
        body = environment().get_template("serve.html").render(names=list(batcher.models), limits=limits)
        return HTMLResponse(body, headers={"Content-Security-Policy": policy})

    async def on_api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def on_any_error(_: Request, error: Exception) -> Response:
        log.error("a request failed", exc_info=error)
        return ApiError(500, f"The transcription failed: {type(error).__name__}.").response()

    async def on_wrong_path(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return ApiError(error.status_code, f"{error.detail}.").response()

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        batcher.close()
        threads.shutdown()

    app = Starlette(
        routes=[
            Route("/v1/audio/transcriptions", transcriptions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/health", health),
            Route("/", page),
        ],
        exception_handlers={ApiError: on_api_error, HTTPException: on_wrong_path, Exception: on_any_error},
        lifespan=lifespan,
    )
    app.add_middleware(LimitBody, most=int(limits.megabytes * MEGABYTE) + FORM_BYTES, megabytes=limits.megabytes)
    return app


@dataclass(frozen=True)
class Asked:
    """The fields of a request."""

    model: str
    language: str | None
    format: str
    words: bool
    segments: bool


def read_fields(fields: dict[str, str], granularities: list[str]) -> Asked:
    """Check the fields of a request.

    Raises:
        ApiError: one is missing, has no such value, or asks for what is not there.
    """
    if not fields.get("model"):
        raise ApiError(400, "The field model is missing.", param="model")
    kind = fields.get("response_format") or "json"
    if kind not in FORMATS:
        message = f"There is no response_format {one_line(kind)!r}; choose from {', '.join(FORMATS)}."
        raise ApiError(400, message, param="response_format")
    if fields.get("stream", "").lower() in ("true", "1"):
        raise ApiError(400, "Answers come whole: leave stream out.", param="stream", code="unsupported_value")
    if unknown := [g for g in granularities if g not in ("word", "segment")]:
        message = f"There is no granularity {one_line(unknown[0])!r}; choose from word and segment."
        raise ApiError(400, message, param="timestamp_granularities")
    if granularities and kind != "verbose_json":
        message = "timestamp_granularities need response_format verbose_json."
        raise ApiError(400, message, param="timestamp_granularities")
    language = fields.get("language") or None
    return Asked(
        fields["model"],
        language,
        kind,
        "word" in granularities,
        "word" not in granularities or "segment" in granularities,
    )


def check_times(served: Served, asked: Asked) -> None:
    """Raise ApiError where times are asked for of a model that has none; verbose_json alone comes without segments."""
    if not served.has_times and (asked.format in ("srt", "vtt") or asked.words):
        message = (
            f"{asked.model} is an exported model, whose texts come without times: ask for json, text or verbose_json."
        )
        raise ApiError(400, message, param="response_format")


def prompt_language(served: Served, language: str | None) -> str | None:
    """Return the language for a prompt model; None for others, which find it by themselves.

    Raises:
        ApiError: a prompt model lacks it.
    """
    try:
        return served.language(language)
    except UserError as error:
        raise ApiError(400, str(error), param="language") from error


def written(row: dict[str, Any], asked: Asked) -> Response:
    """Return a transcript in the format that was asked for."""
    took = {"X-Processing-Seconds": f"{row['seconds']:.3f}"}
    if asked.format == "text":
        return PlainTextResponse(row["text"] + "\n", headers=took)
    if asked.format in ("srt", "vtt"):
        return PlainTextResponse((srt if asked.format == "srt" else vtt)(cues_of(row["words"])), headers=took)
    if asked.format == "json":
        return JSONResponse({"text": row["text"]}, headers=took)
    answer: dict[str, Any] = {"task": "transcribe", "duration": row["duration"], "text": row["text"]}
    if asked.language is not None:
        answer["language"] = asked.language
    if asked.words:
        answer["words"] = [{key: w[key] for key in ("word", "start", "end")} for w in row["words"]]
    if asked.segments and "segments" in row:
        answer["segments"] = [
            {"id": i, "start": s["start"], "end": s["end"], "text": s["text"]} for i, s in enumerate(row["segments"])
        ]
    return JSONResponse(answer, headers=took)
