"""Recognition chunk by chunk, as at inference: what was heard is kept in caches, what comes is not known yet.

Cache-aware models (Noroozi et al., "Stateful Conformer with Cache-based Inference for Streaming Automatic Speech
Recognition", ICASSP 2024) keep the attention's and the convolutions' inputs of what was heard. Unified models have no
caches in NeMo: each step encodes a window of left context, chunk and right context anew, and decodes the chunk. The
texts are those of NeMo's own streaming of each recording by itself.

B recordings, S samples, F mel bins, T frames.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from finetune.data.decode import as_float
from finetune.errors import UserError
from finetune.models.look_ahead import attending, is_unified
from finetune.models.nemo import chosen_head, ctc_head, ctc_log_probs, weight_dtype
from finetune.models.prompts import encode, slots_of, with_prompt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from finetune.models.look_ahead import Context
    from finetune.models.protocols import AsrModel

ONLINE = ("per_feature", "all_features")
"""Normalisations of the features that need the whole recording, and are made chunk by chunk instead."""


@dataclass
class Heard:
    """What is recognised after a chunk."""

    hypotheses: list[Any]
    """Of each recording: NeMo's Hypothesis, or the best CTC label of each frame; None without any frame so far. The
    next chunk continues them."""
    seconds: float
    """Computing time of the chunk."""


def check_streams(model: AsrModel) -> None:
    """Raise UserError where the model's decoding cannot go on where it stopped. CTC can: it is greedy here, but for
    phrases and language models."""
    strategy = str(model.cfg.decoding.get("strategy"))
    if chosen_head(model) == "ctc" and getattr(model, "ctc_fusion", None) is not None:
        raise UserError(
            "--boost and --lm: a CTC head that streams takes none. Decode with --head transducer, if the model has "
            "one, or whole files without --streaming."
        )
    if chosen_head(model) != "ctc" and strategy not in ("greedy", "greedy_batch"):
        raise UserError(
            f"model: its decoding.strategy is {strategy}, which cannot stream. In NeMo, change_decoding_strategy to "
            "greedy_batch and save the model again."
        )


def stream(
    model: AsrModel,
    audio_BS: torch.Tensor,
    audio_lengths_B: torch.Tensor,
    context: Context,
    languages: Sequence[str] | None = None,
) -> Iterator[Heard]:
    """Recognise recordings chunk by chunk; call inside `evaluation_mode`.

    Args:
        audio_BS: (B, S) waveforms at the model's sample rate, zero-padded; float32, or int16 in 1/32768.
        audio_lengths_B: (B,) samples.
        context: of `finetune.models.look_ahead.streaming_contexts`.
        languages: for the prompts of a prompt model; None: `auto`.

    Yields:
        What is recognised so far, after each chunk of the longest recording; others stay as they were at their end.

    Raises:
        UserError: as `check_streams`.
    """
    check_streams(model)
    device = next(model.parameters()).device
    audio_BS, audio_lengths_B = as_float(audio_BS.to(device)), audio_lengths_B.to(device)
    slots_B = None if languages is None else slots_of(model, languages)
    steps = (_windows if is_unified(model) else _cached)(model, audio_BS, audio_lengths_B, context, slots_B)
    with torch.autocast(device.type, enabled=False), attending(model.encoder, context):
        while True:
            started = time.perf_counter()
            hypotheses = next(steps, None)
            if hypotheses is None:
                return
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            yield Heard(hypotheses, time.perf_counter() - started)


def normalizes_chunks(model: AsrModel) -> bool:
    """Return whether streaming normalises the features of each chunk by itself, since the model normalises those of
    whole recordings, as NeMo's online normalisation does."""
    return not is_unified(model) and model.preprocessor.featurizer.normalize in ONLINE


def texts_of(model: AsrModel, hypotheses: list[Any]) -> list[str]:
    """Return the texts of what is recognised so far."""
    head = ctc_head(model)
    if head is not None and chosen_head(model) == "ctc":
        blank = head.num_classes_with_blank - 1
        runs = ([] if labels_T is None else labels_T.unique_consecutive().tolist() for labels_T in hypotheses)
        decode = model.decoding.decode_tokens_to_str_with_strip_punctuation
        return [decode([label for label in run if label != blank]) for run in runs]
    heard = iter(model.decoding.decode_hypothesis([h for h in hypotheses if h is not None]))
    return ["" if hypothesis is None else next(heard).text for hypothesis in hypotheses]


