"""Strategies that change how the encoder is trained: each has to do what it says, and to leave alone what it does not
change."""

import contextlib
import copy
import functools
import math
from typing import Any

import pytest
import torch
from conftest import read_lines, slow
from memory_cases import assert_same, batch, forward_and_backward, losses, saved_storages

from finetune.errors import UserError
from finetune.strategies.activation_offload import ActivationOffload

STEPS = 20

# ---- what leaves the mathematics alone ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("--strategy", "gradient_checkpointing_every_2"),
        slow(("--strategy", "activation_offload")),
        slow(("--strategy", "activation_offload", "--strategy", "gradient_checkpointing")),
        ("model.scaled_dot_product_attention=true",),
    ],
    ids=lambda a: "+".join(v for v in a if v != "--strategy"),
)
def test_losses_equal_plain_adamw(train, plain_losses, arguments, monkeypatch, capfd):
    monkeypatch.setattr("finetune.strategies.activation_offload.THRESHOLD", 1024)
    curve = losses(train("run", *arguments))
    assert curve == pytest.approx(plain_losses, rel=1e-4)
    told = capfd.readouterr().err
    assert ("activation offload gains nothing here" in told) == ("activation_offload" in arguments)
    assert ("of the first batch wait in host memory" in told) == ("activation_offload" in arguments)
    assert ("gradient checkpointing of 1 of 2" in told) == ("gradient_checkpointing_every_2" in arguments)
    assert ("gradient checkpointing of 2 of 2" in told) == ("gradient_checkpointing" in arguments)


def test_one_batch_of_16_equals_four_of_4(train):
    """Accumulated: the sum of the losses is divided by what the whole step holds."""
    curves = {}
    for clips, batches in ((16, 1), (4, 4)):
        sizes = (f"training.per_device_train_batch_size={clips}", f"training.gradient_accumulation_steps={batches}")
        rows = read_lines(train(f"{batches}x{clips}", *sizes) / "metrics.jsonl")
        assert {row["samples"] for row in rows} >= {16, 24, 40}
        curves[clips] = [value for row in rows for value in (row["loss"], row["grad_norm"])]
    assert curves[4] == pytest.approx(curves[16], rel=1e-4)


def test_every_second_layer_is_computed_twice(tiny):
    from finetune.strategies.checkpointing import enable_gradient_checkpointing

    plain = forward_and_backward(tiny())
    model = tiny()
    enable_gradient_checkpointing(model, every=2)
    computed: list[str] = []
    for name, module in (("subsampling", model.encoder.pre_encode.conv[0]), *enumerate(model.encoder.layers)):
        inner = getattr(module, "norm_feed_forward1", module)
        inner.register_forward_hook(lambda *_, name=name: computed.append(str(name)))
    assert_same(forward_and_backward(model), plain, 1e-6)
    assert sorted(computed) == ["0", "0", "1", "subsampling", "subsampling"]
    computed.clear()
    model.eval()
    forward_and_backward(model)
    assert sorted(computed) == ["0", "1", "subsampling"]


def test_checkpointing_hands_its_inputs_over_by_position(tiny, monkeypatch):
    """torch looks only there for GPUs whose random state it keeps; without it dropout would draw another mask."""
    from finetune.strategies import checkpointing

    seen = []

    def watch(function: Any, *inputs: Any, **options: Any) -> Any:
        seen.append((inputs, set(options)))
        return torch.utils.checkpoint.checkpoint(function, *inputs, **options)

    monkeypatch.setattr(checkpointing, "checkpoint", watch)
    model = tiny()
    checkpointing.enable_gradient_checkpointing(model)
    forward_and_backward(model)
    assert len(seen) == 3
    assert all(
        isinstance(inputs[0], torch.Tensor) and options == {"use_reentrant", "context_fn"} for inputs, options in seen
    )


def test_a_copy_of_an_encoder_computes_with_its_own_weights(tiny):
    from finetune.strategies.checkpointing import enable_gradient_checkpointing
    from finetune.strategies.compilation import compile_layers

    model = tiny()
    compile_layers(model, backend="eager")
    enable_gradient_checkpointing(model)
    other = copy.deepcopy(model.encoder)
    for layer in other.layers:
        layer.norm_out.weight.data.zero_()
        layer.norm_out.bias.data.zero_()
        assert layer.forward.__self__ is layer
    with torch.no_grad():
        assert not other(**batch())[0].any()
        assert model.encoder(**batch())[0].any()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_offload_copies_each_storage_once_and_nothing_else(tiny, checkpointing):
    from finetune.strategies.checkpointing import enable_gradient_checkpointing

    def model() -> Any:
        made = tiny()
        if checkpointing:
            enable_gradient_checkpointing(made)
        return made

    theirs = model()
    kept = saved_storages(theirs, lambda: theirs.encoder(**batch()))
    big = [t.untyped_storage().nbytes() for t in kept.values() if t.untyped_storage().nbytes() >= 2048]
    assert 0 < len(big) < len(kept)

    ours = model()
    offload = ActivationOffload(ours.encoder, threshold=2048)
    assert_same(forward_and_backward(ours, offload()), forward_and_backward(model()), 1e-7)
    assert offload.bytes == sum(big)
    layer_input = 2 * math.ceil(300 / 8) * 32 * 4  # bytes of (B, T, H)
    assert offload.bytes >= 2 * layer_input
    forward_and_backward(ours, offload(), **batch((200, 200, 200), seed=1))
    assert offload.bytes != sum(big), "counted anew for each batch"


