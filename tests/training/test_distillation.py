"""Training with distillation from the frozen base."""

import json
import math
from pathlib import Path

import pytest
import torch
from conftest import DETERMINISTIC, ONLY_TRAIN, read_lines
from engine_cases import reference
from safetensors.torch import load_file, save_file

from finetune.callbacks.distillation import FILE

STEPS = {"max_steps": 6, "save_steps": 3, "eval_on_start": False, "eval_steps": 0, "learning_rate": 3e-3}


@pytest.fixture
def distilled(run_train, tiny_run, tmp_path):
    """`distilled(name, weight, *arguments)` trains; returns the lines of metrics.jsonl."""

    def run(name: str, weight: float, *arguments: str, model=None, data=None, code: int = 0, **training):
        sections = {
            "model": {**DETERMINISTIC, "distillation": weight, **(model or {})},
            "data": {**ONLY_TRAIN, **(data or {})},
            "training": {**STEPS, "output_dir": str(tmp_path / name), **training},
        }
        assert run_train(*tiny_run(**sections), *arguments) == code
        return read_lines(tmp_path / name / "metrics.jsonl")

    return run


def test_a_run_stays_nearer_to_its_base(distilled, tmp_path):
    """The first step has nothing to distil; later ones stay nearer the base the larger the weight, and `loss` is the
    whole."""
    plain, tied = distilled("plain", 1e-9), distilled("tied", 3.0)
    assert abs(tied[0]["distillation"]) < 1e-4
    assert tied[0]["loss"] == pytest.approx(plain[0]["loss"], rel=1e-6)
    assert 0 < tied[-1]["distillation"] / 3.0 < 0.8 * plain[-1]["distillation"] / 1e-9
    assert tied[-1]["loss"] - tied[-1]["distillation"] > plain[-1]["loss"]
    weights = load_file(tmp_path / "tied" / "checkpoints" / "step-00000006" / "model.safetensors")
    assert not any("frozen_base" in name for name in weights)


def test_a_factor_by_source(distilled, clips):
    manifest = str(clips / "manifest.jsonl")
    sources = [manifest, {"path": manifest, "distillation": 0.0}]  # unshuffled: six steps of each
    rows = distilled("run", 3.0, data={"train": sources}, max_steps=9)
    assert all(row["distillation"] > 0 for row in rows[1:6])
    assert [row["distillation"] for row in rows[6:]] == [0.0] * 3


def test_the_base_hears_only_the_clips_that_are_distilled(tiny_model):
    from finetune.models.frozen_base import FrozenBase
    from finetune.models.loading import load_model

    base = FrozenBase(load_model(str(tiny_model)).eval(), "base")
    generator = torch.Generator().manual_seed(0)
    mel_BFT = torch.randn(3, base.model.cfg.preprocessor.features, 80, generator=generator)
    clips = mel_BFT, torch.tensor([80, 48, 64]), torch.tensor([[1, 2], [3, 0], [4, 5]]), torch.tensor([2, 1, 2])
    whole = base.hear(*clips, None, None)
    part = base.hear(*clips, None, None, torch.tensor([0, 2]))
    for mine, all_of_them in ((part.enc_BTH, whole.enc_BTH), (part.pred_BUH, whole.pred_BUH)):
        assert mine.shape == all_of_them.shape
        torch.testing.assert_close(mine[[0, 2]], all_of_them[[0, 2]], rtol=1e-5, atol=1e-5)
        assert not mine[1].any()
        assert all_of_them[1].any()


@pytest.mark.slow
def test_a_resume_distils_from_the_same_base(distilled, failed, tiny_model, tiny_run, tmp_path, capsys):
    """With a vocabulary that the run grows, dropout, SpecAugment and BatchNorm in training."""
    base = tmp_path / "base.nemo"
    base.write_bytes(Path(tiny_model).read_bytes())
    texts = tmp_path / "texts.txt"
    texts.write_text("ŵŷ ŵa ŷa\n" * 20, encoding="utf-8")
    grown = {"extend_from": str(texts), "size": 2}
    own = {"name": str(base), "tokenizer": grown, "spec_augment": True, "dropout": 0.1, "freeze_batchnorm": False}
    whole = distilled("run", 1.0, model=own)
    rows = load_file(tmp_path / "run" / "checkpoints" / "step-00000003" / FILE)
    assert {name.split(".")[0] for name in rows} == {"decoder", "joint"}
    checkpoint = f"training.resume_from_checkpoint={tmp_path / 'run' / 'checkpoints' / 'step-00000003'}"
    again = distilled("run", 1.0, checkpoint, model=own)
    for a, b in zip(again[3:], whole[3:], strict=True):
        assert (a["loss"], a["distillation"]) == (b["loss"], b["distillation"])


