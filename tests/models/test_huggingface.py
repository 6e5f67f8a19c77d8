"""From .nemo to Hugging Face and back: the same weights, texts, losses, gradients and timestamps."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import soundfile
import torch
import yaml
from conftest import DETERMINISTIC, ROOT, VOICE_PROMPTS, read_lines, write_manifest
from omegaconf import OmegaConf

from finetune.errors import UserError
from finetune.tools.export.equal_texts import Agreement

BASE = ROOT / "examples" / "base" / "fastconformer_tdt_3m.nemo"
CLIPS = 12


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve held-out prompts of different length as files, and manifest.jsonl."""
    folder = tmp_path_factory.mktemp("speech")
    rows = pq.read_table(VOICE_PROMPTS / "test-00000-of-00001.parquet").to_pylist()[:: 123 // CLIPS][:CLIPS]
    lines = []
    for row in rows:
        samples_S, rate = soundfile.read(io.BytesIO(row["audio"]["bytes"]), dtype="float32")
        name = row["id"].replace("/", "-") + ".wav"
        soundfile.write(folder / name, samples_S, rate, subtype="FLOAT")
        lines.append({"audio_filepath": name, "duration": len(samples_S) / rate, "text": row["text"], "id": row["id"]})
    write_manifest(folder / "manifest.jsonl", lines)
    return folder


@pytest.fixture(scope="module")
def files(speech: Path) -> list[str]:
    return [str(speech / row["audio_filepath"]) for row in read_lines(speech / "manifest.jsonl")]


@pytest.fixture(scope="module")
def exported(speech: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base model in Hugging Face's format."""
    from finetune.export import main

    output = tmp_path_factory.mktemp("hf") / "model"
    arguments = ["--model", BASE, "--to", "hf", "--output", output, "--data", speech / "manifest.jsonl"]
    assert main([str(a) for a in arguments]) == 0
    return output


@pytest.fixture(scope="module")
def nemo() -> Any:
    """The base model, restored by plain NeMo."""
    from finetune.models.nemo import import_nemo

    return import_nemo().ASRModel.restore_from(str(BASE), map_location="cpu").eval()


@pytest.fixture(scope="module")
def pair(exported: Path) -> tuple[Any, Any]:
    """Model and processor as transformers loads them."""
    from transformers import AutoModelForTDT, AutoProcessor

    return AutoModelForTDT.from_pretrained(exported).eval(), AutoProcessor.from_pretrained(exported)


@pytest.fixture(scope="module")
def audio(files: list[str]) -> list[Any]:
    return [soundfile.read(file, dtype="float32")[0] for file in files]


def texts_of(model: Any, files: list[str]) -> list[str]:
    return [h.text for h in model.transcribe(files, batch_size=4, verbose=False)]


def equal_weights(one: Any, other: Any) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return list(ours) == list(theirs) and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_there_and_back_nothing_changes(exported, nemo, files, audio, tmp_path, capsys):
    from transformers import pipeline

    from finetune.export import main
    from finetune.models.nemo import import_nemo
    from finetune.transcribe import main as transcribe

    texts = texts_of(nemo, files)
    assert sum(bool(text) for text in texts) == CLIPS
    recognise = pipeline("automatic-speech-recognition", model=str(exported), device="cpu")
    clips = [{"raw": samples_S, "sampling_rate": 16000} for samples_S in audio]
    assert [r["text"] for r in recognise(clips, batch_size=5)] == texts
    assert main(["--model", str(exported), "--to", "nemo", "--output", str(tmp_path)]) == 0
    back = import_nemo().ASRModel.restore_from(str(tmp_path / "model.nemo"), map_location="cpu").eval()
    assert equal_weights(nemo, back)
    assert texts_of(back, files) == texts
    configs = [OmegaConf.to_container(m.cfg) for m in (nemo, back)]
    for config in configs:
        assert config.pop("tokenizer")["type"] == "bpe"
    assert configs[0] == configs[1]
    capsys.readouterr()
    for path in (BASE, exported, tmp_path / "model.nemo"):
        assert transcribe(["--model", str(path), *files]) == 0
        found = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
        assert found == [" ".join(text.split()) for text in texts]


def test_what_is_written(exported):
    config = json.loads((exported / "config.json").read_text())
    assert config["model_type"] == "parakeet_tdt"
    assert config["vocab_size"] == 129
    assert config["blank_token_id"] == 128
    assert config["encoder_config"]["intermediate_size"] == 4 * 144
    assert config["encoder_config"]["layerdrop"] == 0.0
    assert config["encoder_config"]["scale_input"] is False
    assert json.loads((exported / "processor_config.json").read_text())["decoder_type"] == "tdt"
    kept = yaml.safe_load((exported / "nemo_config.yaml").read_text())
    assert kept["loss"]["tdt_kwargs"]["sigma"] == 0.02
    assert kept["spec_augment"]["freq_width"] == 15
    assert "labels" not in kept
    modes = {file.stat().st_mode for file in exported.iterdir()}
    assert len(modes) == 1, "safetensors alone would be readable for the owner only"


@pytest.mark.slow
def test_batches_decode_as_single_clips_and_only_with_the_saved_settings(pair, audio, monkeypatch):
    model, processor = pair
    settings = model.generation_config
    assert settings.eos_token_id == 129
    assert settings.suppress_tokens == [129, 130, 131, 132, 133]
    assert settings.decoder_start_token_id == settings.pad_token_id == 128

    def decode(clips: list[Any]) -> list[str]:
        inputs = processor(clips, sampling_rate=16000)
        return processor.batch_decode(model.generate(**inputs).sequences, skip_special_tokens=True)

    single = [decode([samples_S])[0] for samples_S in audio]
    assert decode(audio) == single
    # What the saved end of sequence is for: without it, short rows go on until the longest clip of the batch ends. The
    # blank is made a little less likely, so that this model has something to say there.
    bias_V = model.joint.head.bias.data
    monkeypatch.setattr(model.joint.head.bias, "data", bias_V - 10.0 * (torch.arange(len(bias_V)) == 128))
    single = [decode([samples_S])[0] for samples_S in audio]
    assert decode(audio) == single
    monkeypatch.setattr(settings, "eos_token_id", None)
    assert decode(audio) != single


@pytest.mark.slow
def test_token_times_are_nemos_within_a_frame(pair, nemo, files, audio):
    from finetune.tools.transcription.words import enable_timestamps

    model, processor = pair
    enable_timestamps(nemo)
    theirs = nemo.transcribe(files, batch_size=4, timestamps=True, verbose=False)
    output = model.generate(**processor(audio, sampling_rate=16000))
    starts = output.durations.cumsum(-1) - output.durations
    decoded, stamps = processor.decode(output.sequences, durations=output.durations, skip_special_tokens=True)
    compared = 0
    for row, hypothesis in enumerate(theirs):
        spoken = output.sequences[row] != model.config.blank_token_id
        assert output.sequences[row][spoken].tolist() == torch.as_tensor(hypothesis.y_sequence).tolist()
        frames = torch.as_tensor([int(token["start_offset"]) for token in hypothesis.timestamp["char"]])
        assert len(frames) == int(spoken.sum())
        assert (starts[row][spoken] - frames).abs().max() <= 1
        seconds = [token["start"] for token in stamps[row]]
        assert seconds == pytest.approx([0.08 * int(f) for f in starts[row][spoken]][: len(seconds)], abs=0.081)
        compared += len(frames)
    assert compared > 100


def gradients(
    model: Any, audio: list[Any], tokens_BU: torch.Tensor, lengths_B: torch.Tensor
) -> tuple[Any, dict[str, Any]]:
    """Losses of our module in evaluation mode, sigma 0, and gradients of its mean a token by NeMo's names."""
    from finetune.models.loss_module import LossModule

    module = LossModule(model, sigma=0.0, omega=0.0).eval()
    audio_BS = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(a) for a in audio], batch_first=True)
    losses_B = module(audio_BS, torch.tensor([len(a) for a in audio]), tokens_BU, lengths_B)
    model.zero_grad()
    (losses_B / lengths_B).mean().backward()
    return losses_B.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_losses_and_gradients_equal_nemos_route_and_transformers_own(exported, pair, speech, audio):
    from finetune.models.huggingface.layout import KINDS, names_of, to_hugging_face
    from finetune.models.loading import load_model

    model, processor = pair
    clips = audio[:4]
    texts = [row["text"].lower() for row in read_lines(speech / "manifest.jsonl")][:4]
    inputs = processor(clips, text=texts, sampling_rate=16000)
    lengths_B = (inputs["labels"] != processor.tokenizer.pad_token_id).sum(-1)
    assert int(lengths_B.sum()) > 50
    routes = {
        name: gradients(load_model(str(path)), clips, inputs["labels"], lengths_B)
        for name, path in (("nemo", BASE), ("hf", exported))
    }
    assert torch.equal(routes["nemo"][0], routes["hf"][0])
    ours = routes["hf"][1]
    assert ours.keys() == routes["nemo"][1].keys()
    assert all(torch.equal(ours[key], routes["nemo"][1][key]) for key in ours)

    model.zero_grad()
    theirs = model(**inputs).loss
    theirs.backward()
    assert float(theirs) == pytest.approx(float((routes["hf"][0] / lengths_B).mean()), rel=1e-5)
    named = dict(model.named_parameters())
    largest, names = max(float(g.abs().max()) for g in ours.values()), names_of(KINDS["parakeet_tdt"], ours)
    for key, gradient in ours.items():
        other = named[to_hugging_face(key, names)].grad
        if key == "decoder.prediction.embed.weight":
            # transformers also trains the blank's row, where NeMo starts from zeros.
            gradient, other = gradient[:-1], other[:-1]
        assert (gradient - other).abs().max() <= 1e-4 * largest, key
    model.zero_grad()


