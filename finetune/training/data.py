"""The stream of a split, with the numbers of the model that it is for."""

from collections.abc import Callable
from dataclasses import replace

import torch
from accelerate import Accelerator

from finetune.config.schema import RunConfig
from finetune.data.augment import parse_augmentation
from finetune.data.leave_out import LeaveOut
from finetune.data.options import StreamOptions
from finetune.data.run_file import train_limits, with_filters
from finetune.data.sources import OpenSource
from finetune.data.stream import UtteranceStream
from finetune.data.utterances import no_tokens, text_encoder
from finetune.evaluation.recognise import LONGEST_AT_ONCE, evaluation_limits
from finetune.models.nemo import clips_with_alignment, encoder_lengths
from finetune.models.protocols import Transducer


def make_stream(
    accelerator: Accelerator,
    model: Transducer,
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
        keep_empty_text=not training,
        check_durations=training,
        frame_rate=1 / (model.cfg.preprocessor.window_stride * model.encoder.subsampling_factor),
        read_retries=d.read_retries,
    )
    if training:
        sources = with_filters(sources, d)
        leave_out = LeaveOut(d.leave_out, "data.leave_out") if d.leave_out else None
        options = replace(
            options, leave_out=leave_out, augmentation=parse_augmentation(d.augment), fits=fits_of(model)
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


def fits_of(model: Transducer) -> Callable[[list[int], list[list[int]]], list[bool]]:
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
