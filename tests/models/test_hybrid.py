"""Hybrid models: a transducer and a CTC head on one encoder, trained together."""

import pytest
import torch
from conftest import DETERMINISTIC, ONLY_TRAIN, read_lines, slow
from loss_equality import assert_equal_gradients, batch_of, gradients, prepared

from finetune.models.loading import load_model
from finetune.models.loss_module import LossModule


def test_loss_and_gradients_are_nemos(archive_of):
    model = prepared(archive_of("hybrid-rnnt"))
    audio_BS, audio_lengths_B, tokens_BU, token_lengths_B = batch_of(model)
    module = LossModule(model)
    module.train()
    ours = module(audio_BS, audio_lengths_B, tokens_BU, token_lengths_B).mean()
    ours.backward()
    of_ours = gradients(model)
    model.zero_grad()

    encoded, lengths = model.forward(input_signal=audio_BS, input_signal_length=audio_lengths_B)
    decoded, target_lengths, _ = model.decoder(targets=tokens_BU, target_length=token_lengths_B)
    model.joint.set_fuse_loss_wer(False)
    transducer = model.loss(
        log_probs=model.joint(encoder_outputs=encoded, decoder_outputs=decoded),
        targets=tokens_BU,
        input_lengths=lengths,
        target_lengths=target_lengths,
    )
    targets = {"targets": tokens_BU, "input_lengths": lengths, "target_lengths": token_lengths_B}
    ctc = model.ctc_loss(log_probs=model.ctc_decoder(encoder_output=encoded), **targets)
    weight = model.ctc_loss_weight
    assert weight == 0.3
    # The training configuration has the mean over tokens for the transducer and over utterances for CTC, so that CTC
    # dominates (NVIDIA-NeMo/NeMo issue 14710). Here both are means over utterances.
    assert model.cfg.rnnt_reduction == "mean_volume"
    transducer = transducer * token_lengths_B.sum() / len(token_lengths_B)
    theirs = (1 - weight) * transducer + weight * ctc
    theirs.backward()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    assert_equal_gradients(of_ours, gradients(model))
    assert of_ours["ctc_decoder.decoder_layers.0.weight"].abs().max() > 0


def test_an_utterance_without_a_ctc_alignment_still_trains_the_transducer(archive_of):
    model = prepared(archive_of("hybrid-tdt"))
    module = LossModule(model)
    module.train()
    audio_BS, lengths_B = (
        0.1 * torch.randn(1, 4_000, generator=torch.Generator().manual_seed(0)),
        torch.tensor([4_000]),
    )
    losses_B = module(audio_BS, lengths_B, torch.tensor([[5, 5, 5]]), torch.tensor([3]))  # 4 frames, 5 are needed
    losses_B.sum().backward()
    assert torch.isfinite(losses_B).all()
    assert all(torch.isfinite(g).all() for g in gradients(model).values())
    assert model.ctc_decoder.decoder_layers[0].weight.grad.abs().max() == 0
    assert model.joint.enc.weight.grad.abs().max() > 0


@pytest.mark.parametrize(("weight", "moves"), [slow(None, True), (0.0, False)])
def test_both_heads_are_trained_unless_the_weight_is_zero(archive_of, run_train, tiny_run, tmp_path, weight, moves):
    path = str(archive_of("hybrid-tdt"))
    model = {**DETERMINISTIC, "name": path, "ctc_loss_weight": weight}
    assert run_train(*tiny_run(model=model, data=ONLY_TRAIN, training={"max_steps": 2})) == 0
    trained = load_model(str(tmp_path / "run"))
    assert type(trained).__name__ == "EncDecHybridRNNTCTCBPEModel"
    assert trained.cfg.aux_ctc.ctc_loss_weight == (0.3 if weight is None else weight)
    before, after = load_model(path).state_dict(), trained.state_dict()
    assert torch.equal(
        before["ctc_decoder.decoder_layers.0.weight"], after["ctc_decoder.decoder_layers.0.weight"]
    ) is (not moves)
    assert not torch.equal(before["joint.joint_net.2.weight"], after["joint.joint_net.2.weight"])
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 2


def test_the_plans_model_has_both_heads(archive_of):
    from finetune.tools.planning.layout import Skeleton, read_layout

    layout = read_layout(str(archive_of("hybrid-tdt")))
    published = load_model(str(archive_of("hybrid-tdt")))
    names = {name for name, _ in published.named_parameters() if name.startswith("ctc_decoder.")}
    assert names == {name for name, _ in Skeleton(layout).named_parameters() if name.startswith("ctc_decoder.")}