@pytest.mark.slow
def test_a_base_that_is_another_or_gone_is_refused(distilled, run_train, failed, make_tiny_model, tiny_run, tmp_path):
    from finetune.models.loading import load_model
    from finetune.models.nemo_archive import save_nemo

    base = tmp_path / "base.nemo"
    base.write_bytes(make_tiny_model().read_bytes())
    distilled("run", 1.0, model={"name": str(base)}, max_steps=3)
    model = load_model(str(base))
    with torch.no_grad():
        model.joint.joint_net[-1].bias[0] += 1.0
    save_nemo(model, base)
    sections = {
        "model": {**DETERMINISTIC, "distillation": 1.0, "name": str(base)},
        "data": ONLY_TRAIN,
        "training": {**STEPS, "output_dir": str(tmp_path / "run"), "resume_from_checkpoint": True},
    }
    said = failed(2, *tiny_run(**sections))
    assert f"model.distillation: the run began with another base: the weights of {base} had the SHA-256" in said
    assert "model.distillation: 0" in said
    base.unlink()
    assert str(base) in failed(2, *tiny_run(**sections))


@pytest.mark.slow
def test_an_adapter_is_a_part_of_the_base(distilled, failed, tiny_run, tmp_path):
    first, run = tmp_path / "first", tmp_path / "run"
    distilled("first", 0.0, model={"lora_rank": 2}, max_steps=3)
    adapter = first / "adapter" / "adapter_model.safetensors"
    own = {**DETERMINISTIC, "distillation": 1.0, "lora_rank": 2, "adapter": str(first / "adapter")}
    distilled("run", 1.0, model=own, max_steps=3)
    again = {"output_dir": str(run), "resume_from_checkpoint": True}
    assert failed(0, *tiny_run(model=own, data=ONLY_TRAIN, training={**STEPS, **again, "max_steps": 4}))
    tensors = load_file(adapter)
    changed = next(name for name, tensor in tensors.items() if ".lora_B." in name and tensor.any())
    save_file(tensors | {changed: 2 * tensors[changed]}, adapter)
    said = failed(2, *tiny_run(model=own, data=ONLY_TRAIN, training={**STEPS, **again}))
    assert "model.distillation: the run began with another base: the weights of" in said


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("model.ctc_loss_weight=1",), "model.distillation and model.ctc_loss_weight 1 exclude each other"),
        (("model.name=random.yaml",), "model.distillation and a NeMo model YAML as model.name exclude each other"),
        (("model.distillation=-1",), "model.distillation"),
        (("model.distillation=0", "data.train={path: a.jsonl, distillation: 0.5}"), "`distillation` has no effect"),
    ],
)
def test_what_cannot_be_distilled(refused, tiny_run, arguments, named):
    assert named in refused(*tiny_run("model.distillation=1", *arguments))


def test_a_ctc_model_is_refused(failed, archive_of, tiny_run):
    said = failed(2, *tiny_run(f"model.name={archive_of('ctc')}", "model.distillation=1"))
    assert "is trained by CTC alone" in said


def test_lora_and_a_hybrid(distilled, archive_of):
    """Of a hybrid the parts add up; LoRA's base is the model without adapters."""
    rows = distilled("hybrid", 2.0, model={"name": str(archive_of("hybrid-rnnt")), "lora_rank": 2}, max_steps=3)
    assert abs(rows[0]["distillation"]) < 1e-4
    assert rows[-1]["distillation"] > 0
    w = 0.3
    for row in rows:
        parts = (1 - w) * row["transducer_loss"] + w * row["ctc_loss"] + row["distillation"]
        assert row["loss"] == pytest.approx(parts, rel=1e-6)
        assert math.isfinite(row["loss"])


@pytest.mark.slow
def test_a_dry_run_with_it(run_train, tiny_run, tmp_path):
    arguments = tiny_run("--dry-run", "model.distillation=1", "training.auto_batch=true")
    assert run_train(*arguments) == 0
    assert json.loads((tmp_path / "run" / "dry_run.json").read_text())["verdict"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", "ddp", "zero2", "zero3"])
def test_two_ranks_distil_like_one(trainings, tmp_path, bare_zero3, engine):
    own = ("model.distillation=2", "training.max_steps=3", "training.learning_rate=3e-3")
    option = ("--deepspeed", bare_zero3) if engine == "zero3" else ("--strategy", engine)
    first_import = "deepspeed" if engine.startswith("zero") else "torch"
    trainings(first_import, one=(*reference(), *own), two=(2, *own, *option))
    one, two = (read_lines(tmp_path / run / "metrics.jsonl") for run in ("one", "two"))
    assert one[-1]["distillation"] > 1e-3
    for a, b in zip(one, two, strict=True):
        for key in ("loss", "distillation"):
            assert b[key] == pytest.approx(a[key], rel=1e-3, abs=1e-5)