def stream_texts(
    model: AsrModel,
    audio_BS: torch.Tensor,
    audio_lengths_B: torch.Tensor,
    context: Context,
    languages: Sequence[str] | None = None,
    chunk_seconds: list[float] | None = None,
) -> list[str]:
    """Recognise recordings as `stream`, and return their texts.

    Args:
        chunk_seconds: gets the computing time of each chunk.
    """
    hypotheses: list[Any] = []
    for heard in stream(model, audio_BS, audio_lengths_B, context, languages):
        hypotheses = heard.hypotheses
        if chunk_seconds is not None:
            chunk_seconds.append(heard.seconds)
    return texts_of(model, hypotheses) if hypotheses else [""] * len(audio_BS)


# ---- one chunk's hypotheses -----------------------------------------------------------------------------------------


def _decode(
    model: AsrModel, enc_BHT: torch.Tensor, enc_lengths_B: torch.Tensor, before: list[Any] | None
) -> list[Any]:
    """Continue hypotheses with the encoder's output of a chunk."""
    head = ctc_head(model)
    if head is not None and chosen_head(model) == "ctc":
        labels_BT = ctc_log_probs(head, enc_BHT).argmax(-1)
        new = [labels_T[:length] for labels_T, length in zip(labels_BT, enc_lengths_B.tolist(), strict=True)]
        return new if before is None else [torch.cat(pair) for pair in zip(before, new, strict=True)]
    return model.decoding.decoding(encoder_output=enc_BHT, encoded_lengths=enc_lengths_B, partial_hypotheses=before)[0]


# ---- cache-aware models ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _without_normalization(model: AsrModel) -> Iterator[str | None]:
    """Compute features without a normalisation that needs the whole recording; return the one that is missing."""
    featurizer = model.preprocessor.featurizer
    own = featurizer.normalize
    online = own if own in ONLINE else None
    if online:
        featurizer.normalize = None
    try:
        yield online
    finally:
        featurizer.normalize = own


def _first_and_later(value: int | list[int]) -> tuple[int, int]:
    return (value[0], value[1]) if isinstance(value, list) else (value, value)


def _cached(
    model: AsrModel,
    audio_BS: torch.Tensor,
    audio_lengths_B: torch.Tensor,
    context: Context,
    slots_B: torch.Tensor | None,
) -> Iterator[list[Any]]:
    """Yield hypotheses after each chunk of a cache-aware model."""
    with _without_normalization(model) as online:
        mel_BFT, lengths_B = chunk_features(model, audio_BS, audio_lengths_B)
    hypotheses = None
    for enc_BHT, enc_lengths_B in encoded_chunks(model, mel_BFT, lengths_B, context, online):
        hypotheses = _decode(model, with_prompt(model, enc_BHT, slots_B), enc_lengths_B, hypotheses)
        yield hypotheses


