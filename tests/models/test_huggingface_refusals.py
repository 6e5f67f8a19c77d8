"""What the conversion refuses, what it says, and that nothing is left of a model that is not the same; without NeMo,
too."""

import copy
import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, read_lines, write_manifest

from finetune.errors import UserError
from finetune.models.huggingface.writing import check_expressible, write_hugging_face
from finetune.models.nemo_archive import read_nemo

BASE = ROOT / "examples" / "base" / "fastconformer_tdt_3m.nemo"
_read: list[Any] = []


@pytest.fixture
def nemo() -> Any:
    """The base model as read from its file, to be changed."""
    if not _read:
        _read.append(read_nemo(BASE))
    return copy.deepcopy(_read[0])


def reasons(nemo: Any) -> str:
    with pytest.raises(UserError) as caught:
        check_expressible(nemo)
    assert caught.value.exit_code == 2
    assert str(nemo.path) in str(caught.value)
    return str(caught.value)


CASES = [
    ("preprocessor", "normalize", "all_features", "preprocessor.normalize: 'all_features'"),
    ("preprocessor", "window", "hamming", "preprocessor.window: 'hamming'"),
    ("preprocessor", "pad_value", -16.0, "preprocessor.pad_value: -16.0"),
    ("preprocessor", "frame_splicing", 2, "preprocessor.frame_splicing: 2"),
    ("preprocessor", "highfreq", 7600, "preprocessor.highfreq: 7600"),
    ("preprocessor", "log_zero_guard_type", "clamp", "preprocessor.log_zero_guard_type: 'clamp'"),
    ("preprocessor", "exact_pad", True, "preprocessor.exact_pad: True"),
    ("encoder", "subsampling", "striding", "encoder.subsampling: 'striding'"),
    ("encoder", "causal_downsampling", True, "encoder.causal_downsampling: True"),
    ("encoder", "conv_context_size", "causal", "encoder.conv_context_size: 'causal'"),
    ("encoder", "att_context_size", [128, 128], "encoder.att_context_size: [128, 128]"),
    ("encoder", "self_attention_model", "rel_pos_local_attn", "encoder.self_attention_model: 'rel_pos_local_attn'"),
    ("encoder", "conv_norm_type", "layer_norm", "encoder.conv_norm_type: 'layer_norm'"),
    ("encoder", "reduction", "pooling", "encoder.reduction: 'pooling'"),
    ("encoder", "feat_in", 100, "encoder.feat_in: 100 mel bins are not divisible"),
    ("encoder", "subsampling_factor", 6, "encoder.subsampling_factor: 6"),
    (
        "encoder",
        "_target_",
        "nemo.collections.asr.modules.SqueezeformerEncoder",
        "SqueezeformerEncoder is no ConformerEncoder",
    ),
    ("decoder", "normalization_mode", "layer", "decoder.normalization_mode: 'layer'"),
    ("decoder", "blank_as_pad", False, "decoder.blank_as_pad: false"),
    ("decoder", "_target_", "nemo.collections.asr.modules.StatelessTransducerDecoder", "is no RNNTDecoder"),
    ("decoder", "prednet", {"pred_hidden": 144, "rnn_hidden_size": 64}, "decoder.prednet.rnn_hidden_size"),
    ("joint", "jointnet", {"joint_hidden": 100, "activation": "relu"}, "joint.jointnet.joint_hidden: 100"),
    ("joint", "jointnet", {"joint_hidden": 144, "activation": "gelu"}, "joint.jointnet.activation: 'gelu'"),
    ("joint", "num_extra_outputs", 4, "are not the joint's 4 outputs"),
    ("joint", "num_classes", 1024, "joint.num_classes: 1024"),
    ("loss", "tdt_kwargs", {"durations": [0, 1, 2, 4, 8]}, "durations: [0, 1, 2, 4, 8]"),
]


