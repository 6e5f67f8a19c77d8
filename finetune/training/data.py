"""The stream of a split, with the numbers of the model that it is for."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from accelerate import Accelerator

from finetune.config.schema import RunConfig
from finetune.data.augment import parse_augmentation
from finetune.data.decode import as_float
from finetune.data.language_prompts import prompt_of
from finetune.data.leave_out import LeaveOut
from finetune.data.options import Features, StreamOptions
from finetune.data.quarantine import BadUtterance
from finetune.data.run_file import train_limits, with_filters
from finetune.data.sources import OpenSource
from finetune.data.stream import UtteranceStream
from finetune.data.survey import count_languages
from finetune.data.utterances import no_tokens, text_encoder
from finetune.errors import UserError
from finetune.evaluation.recognise import LONGEST_AT_ONCE, evaluation_limits
from finetune.models.features import is_usual, log_mel
from finetune.models.nemo import clips_with_alignment, encoder_lengths
from finetune.models.prompts import auto_ratio, prompt_slots
from finetune.models.protocols import AsrModel, Preprocessor

LANGUAGE_ROWS, LANGUAGE_SECONDS = 1000, 10.0


def make_stream(
    accelerator: Accelerator,
    model: AsrModel,
    config: RunConfig,
    sources: list[OpenSource],
    training: bool,
    max_clips: int | None = None,
) -> UtteranceStream:
    """Make this rank's stream over the sources, with filters, shuffling and augmentation where it trains.

    Args:
        max_clips: instead of data.max_eval_samples.
    """
    t, d = config.training, config.data
    if max_clips is None:
        max_clips = d.max_samples if training else d.max_eval_samples
    options = StreamOptions(
        limits=train_limits(config) if training else evaluation_limits(t.per_device_eval_batch_size, LONGEST_AT_ONCE),
        sample_rate=model.preprocessor._sample_rate,
        seed=t.seed,
        shuffle=d.shuffle and training,
        interleave=training and not d.shuffle,
        shuffle_buffer_size=d.shuffle_buffer_size,
        shuffle_buffer_bytes=d.shuffle_buffer_mib * 2**20,
        group_by_duration=d.group_by_duration and training,
        max_samples=max_clips,
        skip_samples=d.skip_samples if training else 0,
        text_normalization=d.text_normalization if training else "none",
        keep_empty_text=d.keep_empty_text or not training,
        check_durations=training,
        frame_rate=1 / (model.cfg.preprocessor.window_stride * model.encoder.subsampling_factor),
        prompts=prompt_slots(model),
        auto_ratio=auto_ratio(model, config.model.unified_auto_ratio) if training else 0.0,
        read_retries=d.read_retries,
    )
    if training:
        sources = with_filters(sources, d)
        leave_out = LeaveOut(d.leave_out, "data.leave_out") if d.leave_out else None
        options = replace(
            options,
            leave_out=leave_out,
            augmentation=parse_augmentation(d.augment),
            fits=fits_of(model),
            features=features_of(model) if d.features == "workers" else None,
        )
    return UtteranceStream(
        sources,
        options,
        text_encoder(model.tokenizer) if training else no_tokens,
        rank=accelerator.process_index,
        ranks=accelerator.num_processes,
        workers=t.dataloader_num_workers if training else min(1, t.dataloader_num_workers),
        prefetch_factor=t.dataloader_prefetch_factor,
        pin_memory=t.dataloader_pin_memory and accelerator.device.type == "cuda",
    )


def features_of(model: AsrModel) -> Features:
    """Return the computation of a model's features for training, on the CPU.

    Raises:
        UserError: only NeMo itself can compute them, whose code may ask the GPU, which a forked worker must not.
    """
    from nemo.core import Serialization

    if not is_usual(model.preprocessor.featurizer):
        raise UserError(
            "data.features: workers cannot compute the features of this model, whose preprocessor has unusual "
            "settings (exact_pad, frame_splicing, narrow-band augmentation, no log or a clamped one). Write "
            "data.features: model."
        )
    # NeMo's cannot be copied.
    preprocessor = cast(Preprocessor, Serialization.from_config_dict(model.cfg.preprocessor))
    preprocessor.load_state_dict(model.preprocessor.state_dict())

    def features(
        audio_BS: torch.Tensor, audio_lengths_B: torch.Tensor, seed: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
        return log_mel(preprocessor, as_float(audio_BS), audio_lengths_B, generator)

    return features


def fits_of(model: AsrModel) -> Callable[[list[int], list[list[int]]], list[bool]]:
    """Return the test whether utterances of so many samples have an alignment with these tokens."""

    def fits(samples: list[int], tokens: list[list[int]]) -> list[bool]:
        tokens_BU = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(ids, dtype=torch.int64) for ids in tokens], batch_first=True
        )
        lengths_B = torch.tensor([len(ids) for ids in tokens])
        return clips_with_alignment(
            model, encoder_lengths(model, torch.tensor(samples)), tokens_BU, lengths_B
        ).tolist()

    return fits


def prompts_of_rows(stream: UtteranceStream, max_bad_fraction: float) -> tuple[str, Counter[str], Counter[str]]:
    """Look at which prompts of a prompt model the languages of data.train's rows mean.

    Returns:
        A line to log; the rows by `language -> prompt`; and those without a prompt by the reason, which go into
            quarantine.

    Raises:
        UserError: more have none than `max_bad_fraction`.
    """
    options = stream.options
    taken: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for language, rows in count_languages(stream, LANGUAGE_ROWS, LANGUAGE_SECONDS).items():
        try:
            taken[f"{language or '(no language)'} -> {prompt_of(language, options.prompts)}"] += rows
        except BadUtterance as reason:
            refused[str(reason)] += rows
    rows = taken.total() + refused.total()
    line = ", ".join(f"{name} {n}x" for name, n in taken.most_common(20)) or "none"
    line = f"prompts of {rows} rows: {line}; in training {options.auto_ratio:.0%} of the clips get auto"
    if refused.total() > max_bad_fraction * rows:
        reasons = "; ".join(f"{n} rows: {reason}" for reason, n in refused.most_common(4))
        raise UserError(
            f"data.train: {refused.total()} of {rows} rows have no prompt of the model. {reasons}. Mend the column "
            "`language`, or write `language` for the source."
        )
    return line, taken, refused
