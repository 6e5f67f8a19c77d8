"""Training less than everything: frozen encoders, and LoRA adapters in them."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import DETERMINISTIC, ONLY_TRAIN, tiny_layout
from launching import summary
from memory_cases import batch, forward_and_backward, losses, saved_bytes
from safetensors.torch import load_file

from finetune.errors import UserError

STEPS = 20

# ---- freezing ------------------------------------------------------------------------------------------------------


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    """Weights in a run's last checkpoint, under NeMo's names."""
    newest = sorted((path / "checkpoints").glob("step-*"))[-1]
    return {k.removeprefix("nemo."): v for k, v in load_file(newest / "model.safetensors").items()}


@pytest.mark.parametrize("layers", [0, 1])
def test_frozen_layers_stay_as_they_are_and_cost_nothing(train, tiny_model, layers):
    """BatchNorm and dropout are on, so that a frozen module left in training mode would show."""
    from finetune.models.loading import load_model

    base = load_model(str(tiny_model)).state_dict()
    strategy = ["--strategy", "partial_unfreeze", f"model.unfreeze_encoder_layers={layers}"]
    strategy = strategy if layers else ["--strategy", "freeze_encoder"]
    run = train("run", *strategy, model={"freeze_batchnorm": False, "dropout": 0.1}, max_steps=6)
    after = weights_of(run)
    frozen = {n for n in base if n.startswith("encoder.") and not (layers and n.startswith("encoder.layers.1."))}
    assert all(torch.equal(after[n], base[n]) for n in frozen)
    moved = {n for n in base if not torch.equal(after[n], base[n])}
    trained = {n for n in base if n not in frozen and not n.startswith("preprocessor")}
    # behind a softmax the bias of the keys changes nothing, and its gradient is rounding
    assert trained - moved <= {n for n in base if n.endswith(("linear_k.bias", "depthwise_conv.bias"))}
    told = summary(run)
    parameters = sum(base[n].numel() for n in trained if "running_" not in n and "num_batches" not in n)
    assert told["trainable_parameters"] == parameters
    assert told["optimizer_state_bytes"] == pytest.approx(8 * parameters, rel=0.02)


def test_frozen_layers_store_no_activations(tiny):
    from finetune.models.nemo import set_train_mode
    from finetune.strategies.checkpointing import enable_gradient_checkpointing
    from finetune.strategies.freezing import freeze_encoder

    everything = saved_bytes(tiny())
    sizes = []
    for trained in (0, 1, 2):
        model = tiny()
        freeze_encoder(model, trained)
        set_train_mode(model)
        sizes.append(saved_bytes(model))
        modes = {layer.training for layer in list(model.encoder.layers)[2 - trained :]}
        assert modes == ({True} if trained else set())
        assert not any(m.training for m in model.encoder.pre_encode.modules())
        assert model.decoder.training
    assert sizes[0] == 0
    assert 0 < sizes[1] < sizes[2] < everything
    assert sizes[2] == pytest.approx(2 * sizes[1], rel=0.1)
    model = tiny()
    freeze_encoder(model, 1)
    enable_gradient_checkpointing(model)
    set_train_mode(model)
    assert saved_bytes(model) < 0.2 * sizes[1]


def test_position_biases_that_layers_share_stay_frozen(tmp_path):
    from finetune.models.loading import load_model
    from finetune.strategies.freezing import freeze_encoder

    layout = tiny_layout()
    layout["model"]["encoder"]["untie_biases"] = False
    path = tmp_path / "tied.yaml"
    path.write_text(yaml.safe_dump(layout), encoding="utf-8")
    model = load_model(str(path))
    freeze_encoder(model, 1)
    assert model.encoder.layers[0].self_attn.pos_bias_u is model.encoder.layers[1].self_attn.pos_bias_u
    assert not model.encoder.layers[1].self_attn.pos_bias_u.requires_grad
    assert model.encoder.layers[1].self_attn.linear_q.weight.requires_grad


def test_more_layers_than_the_encoder_has(failed, tiny_run):
    message = failed(2, *tiny_run(data=ONLY_TRAIN), "--strategy", "partial_unfreeze")
    assert "model.unfreeze_encoder_layers: 4 layers are to be trained, but the encoder has 2" in message
    assert "from 0 to 2" in message


@pytest.mark.parametrize("kind", ["frozen", "partial", "lora"])
def test_ddp_does_not_wait_for_what_is_frozen(tiny, tmp_path, kind):
    """DDP stops the second forward where a parameter that it expects got no gradient in the first."""
    from conftest import reset_process

    from finetune.models.loss_module import LossModule
    from finetune.strategies.freezing import freeze_encoder
    from finetune.strategies.lora import add_lora

    model = tiny()
    if kind == "lora":
        add_lora(model, rank=2, targets=["linear_q"])
    else:
        freeze_encoder(model, 0 if kind == "frozen" else 1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        module = torch.nn.parallel.DistributedDataParallel(LossModule(model)).train()
        for _ in range(2):
            module(
                torch.randn(2, 16000),
                torch.tensor([16000, 9000]),
                torch.tensor([[3, 4], [5, 6]]),
                torch.tensor([2, 1]),
            ).sum().backward()
    finally:
        reset_process()
    assert any(p.grad is not None and p.grad.any() for p in model.decoder.parameters())


# ---- LoRA ----------------------------------------------------------------------------------------------------------

LORA = ("--strategy", "lora", "model.lora_rank=4")


def test_lora_trains_adapters_and_resumes_exactly(train, tiny_model):
    from finetune.models.adapters import merge_saved_lora
    from finetune.models.loading import load_model

    options = {
        "model": {"dropout": 0.1, "freeze_batchnorm": False},
        "max_steps": 8,
        "save_steps": 4,
        "save_total_limit": 0,
    }
    whole = train("whole", *LORA, **options)
    shutil.copytree(whole, whole.with_name("resumed"))
    shutil.rmtree(whole.with_name("resumed") / "checkpoints" / "step-00000008")
    resumed = train("resumed", *LORA, "training.resume_from_checkpoint=true", **options)
    assert summary(resumed)["resumed_from"] == 4
    assert losses(resumed) == losses(whole)
    state, again = weights_of(whole), weights_of(resumed)
    assert all(torch.equal(state[name], again[name]) for name in state)

    base = load_model(str(tiny_model)).state_dict()
    adapters = {name for name in state if ".lora_" in name}
    assert len(adapters) == 2 * 2 * (4 + 4)  # A and B, two layers, attention and the two feed-forwards
    assert all(state[name].any() for name in adapters), "the second factors have left zero"
    for name in set(state) - adapters:
        original = name.replace(".base_layer.", ".")
        same = torch.equal(state[name], base[original])
        assert same or not name.startswith("encoder."), name
    assert not torch.equal(state["joint.joint_net.2.weight"], base["joint.joint_net.2.weight"])

    restored = load_model(str(whole)).state_dict()
    merged = merge_saved_lora(state, scaling=2.0)
    assert list(restored) == list(base)
    assert merged.keys() == base.keys()
    assert all(torch.equal(restored[name], merged[name]) for name in base)
    assert not torch.equal(
        restored["encoder.layers.0.self_attn.linear_q.weight"], base["encoder.layers.0.self_attn.linear_q.weight"]
    )


def test_a_merged_model_computes_the_same_and_comes_back(tiny, tiny_model, tmp_path):
    """After some steps of training: merged equals unmerged, adapters off differ, and saving changes nothing."""
    from finetune.evaluation.recognise import evaluation_mode, recognise_batch
    from finetune.models.adapters import merged_state_dict
    from finetune.models.loading import load_model
    from finetune.models.nemo import set_train_mode
    from finetune.models.nemo_archive import load_weights, save_nemo
    from finetune.strategies.lora import add_lora

    def outputs(model: Any) -> torch.Tensor:
        with evaluation_mode(model):
            return model.encoder(**batch())[0]

    def texts(model: Any) -> list[str]:
        audio_BS = torch.randn(2, 32000, generator=torch.Generator().manual_seed(0))
        with evaluation_mode(model):
            return [h.y_sequence.tolist() for h in recognise_batch(model, audio_BS, torch.tensor([32000, 20000]))]

    model = tiny()
    untouched = outputs(model)
    assert add_lora(model, rank=4, alpha=12, targets=["linear_q", "linear_pos", "linear2"]) == 2 * 4
    assert torch.equal(outputs(model), untouched), "adapters add nothing at first"
    set_train_mode(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(4):
        forward_and_backward(model)
        optimizer.step()
    with_adapters = outputs(model)
    for module in model.encoder.modules():
        if hasattr(module, "enable_adapters"):
            module.enable_adapters(False)
    assert float((outputs(model) - with_adapters).abs().max()) > 0.01, "the adapters take part"
    torch.testing.assert_close(outputs(model), untouched)
    for module in model.encoder.modules():
        if hasattr(module, "enable_adapters"):
            module.enable_adapters(True)

    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_nemo(model, tmp_path / "model.nemo")
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    restored = load_model(str(tmp_path / "model.nemo"))
    assert list(restored.state_dict()) == list(load_model(str(tiny_model)).state_dict())
    torch.testing.assert_close(outputs(restored), with_adapters, rtol=0, atol=1e-5)
    assert texts(restored) == texts(model)

    forward_and_backward(model)
    optimizer.step()
    assert float((outputs(model) - with_adapters).abs().max()) > 1e-3
    load_weights(model, tmp_path / "model.nemo")
    torch.testing.assert_close(outputs(model), with_adapters, rtol=0, atol=1e-5)
    assert all(torch.equal(merged_state_dict(model)[n], t) for n, t in restored.state_dict().items())


@pytest.mark.slow
def test_lora_run_ends_with_the_best_model(run_train, tiny_run, tmp_path, tiny_model):
    """No evaluation beats the base model, so the run goes back to it, merged, and measures it."""
    from finetune.models.loading import load_model

    training = {"max_steps": 2, "learning_rate": 1e-12}
    assert run_train(*tiny_run(model=DETERMINISTIC, data={"test": None}, training=training), *LORA) == 0
    told = summary(tmp_path / "run")
    assert told["best_step"] == 0
    assert told["wer_after"] == told["wer_before"]
    base, kept = load_model(str(tiny_model)).state_dict(), load_model(str(tmp_path / "run")).state_dict()
    assert all(torch.equal(base[name], kept[name]) for name in base)


def test_lora_with_settings_that_make_no_sense(tiny):
    from finetune.strategies.lora import add_lora

    with pytest.raises(
        UserError, match=r"no linear layer linear_x; they have linear1, linear2, linear_k, linear_out, .*linear_v"
    ):
        add_lora(tiny(), rank=4, targets=["linear_q", "linear_x"])
    with pytest.raises(UserError, match="the list is empty"):
        add_lora(tiny(), rank=4, targets=[])
    for wrong in ({"rank": -1}, {"rank": 4, "alpha": 0.0}, {"rank": 4, "dropout": 1.0}):
        with pytest.raises(UserError, match=r"Try lora_rank: 16"):
            add_lora(tiny(), targets=["linear_q"], **wrong)


def test_adapters_keep_batchnorm_on_its_stored_statistics(tiny):
    from finetune.models.nemo import learning_batchnorms, set_train_mode
    from finetune.strategies.freezing import freeze_encoder
    from finetune.strategies.lora import add_lora

    model = tiny(dropout=0.1)
    assert len(learning_batchnorms(model)) == 2
    add_lora(model, rank=4, targets=["linear_q"])
    set_train_mode(model)
    assert not learning_batchnorms(model)
    assert not model.encoder.layers[0].conv.batch_norm.training
    assert model.encoder.layers[0].training, "dropout stays on"
    model = tiny()
    freeze_encoder(model, 1)
    assert learning_batchnorms(model) == [model.encoder.layers[1].conv.batch_norm]
