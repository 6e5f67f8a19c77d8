"""Listening to clips of the training data before the model can write them."""

import contextlib
import logging

from accelerate import Accelerator

from finetune.config.schema import RunConfig
from finetune.data.sources import OpenSource
from finetune.data.utterances import no_tokens
from finetune.errors import UserError
from finetune.evaluation.long_audio import LONGEST_AT_ONCE
from finetune.evaluation.recognise import evaluation_mode, recognise_texts
from finetune.models.heard_letters import Heard, Pair, match_letters
from finetune.models.nemo import prepare_for_decoding
from finetune.models.protocols import AsrModel
from finetune.training.data import make_stream

log = logging.getLogger(__name__)

SECONDS_LISTENED_TO = 900.0
CLIPS_LOOKED_AT = 5000
LETTERS_SHOWN = 64


def listen(
    accelerator: Accelerator, model: AsrModel, config: RunConfig, sources: list[OpenSource], letters: set[str]
) -> Heard:
    """Find the letters that a model writes where texts of the training data have new ones. On the main process.

    Up to 15 minutes of audio with such letters are decoded, of the first 5,000 clips of an epoch.

    Args:
        sources: of data.train.
        letters: new ones, small letters.
    """
    pairs: list[Pair] = []
    texts: list[str] = []
    seconds, rate = 0.0, model.preprocessor._sample_rate
    stream = make_stream(accelerator, model, config, sources, training=True)
    stream.encode = no_tokens  # the model has no pieces for these texts yet
    stream.options.features = None  # decoding begins at the audio
    stream.rank, stream.ranks = 0, 1  # else new pieces would begin by the number of ranks
    prepare_for_decoding(model)
    model.to(accelerator.device)
    with evaluation_mode(model), contextlib.closing(stream.batches()) as batches:
        for batch in batches:
            if batch.error:
                raise UserError(f"data.train: {batch.error}", exit_code=1)
            texts += batch.texts
            rows = [i for i, text in enumerate(batch.texts) if not letters.isdisjoint(text.lower())]
            if rows:
                lengths_B = batch.audio_lengths_B[rows]
                audio_BS = batch.audio_BS[rows, : int(lengths_B.max())]
                languages = [batch.languages[i] for i in rows]
                heard = recognise_texts(model, audio_BS, lengths_B, LONGEST_AT_ONCE, languages)
                pairs += zip((batch.texts[i] for i in rows), heard, strict=True)
                seconds += int(lengths_B.sum()) / rate
            if seconds >= SECONDS_LISTENED_TO or len(texts) >= CLIPS_LOOKED_AT:
                break
    model.cpu()
    matched = match_letters(pairs, letters)
    unheard = "".join(sorted(letters - set(matched)))
    log.info(
        "%d of %d clips of data.train have letters that the vocabulary lacks in every form. Their pieces begin as "
        "those that the model writes where they are spoken: %s%s",
        len(pairs),
        len(texts),
        " ".join(f"{new}={old}" for new, old in sorted(matched.items())[:LETTERS_SHOWN]) or "none",
        f"; not heard: {unheard[:LETTERS_SHOWN]}" if unheard else "",
    )
    return Heard(matched, unheard, texts, len(pairs))
