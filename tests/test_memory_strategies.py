"""Strategies that change how the encoder is trained: each has to do what it says, and to leave alone what it does not change."""

import contextlib
import copy
import functools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import read_lines, tiny_layout
from safetensors.torch import load_file

from finetune.errors import UserError
from finetune.strategies.activation_offload import ActivationOffload

DETERMINISTIC = {"spec_augment": False, "dropout": 0.0, "freeze_batchnorm": True}
ONLY_TRAIN = {"validation": None, "test": None, "shuffle": False, "group_by_duration": False}
STEPS = 20


@pytest.fixture
def tiny(tiny_model: Path) -> Callable[[], Any]:
    """Loads the tiny model, in training mode, without anything random in it."""
    from finetune.models.nemo import load_model, prepare_for_training, set_train_mode

    def load(dropout: float = 0.0) -> Any:
        model = load_model(str(tiny_model))
        prepare_for_training(model, spec_augment=False, dropout=dropout, freeze_batchnorm=False)
        set_train_mode(model)
        return model

    return load


def batch(sizes: tuple[int, ...] = (300, 180), seed: int = 0) -> dict[str, torch.Tensor]:
    """Mel frames of clips of these lengths, as the encoder takes them."""
    mel_BFT = torch.randn(len(sizes), 80, max(sizes), generator=torch.Generator().manual_seed(seed))
    return {"audio_signal": mel_BFT, "length": torch.tensor(sizes)}


def forward_and_backward(model: Any, context: Any = None, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Encoder output and gradients; the sum of cubes, since that of squares is constant behind a layer norm."""
    model.zero_grad()
    with context or contextlib.nullcontext():
        enc_BHT, _ = model.encoder(**(inputs or batch()))
    (enc_BHT**3).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"output": enc_BHT.detach(), **gradients}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float = 1e-4) -> None:
    assert ours.keys() == theirs.keys()
    for name in theirs:
        scale = float(theirs[name].abs().max()) + 1e-6
        assert torch.isfinite(theirs[name]).all(), name
        torch.testing.assert_close(ours[name] / scale, theirs[name] / scale, rtol=0, atol=tolerance, msg=name)


def saved_storages(model: Any, run: Callable[[], Any]) -> dict[int, torch.Tensor]:
    """What autograd keeps of a forward besides parameters and buffers, one tensor a storage."""
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # alive, so that no other gets the same address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return kept


def saved_bytes(model: Any, **inputs: torch.Tensor) -> int:
    kept = saved_storages(model, lambda: model.encoder(**(inputs or batch())))
    return sum(t.untyped_storage().nbytes() for t in kept.values())


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_lines(run / "metrics.jsonl")]


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text(encoding="utf-8"))


_plain: list[float] = []


@pytest.fixture
def train(run_train: Callable[..., int], tiny_run: Callable[..., Any], tmp_path: Path) -> Callable[..., Path]:
    """Trains the tiny model for 20 steps without anything random; returns the run's directory."""

    def run(name: str, *arguments: str, model: dict[str, Any] | None = None, **training: Any) -> Path:
        settings = {"max_steps": STEPS, "output_dir": str(tmp_path / name), "learning_rate": 3e-3, **training}
        settings = {"save_steps": 0, "eval_on_start": False, **settings}
        run_file = tiny_run(model={**DETERMINISTIC, **(model or {})}, data=ONLY_TRAIN, training=settings)
        assert run_train(*run_file, *arguments) == 0
        return tmp_path / name

    return run


@pytest.fixture
def plain_losses(train: Callable[..., Path]) -> list[float]:
    """Losses of plain AdamW, trained once for all tests."""
    if not _plain:
        _plain.extend(losses(train("plain", "--strategy", "adamw")))
        assert _plain[-1] < 0.9 * _plain[0], "it has to learn something for the comparison to mean much"
    return _plain


# ---- what leaves the mathematics alone ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("--strategy", "gradient_checkpointing_every_2"),
        ("--strategy", "activation_offload"),
        ("--strategy", "activation_offload", "--strategy", "gradient_checkpointing"),
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
    """torch looks only there for GPUs whose random state has to be kept; without it dropout would draw another mask."""
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


def test_compiled_layers_train_like_plain_ones(train, plain_losses, graphs, tiny_model, monkeypatch):
    """ "eager" runs the graph that torch.compile caught as it is; to make kernels of it takes minutes on a small CPU."""
    from finetune.models.nemo import load_model
    from finetune.strategies import encoder

    monkeypatch.setattr(encoder, "compile_layers", functools.partial(encoder.compile_layers, backend="eager"))
    run = train("compiled", "model.compile=true")
    assert losses(run) == pytest.approx(plain_losses, rel=1e-4)
    assert graphs() == 1
    assert list(load_model(str(run)).state_dict()) == list(load_model(str(tiny_model)).state_dict())


def test_lengths_are_padded_to_buckets_and_losses_stay(tiny_model):
    """BatchNorm on its stored statistics: in others the padding counts."""
    from finetune.models.nemo import load_model, prepare_for_training
    from finetune.models.transducer import TransducerLossModule

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
        plain = TransducerLossModule(model).train()(*batch)
        padded = TransducerLossModule(model, length_bucket=0.5).train()(*batch)
        torch.testing.assert_close(padded, plain, rtol=1e-5, atol=1e-5)
    assert [f % 50 for f in frames[1::2]] == [0, 0, 0]
    assert all(f % 50 for f in frames[0::2])


# ---- freezing ------------------------------------------------------------------------------------------------------


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    """Weights in a run's last checkpoint, under NeMo's names."""
    newest = sorted((path / "checkpoints").glob("step-*"))[-1]
    return {k.removeprefix("nemo."): v for k, v in load_file(newest / "model.safetensors").items()}


@pytest.mark.parametrize("layers", [0, 1])
def test_frozen_layers_stay_as_they_are_and_cost_nothing(train, tiny_model, layers):
    """BatchNorm and dropout are on, so that a frozen module left in training mode would show."""
    from finetune.models.nemo import load_model

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
    from finetune.models.nemo import load_model
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

    from finetune.models.transducer import TransducerLossModule
    from finetune.strategies.freezing import freeze_encoder
    from finetune.strategies.lora import add_lora

    model = tiny()
    if kind == "lora":
        add_lora(model, rank=2, targets=["linear_q"])
    else:
        freeze_encoder(model, 0 if kind == "frozen" else 1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        module = torch.nn.parallel.DistributedDataParallel(TransducerLossModule(model)).train()
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
    from finetune.models.nemo import load_model
    from finetune.strategies.lora import merge_saved_lora

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
    from finetune.models.nemo import load_model, load_weights, save_nemo, set_train_mode
    from finetune.strategies.lora import add_lora, merged_state_dict

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


def test_lora_run_ends_with_the_best_model(run_train, tiny_run, tmp_path, tiny_model):
    """No evaluation beats the base model, so the run goes back to it, merged, and measures it."""
    from finetune.models.nemo import load_model

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
