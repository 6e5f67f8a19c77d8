"""NeMo's greedy decoding over batches and streams. B batch, S samples."""

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from finetune.data.decode import as_float
from finetune.data.stream import Batch, ClipStream
from finetune.errors import UserError
from finetune.evaluation.mistakes import Mistakes
from finetune.evaluation.scores import Scoreboard


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


def score_stream(
    model: Any,
    stream: ClipStream,
    *,
    normalization: str,
    description: str,
    total: int | None = None,
    keep_pairs: int = 0,
    keep_worst: int = 0,
    show_progress: bool = True,
    on_clip: Callable[[str, str, str, str, Any], None] | None = None,
    on_batch: Callable[[Batch, list[str], Scoreboard], None] | None = None,
) -> Scoreboard:
    """Decodes one pass over a stream and counts errors. Nothing but strings and counts is kept, and the audio of the worst clips.

    Args:
        model: NeMo transducer.
        stream: clips of this rank.
        normalization: for references and hypotheses.
        description: label of the progress bar.
        total: clips, for the bar.
        keep_pairs: reference/hypothesis pairs to keep.
        keep_worst: clips to keep in the board's `mistakes`, which has the confused words too; 0: no such account.
        on_clip: called with id, language, reference, hypothesis and counts of each clip.
        on_batch: called with each batch, its hypotheses and the counts so far.

    Raises:
        UserError: a shard cannot be read.
    """
    board = Scoreboard(normalization, keep_pairs)
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
            if batch.audio_BS is None:
                continue
            began = time.perf_counter()
            hypotheses = recognise_batch(model, batch.audio_BS, batch.audio_lengths_B)
            board.decoding_seconds += (
                time.perf_counter() - began
            )  # the texts are on the host: nothing is still computed
            board.audio_seconds += int(batch.audio_lengths_B.sum()) / model.preprocessor._sample_rate
            for clip_id, language, reference, hypothesis, audio_S, length in zip(
                batch.ids,
                batch.languages,
                batch.texts,
                hypotheses,
                batch.audio_BS,
                batch.audio_lengths_B.tolist(),
                strict=True,
            ):
                counts = board.add(clip_id, language, reference, hypothesis.text, audio_S[:length])
                if on_clip is not None:
                    on_clip(clip_id, language, reference, hypothesis.text, counts)
            if on_batch is not None:
                on_batch(batch, [hypothesis.text for hypothesis in hypotheses], board)
            bar.update(len(batch.ids))
            if board.total.words:
                bar.set_postfix(wer=f"{board.total.word_errors / board.total.words:.3f}")
    if board.mistakes is not None:
        board.mistakes.encode_audio()
    return board


def batched_decoding_differs(model: Any, batch: Batch, clips: int = 4) -> list[tuple[str, str, str]]:
    """Clips that decode otherwise alone than in a batch, as (id, alone, batched). Empty is as it should be."""
    n = min(clips, len(batch.ids))
    with evaluation_mode(model):
        batched = [h.text for h in recognise_batch(model, batch.audio_BS[:n], batch.audio_lengths_B[:n])]
        differing = []
        for i in range(n):
            length = int(batch.audio_lengths_B[i])
            alone = recognise_batch(model, batch.audio_BS[i : i + 1, :length], batch.audio_lengths_B[i : i + 1])[
                0
            ].text
            if alone != batched[i]:
                differing.append((batch.ids[i], alone, batched[i]))
    return differing
