"""LoRA adapters as files: what a run leaves, that PEFT and this project read it, and that training goes on with it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DETERMINISTIC, ROOT, slow
from launching import summary
from memory_cases import batch, losses
from safetensors.torch import load_file

LORA = ("--strategy", "lora", "model.lora_rank=4")
TRAINING = {"max_steps": 6, "learning_rate": 1e-2, "save_steps": 0, "eval_steps": 0, "eval_on_start": False}
ONLY = {"validation": None, "test": None, "shuffle": False, "group_by_duration": False}


@pytest.fixture
def lora_run(run_train, tiny_run, tmp_path):
    """`lora_run(name, *key_values, model=...)`: a run with adapters; its directory."""

    def run(name: str, *more: str, model: dict[str, Any] | None = None, lora: bool = True) -> Path:
        training = {**TRAINING, "output_dir": str(tmp_path / name)}
        arguments = tiny_run(*more, model={**DETERMINISTIC, **(model or {})}, data=ONLY, training=training)
        assert run_train(*arguments, *(LORA if lora else ())) == 0
        return tmp_path / name

    return run


def outputs(model: Any) -> torch.Tensor:
    """What the encoder makes of noise."""
    from finetune.evaluation.recognise import evaluation_mode

    with evaluation_mode(model):
        return model.encoder(**batch())[0]


def texts(model: Any) -> list[str]:
    from finetune.evaluation.recognise import evaluation_mode, recognise_batch

    audio_BS = 0.3 * torch.randn(3, 24000, generator=torch.Generator().manual_seed(0))
    with evaluation_mode(model):
        return [h.text for h in recognise_batch(model, audio_BS, torch.tensor([24000, 16000, 20000]))]


@pytest.mark.parametrize("train_decoder", [True, slow(False)])
def test_an_adapter_gives_the_model_that_was_trained(lora_run, tiny_model, train_decoder):
    """By this project merged, bit for bit; by PEFT beside the base model; and it takes part."""
    from peft import PeftModel

    from finetune.models.loading import load_model

    run = lora_run("run", f"model.lora_train_decoder={str(train_decoder).lower()}")
    told, folder = summary(run), run / "adapter"
    assert {p.name for p in folder.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "base_model.json",
    }
    assert told["adapter_bytes"] == sum(p.stat().st_size for p in folder.iterdir()) < told["model_bytes"]
    tensors = load_file(folder / "adapter_model.safetensors")
    assert sum(t.numel() for t in tensors.values()) == told["trainable_parameters"]
    assert train_decoder == any(not name.startswith("base_model.model.encoder.") for name in tensors)
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(tiny_model)

    trained, merged, base = load_model(str(run)), load_model(str(folder)), load_model(str(tiny_model))
    assert all(torch.equal(a, b) for a, b in zip(trained.state_dict().values(), merged.state_dict().values()))
    decoder_moved = not torch.equal(trained.joint.pred.weight, base.joint.pred.weight)
    assert decoder_moved == train_decoder
    untouched, ours, said, said_before = outputs(base), outputs(trained), texts(trained), texts(base)
    assert float((ours - untouched).abs().max()) > 0.01, "the adapter has to change what the encoder makes"

    with_peft = PeftModel.from_pretrained(base, str(folder))
    torch.testing.assert_close(outputs(base), ours, rtol=0, atol=1e-4)
    assert texts(base) == said
    assert not train_decoder or said != said_before
    with with_peft.disable_adapter():
        torch.testing.assert_close(outputs(base), untouched, rtol=0, atol=1e-6)
        assert texts(base) == said_before
    torch.testing.assert_close(outputs(base), ours, rtol=0, atol=1e-4)


def test_training_goes_on_with_an_adapter(lora_run, tiny_model):
    first = lora_run("first")
    folder = first / "adapter"
    onward = lora_run("onward", f"model.adapter={folder}")
    merged = lora_run("merged", model={"name": str(folder)}, lora=False)
    fresh = lora_run("fresh", model={"name": str(folder)})
    # The same weights: the first step's loss is that of the first run's model, not of the base model.
    expected = losses(merged)[0]
    assert losses(first)[0] > 1.05 * expected
    assert losses(onward)[0] == pytest.approx(expected, rel=1e-5)
    assert losses(fresh)[0] == pytest.approx(expected, rel=1e-5)

    before, after = (load_file(f / "adapter" / "adapter_model.safetensors") for f in (first, onward))
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[n], after[n]) for n in before if ".lora_" in n)
    bases = [json.loads((f / "adapter" / "base_model.json").read_text()) for f in (first, onward, fresh)]
    assert bases[0] == bases[1]
    assert bases[2]["name"] == str(folder)
    assert bases[2]["sha256"] != bases[0]["sha256"]

    from finetune.models.loading import load_model

    for run in (onward, fresh):  # the second is an adapter on a base that is itself base and adapter
        a, b = load_model(str(run)).state_dict(), load_model(str(run / "adapter")).state_dict()
        assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_commands_take_an_adapter(lora_run, clips, tmp_path, capsys):
    from finetune import evaluate, export, transcribe
    from finetune.models.loading import load_model
    from finetune.tools.planning.layout import read_layout

    run = lora_run("run")
    folder = str(run / "adapter")
    clip = str(next(clips.glob("*.flac")))
    said = {}
    for model in (folder, str(run)):
        told = tmp_path / "told.json"
        arguments = [
            "--model",
            model,
            "--data",
            str(clips / "manifest.jsonl"),
            "--max-samples",
            "6",
            "--json",
            str(told),
        ]
        assert evaluate.main([*arguments, "--workers", "0"]) == 0
        capsys.readouterr()
        assert transcribe.main(["--model", model, clip]) == 0
        text = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["text"]
        said[model] = (json.loads(told.read_text())["wer"], text)
    assert said[folder] == said[str(run)]
    assert export.main(["--model", folder, "--to", "nemo", "--output", str(tmp_path / "exported")]) == 0
    a, b = (load_model(str(p)).state_dict() for p in (run, tmp_path / "exported"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert read_layout(folder).layers == 2
    from finetune.models.loading import read_tokenizer
    from finetune.models.sentencepiece_model import tokenizer_of

    assert read_tokenizer(folder, "--extend") == tokenizer_of(load_model(folder), "k")


@pytest.mark.slow
def test_an_adapter_goes_to_hugging_face(lora_run, tmp_path, clips):
    """Merged into its base model, by a file that is gone afterwards."""
    import tempfile

    from finetune.models.loading import load_model
    from finetune.tools.export.hugging_face import export_hugging_face

    base = ROOT / "examples" / "base" / "fastconformer_tdt_3m.nemo"
    run = lora_run("run", "training.max_steps=2", "training.learning_rate=1e-4", model={"name": str(base)})
    before = set(Path(tempfile.gettempdir()).glob("finetune-export-*"))
    told = export_hugging_face(str(run / "adapter"), tmp_path / "out")
    assert "texts equal, " in told
    assert "not empty; encoder outputs within" in told
    assert "no speech was compared" in told
    assert set(Path(tempfile.gettempdir()).glob("finetune-export-*")) <= before
    a, b = (load_model(str(p)).state_dict() for p in (run, tmp_path / "out"))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_what_is_refused(lora_run, tiny_model, tmp_path, failed, tiny_run):
    from finetune.errors import UserError
    from finetune.models.loading import load_model
    from finetune.models.nemo_archive import save_nemo

    base = tmp_path / "base.nemo"
    shutil.copy(tiny_model, base)
    folder = lora_run("run", model={"name": str(base)}) / "adapter"

    def refused(*settings: str, code: int = 2) -> str:
        training = {**TRAINING, "output_dir": str(tmp_path / "none")}
        return failed(code, *tiny_run(*settings, model={"name": str(base)}, data=ONLY, training=training))

    on = f"model.adapter={folder}"
    assert "Write model.lora_rank: 4, model.lora_alpha: 8.0." in refused(on, "model.lora_rank=8")
    said = refused(on, "model.lora_rank=4", "model.lora_targets=[linear_q]", "model.lora_train_decoder=false")
    assert "Write model.lora_targets: [linear1, linear2, linear_k" in said
    assert "model.lora_train_decoder: true" in said

    model = load_model(str(base))
    with torch.no_grad():
        model.encoder.layers[1].norm_out.bias[3] += 1e-3
    save_nemo(model, base)
    with pytest.raises(UserError, match=r"trained on another base model than .*base.nemo: weights or tokens differ"):
        load_model(str(folder))
    assert "another base model" in refused(on, "model.lora_rank=4")
    base.unlink()
    with pytest.raises(
        UserError, match=r"is an adapter of the base model .*base.nemo, which cannot be loaded: .*no file"
    ):
        load_model(str(folder))

    shutil.copy(tiny_model, base)
    load_model(str(folder))
    whole = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(whole[:1000])
    with pytest.raises(UserError, match=r"cannot be read as an adapter: .*adapter_model.safetensors"):
        load_model(str(folder))
    (folder / "adapter_model.safetensors").write_bytes(whole)
    (folder / "base_model.json").unlink()
    with pytest.raises(UserError, match=r"base_model.json"):
        load_model(str(folder))


@pytest.mark.slow
def test_no_adapter_without_its_base_model(lora_run, run_train, tiny_run, tmp_path, capfd):
    """Of a checkpoint of full training the adapters go on from weights that are no file; and a new run removes an old
    adapter."""
    full = lora_run("run", lora=False)
    assert not (full / "adapter").exists()
    training = {**TRAINING, "output_dir": str(full), "max_steps": 8}
    arguments = tiny_run("training.resume_from_checkpoint=true", model=DETERMINISTIC, data=ONLY, training=training)
    capfd.readouterr()
    assert run_train(*arguments, *LORA) == 0
    assert "no adapter will be written beside model.nemo: the checkpoint's base weights" in capfd.readouterr().err
    assert not (full / "adapter").exists()
    assert summary(full)["adapter_bytes"] is None

    again = lora_run("again")
    assert (again / "adapter").is_dir()
    lora_run("again", "training.overwrite_output_dir=true", lora=False)
    assert not (again / "adapter").exists()


@pytest.mark.slow
def test_a_continued_run_leaves_the_adapter_of_its_model(lora_run, run_train, tiny_run, capfd):
    from finetune.models.loading import load_model

    run = lora_run("run")
    before = load_model(str(run)).state_dict()
    capfd.readouterr()
    training = {**TRAINING, "output_dir": str(run), "max_steps": 9}
    arguments = tiny_run("training.resume_from_checkpoint=true", model=DETERMINISTIC, data=ONLY, training=training)
    assert run_train(*arguments, *LORA) == 0
    assert "no adapter will be written" not in capfd.readouterr().err
    a, b = load_model(str(run)).state_dict(), load_model(str(run / "adapter")).state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not all(torch.equal(a[name], before[name]) for name in a)


@pytest.mark.slow
def test_the_best_of_the_averages_has_its_adapter(run_train, tiny_run, tmp_path):
    """Whatever weights were chosen, adapter and model.nemo are of one state."""
    from finetune.models.loading import load_model

    training = {"max_steps": 4, "eval_steps": 2, "save_steps": 0, "ema_decay": 0.5, "average_checkpoints": 2}
    training |= {"learning_rate": 1e-2, "eval_on_start": False}
    data = {"test": None, "max_eval_samples": 8}
    assert run_train(*tiny_run(model={"dropout": 0.0}, data=data, training=training), *LORA) == 0
    run = tmp_path / "run"
    a, b = load_model(str(run)).state_dict(), load_model(str(run / "adapter")).state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