def test_without_the_kept_files_the_tokenizer_is_rebuilt_and_the_recipe_said(
    exported, nemo, files, tmp_path, messages
):
    from finetune.models.huggingface.layout import KINDS, names_of, to_hugging_face
    from finetune.models.loading import load_model

    bare = shutil.copytree(
        exported, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer.model", "nemo_config.yaml")
    )
    model = load_model(str(bare))
    weights = [  # the recipe has dropout in the joint, which moves its last layer one place on
        {to_hugging_face(key, names_of(KINDS["parakeet_tdt"], state)): tensor for key, tensor in state.items()}
        for state in (nemo.state_dict(), model.state_dict())
    ]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0] if key)
    assert texts_of(model, files) == texts_of(nemo, files)
    said = "\n".join(messages)
    assert "tokenizer from tokenizer.json" in said
    assert "sigma 0.02, omega 0.1" in said
    assert "NeMo's published recipes" in said
    assert model.cfg.encoder.dropout == 0.0, "config.json has a setting for it, which holds"
    for row in read_lines(Path(files[0]).with_name("manifest.jsonl")):
        text = row["text"].lower()
        assert model.tokenizer.text_to_ids(text) == nemo.tokenizer.text_to_ids(text)


def test_config_json_holds_where_the_kept_file_says_something_else(exported, tmp_path, messages):
    from finetune.models.loading import load_model

    changed = shutil.copytree(exported, tmp_path / "changed")
    config = json.loads((changed / "config.json").read_text())
    config["encoder_config"]["dropout"] = 0.25
    (changed / "config.json").write_text(json.dumps(config))
    assert load_model(str(changed)).cfg.encoder.dropout == 0.25
    assert any("encoder.dropout 0.0 -> 0.25" in m for m in messages)