@pytest.mark.parametrize(("part", "key", "value", "said"), CASES, ids=[f"{c[0]}.{c[1]}-{c[2]}"[:60] for c in CASES])
def test_a_setting_that_transformers_has_not(nemo, part, key, value, said, monkeypatch):
    nemo.config[part][key] = value
    monkeypatch.setattr(nemo, "sentencepiece", nemo.sentencepiece)
    found = _without_tokenizer_check(nemo, monkeypatch)
    assert said in found
    assert found.count("\n") == 2, "no other reason"


def _without_tokenizer_check(nemo: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """The reasons; the tokenizer, which takes two seconds to try, is fine in all cases."""
    monkeypatch.setattr("finetune.models.huggingface.writing.encoding_differs", lambda *_: "")
    monkeypatch.setattr("finetune.models.huggingface.writing.decoding_differs", lambda *_: "")
    return reasons(nemo)


def test_every_reason_is_said_at_once(nemo):
    nemo.config["target"] = "nemo.collections.asr.models.EncDecMultiTalkerRNNTBPEModel"
    nemo.config["encoder"]["causal_downsampling"] = True
    nemo.config["preprocessor"]["mag_power"] = 1.0
    nemo.config["loss"]["tdt_kwargs"]["durations"] = [1, 2, 3, 4, 5]
    nemo.config["tokenizer"] = {"type": "agg", "langs": {"en": {}, "es": {}}}
    nemo.sentencepiece = None
    said = reasons(nemo)
    for words in (
        "EncDecMultiTalkerRNNTBPEModel",
        "causal_downsampling",
        "mag_power",
        "durations: [1, 2, 3, 4, 5]",
        "tokenizer.type: 'agg'",
        "Nothing was written",
        "--to nemo",
    ):
        assert words in said


def test_weights_that_transformers_has_no_place_for(nemo, monkeypatch):
    nemo.weights["decoder.prediction.embed.weight"][-1] = 0.5
    nemo.weights["encoder.layers.0.self_attn.linear_q.lora_A.default.weight"] = torch.zeros(2, 2)
    nemo.weights["preprocessor.featurizer.fb"] = nemo.weights["preprocessor.featurizer.fb"] * 2
    said = _without_tokenizer_check(nemo, monkeypatch)
    assert "the blank's row is not zero (up to 0.5)" in said
    assert "adapters have to be merged" in said
    assert "preprocessor.featurizer.fb is not what transformers makes" in said


def test_the_map_of_names_is_strict(nemo, tmp_path):
    nemo.weights["encoder.something.else"] = torch.zeros(3)
    del nemo.weights["joint.enc.bias"]
    nemo.weights["joint.pred.weight"] = torch.zeros(3, 144)
    with pytest.raises(UserError) as caught:
        write_hugging_face(nemo, tmp_path / "out")
    for words in (
        "encoder_projector.bias is missing",
        "encoder.something.else has no place",
        "(3, 144), not (144, 144)",
    ):
        assert words in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_tensors_that_share_memory_are_written_apart(nemo, tmp_path):
    """As those of a model whose layers share their position biases (untie_biases: false), or of one flat buffer."""
    from safetensors.torch import load_file

    shared = nemo.weights["encoder.layers.0.self_attn.pos_bias_u"]
    flat = torch.arange(2.0 * 144)
    nemo.weights["encoder.layers.3.self_attn.pos_bias_u"] = shared
    nemo.weights["encoder.layers.0.norm_out.weight"] = flat[:144]
    nemo.weights["encoder.layers.0.norm_out.bias"] = flat[144:]
    write_hugging_face(nemo, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    for layer in (0, 3):
        assert torch.equal(written[f"encoder.layers.{layer}.self_attn.bias_u"], shared)
    assert torch.equal(written["encoder.layers.0.norm_out.bias"], flat[144:])
    assert (tmp_path / "model.safetensors").stat().st_size < 1.1 * BASE.stat().st_size


def test_old_tables_of_positions_are_dropped(nemo):
    from finetune.models.huggingface.layout import kind_of, names_of, to_hugging_face, to_nemo

    names = names_of(kind_of(nemo.config), nemo.weights)
    assert to_hugging_face("encoder.pos_enc.pe", names) is None
    for key in nemo.weights:
        if not key.startswith("preprocessor."):
            assert to_nemo(to_hugging_face(key, names), names) == key
    assert len({to_hugging_face(key, names) for key in nemo.weights}) == len(nemo.weights) - 1  # window, fb: None


@pytest.mark.parametrize(
    ("model_type", "tokens", "parameters", "tensors"),
    [
        ("parakeet_tdt", 8192, 627_008_134, 723),
        ("parakeet_rnnt", 1024, 617_822_721, 723),
        ("parakeet_ctc", 1024, 609_930_241, 710),
        ("nemotron_asr_streaming", 1024, 618_084_865, 651),
        ("nemotron3_5_asr", 13087, 637_997_088, 655),
    ],
)
def test_the_settings_of_the_large_model_make_its_network(model_type, tokens, parameters, tensors):
    """Names and number of parameters at the size of the published models, without allocating them."""
    import transformers

    from finetune.models.huggingface.layout import (
        KINDS,
        STREAMING_ENCODER,
        model_settings,
        names_of,
        to_hugging_face,
        to_nemo,
    )
    from finetune.models.huggingface.reading import _recipe

    kind = KINDS[model_type]
    recipe = _recipe(kind)
    if kind.streaming:
        recipe["encoder"] |= {key: values[0] for key, values in STREAMING_ENCODER.items()}
        recipe["encoder"]["att_context_size"] = [[70, 13], [70, 0]]
    config = getattr(transformers, kind.config)(**model_settings(recipe, kind, tokens=tokens, pad_id=tokens))
    with torch.device("meta"):
        model = getattr(transformers, kind.name)(config)
    keys, names = list(model.state_dict()), names_of(kind, [])
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert len(keys) == len({to_nemo(key, names) for key in keys}) == tensors
    assert all(to_hugging_face(to_nemo(key, names), names) == key for key in keys)


def test_a_clip_of_one_frame_has_no_features_in_transformers(directory):
    """Why the documentation says so: the deviation of a single frame is 0 / 0 there, and NeMo takes care of it."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(directory)
    noise_S = np.random.default_rng(0).standard_normal(320).astype("float32")
    assert processor([noise_S[:300]], sampling_rate=16000)["input_features"].isnan().any()
    assert not processor([noise_S], sampling_rate=16000)["input_features"].isnan().any()


def export(*arguments: object) -> int:
    from finetune.export import main

    return main([str(a) for a in arguments])


def test_a_model_that_is_not_the_same_is_not_kept(tmp_path, monkeypatch, clips, capsys):
    from finetune.tools.export import hugging_face as module

    def damaged(nemo: Any, directory: Path, dtype: str) -> None:
        nemo.weights["encoder.layers.4.norm_out.bias"] = nemo.weights["encoder.layers.4.norm_out.bias"] + 0.3
        write_hugging_face(nemo, directory, dtype)

    monkeypatch.setattr(module, "write_hugging_face", damaged)
    arguments = ["--model", BASE, "--to", "hf", "--output", tmp_path / "out", "--data", clips / "manifest.jsonl"]
    assert export(*arguments) == 1
    said = capsys.readouterr().err
    assert "encoder outputs of NeMo single and transformers single differ" in said
    assert "allowed 0.001" in said
    found = re.search(r"clip (\S+): NeMo single gives '(.*)', transformers single gives '(.*)'", said)
    assert found is not None
    assert found[2] != found[3]
    assert found[1] in (clips / "manifest.jsonl").read_text()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_model_that_stays_on_a_frame_is_refused_with_the_cause(tiny_model, clips, tmp_path, capsys):
    """Where tokens of duration 0 come without end, NeMo goes on after ten of them and transformers does not."""
    from finetune.models.loading import load_model
    from finetune.models.nemo_archive import save_nemo

    model = load_model(str(tiny_model))
    with torch.no_grad():
        bias_V = model.joint.joint_net[-1].bias
        bias_V[128] = -50.0  # the blank
        bias_V[129] = 50.0  # duration 0
    save_nemo(model, tmp_path / "stuck.nemo")
    rows = [
        {**row, "audio_filepath": str(clips / row["audio_filepath"])} for row in read_lines(clips / "manifest.jsonl")
    ]
    two = write_manifest(tmp_path / "two.jsonl", rows[:2])
    arguments = ["--model", tmp_path / "stuck.nemo", "--to", "hf", "--output", tmp_path / "out", "--data", two]
    assert export(*arguments) == 1
    said = capsys.readouterr().err
    assert "tokens on one frame; NeMo goes on after 10, transformers never: the model is hardly trained" in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["stuck.nemo", "two.jsonl"]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("no/such/model.nemo", "there is no file or directory no/such/model.nemo (looked in "),
        ("finetune/configs/models/fastconformer_tdt_3m.yaml", "random weights"),
        ("pyproject.toml", "is no .nemo file"),
    ],
)
def test_models_that_are_none(model, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert export("--model", model, "--to", "hf", "--output", tmp_path / "out") == 2
    assert said in capsys.readouterr().err


def test_an_output_that_holds_something(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert export("--model", BASE, "--to", "hf", "--output", tmp_path) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_the_directory_that_the_command_runs_in(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for output in (".", tmp_path):
        assert export("--model", BASE, "--to", "hf", "--output", output) == 2
        assert "is the directory that this command runs in" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no torch file"),
        (b"no weights at all", "no torch file"),
        ("half", "no torch file"),
        (None, "ReadError"),
    ],
)
def test_a_nemo_file_that_is_damaged(content, said, tmp_path, capsys):
    """One line with the file and what to do; None: the archive itself is cut off."""
    bad = tmp_path / "bad.nemo"
    with tarfile.open(BASE) as whole, tarfile.open(bad, "w") as archive:
        for member in whole:
            if not member.isfile():
                continue
            data = whole.extractfile(member).read()
            if member.name.endswith("model_weights.ckpt") and content is not None:
                data = data[: len(data) // 2] if content == "half" else content
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    if content is None:
        bad.write_bytes(bad.read_bytes()[:100_000])
    assert export("--model", bad, "--to", "hf", "--output", tmp_path / "out") == 2
    lines = capsys.readouterr().err.strip().splitlines()
    part = " cannot be read as a NeMo model" if content is None else ": model_weights.ckpt cannot be read"
    assert re.search(rf"--model: .*bad\.nemo{part}: .*({said})", lines[-1])
    assert "copy or download it again" in lines[-1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.nemo"]


def _cut(text: str) -> str:
    return text[: len(text) // 2]


def _without_unknown(text: str) -> str:
    """A tokenizer.json whose model names no piece for what it cannot write."""
    return text.replace("<unk>", "<other>").replace('"unk_token": "<other>"', '"unk_token": null')


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (
            "tokenizer.json",
            _cut,
            r"tokenizer\.json cannot be read as a tokenizer: JSONDecodeError: .*Copy or download",
        ),
        ("tokenizer.json", lambda text: "[]", r"tokenizer\.json cannot be read as a tokenizer: .*Copy or download"),
        ("tokenizer.json", _without_unknown, r"tokenizer\.json has no piece '<unk>' .*Put the tokenizer\.model"),
        ("tokenizer.model", lambda text: "no model", r"tokenizer\.model is no SentencePiece model: .*remove it"),
    ],
)
def test_a_tokenizer_that_is_damaged(directory, name, change, said, capsys):
    from finetune.models.huggingface.tokenizer import sentencepiece_of

    if name == "tokenizer.json":
        (directory / "tokenizer.model").unlink()
    file = directory / name
    file.write_text(change(file.read_text(encoding="utf-8", errors="replace")), encoding="utf-8")
    with pytest.raises(UserError, match=said):
        sentencepiece_of(directory, 128)


def test_the_tokenizer_of_a_directory(directory):
    """`finetune.tokenizer --extend DIR` reads it as a model does, with tokenizer.model and without."""
    from finetune.models.loading import read_tokenizer

    pieces = [p.piece for p in read_tokenizer(str(BASE), "--extend").pieces]
    assert [p.piece for p in read_tokenizer(str(directory), "--extend").pieces] == pieces
    (directory / "tokenizer.model").unlink()
    assert [p.piece for p in read_tokenizer(str(directory), "--extend").pieces] == pieces
    (directory / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"^--extend: .* has no tokenizer\.json"):
        read_tokenizer(str(directory), "--extend")
    (directory / "config.json").unlink()
    with pytest.raises(UserError, match=r"^--extend: .* holds neither tokenizer\.model, model\.nemo nor"):
        read_tokenizer(str(directory), "--extend")


@pytest.fixture
def directory(nemo, tmp_path) -> Path:
    """A written directory that no one has compared."""
    write_hugging_face(nemo, tmp_path / "written")
    return tmp_path / "written"


def changed(directory: Path, name: str, **values: Any) -> None:
    content = json.loads((directory / name).read_text())
    for key, value in values.items():
        part, _, inner = key.partition("__")
        if inner:
            content[part][inner] = value
        else:
            content[part] = value
    (directory / name).write_text(json.dumps(content))


def test_directories_that_nemo_cannot_express(directory):
    from finetune.models.huggingface.reading import nemo_config

    changed(directory, "config.json", encoder_config__convolution_bias=True, hidden_act="gelu", blank_token_id=127)
    with pytest.raises(UserError) as caught:
        nemo_config(directory)
    for words in ("attention_bias and convolution_bias differ", "hidden_act: 'gelu'", "blank_token_id: 127"):
        assert words in str(caught.value)
    changed(directory, "config.json", model_type="lasr_ctc")
    with pytest.raises(UserError, match=r"type 'lasr_ctc'; this project trains .* parakeet_ctc \(ParakeetForCTC"):
        nemo_config(directory)


def test_settings_that_config_json_leaves_out_are_transformers_own(directory):
    from finetune.models.huggingface.reading import nemo_config

    whole = nemo_config(directory)
    config = json.loads((directory / "config.json").read_text())
    for key in ("hidden_act", "durations", "max_symbols_per_step"):
        del config[key]
    for key in ("conv_kernel_size", "subsampling_factor", "max_position_embeddings", "dropout_positions"):
        del config["encoder_config"][key]
    (directory / "config.json").write_text(json.dumps(config))
    assert nemo_config(directory) == whole
    changed(directory, "config.json", vocab_size="many")
    with pytest.raises(UserError, match=r"transformers does not take .*config\.json.*vocab_size"):
        nemo_config(directory)


def test_directories_with_something_missing(directory):
    from finetune.models.huggingface.reading import nemo_config, read_weights
    from finetune.models.huggingface.tokenizer import sentencepiece_of

    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(UserError, match="Only safetensors files are taken"):
        read_weights(directory)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        sentencepiece_of(directory, 128)
    (directory / "processor_config.json").unlink()
    with pytest.raises(UserError, match=r"has no processor_config\.json"):
        nemo_config(directory)


def test_features_of_another_rate_come_back_as_the_same_samples(directory):
    from finetune.models.huggingface.layout import feature_settings
    from finetune.models.huggingface.reading import nemo_config

    for rate, window, hop in ((8000, 200, 80), (22050, 551, 220), (44100, 1102, 441)):
        features = {"sampling_rate": rate, "win_length": window, "hop_length": hop, "n_fft": 2048, "feature_size": 80}
        changed(directory, "processor_config.json", feature_extractor={**features, "preemphasis": 0.9})
        found = feature_settings(nemo_config(directory))
        assert {key: found[key] for key in features} == features
        assert found["preemphasis"] == 0.9


def test_a_directory_in_shards(directory, nemo):
    from safetensors.torch import load_file, save_file

    from finetune.models.huggingface.reading import read_weights

    whole = load_file(directory / "model.safetensors")
    names = sorted(whole)
    index = {}
    for i, part in enumerate((names[:80], names[80:])):
        file = f"model-{i + 1:05d}-of-00002.safetensors"
        save_file({name: whole[name] for name in part}, directory / file)
        index.update(dict.fromkeys(part, file))
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    again = read_weights(directory)
    assert again.keys() == whole.keys()
    assert all(torch.equal(again[name], whole[name]) for name in names)
