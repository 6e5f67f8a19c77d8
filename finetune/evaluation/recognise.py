"""NeMo's greedy decoding over batches and streams. B batch, S samples."""

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from finetune.data.batch import Batch
from finetune.data.batching import BatchLimits
from finetune.data.decode import as_float
from finetune.data.stream import UtteranceStream
from finetune.errors import UserError
from finetune.evaluation.long_audio import Chunk, Cutting, Pieces, Stitcher, Token, chunks_of
from finetune.evaluation.mistakes import Mistakes
from finetune.evaluation.scores import WerAccumulator

SHORTEST_SECONDS = 0.1
CHUNKS_AT_ONCE = 4  # decoded together, of a clip that is too long for one piece
LONGEST_AT_ONCE = 40.0  # seconds: `data.max_duration` as it ships, so what is trained on is judged in one piece


@contextlib.contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """eval() and no gradients; afterwards modes and random states are as before, so that evaluating changes no training."""
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


def recognise_batch(model: Any, audio_BS: torch.Tensor, audio_lengths_B: torch.Tensor) -> list[Any]:
    """Greedy hypotheses (NeMo's Hypothesis objects) of a padded batch of waveforms; call inside `evaluation_mode`.

    Decoding runs in the parameters' own precision, not under autocast: half-precision batched decoding has been seen to be
    right for the first clip only.
    """
    device = next(model.parameters()).device
    with torch.autocast(device.type, enabled=False):
        mel_BFT, mel_lengths_B = model.preprocessor(
            input_signal=as_float(audio_BS.to(device)), length=audio_lengths_B.to(device)
        )
        dtype = model.joint.enc.weight.dtype
        enc_BHT, enc_lengths_B = model.encoder(audio_signal=mel_BFT.to(dtype), length=mel_lengths_B)
        return model.decoding.rnnt_decoder_predictions_tensor(
            encoder_output=enc_BHT, encoded_lengths=enc_lengths_B, return_hypotheses=True
        )


def frame_seconds(model: Any) -> float:
    """Seconds of an encoder frame."""
    return float(model.cfg.preprocessor.window_stride) * model.encoder.subsampling_factor


def recognise_chunks(model: Any, chunks: list[Chunk], pieces: Pieces) -> list[list[Token]]:
    """Tokens of chunks that are decoded together, of one recording or of several; call inside `evaluation_mode`.

    Args:
        model: NeMo transducer. Tokens have durations and probabilities only after `finetune.tools.transcription.words.enable_timestamps`.
        chunks: parts of recordings at the model's sample rate. Less than 0.1 s has no tokens.
        pieces: of the model's tokenizer.
    """
    found: list[list[Token]] = [[] for _ in chunks]
    heard = [i for i, c in enumerate(chunks) if len(c.audio_S) >= SHORTEST_SECONDS * model.preprocessor._sample_rate]
    if not heard:
        return found
    audio_BS = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(chunks[i].audio_S) for i in heard], batch_first=True)
    lengths_B = torch.tensor([len(chunks[i].audio_S) for i in heard])
    for i, hypothesis in zip(heard, recognise_batch(model, audio_BS, lengths_B), strict=True):
        # A model that was saved with decoding.compute_timestamps has words and segments beside the tokens' frames.
        stamps = hypothesis.timestamp
        ids, starts = (
            _listed(hypothesis.y_sequence),
            _listed(stamps["timestep"] if isinstance(stamps, dict) else stamps),
        )
        durations = _listed(hypothesis.token_duration) or [1] * len(ids)
        confidences = _listed(hypothesis.token_confidence) or [None] * len(ids)
        found[i] = [
            Token(int(token), chunks[i].start + int(start), int(duration), *pieces.kind(int(token)), confidence)
            for token, start, duration, confidence in zip(ids, starts, durations, confidences, strict=True)
        ]
    return found


def _listed(values: Any) -> list[Any]:
    return (
        [] if values is None else values.tolist() if isinstance(values, torch.Tensor) else [float(v) for v in values]
    )


def text_of(model: Any, tokens: list[Token]) -> str:
    """The text of a sequence of tokens."""
    return " ".join(model.decoding.decode_tokens_to_str_with_strip_punctuation([t.id for t in tokens]).split())


def recognise_long(model: Any, audio_S: torch.Tensor, longest: float, batch_size: int) -> str:
    """The text of a recording of any length, chunk by chunk; call inside `evaluation_mode`.

    Args:
        audio_S: float32 in [-1, 1] or int16.
        longest: seconds of a chunk.
        batch_size: chunks decoded together.
    """
    cutting = Cutting.of_seconds(model.preprocessor._sample_rate, frame_seconds(model), longest)
    pieces, stitcher = Pieces(model.tokenizer), Stitcher(cutting)
    blocks = (as_float(block_S).numpy() for block_S in audio_S.split(10 * model.preprocessor._sample_rate))
    coming = chunks_of(blocks, cutting)
    while chunks := list(itertools.islice(coming, batch_size)):
        for chunk, tokens in zip(chunks, recognise_chunks(model, chunks, pieces), strict=True):
            stitcher.add(chunk, tokens)
    return text_of(model, stitcher.tokens)