def test_classes_that_a_directory_names_are_not_made(exported, tmp_path):
    from finetune.models.loading import load_model

    planted = shutil.copytree(exported, tmp_path / "planted")
    kept = yaml.safe_load((planted / "nemo_config.yaml").read_text())
    kept["spec_augment"]["_target_"] = "nemo.collections.asr.modules.CropOrPadSpectrogramAugmentation"
    kept["encoder"]["_target_"] = "os.system"
    kept["decoding"]["_target_"] = "os.system"
    (planted / "nemo_config.yaml").write_text(yaml.safe_dump(kept))
    model = load_model(str(planted))
    assert type(model.encoder).__name__ == "ConformerEncoder"
    assert type(model.spec_augmentation).__name__ == "SpectrogramAugmentation"
    assert "_target_" not in model.cfg.decoding


def test_a_row_of_the_blank_that_transformers_has_trained_is_said(exported, tmp_path, messages):
    from safetensors.torch import load_file, save_file

    from finetune.models.loading import load_model

    trained = shutil.copytree(exported, tmp_path / "trained")
    weights = load_file(trained / "model.safetensors")
    weights["decoder.embedding.weight"][-1] = 0.125
    save_file(weights, trained / "model.safetensors", metadata={"format": "pt"})
    model = load_model(str(trained))
    assert not model.decoder.prediction["embed"].weight[-1].any()
    assert any("blank's row" in m and "0.125" in m for m in messages)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_weights(dtype, speech, nemo, tmp_path, capsys):
    from transformers import AutoModelForTDT

    from finetune.export import main
    from finetune.models.loading import load_model

    output = tmp_path / "half"
    arguments = [
        "--model",
        BASE,
        "--to",
        "hf",
        "--output",
        output,
        "--dtype",
        dtype,
        "--data",
        speech / "manifest.jsonl",
    ]
    assert main([str(a) for a in arguments]) == 0
    said = capsys.readouterr().out
    assert f"in {dtype}" in said
    kind = getattr(torch, dtype)
    assert AutoModelForTDT.from_pretrained(output).dtype == kind
    model = load_model(str(output))
    for key, tensor in nemo.state_dict().items():
        if not key.startswith("preprocessor."):
            wanted = tensor.to(kind).float() if tensor.is_floating_point() else tensor
            assert torch.equal(model.state_dict()[key], wanted), key


