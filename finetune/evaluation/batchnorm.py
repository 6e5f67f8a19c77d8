"""BatchNorm's running statistics, estimated anew for weights that no training has seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from finetune.errors import UserError
from finetune.evaluation.dataset import EvaluationSettings, stream_in_order
from finetune.evaluation.recognise import as_float, evaluation_limits, evaluation_mode
from finetune.models.features import log_mel
from finetune.models.nemo import weight_dtype
from finetune.models.prompts import encode, prompt_slots, slots_of

if TYPE_CHECKING:
    from finetune.data.sources import OpenSource
    from finetune.models.protocols import AsrModel


def estimate_batchnorm(model: AsrModel, sources: list[OpenSource], settings: EvaluationSettings) -> int:
    """Replace the running means and variances of all BatchNorm modules by the means over the batches of data, in place
    (Wu and Johnson, "Rethinking 'Batch' in BatchNorm", arXiv 2105.07576, section 3: precise BatchNorm).

    Each batch passes with its own statistics, as in training, and everything else as in an evaluation.

    Returns:
        The number of batches; without a BatchNorm module 0, and nothing is read.

    Raises:
        UserError: the data hold no batch.
    """
    norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    norms = [norm for norm in norms if norm.track_running_stats]
    if not norms:
        return 0
    s, prompts, batches = settings, prompt_slots(model), 0
    limits, rate = evaluation_limits(s.batch_size, s.chunk), model.preprocessor._sample_rate
    stream = stream_in_order(sources, rate, limits, max_samples=s.max_samples, workers=s.workers, prompts=prompts)
    device = next(model.parameters()).device
    before = [(norm.momentum, int(norm.num_batches_tracked or 0)) for norm in norms]
    with evaluation_mode(model):
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a cumulative mean
            norm.train()
        for batch in stream.batches():
            if not batch.ids:
                continue
            audio_BS, lengths_B = as_float(batch.audio_BS.to(device)), batch.audio_lengths_B.to(device)
            mel_BFT, mel_lengths_B = log_mel(model.preprocessor, audio_BS, lengths_B)
            encode(model, mel_BFT.to(weight_dtype(model)), mel_lengths_B, slots_of(model, batch.languages))
            batches += 1
    for norm, (momentum, counted) in zip(norms, before, strict=True):
        norm.momentum = momentum
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.fill_(counted)
    if not batches:
        raise UserError(f"--batchnorm estimate: --data {' '.join(s.data)} holds no clip that can be used.", 1)
    return batches
