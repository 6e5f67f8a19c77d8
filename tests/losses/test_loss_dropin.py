"""The fused loss inside models that others train: equal losses and gradients, and nothing else changed."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import slow, tiny_layout

from finetune.losses import use_in_nemo, use_in_transformers


@pytest.fixture
def nemo_inputs() -> tuple[Any, dict[str, torch.Tensor]]:
    """A tiny NeMo model in training mode without dropout, always the same, and encoder and prediction outputs of two
    clips."""
    return build_nemo(), nemo_batch()


def build_nemo() -> Any:
    from omegaconf import OmegaConf

    from finetune.models.nemo import import_nemo

    config = OmegaConf.create(tiny_layout(dropout=0.0))
    OmegaConf.resolve(config)
    torch.manual_seed(0)
    return import_nemo().EncDecRNNTBPEModel(cfg=config.model).train()


def nemo_batch() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 128, (2, 5), generator=g)
    return {
        "encoded": torch.randn(2, 32, 11, generator=g),
        "decoded": torch.randn(2, 32, 6, generator=g),
        "frames": torch.tensor([11, 8]),
        "targets": targets,
        "tokens": torch.tensor([5, 3]),
    }


def reference(model: Any, given: dict[str, torch.Tensor], reduction: str) -> torch.Tensor:
    """transformers' tdt_loss on NeMo's joint."""
    from transformers.loss.loss_tdt import tdt_loss

    hidden = model.joint.project_encoder(given["encoded"].transpose(1, 2))[:, :, None]
    hidden = hidden + model.joint.project_prednet(given["decoded"].transpose(1, 2))[:, None]
    logits = model.joint.joint_net(hidden)
    tokens, durations = logits[..., :129], logits[..., 129:]
    return tdt_loss(
        tokens, durations, given["targets"], given["frames"], given["tokens"], 128, [0, 1, 2, 3, 4],
        sigma=0.02, reduction=reduction,
    )  # fmt: skip


def as_nemo_trains(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The calls of EncDecRNNTModel.training_step, with and without its fused joint."""
    if model.joint.fuse_loss_wer:
        loss, wer, *_ = model.joint(
            encoder_outputs=given["encoded"],
            decoder_outputs=given["decoded"],
            encoder_lengths=given["frames"],
            transcripts=given["targets"],
            transcript_lengths=given["tokens"],
            compute_wer=False,
        )
        assert wer is None
        return loss
    joint = model.joint(encoder_outputs=given["encoded"], decoder_outputs=given["decoded"])
    return model.loss(
        log_probs=joint, targets=given["targets"], input_lengths=given["frames"], target_lengths=given["tokens"]
    )


@pytest.mark.parametrize("fused_joint", [False, True])
@pytest.mark.parametrize("reduction", ["mean_batch", "mean_volume"])
def test_nemo_trains_with_the_same_loss_and_gradients(nemo_inputs, fused_joint, reduction):
    model, given = nemo_inputs
    model = use_in_nemo(model)
    model.loss.reduction = reduction
    model.joint._fuse_loss_wer = fused_joint
    weights = list(model.joint.parameters())
    expected = reference(model, given, reduction)
    actual = as_nemo_trains(model, given)
    assert actual.item() == pytest.approx(expected.item(), rel=1e-5)
    for a, e in zip(torch.autograd.grad(actual, weights), torch.autograd.grad(expected, weights), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-6 * float(e.abs().max()) + 1e-9)


def test_nemo_outside_of_training_is_as_before(nemo_inputs):
    model, given = nemo_inputs
    plain = build_nemo().eval()
    model = use_in_nemo(model).eval()
    with torch.no_grad():
        outputs = [m.joint(encoder_outputs=given["encoded"], decoder_outputs=given["decoded"]) for m in (plain, model)]
        decoded = [
            m.decoding.rnnt_decoder_predictions_tensor(given["encoded"], given["frames"], return_hypotheses=True)
            for m in (plain, model)
        ]
        texts = [[h.text for h in hypotheses] for hypotheses in decoded]
    assert torch.equal(*outputs)
    assert texts[0] == texts[1]
    assert set(model.state_dict()) == set(plain.state_dict())


def test_nemo_reports_wer_beside_the_fused_loss(nemo_inputs):
    model, given = nemo_inputs
    model = use_in_nemo(model)
    model.joint._fuse_loss_wer, model.joint._fused_batch_size = True, 1
    model.joint.set_loss(model.loss)
    model.joint.set_wer(model.wer)
    loss, wer, errors, words = model.joint(
        encoder_outputs=given["encoded"],
        decoder_outputs=given["decoded"],
        encoder_lengths=given["frames"],
        transcripts=given["targets"],
        transcript_lengths=given["tokens"],
        compute_wer=True,
    )
    assert loss.item() == pytest.approx(reference(model, given, "mean_batch").item(), rel=1e-5)
    assert words > 0
    assert float(wer) >= 0


def test_nemo_models_that_it_cannot_serve_are_named():
    from omegaconf import open_dict

    model = build_nemo()
    with open_dict(model.cfg):
        model.cfg.loss.loss_name = "multiblank_rnnt"
    with pytest.raises(ValueError, match="expected a TDT or RNN-T loss, got 'multiblank_rnnt'"):
        use_in_nemo(model)
    model = build_nemo()
    model.cfg.loss.tdt_kwargs.durations = [0, 1]
    with pytest.raises(ValueError, match="expected 5 durations, as the joint has, got"):
        use_in_nemo(model)
    model = build_nemo()
    model.joint.masking_prob = 0.5
    with pytest.raises(ValueError, match=r"masking_prob: expected 0, got 0\.5"):
        use_in_nemo(model)


