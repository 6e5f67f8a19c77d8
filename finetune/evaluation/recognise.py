"""Greedy decoding over batches and streams: NeMo's of transducers, and the best path of CTC.

B batch, S samples, T encoder frames, V tokens and blank, N tokens of a text.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm import tqdm

from finetune.data.batching import BatchLimits
from finetune.data.decode import as_float
from finetune.errors import UserError
from finetune.evaluation.long_audio import LONGEST_AT_ONCE, Chunk, Cutting, Pieces, Stitcher, Token, chunks_of
from finetune.evaluation.mistakes import Mistakes
from finetune.evaluation.scores import Counts, Utterance, WerAccumulator
from finetune.models.features import log_mel
from finetune.models.fusion import fused_labels
from finetune.models.nemo import chosen_head, ctc_head, ctc_log_probs, weight_dtype
from finetune.models.prompts import encode, slots_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from finetune.data.batch import Batch
    from finetune.data.stream import UtteranceStream
    from finetune.models.protocols import AsrModel

SHORTEST_SECONDS = 0.1
CHUNKS_AT_ONCE = 4  # decoded together, of one long utterance


@contextlib.contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Switch to eval() without gradients. Modes and random states are restored, so that an evaluation does not change
    training."""
    modes = {module: module.training for module in model.modules()}
    python_state, numpy_state = random.getstate(), np.random.get_state()
    cuda = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=cuda), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def encode_audio(
    model: AsrModel, audio_BS: torch.Tensor, audio_lengths_B: torch.Tensor, languages: Sequence[str] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the encoder's outputs (B, H, T) for a padded batch of waveforms, and their lengths (B,); call inside
    `evaluation_mode`. `languages` as in `recognise_batch`, and so is the precision."""
    device = next(model.parameters()).device
    with torch.autocast(device.type, enabled=False):
        audio_BS, audio_lengths_B = as_float(audio_BS.to(device)), audio_lengths_B.to(device)
        mel_BFT, mel_lengths_B = log_mel(model.preprocessor, audio_BS, audio_lengths_B)
        slots_B = None if languages is None else slots_of(model, languages)
        return encode(model, mel_BFT.to(weight_dtype(model)), mel_lengths_B, slots_B)


def recognise_batch(
    model: AsrModel, audio_BS: torch.Tensor, audio_lengths_B: torch.Tensor, languages: Sequence[str] | None = None
) -> list[Any]:
    """Decode a padded batch of waveforms greedily, to NeMo's Hypothesis objects; call inside `evaluation_mode`.

    `languages` of the utterances are for prompt models; None, or an empty one: `auto`.

    Decoding runs in the parameters' own precision, not under autocast: batched decoding in half precision has been
    seen to be right for the first utterance only.
    """
    return decode_encoded(model, *encode_audio(model, audio_BS, audio_lengths_B, languages))


def decode_encoded(model: AsrModel, enc_BHT: torch.Tensor, enc_lengths_B: torch.Tensor) -> list[Any]:
    """Decode what `encode_audio` returned, to NeMo's Hypothesis objects; call inside `evaluation_mode`."""
    with torch.autocast(enc_BHT.device.type, enabled=False):
        if chosen_head(model) == "ctc":
            head, fusion = ctc_head(model), getattr(model, "ctc_fusion", None)
            assert head is not None
            log_probs_BTV = ctc_log_probs(head, enc_BHT)
            labels_BT = None if fusion is None else fused_labels(fusion, log_probs_BTV)
            return best_paths(model, log_probs_BTV, enc_lengths_B, labels_BT)
        return model.decoding.rnnt_decoder_predictions_tensor(
            encoder_output=enc_BHT, encoded_lengths=enc_lengths_B, return_hypotheses=True
        )


def best_paths(
    model: AsrModel,
    log_probs_BTV: torch.Tensor,
    enc_lengths_B: torch.Tensor,
    labels_BT: torch.Tensor | None = None,
) -> list[Any]:
    """Return the best path of each utterance as NeMo's Hypothesis (Graves et al., ICML 2006, section 3.2): the most
    probable label of each frame, equal neighbours as one token, without blanks.

    A token begins at its first frame and lasts for all that it takes. Its confidence is that of its surest frame, on
    the scale of `finetune.tools.transcription.words.enable_timestamps`.

    Args:
        labels_BT: of each frame, where they are other than the most probable ones.
    """
    from nemo.collections.asr.parts.utils.rnnt_utils import Hypothesis

    outputs = log_probs_BTV.size(-1)
    if labels_BT is None:
        best_BT, labels_BT = log_probs_BTV.float().max(-1)
    else:
        best_BT = log_probs_BTV.float().gather(2, labels_BT[:, :, None])[:, :, 0]
    best_BT, labels_BT = best_BT.cpu(), labels_BT.cpu()
    found = []
    for best_T, labels_T, frames in zip(best_BT, labels_BT, enc_lengths_B.tolist(), strict=True):
        runs_N, run_T, lengths_N = labels_T[:frames].unique_consecutive(return_inverse=True, return_counts=True)
        surest_N = torch.zeros(len(runs_N)).scatter_reduce(0, run_T, best_T[:frames].exp(), "amax")
        confidences_N = ((outputs * surest_N - 1) / (outputs - 1)).clamp(min=0)
        tokens_N = runs_N != outputs - 1  # the blank is the last
        ids = runs_N[tokens_N]
        found.append(
            Hypothesis(
                score=float(best_T[:frames].sum()),
                y_sequence=ids,
                text=model.decoding.decode_tokens_to_str_with_strip_punctuation(ids.tolist()),
                timestamp=(lengths_N.cumsum(0) - lengths_N)[tokens_N],
                token_duration=lengths_N[tokens_N],
                token_confidence=confidences_N[tokens_N].tolist(),
            )
        )
    return found


def frame_seconds(model: AsrModel) -> float:
    """Length of an encoder frame in seconds."""
    return float(model.cfg.preprocessor.window_stride) * model.encoder.subsampling_factor


def recognise_chunks(
    model: AsrModel, chunks: list[Chunk], pieces: Pieces, language: str | None = None
) -> list[list[Token]]:
    """Decode chunks of recordings at the model's sample rate together; call inside `evaluation_mode`.

    Less than 0.1 s has no tokens. A transducer's tokens have durations and probabilities only after
    `finetune.tools.transcription.words.enable_timestamps`.
    """
    found: list[list[Token]] = [[] for _ in chunks]
    heard = [i for i, c in enumerate(chunks) if len(c.audio_S) >= SHORTEST_SECONDS * model.preprocessor._sample_rate]
    if not heard:
        return found
    audio_BS = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(chunks[i].audio_S) for i in heard], batch_first=True)
    lengths_B = torch.tensor([len(chunks[i].audio_S) for i in heard])
    languages = None if language is None else [language] * len(heard)
    for i, hypothesis in zip(heard, recognise_batch(model, audio_BS, lengths_B, languages), strict=True):
        # A model that was saved with decoding.compute_timestamps has words and segments beside the tokens' frames.
        stamps = hypothesis.timestamp
        ids = _as_list(hypothesis.y_sequence)
        starts = _as_list(stamps["timestep"] if isinstance(stamps, dict) else stamps)
        durations = _as_list(hypothesis.token_duration) or [1] * len(ids)
        confidences = _as_list(hypothesis.token_confidence) or [None] * len(ids)
        found[i] = [
            Token(int(token), chunks[i].start + int(start), int(duration), *pieces.kind(int(token)), confidence)
            for token, start, duration, confidence in zip(ids, starts, durations, confidences, strict=True)
        ]
    return found