def test_offload_keeps_values_while_memory_is_reused_and_the_graph_is_walked_twice():
    """A tensor that is freed gives its address to the next one, which must not be taken for it."""
    weight = torch.nn.Linear(64, 64, bias=False)
    x = torch.randn(32, 64, requires_grad=True)
    offload = ActivationOffload(weight, threshold=1024)
    results = []
    for context in (None, offload()):
        hidden = x
        with context or contextlib.nullcontext():
            for _ in range(6):
                wide = torch.exp(weight(hidden)).view(8, 4, 64).transpose(0, 1)  # a view that is not contiguous
                hidden = (wide.square() + wide.sin()).transpose(0, 1).reshape(32, 64).tanh()
                del wide
        total = hidden.sum()
        results.append([torch.autograd.grad(total, [x, weight.weight], retain_graph=i == 0) for i in range(2)])
    assert offload.bytes > 0
    for plain, offloaded in zip(*results, strict=True):
        for a, b in zip(plain, offloaded, strict=True):
            assert torch.equal(a, b)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_offload_frees_gpu_memory_and_gives_the_same_gradients(tiny):
    results, kept = [], []
    for offloading in (False, True):
        model = tiny().cuda()
        inputs = {name: tensor.cuda() for name, tensor in batch((3000, 2000, 3000, 1000)).items()}
        offload = ActivationOffload(model.encoder, threshold=2**16)
        for _ in range(3):
            results.append(forward_and_backward(model, offload() if offloading else None, **inputs))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with offload() if offloading else contextlib.nullcontext():
            out = model.encoder(**inputs)
        torch.cuda.synchronize()
        kept.append(torch.cuda.memory_allocated() - before)
        del out
    for other in results[1:]:
        assert_same(other, results[0])
    assert kept[1] < 0.6 * kept[0]


# ---- attention -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_fused_attention_is_called_and_computes_the_same(tiny, monkeypatch, precision):
    """One clip is far shorter than the other, so that most of its rows are masked as a whole."""
    from finetune.strategies.attention import use_scaled_dot_product_attention

    calls = []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def watch(*arguments: Any, **options: Any) -> torch.Tensor:
        calls.append(options["dropout_p"])
        return kernel(*arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watch)
    inputs = batch((640, 40))
    results = []
    for fused in (False, True):
        model = tiny()
        if fused:
            assert use_scaled_dot_product_attention(model) == 2
        for layer in model.encoder.layers:  # random weights leave the position biases at zero
            for bias in (layer.self_attn.pos_bias_u, layer.self_attn.pos_bias_v):
                torch.nn.init.normal_(bias, generator=torch.Generator().manual_seed(0))
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision is torch.bfloat16)
        results.append(forward_and_backward(model, autocast, **inputs))
    assert calls == [0.0, 0.0]
    if precision is torch.bfloat16:  # eight bits of mantissa: gradients agree in direction only
        results = [{name: result[name] for name in ("output",)} for result in results]
    assert_same(results[1], results[0], 1e-4 if precision is torch.float32 else 0.05)
    model = tiny(dropout=0.25)
    use_scaled_dot_product_attention(model)
    model.encoder(**inputs)
    model.eval()
    model.encoder(**inputs)
    assert calls[2:] == [0.25, 0.25, 0, 0]


def test_fused_attention_takes_the_layouts_kernels_and_refuses_local_attention(tiny):
    from torch.nn.attention import SDPBackend

    from finetune.strategies.attention import use_scaled_dot_product_attention

    model = tiny()
    for layer in model.encoder.layers:
        layer.self_attn.use_pytorch_sdpa_backends = ["MATH"]
    use_scaled_dot_product_attention(model)
    assert model.encoder.layers[0].self_attn.use_pytorch_sdpa_backends == [SDPBackend.MATH]
    assert_same(forward_and_backward(model), forward_and_backward(tiny()))
    model.encoder.self_attention_model = "rel_pos_local_attn"
    with pytest.raises(UserError, match=r"rel_pos_local_attn.*Set model.scaled_dot_product_attention: false"):
        use_scaled_dot_product_attention(model)


# ---- compilation ---------------------------------------------------------------------------------------------------