def small_parakeet(head: str, padding: int, **config: Any) -> SimpleNamespace:
    """A small random Parakeet with a TDT or RNNT head, and one batch whose second clip is shorter."""
    import transformers

    torch.manual_seed(0)
    encoder = transformers.ParakeetEncoderConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, num_mel_bins=80,
        layerdrop=0.0, dropout=0.0, activation_dropout=0.0, attention_dropout=0.0, dropout_positions=0.0,
    )  # fmt: skip
    layout = getattr(transformers, f"Parakeet{head}Config")(
        encoder_config=encoder.to_dict(), vocab_size=33, blank_token_id=32, pad_token_id=2, decoder_hidden_size=24,
        num_decoder_layers=1, **config,
    )  # fmt: skip
    labels = torch.randint(3, 32, (2, 6))
    labels[1, 4:] = padding
    batch = {
        "input_features": torch.randn(2, 120, 80),
        "attention_mask": torch.ones(2, 120, dtype=torch.bool),
        "decoder_input_ids": torch.cat([torch.full((2, 1), 32), labels], 1),
        "labels": labels,
    }
    batch["attention_mask"][1, 90:] = False
    return SimpleNamespace(model=getattr(transformers, f"ParakeetFor{head}")(layout).train(), batch=batch)


@pytest.fixture(scope="module")
def parakeet() -> SimpleNamespace:
    return small_parakeet("TDT", 2, durations=[0, 1, 2, 3, 4])


def test_transformers_trains_with_the_same_loss_and_gradients(parakeet):
    plain, fused = copy.deepcopy(parakeet.model), use_in_transformers(copy.deepcopy(parakeet.model))
    expected, actual = plain(**parakeet.batch), fused(**parakeet.batch)
    assert actual.logits is None
    assert actual.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    expected.loss.backward()
    actual.loss.backward()
    for (name, e), (_, a) in zip(plain.named_parameters(), fused.named_parameters(), strict=True):
        assert (a.grad is None) == (e.grad is None), name
        if e.grad is not None:
            torch.testing.assert_close(a.grad, e.grad, rtol=1e-3, atol=1e-5 * float(e.grad.abs().max()) + 3e-6)
    # Without labels everything is as before.
    inputs = {k: v for k, v in parakeet.batch.items() if k != "labels"}
    with torch.no_grad():
        assert torch.equal(fused.eval()(**inputs).logits, plain.eval()(**inputs).logits)


@pytest.mark.parametrize(("threshold", "tolerance"), [slow(0.0, 2e-3), (1e-4, 1e-2)])
def test_a_training_curve_equals_the_unfused_one(parakeet, threshold, tolerance):
    curves = []
    fused = use_in_transformers(copy.deepcopy(parakeet.model), occupancy_threshold=threshold)
    for model in (copy.deepcopy(parakeet.model), fused):
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        curve = []
        for _ in range(25):
            loss = model(**parakeet.batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.item())
        curves.append(curve)
    assert curves[0][-1] < 0.8 * curves[0][0]
    assert curves[1] == pytest.approx(curves[0], rel=tolerance)


def test_transformers_rnnt_keeps_its_reduction_and_its_padding():
    rnnt = small_parakeet("RNNT", 32)  # labels are padded with the blank
    expected = rnnt.model(**rnnt.batch).loss
    model = use_in_transformers(copy.deepcopy(rnnt.model))
    assert model(**rnnt.batch).loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_transformers_outside_of_training_and_copies_are_as_before(parakeet):
    plain, fused = copy.deepcopy(parakeet.model), use_in_transformers(copy.deepcopy(parakeet.model))
    copied = copy.deepcopy(fused)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(1.1)
    for model in (fused, copied):
        plain.load_state_dict(model.state_dict())
        with torch.no_grad():
            expected, actual = plain.eval()(**parakeet.batch), model.eval()(**parakeet.batch)
        assert torch.equal(actual.logits, expected.logits)
        assert torch.equal(actual.loss, expected.loss)
    trained = fused.train()(**parakeet.batch, output_hidden_states=True)
    assert trained.hidden_states is not None
    assert isinstance(fused(**parakeet.batch, return_dict=False), tuple)


def test_transformers_models_that_it_cannot_serve_are_named(parakeet):
    with pytest.raises(ValueError, match="expected ParakeetForTDT or ParakeetForRNNT, got Linear"):
        use_in_transformers(torch.nn.Linear(1, 1))
    model = copy.deepcopy(parakeet.model)
    model.config.blank_token_id = 0
    with pytest.raises(ValueError, match="blank_token_id: expected the last token, 32, got 0"):
        use_in_transformers(model)


def test_hooks_that_bring_weights_in_take_part_and_stay():
    from accelerate.hooks import ModelHook, add_hook_to_module

    from finetune.losses.dropin import in_forward_of

    seen = []

    class Bring(ModelHook):
        def pre_forward(self, module, *arguments, **named):
            seen.append("brought")
            return arguments, named

    layer, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    add_hook_to_module(layer, Bring())
    before = layer.forward
    assert torch.equal(in_forward_of(layer, lambda x: x @ layer.weight.t(), x), x @ layer.weight.t())
    assert seen == ["brought"]
    assert layer.forward == before
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
    other = torch.nn.Linear(3, 2)
    other.forward = lambda x: x
    with pytest.raises(ValueError, match="its forward has been replaced"):
        in_forward_of(other, lambda x: x, x)