def _as_list(values: Any) -> list[Any]:
    if values is None:
        return []
    return values.tolist() if isinstance(values, torch.Tensor) else [float(v) for v in values]


def text_of(model: AsrModel, tokens: list[Token]) -> str:
    """Text of a sequence of tokens."""
    return " ".join(model.decoding.decode_tokens_to_str_with_strip_punctuation([t.id for t in tokens]).split())


def recognise_long(
    model: AsrModel, audio_S: torch.Tensor, longest: float, batch_size: int, language: str | None = None
) -> str:
    """Recognise a recording of any length (floats in [-1, 1] or int16) in chunks of `longest` seconds, `batch_size` of
    them at once; call inside `evaluation_mode`."""
    cutting = Cutting.of_seconds(model.preprocessor._sample_rate, frame_seconds(model), longest)
    pieces, stitcher = Pieces(model.tokenizer), Stitcher(cutting)
    blocks = (as_float(block_S).numpy() for block_S in audio_S.split(10 * model.preprocessor._sample_rate))
    chunk_stream = chunks_of(blocks, cutting)
    while chunks := list(itertools.islice(chunk_stream, batch_size)):
        for chunk, tokens in zip(chunks, recognise_chunks(model, chunks, pieces, language), strict=True):
            stitcher.add(chunk, tokens)
    return text_of(model, stitcher.tokens)