@pytest.mark.slow
def test_a_training_from_the_directory_is_the_training_from_the_nemo(exported, tiny_run, run_train, tmp_path):
    losses = {}
    for name, path in (("hf", exported), ("nemo", BASE)):
        run = tmp_path / name
        training = {"output_dir": str(run), "max_steps": 3, "eval_on_start": False}
        assert run_train(*tiny_run(model={"name": str(path), **DETERMINISTIC}, training=training)) == 0
        losses[name] = [row["loss"] for row in read_lines(run / "metrics.jsonl")]
    assert losses["hf"] == losses["nemo"]
    assert len(losses["hf"]) == 3

    def names(run: Path) -> set[str]:
        return {str(p.relative_to(run)) for p in run.rglob("*") if p.is_file() and "tfevents" not in p.name}

    assert names(tmp_path / "hf") == names(tmp_path / "nemo")
    assert "model.nemo" in names(tmp_path / "hf")
    from finetune.models.loading import load_model

    assert equal_weights(load_model(str(tmp_path / "hf")), load_model(str(tmp_path / "nemo")))


def test_the_plan_reads_the_directory(exported):
    from finetune.tools.planning.layout import read_layout

    ours, theirs = read_layout(str(exported)), read_layout(str(BASE))
    assert (ours.tokens, ours.layers, ours.seconds_a_frame, ours.sample_rate) == (128, 5, 0.08, 16000)
    for part in ("encoder", "decoder", "preprocessor", "loss"):
        assert OmegaConf.to_container(ours.model[part]) == OmegaConf.to_container(theirs.model[part]), part


def test_the_doctor_knows_the_directory(exported, run_file):
    from finetune.config.schema import RunConfig
    from finetune.tools.doctor.run_file_checks import model as model_line
    from finetune.tools.doctor.run_file_checks import parameters_of

    class Wanted:
        config_file = "RUN.yaml"
        config = RunConfig.model_validate(
            {"model": {"name": str(exported)}, "data": {"train": "t"}, "training": {"output_dir": "o"}}
        )

    (line,) = model_line(Wanted())
    assert "Hugging Face format" in line.found
    assert line.state == "OK"
    assert parameters_of(str(exported)) == pytest.approx(2.86e6, rel=0.01)


