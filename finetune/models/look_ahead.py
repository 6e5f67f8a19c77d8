"""How far the encoder of a streaming model sees: the contexts that it is trained with, and the one that holds.

A context counts encoder frames. Of a cache-aware model (`att_context_style: chunked_limited`) it is (left, right): a
chunk of right + 1 frames sees itself and `left` frames before it, so that `right` is the look-ahead. Of a unified
model (`chunked_limited_with_rc`) it is (left, chunk, right), where -1 sees everything.
"""

import contextlib
import itertools
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from finetune.errors import UserError
from finetune.models.protocols import AsrModel, Encoder

log = logging.getLogger(__name__)

Context = tuple[int, ...]
CACHE_AWARE, UNIFIED = "chunked_limited", "chunked_limited_with_rc"
OFFLINE: Context = (-1, -1, -1)
"""The context with which a unified model sees whole recordings."""


@dataclass(frozen=True)
class Latency:
    """What a context costs before any computing, in milliseconds."""

    look_ahead_ms: float
    """The most sound behind a frame that the frame sees."""
    chunk_ms: float
    """From one chunk to the next."""
    latency_ms: float
    """The frame itself and its look-ahead: from a chunk's first sound until the chunk can be recognised."""


def is_unified(model: AsrModel) -> bool:
    return model.encoder.att_context_style == UNIFIED


def _chunked_contexts(model: AsrModel) -> list[Context]:
    """Return every (left, chunk, right) of a unified model's lists; none of another model."""
    lists = model.encoder.att_chunk_context_size if is_unified(model) else None
    return [tuple(map(int, one)) for one in itertools.product(*lists)] if lists else []


def training_contexts(model: AsrModel, streaming_share: float | None = None) -> tuple[list[Context], list[float]]:
    """Return the contexts that a training draws from, and their probabilities.

    Args:
        model: any; without a choice there is one context.
        streaming_share: of a unified model's steps, those with a chunked context, any of its lists; the others see
            whole recordings. None: as its streaming and offline losses were weighted (`loss.streaming_loss_weight`),
            half where nothing says so.
    """
    encoder = model.encoder
    chunked = _chunked_contexts(model)
    if not chunked:
        if streaming_share is not None:
            log.warning("model.streaming_share has no effect: the model is not a unified one")
        return [tuple(one) for one in encoder.att_context_size_all], list(encoder.att_context_probs)
    if streaming_share is None:
        loss = model.cfg.get("loss") or {}
        weights = [float(loss.get(f"{mode}_loss_weight") or 0.0) for mode in ("streaming", "offline")]
        streaming_share = weights[0] / sum(weights) if sum(weights) else 0.5
    return [OFFLINE, *chunked], [1 - streaming_share, *[streaming_share / len(chunked)] * len(chunked)]


def draw_context(contexts: Sequence[Context], probabilities: Sequence[float], seed: int, step: int) -> Context:
    """Draw the context of a step: on all ranks and after a resume the same, since only seed and step decide."""
    return random.Random(f"{seed} {step}").choices(contexts, probabilities)[0]


@contextlib.contextmanager
def attending(encoder: Encoder, context: Sequence[int] | None) -> Iterator[None]:
    """Let the encoder see one context; None: its default, the first of its list.

    NeMo's own draw, a new one in each forward pass of each rank, does not happen inside.
    """
    before = encoder.att_context_size, encoder.att_context_size_all
    encoder.att_context_size = list(encoder.att_context_size if context is None else context)
    encoder.att_context_size_all = [encoder.att_context_size]
    try:
        yield
    finally:
        encoder.att_context_size, encoder.att_context_size_all = before


# ---- streaming ------------------------------------------------------------------------------------------------------


def streaming_contexts(model: AsrModel) -> dict[str, Context]:
    """Return the contexts that a model was trained to stream with, by the names that commands give them.

    The name is the look-ahead in frames, such as "13"; of a unified model chunk and right context, such as "7+7".

    Raises:
        UserError: it is no streaming model.
    """
    encoder, found = model.encoder, dict[str, Context]()
    if encoder.att_context_style == CACHE_AWARE:
        for left, right in encoder.att_context_size_all:
            if right >= 0:
                found.setdefault(str(right), (left, right))
    for left, chunk, right in _chunked_contexts(model):
        found.setdefault(f"{chunk}+{right}", (left, chunk, right))
    if not found:
        raise UserError(
            "--look-ahead: the model is no streaming model: its attention is not limited to chunks "
            f"(encoder.att_context_style {encoder.att_context_style}, att_context_size "
            f"{list(encoder.att_context_size)}). Recognise whole recordings, or take a cache-aware model such as "
            "nvidia/nemotron-speech-streaming-en-0.6b."
        )
    return found


def choose_contexts(model: AsrModel, wanted: str) -> dict[str, Context]:
    """Return the contexts that `--look-ahead` names: one or several with commas, or `all`.

    Raises:
        UserError: it is no streaming model, or it was not trained with such a context.
    """
    known = streaming_contexts(model)
    if wanted == "all":
        return known
    names = [name.strip() for name in wanted.split(",")]
    if unknown := [name for name in names if name not in known]:
        meaning = "chunk+right context" if is_unified(model) else "look-ahead"
        raise UserError(
            f"--look-ahead: the model was not trained with {unknown[0] or 'nothing'}; it was with the following "
            f"(frames, {meaning}): {', '.join(known)}, or all."
        )
    return {name: known[name] for name in names}


def one_context(model: AsrModel, wanted: str) -> Context:
    """Return the context of a single look-ahead.

    Raises:
        UserError: as `choose_contexts`, or it names several.
    """
    known = streaming_contexts(model)
    if wanted not in known and (wanted == "all" or "," in wanted):
        raise UserError(f"--look-ahead: {wanted} names several. Give one of {', '.join(known)} at a time.")
    return choose_contexts(model, wanted)[wanted.strip()]


def latency_of(context: Context, frame_seconds: float) -> Latency:
    """Return what a streaming context costs.

    Args:
        frame_seconds: length of an encoder frame.
    """
    _, chunk, right = (context[0], context[1] + 1, 0) if len(context) == 2 else context
    frames = (chunk + right - 1, chunk, chunk + right)
    return Latency(*(round(1000 * frame_seconds * n, 3) for n in frames))


def describe_contexts(model: AsrModel, contexts: Sequence[Context], probabilities: Sequence[float]) -> str:
    """Return what a training draws from, and what its evaluations use, in a line."""
    if is_unified(model):
        return (
            f"a unified model: {probabilities[0]:.0%} of the steps see whole recordings, the others one of "
            f"{len(contexts) - 1} chunked contexts (left, chunk, right); evaluations see whole recordings"
        )
    drawn = ", ".join(f"{list(one)} {share:.0%}" for one, share in zip(contexts, probabilities, strict=True))
    return f"each step draws its attention context: {drawn}; evaluations use {list(model.encoder.att_context_size)}"