def evaluation_limits(clips: int, longest: float) -> BatchLimits:
    """Batches of an evaluation: `clips` utterances of up to `longest` seconds, fewer of longer ones, which would pad
    the others."""
    return BatchLimits(clips=clips, seconds=clips * longest)


def recognise_texts(
    model: AsrModel,
    audio_BS: torch.Tensor,
    lengths_B: torch.Tensor,
    longest: float,
    languages: Sequence[str] | None = None,
) -> list[str]:
    """Recognise a padded batch; call inside `evaluation_mode`.

    Utterances of at most `longest` seconds are decoded together, as they are; longer ones one by one, in chunks.
    """
    limit = int(longest * model.preprocessor._sample_rate)
    texts = [""] * len(lengths_B)
    short: list[int] = torch.nonzero(lengths_B <= limit)[:, 0].tolist()
    if short:
        # Indexing copies: only for a batch that has to be split.
        whole = len(short) == len(texts)
        short_BS = audio_BS if whole else audio_BS[short, : int(lengths_B[short].max())]
        spoken = None if languages is None else [languages[i] for i in short]
        for i, hypothesis in zip(short, recognise_batch(model, short_BS, lengths_B[short], spoken), strict=True):
            texts[i] = hypothesis.text
    for i in set(range(len(texts))) - set(short):
        language = None if languages is None else languages[i]
        texts[i] = recognise_long(model, audio_BS[i, : int(lengths_B[i])], longest, CHUNKS_AT_ONCE, language)
    return texts


def score_stream(
    model: AsrModel,
    stream: UtteranceStream,
    *,
    normalization: str,
    description: str,
    longest: float = LONGEST_AT_ONCE,
    total: int | None = None,
    keep_pairs: int = 0,
    keep_worst: int = 0,
    show_progress: bool = True,
    on_utterance: Callable[[Utterance, Counts], None] | None = None,
    on_batch: Callable[[Batch, list[str], WerAccumulator], None] | None = None,
    language: str | None = None,
    recognise: Callable[[Batch], list[str]] | None = None,
) -> WerAccumulator:
    """Decode one pass over a stream and count errors. Only strings, counts and the audio of the worst utterances are
    kept.

    Args:
        description: label of the progress bar.
        longest: seconds that are decoded at once; longer utterances are recognised in chunks of that length, so that
            memory does not grow with the square of their length.
        total: utterances, for the progress bar.
        keep_pairs: reference/hypothesis pairs to keep.
        keep_worst: utterances to keep in the accumulator's `mistakes`, which also has the confused words; 0: no
            `mistakes`.
        on_utterance: called with each utterance and its counts.
        on_batch: called with each batch, its hypotheses and the counts so far.
        language: for the prompt of all utterances; None: each one's own.
        recognise: returns a batch's texts, instead of `recognise_texts`.

    Raises:
        UserError: a shard cannot be read.
    """

    def recognise_own(batch: Batch) -> list[str]:
        languages = batch.languages if language is None else [language] * len(batch.ids)
        return recognise_texts(model, batch.audio_BS, batch.audio_lengths_B, longest, languages)

    with evaluation_mode(model):
        return count_stream(
            stream,
            model.preprocessor._sample_rate,
            recognise or recognise_own,
            normalization=normalization,
            description=description,
            total=total,
            keep_pairs=keep_pairs,
            keep_worst=keep_worst,
            show_progress=show_progress,
            on_utterance=on_utterance,
            on_batch=on_batch,
        )


