"""Transcribe a file chunk by chunk with a streaming model, and tell the text as it grows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from finetune.data.audio_blocks import read_blocks
from finetune.data.quarantine import BadUtterance
from finetune.errors import UserError
from finetune.evaluation.streaming import stream, texts_of
from finetune.models.look_ahead import Context, choose_contexts, is_unified

if TYPE_CHECKING:
    from collections.abc import Callable

    from finetune.models.protocols import AsrModel


def chosen_context(model: AsrModel, look_ahead: str | None) -> Context:
    """Return the context of `--look-ahead`; None: the model's default, the longest of a unified model.

    Raises:
        UserError: there is no such context, or it names several.
    """
    found = list(choose_contexts(model, look_ahead or "all").values())
    if look_ahead is None:
        return found[-1 if is_unified(model) else 0]
    if len(found) > 1:
        raise UserError("--look-ahead: one is used at a time.")
    return found[0]


def stream_file(
    model: AsrModel, file: str, context: Context, language: str | None, on_text: Callable[[str], None]
) -> dict[str, Any]:
    """Transcribe a file; call inside `evaluation_mode`. Its samples and features are held whole.

    Args:
        language: for the prompt of a prompt model; None: `auto`.
        on_text: gets what each chunk adds to the text.

    Returns:
        file, duration in seconds, text; error where it cannot be read (to its end).
    """
    rate, blocks, row = model.preprocessor._sample_rate, [], {"file": file}
    try:
        for block_S in read_blocks(file, rate):
            blocks.append(block_S)
    except BadUtterance as reason:
        row["error"] = str(reason)
    audio_S = np.concatenate(blocks) if blocks else np.zeros(0, dtype=np.float32)
    if not len(audio_S):
        return row if "error" in row else {**row, "duration": 0.0, "text": ""}
    audio_1S, lengths_1 = torch.from_numpy(audio_S)[None], torch.tensor([len(audio_S)])
    languages, text = None if language is None else [language], ""
    for heard in stream(model, audio_1S, lengths_1, context, languages):
        [longer] = texts_of(model, heard.hypotheses)
        longer = longer.rstrip("\N{REPLACEMENT CHARACTER}")  # bytes of a character that is not complete yet
        same = next((i for i, pair in enumerate(zip(text, longer, strict=False)) if len({*pair}) > 1), len(text))
        on_text(longer[same:])
        text = longer
    return {**row, "duration": round(len(audio_S) / rate, 3), "text": text}
