"""How the letters of a new script begin: before the training the model listens to clips with them, and they start from
the letters that it writes in their place.

B batch, U target tokens, V pieces.
"""

import contextlib
import logging
from pathlib import Path

import torch
from accelerate import Accelerator

from finetune.config.schema import RunConfig
from finetune.data.sources import OpenSource
from finetune.distributed import on_main
from finetune.evaluation.long_audio import LONGEST_AT_ONCE
from finetune.evaluation.recognise import evaluation_mode, recognise_texts
from finetune.models.heard_letters import Pair, match_letters
from finetune.models.protocols import Transducer
from finetune.models.sentencepiece_model import SentencePieceModel, tokenizer_of
from finetune.models.vocabulary_rows import letters_without_relative, start_as_heard
from finetune.training.data import make_stream
from finetune.training.vocabulary_change import add_to_report

log = logging.getLogger(__name__)

LISTENED_SECONDS = 900.0
"""Audio with new letters that is listened to."""
CLIPS_LOOKED_AT = 5000
LETTERS_SHOWN = 64


def start_new_letters(
    accelerator: Accelerator, model: Transducer, config: RunConfig, sources: list[OpenSource], old: SentencePieceModel
) -> None:
    """Set the rows of new pieces with letters that have no relative among the old ones, by clips of the training data,
    in place. All ranks enter; the main process listens.

    Args:
        model: prepared for training, its vocabulary grown as `model.tokenizer.extend_from` says.
        sources: of data.train.
        old: the tokenizer before.
    """
    lacking = letters_without_relative(old, tokenizer_of(model, "model.tokenizer"))
    if not lacking:
        log.info("every new letter is a form of an old one: new pieces begin as these, with lowered biases")
        return
    heard, counts_V = on_main(lambda: _listen(accelerator, model, config, sources, lacking))
    start_as_heard(model, old, heard, counts_V)


def _listen(
    accelerator: Accelerator, model: Transducer, config: RunConfig, sources: list[OpenSource], lacking: set[str]
) -> tuple[dict[str, str], torch.Tensor]:
    """Return the old letters that are heard for new ones, and how often clips of the training data have each piece."""
    counts_V = torch.zeros(model.tokenizer.vocab_size, dtype=torch.int64)
    pairs: list[Pair] = []
    looked, with_letters, seconds, rate = 0, 0, 0.0, model.preprocessor._sample_rate
    stream = make_stream(accelerator, model, config, sources, training=True)
    model.to(accelerator.device)
    with evaluation_mode(model), contextlib.closing(stream.batches()) as batches:
        for batch in batches:
            looked += len(batch.ids)
            for tokens_U, length in zip(batch.tokens_BU, batch.token_lengths_B.tolist(), strict=True):
                counts_V += torch.bincount(tokens_U[:length], minlength=len(counts_V))
            rows = [i for i, text in enumerate(batch.texts) if not lacking.isdisjoint(text.lower())]
            with_letters += len(rows)
            if rows:
                lengths_B = batch.audio_lengths_B[rows]
                seconds += int(lengths_B.sum()) / rate
                audio_BS = batch.audio_BS[rows, : int(lengths_B.max())]
                texts = recognise_texts(model, audio_BS, lengths_B, LONGEST_AT_ONCE)
                pairs += zip((batch.texts[i] for i in rows), texts, strict=True)
            if seconds >= LISTENED_SECONDS or looked >= CLIPS_LOOKED_AT:
                break
    model.cpu()
    heard = match_letters(pairs, lacking)
    unheard = "".join(sorted(lacking - set(heard)))
    log.info(
        "%d of %d clips of data.train have letters that the old vocabulary lacks in any form. They begin as the letters "
        "that the model writes where they are spoken: %s%s",
        with_letters,
        looked,
        " ".join(f"{new}={letter}" for new, letter in sorted(heard.items())[:LETTERS_SHOWN]) or "none",
        f"; not heard: {unheard[:LETTERS_SHOWN]}" if unheard else "",
    )
    found = {"clips": looked, "with_new_letters": with_letters, "heard": heard, "not_heard": unheard}
    add_to_report(Path(config.training.output_dir), {"new_letters": found})
    return heard, counts_V