def count_stream(
    stream: UtteranceStream,
    rate: int,
    recognise: Callable[[Batch], list[str]],
    *,
    normalization: str,
    description: str,
    total: int | None = None,
    keep_pairs: int = 0,
    keep_worst: int = 0,
    show_progress: bool = True,
    on_utterance: Callable[[Utterance, Counts], None] | None = None,
    on_batch: Callable[[Batch, list[str], WerAccumulator], None] | None = None,
) -> WerAccumulator:
    """Count the errors of whatever recognises the batches of a stream; the other arguments are those of
    `score_stream`.

    Args:
        rate: of the stream's audio, in Hz.

    Raises:
        UserError: a shard cannot be read.
    """
    wer = WerAccumulator(normalization, keep_pairs)
    if keep_worst:
        wer.mistakes = Mistakes(keep_worst, rate)
    with tqdm(total=total, desc=description, unit="clip", disable=not show_progress, leave=False, delay=2) as bar:
        for batch in stream.batches():
            wer.quarantined += batch.quarantined
            wer.filtered.update(batch.filtered)
            if batch.error:
                raise UserError(f"{description}: {batch.error}", exit_code=1)
            if not batch.ids:
                continue
            started = time.perf_counter()
            texts = recognise(batch)
            # The texts are on the host, so the device is done.
            wer.decoding_seconds += time.perf_counter() - started
            wer.audio_seconds += int(batch.audio_lengths_B.sum()) / rate
            for i, length in enumerate(batch.audio_lengths_B.tolist()):
                u = Utterance(batch.ids[i], batch.languages[i], batch.texts[i], texts[i])
                counts = wer.add(u.id, u.language, u.reference, u.hypothesis, batch.audio_BS[i, :length])
                if on_utterance is not None:
                    on_utterance(u, counts)
            if on_batch is not None:
                on_batch(batch, texts, wer)
            if wer.total.words:  # a refresh would show the bar before its delay, and nothing would take it away
                bar.set_postfix(wer=f"{wer.total.word_errors / wer.total.words:.3f}", refresh=False)
            bar.update(len(batch.ids))
    if wer.mistakes is not None:
        wer.mistakes.encode_audio()
    return wer


def batched_decoding_differs(model: AsrModel, batch: Batch, clips: int = 4) -> list[tuple[str, str, str]]:
    """Utterances that decode otherwise alone than in a batch, as (id, alone, batched); normally none."""
    if not batch.ids:
        return []
    n = min(clips, len(batch.ids))
    limit = int(LONGEST_AT_ONCE * model.preprocessor._sample_rate)  # the beginning of a long recording is enough
    audio_BS, lengths_B = batch.audio_BS[:n, :limit], batch.audio_lengths_B[:n].clamp(max=limit)
    with evaluation_mode(model):
        languages = batch.languages[:n]
        batched = [h.text for h in recognise_batch(model, audio_BS, lengths_B, languages)]
        differing = []
        for i in range(n):
            length = int(lengths_B[i])
            own = recognise_batch(model, audio_BS[i : i + 1, :length], lengths_B[i : i + 1], languages[i : i + 1])
            alone = own[0].text
            if alone != batched[i]:
                differing.append((batch.ids[i], alone, batched[i]))
    return differing
