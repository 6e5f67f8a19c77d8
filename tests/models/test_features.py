"""Log-mel features against NeMo's."""

from typing import Any

import pytest
import torch

from finetune.errors import UserError
from finetune.models.features import log_mel
from finetune.training.data import features_of

PARAKEET = {"window_size": 0.025, "features": 80, "n_fft": 512, "dither": 1e-3, "pad_to": 0}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"features": 128, "pad_to": 16, "pad_value": -1.0},
        {"normalize": "NA", "mag_power": 1.0},
        {"normalize": "all_features", "preemph": None},
        {"log_zero_guard_type": "clamp"},
        {"exact_pad": True},
    ],
    ids=str,
)
def test_features_are_nemos_to_the_last_bit(settings: dict[str, Any], training: bool) -> None:
    from nemo.collections.asr.modules import AudioToMelSpectrogramPreprocessor

    preprocessor: Any = AudioToMelSpectrogramPreprocessor(**{**PARAKEET, **settings}).train(training)
    lengths_B = torch.tensor([40_000, 8_001, 319, 33_333])  # one of a single frame
    audio_BS = 0.1 * torch.randn(4, 40_000, generator=torch.Generator().manual_seed(0))
    audio_BS *= torch.arange(40_000) < lengths_B[:, None]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        theirs_BFT, their_lengths_B = preprocessor(input_signal=audio_BS.clone(), length=lengths_B)
        torch.manual_seed(1)
        ours_BFT, our_lengths_B = log_mel(preprocessor, audio_BS, lengths_B)
    assert torch.equal(our_lengths_B, their_lengths_B)
    torch.testing.assert_close(ours_BFT, theirs_BFT, rtol=0, atol=0, equal_nan=True)


def test_workers_refuse_settings_that_only_nemo_knows(tiny: Any) -> None:
    model = tiny()
    model.preprocessor.featurizer.frame_splicing = 2
    with pytest.raises(UserError, match=r"frame_splicing.*Write data\.features: model"):
        features_of(model)