def chunk_features(
    model: AsrModel, audio_BS: torch.Tensor, audio_lengths_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the (B, F, T) features and (B,) lengths that NeMo's streaming cuts into chunks."""
    mel_BFT, lengths_B = model.preprocessor(input_signal=audio_BS, length=audio_lengths_B)
    # The spectrogram has a frame more than the preprocessor counts, and NeMo's streaming hears it.
    return mel_BFT, lengths_B + (0 if model.preprocessor.featurizer.exact_pad else 1)


def encoded_chunks(
    model: AsrModel, mel_BFT: torch.Tensor, lengths_B: torch.Tensor, context: Context, online: str | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield a cache-aware model's (B, H, T) encoder outputs and (B,) lengths of each chunk; call inside `attending`.

    A chunk comes with the last mel frames before it, for the subsampling. As NeMo does, the last chunk of a recording
    is left out where it is too short for an encoder frame (less than 80 ms).

    Args:
        mel_BFT, lengths_B: of `chunk_features`.
        online: a normalisation of each chunk by itself.
    """
    from nemo.collections.asr.parts.preprocessing.features import normalize_batch

    encoder = model.encoder
    encoder.setup_streaming_params(att_context_size=list(context))
    settings = encoder.streaming_cfg
    sizes, shifts = _first_and_later(settings.chunk_size), _first_and_later(settings.shift_size)
    kept, least = _first_and_later(settings.pre_encode_cache_size), encoder.pre_encode.get_sampling_frames()
    over_B = torch.where(lengths_B > shifts[0], (lengths_B - shifts[0]) % shifts[1], 0)
    lengths_B = lengths_B - torch.where(over_B < _first_and_later(least)[1], over_B, 0)
    end = int(lengths_B.max())
    mel_BFT = mel_BFT[:, :, :end]
    dtype = weight_dtype(model)
    caches = encoder.get_initial_cache_state(batch_size=len(mel_BFT), dtype=dtype, device=mel_BFT.device)
    position = 0
    while position < end:
        later = int(position > 0)
        before = min(kept[later], position)
        chunk_BFT = mel_BFT[:, :, position - before : position + sizes[later]]
        chunk_lengths_B = (lengths_B - position + before).clamp(0, chunk_BFT.size(2))
        if online:
            chunk_BFT, _, _ = normalize_batch(chunk_BFT, chunk_lengths_B.clamp(min=1), online)
        missing = kept[later] - before
        chunk_BFT = torch.nn.functional.pad(chunk_BFT, (missing, 0))
        enc_BHT, enc_lengths_B, *caches = encoder.cache_aware_stream_step(
            processed_signal=chunk_BFT.to(dtype),
            processed_signal_length=torch.where(chunk_lengths_B > before, chunk_lengths_B + missing, 0),
            cache_last_channel=caches[0],
            cache_last_time=caches[1],
            cache_last_channel_len=caches[2],
            drop_extra_pre_encoded=settings.drop_extra_pre_encoded if later else 0,
        )
        yield enc_BHT, enc_lengths_B
        position += shifts[later]


# ---- unified models -------------------------------------------------------------------------------------------------


def _windows(
    model: AsrModel,
    audio_BS: torch.Tensor,
    audio_lengths_B: torch.Tensor,
    context: Context,
    slots_B: torch.Tensor | None,
) -> Iterator[list[Any]]:
    """Yield hypotheses after each chunk of a unified model.

    The last window has the recording's end as its right end, so that its chunk is what is left.
    """
    factor = model.encoder.subsampling_factor
    mel_samples = int(model.preprocessor._sample_rate * float(model.cfg.preprocessor.window_stride)) // factor * factor
    left, chunk, right = (frames * mel_samples * factor for frames in context)
    lengths = audio_lengths_B.tolist()
    hypotheses: list[Any] = [None] * len(lengths)
    for position in range(0, max(max(lengths) - right, 1), chunk):
        # Those of which something is left; a last window has taken all there was.
        rows = [i for i, length in enumerate(lengths) if position == 0 or position + right < length]
        ends = [min(position + chunk + right, lengths[i]) for i in rows]
        starts = [max(0, end - left - chunk - right) for end in ends]
        windows = [audio_BS[i, start:end] for i, start, end in zip(rows, starts, ends, strict=True)]
        mel_BFT, mel_lengths_B = model.preprocessor(
            input_signal=torch.nn.utils.rnn.pad_sequence(windows, batch_first=True),
            length=torch.tensor([len(window_S) for window_S in windows], device=audio_BS.device),
        )
        row_slots_B = None if slots_B is None else slots_B[rows]
        enc_BHT, enc_lengths_B = encode(model, mel_BFT.to(weight_dtype(model)), mel_lengths_B, row_slots_B)
        parts, heard = [], []
        for enc_HT, length, i, start, end in zip(enc_BHT, enc_lengths_B.tolist(), rows, starts, ends, strict=True):
            first = (position - start) // (mel_samples * factor)
            part_TH = enc_HT[:, first : length if end == lengths[i] else first + context[1]].T
            if len(part_TH):  # less than a mel frame may be left of a recording
                parts.append(part_TH)
                heard.append(i)
        if not heard:
            yield hypotheses
            continue
        part_lengths_B = torch.tensor([len(part_TH) for part_TH in parts], device=audio_BS.device)
        part_BHT = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True).transpose(1, 2)
        before = [hypotheses[i] for i in heard] if position else None
        for i, hypothesis in zip(heard, _decode(model, part_BHT, part_lengths_B, before), strict=True):
            hypotheses[i] = hypothesis
        yield hypotheses