@pytest.mark.slow
def test_the_check_of_all_formats_finds_a_text_that_differs(speech, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "bench"))
    import formats as check_formats

    result = tmp_path / "formats.json"
    arguments = [
        "--model",
        str(BASE),
        "--data",
        str(speech / "manifest.jsonl"),
        "--max-samples",
        "3",
        "--json",
        str(result),
    ]
    assert check_formats.main(arguments) == 0
    told = json.loads(result.read_text())
    assert told["equal"] is True
    assert [row["identical"] for row in told["rows"]] == [3] * 9
    assert told["weights"] == 170
    plain = check_formats.with_transformers
    monkeypatch.setattr(check_formats, "with_transformers", lambda *a: [t.replace("e", "a") for t in plain(*a)])
    capsys.readouterr()
    assert check_formats.main(arguments) == 1
    printed = capsys.readouterr().out
    assert "NOT equal" in printed
    assert "instead of" in printed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_grown_model_goes_there_and_back(kind, speech, tmp_path):
    """A vocabulary that was extended; the unigram one takes the place of the model's own before."""
    from turkish import TURKISH

    from finetune.export import main
    from finetune.models.loading import load_model
    from finetune.models.nemo_archive import save_nemo
    from finetune.models.sentencepiece_model import tokenizer_of, train_tokenizer, write_tokenizer
    from finetune.models.tokenizer_growth import grow_on_texts
    from finetune.models.vocabulary_rows import change_vocabulary

    model = load_model(str(BASE))
    own = [row["text"].lower() for row in read_lines(speech / "manifest.jsonl")]
    if kind == "unigram":
        write_tokenizer(train_tokenizer(own * 5, 70, kind="unigram", coverage=1.0, key="k"), tmp_path / "unigram")
        change_vocabulary(model, tmp_path / "unigram")
    texts = TURKISH.lower().splitlines() * 3 + own * 5
    growth = grow_on_texts(tokenizer_of(model, "k"), texts, 60, pieces="all", key="k")
    assert len(growth.added) == 60
    write_tokenizer(growth.model, tmp_path / "grown")
    change_vocabulary(model, tmp_path / "grown")
    save_nemo(model, tmp_path / "grown.nemo")
    there, back = tmp_path / "there", tmp_path / "back"
    arguments = ["--model", tmp_path / "grown.nemo", "--to", "hf", "--output", there]
    assert main([str(a) for a in [*arguments, "--data", speech / "manifest.jsonl"]]) == 0
    (there / "tokenizer.model").unlink()
    assert main(["--model", str(there), "--to", "nemo", "--output", str(back)]) == 0
    again = load_model(str(back))
    assert equal_weights(model, again)
    assert all(again.tokenizer.text_to_ids(text) == model.tokenizer.text_to_ids(text) for text in texts)


def test_clips_of_up_to_30_seconds_are_compared(speech, tmp_path):
    """Longer ones are passed over, read on past, and counted; where there is no other, that is said."""
    from finetune.models.huggingface.layout import KINDS
    from finetune.tools.export.hugging_face import describe_export, samples_for

    rows = [
        {**row, "audio_filepath": str(speech / row["audio_filepath"])} for row in read_lines(speech / "manifest.jsonl")
    ]
    soundfile.write(tmp_path / "long.wav", torch.randn(31 * 16000).numpy() * 0.01, 16000)
    long = [{"audio_filepath": "long.wav", "duration": 31.0, "text": "long", "id": f"long-{i}"} for i in range(3)]
    manifest = write_manifest(tmp_path / "m.jsonl", [*long[:2], *rows, long[2], *rows])
    samples = samples_for("none", [str(manifest)], "validation", 16000)
    assert samples.ids == [row["id"] for row in [*rows, *rows][:16]]
    assert samples.passed_over == 3
    agreement = Agreement(0.0, 0.0, 16, ["NeMo single"], 16, 0)
    told = describe_export(tmp_path, samples, agreement, 1e-3, "float32", KINDS["parakeet_tdt"])
    assert "3 clip(s) longer than 30 s were passed over" in told
    only = write_manifest(tmp_path / "only.jsonl", long)
    with pytest.raises(UserError, match=r"no clip of up to 30 s \(3 are longer\)"):
        samples_for("none", [str(only)], "validation", 16000)