def evaluation_limits(clips: int, longest: float) -> BatchLimits:
    """Batches of an evaluation: so many clips of `longest` seconds, and fewer of longer ones, which would be padded to hours."""
    return BatchLimits(clips=clips, seconds=clips * longest)


def recognise_texts(model: Any, audio_BS: torch.Tensor, lengths_B: torch.Tensor, longest: float) -> list[str]:
    """Texts of a padded batch; call inside `evaluation_mode`.

    Clips of at most `longest` seconds are decoded together, as they are; longer ones one by one, in chunks.
    """
    limit = int(longest * model.preprocessor._sample_rate)
    texts = [""] * len(lengths_B)
    short = torch.nonzero(lengths_B <= limit)[:, 0].tolist()
    if short:
        # Indexing copies, so only a batch that has to be parted pays for it.
        whole = len(short) == len(texts)
        short_BS = audio_BS if whole else audio_BS[short, : int(lengths_B[short].max())]
        for i, hypothesis in zip(short, recognise_batch(model, short_BS, lengths_B[short]), strict=True):
            texts[i] = hypothesis.text
    for i in set(range(len(texts))) - set(short):
        texts[i] = recognise_long(model, audio_BS[i, : int(lengths_B[i])], longest, CHUNKS_AT_ONCE)
    return texts


def score_stream(
    model: Any,
    stream: UtteranceStream,
    *,
    normalization: str,
    description: str,
    longest: float = LONGEST_AT_ONCE,
    total: int | None = None,
    keep_pairs: int = 0,
    keep_worst: int = 0,
    show_progress: bool = True,
    on_clip: Callable[[str, str, str, str, Any], None] | None = None,
    on_batch: Callable[[Batch, list[str], WerAccumulator], None] | None = None,
) -> WerAccumulator:
    """Decodes one pass over a stream and counts errors. Nothing but strings and counts is kept, and the audio of the worst clips.

    Args:
        model: NeMo transducer.
        stream: clips of this rank.
        normalization: for references and hypotheses.
        description: label of the progress bar.
        longest: seconds of a clip that is decoded at once; longer ones are recognised in chunks of that length, so that
            memory does not grow with the square of the clip.
        total: clips, for the bar.
        keep_pairs: reference/hypothesis pairs to keep.
        keep_worst: clips to keep in the board's `mistakes`, which has the confused words too; 0: no such account.
        on_clip: called with id, language, reference, hypothesis and counts of each clip.
        on_batch: called with each batch, its hypotheses and the counts so far.

    Raises:
        UserError: a shard cannot be read.
    """
    board = WerAccumulator(normalization, keep_pairs)
    if keep_worst:
        board.mistakes = Mistakes(keep_worst, model.preprocessor._sample_rate)
    with (
        evaluation_mode(model),
        tqdm(total=total, desc=description, unit="clip", disable=not show_progress, leave=False, delay=2) as bar,
    ):
        for batch in stream.batches():
            board.quarantined += batch.quarantined
            for reason, n in batch.filtered.items():
                board.filtered[reason] = board.filtered.get(reason, 0) + n
            if batch.error:
                raise UserError(f"{description}: {batch.error}", exit_code=1)
            if not batch.ids:
                continue
            began = time.perf_counter()
            texts = recognise_texts(model, batch.audio_BS, batch.audio_lengths_B, longest)
            # The texts are on the host: nothing is still computed.
            board.decoding_seconds += time.perf_counter() - began
            board.audio_seconds += int(batch.audio_lengths_B.sum()) / model.preprocessor._sample_rate
            for clip_id, language, reference, hypothesis, audio_S, length in zip(
                batch.ids,
                batch.languages,
                batch.texts,
                texts,
                batch.audio_BS,
                batch.audio_lengths_B.tolist(),
                strict=True,
            ):
                counts = board.add(clip_id, language, reference, hypothesis, audio_S[:length])
                if on_clip is not None:
                    on_clip(clip_id, language, reference, hypothesis, counts)
            if on_batch is not None:
                on_batch(batch, texts, board)
            bar.update(len(batch.ids))
            if board.total.words:
                bar.set_postfix(wer=f"{board.total.word_errors / board.total.words:.3f}")
    if board.mistakes is not None:
        board.mistakes.encode_audio()
    return board


def batched_decoding_differs(model: Any, batch: Batch, clips: int = 4) -> list[tuple[str, str, str]]:
    """Clips that decode otherwise alone than in a batch, as (id, alone, batched). Empty is as it should be."""
    n = min(clips, len(batch.ids))
    limit = int(LONGEST_AT_ONCE * model.preprocessor._sample_rate)  # of hours, the beginning will do
    audio_BS, lengths_B = batch.audio_BS[:n, :limit], batch.audio_lengths_B[:n].clamp(max=limit)
    with evaluation_mode(model):
        batched = [h.text for h in recognise_batch(model, audio_BS, lengths_B)]
        differing = []
        for i in range(n):
            length = int(lengths_B[i])
            alone = recognise_batch(model, audio_BS[i : i + 1, :length], lengths_B[i : i + 1])[0].text
            if alone != batched[i]:
                differing.append((batch.ids[i], alone, batched[i]))
    return differing
