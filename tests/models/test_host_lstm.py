"""Half precision on a CPU, whatever its instructions: a failure without finetune.models.host_lstm on AVX2 alone."""

import pytest
import torch

from finetune.models.host_lstm import use_native_lstm
from finetune.strategies.sharded import make_replica


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_prediction_network_computes_in_half_precision(tiny, dtype):
    model = tiny()
    tokens_BU, lengths_B = torch.tensor([[3, 1, 4], [1, 5, 9]]), torch.tensor([3, 3])
    exact_BHU, *_ = model.decoder(targets=tokens_BU, target_length=lengths_B)
    use_native_lstm(model)
    again_BHU, *_ = model.decoder(targets=tokens_BU, target_length=lengths_B)
    assert torch.equal(exact_BHU, again_BHU)  # float32 is left as it is
    with torch.autocast("cpu", dtype):
        half_BHU, *_ = model.decoder(targets=tokens_BU, target_length=lengths_B)
    assert (half_BHU - exact_BHU).abs().max() < 0.02 * exact_BHU.abs().max()
    half_BHU.float().square().sum().backward()
    lstm = model.decoder.prediction["dec_rnn"].lstm
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in lstm.parameters())
    model.decoder.to(dtype)
    whole_BHU, *_ = model.decoder(targets=tokens_BU, target_length=lengths_B)
    assert (whole_BHU.float() - exact_BHU).abs().max() < 0.05 * exact_BHU.abs().max()


def test_a_replica_computes_in_half_precision(tiny):
    model = tiny()
    use_native_lstm(model)
    tokens_BU, lengths_B = torch.tensor([[3, 1, 4]]), torch.tensor([3])
    exact_BHU, *_ = model.decoder(targets=tokens_BU, target_length=lengths_B)
    with torch.autocast("cpu", torch.bfloat16):
        half_BHU, *_ = make_replica(model).decoder(targets=tokens_BU, target_length=lengths_B)
    assert (half_BHU - exact_BHU).abs().max() < 0.02 * exact_BHU.abs().max()