@pytest.fixture
def graphs() -> Any:
    """`graphs()` is the number of graphs that torch.compile has made in this test."""
    import torch._dynamo as dynamo

    dynamo.reset()
    dynamo.utils.counters.clear()
    yield lambda: dynamo.utils.counters["stats"]["unique_graphs"]
    assert not dynamo.utils.counters["graph_break"]
    dynamo.reset()


@pytest.mark.slow
def test_one_graph_for_all_layers_and_lengths(tiny, graphs):
    from finetune.strategies.checkpointing import enable_gradient_checkpointing
    from finetune.strategies.compilation import compile_layers

    sizes = [(300, 180), (301, 299), (250, 90, 140), (400, 400, 80, 90), (123, 64), (222, 150, 200)]
    compiled, plain = tiny(), tiny()
    names = list(compiled.state_dict())
    assert compile_layers(compiled, backend="eager") == 2
    assert list(compiled.state_dict()) == names
    for seed, lengths in enumerate(sizes):
        inputs = batch(lengths, seed)
        assert_same(forward_and_backward(compiled, **inputs), forward_and_backward(plain, **inputs), 1e-6)
    assert graphs() == 1
    compiled.eval()
    with torch.no_grad():
        compiled.encoder(**batch((90, 80)))
    compiled.train()
    assert graphs() == 1, "evaluations run without compilation"
    enable_gradient_checkpointing(compiled)
    enable_gradient_checkpointing(plain)
    offload = ActivationOffload(compiled.encoder, threshold=1024)
    for seed, lengths in enumerate(sizes):
        inputs = batch(lengths, seed)
        assert_same(forward_and_backward(compiled, offload(), **inputs), forward_and_backward(plain, **inputs), 1e-6)
    assert offload.bytes
    assert graphs() == 2, "one more for the recomputation, in which BatchNorm does not count"
    statistics = [
        {k: v for k, v in m.state_dict().items() if "running" in k or "tracked" in k} for m in (compiled, plain)
    ]
    assert_same(
        {k: v.float() for k, v in statistics[0].items()}, {k: v.float() for k, v in statistics[1].items()}, 1e-6
    )


@pytest.mark.slow
def test_compiled_layers_train_like_plain_ones(train, plain_losses, graphs, tiny_model, monkeypatch):
    """Backend "eager" runs the captured graph as it is; to make kernels of it takes minutes on a small CPU."""
    from finetune.models.loading import load_model
    from finetune.strategies import encoder

    monkeypatch.setattr(encoder, "compile_layers", functools.partial(encoder.compile_layers, backend="eager"))
    run = train("compiled", "model.compile=true")
    assert losses(run) == pytest.approx(plain_losses, rel=1e-4)
    assert graphs() == 1
    assert list(load_model(str(run)).state_dict()) == list(load_model(str(tiny_model)).state_dict())


def test_lengths_are_padded_to_buckets_and_losses_stay(tiny_model):
    """BatchNorm on its stored statistics: in others the padding counts."""
    from finetune.models.loading import load_model
    from finetune.models.loss_module import LossModule
    from finetune.models.nemo import prepare_for_training

    model = load_model(str(tiny_model))
    prepare_for_training(model, spec_augment=False, dropout=0.0, freeze_batchnorm=True)
    frames = []
    model.encoder.register_forward_pre_hook(
        lambda _, args, kwargs: frames.append(kwargs["audio_signal"].size(2)), with_kwargs=True
    )
    for samples in (9_000, 15_000, 20_000):
        batch = (
            torch.randn(2, samples, generator=torch.Generator().manual_seed(samples)),
            torch.tensor([samples, samples - 3_000]),
            torch.tensor([[5, 9], [7, 3]]),
            torch.tensor([2, 1]),
        )
        plain = LossModule(model).train()(*batch)
        padded = LossModule(model, length_bucket=0.5).train()(*batch)
        torch.testing.assert_close(padded, plain, rtol=1e-5, atol=1e-5)
    assert [f % 50 for f in frames[1::2]] == [0, 0, 0]
    assert all(f % 50 for f in frames[0::2])


# ---- precision and pairs -------------------------------------------------------------------------------------------


def test_tf32_is_switched_on_and_otherwise_left_alone(messages, monkeypatch):
    from finetune.training.run import allow_tf32

    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        allow_tf32(False)
        assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (False, False)
        allow_tf32(True)
        assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (True, True)
        assert "in TF32" in messages[-1]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        allow_tf32(True)
        assert "no effect: there is no GPU" in messages[-1]
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ({"lora_rank": 4, "freeze_encoder": True}, ("model.lora_rank", "model.freeze_encoder: false")),
        ({"lora_rank": 4, "sync_batchnorm": True}, ("model.sync_batchnorm: false",)),
        ({"freeze_encoder": True, "sync_batchnorm": True}, ("model.sync_batchnorm: false",)),
    ],
)
def test_pairs_that_make_no_sense(refused, run_file, pair, words):
    message = refused("--config", run_file(**{f"model__{key}": value for key, value in pair.items()}))
    assert all(word in message for word in words)
