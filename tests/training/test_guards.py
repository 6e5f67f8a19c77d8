"""What watches over a run: clipping, decoding, forgetting, advice; and heads that are not trained."""

import contextlib
import gc
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from conftest import LAYOUT, read_lines, write_manifest
from run_callbacks import around_steps
from safetensors.torch import load_file

DETERMINISTIC = {"spec_augment": False, "dropout": 0.0, "freeze_batchnorm": True}
ONLY_TRAIN = {"validation": None, "test": None}
LAST_WAS_BEST = "the last evaluation was the best: with more steps the WER may fall further\n"


@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_gradients_are_clipped_to_the_norm(run_train, tiny_run, tmp_path, tiny_model, limit):
    """With an epsilon far above the gradients, Adam's first step is rate / epsilon times the clipped gradient."""
    from finetune.models.loading import load_model

    training = {
        "max_steps": 1,
        "max_grad_norm": limit,
        "learning_rate": 1.0,
        "weight_decay": 0.0,
        "lr_scheduler_type": "constant",
        "warmup_ratio": 0.0,
        "optimizer_args": {"eps": 1e5},
    }
    assert run_train(*tiny_run(model=DETERMINISTIC, data=ONLY_TRAIN, training=training)) == 0
    before, after = (dict(load_model(str(p)).named_parameters()) for p in (tiny_model, tmp_path / "run"))
    moved = math.sqrt(sum(float(((after[k] - before[k]).double() ** 2).sum()) for k in before)) * 1e5
    norm = read_lines(tmp_path / "run" / "metrics.jsonl")[0]["grad_norm"]
    assert norm > 1
    assert moved == pytest.approx(limit or norm, rel=0.02)


@pytest.mark.slow
def test_8bit_adamw_continues_as_if_unbroken(run_train, tiny_run, tmp_path):
    import shutil

    run = tmp_path / "run"
    training = {"max_steps": 6, "save_steps": 3, "optimizer_args": {"min_8bit_size": 1024}}
    arguments = [*tiny_run(model=DETERMINISTIC, data=ONLY_TRAIN, training=training), "--strategy", "adamw_8bit"]
    assert run_train(*arguments) == 0
    unbroken = [row["loss"] for row in read_lines(run / "metrics.jsonl")]
    weights = load_file(run / "checkpoints" / "step-00000006" / "model.safetensors")
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    assert run_train(*arguments, "training.resume_from_checkpoint=true") == 0
    assert json.loads((run / "summary.json").read_text())["resumed_from"] == 3
    assert [row["loss"] for row in read_lines(run / "metrics.jsonl")] == unbroken
    again = load_file(run / "checkpoints" / "step-00000006" / "model.safetensors")
    assert all(torch.equal(weights[k], again[k]) for k in weights)


def test_batched_decoding_that_differs_is_said(run_train, tiny_run, monkeypatch, capfd):
    from finetune.evaluation import recognise

    right = recognise.recognise_batch

    def first_clip_right(*arguments: Any) -> list[Any]:
        hypotheses = right(*arguments)
        for hypothesis in hypotheses[1:]:
            hypothesis.text += " junk"
        return hypotheses

    assert run_train(*tiny_run(data={"test": None})) == 0
    assert "single decoding" not in capfd.readouterr().err
    monkeypatch.setattr(recognise, "recognise_batch", first_clip_right)
    assert run_train(*tiny_run("training.overwrite_output_dir=true", data={"test": None})) == 0
    assert "batched decoding differs from single decoding on 3 of 4 clips" in capfd.readouterr().err


@pytest.fixture
def heard(tiny_model: Path, clips: Path, tmp_path: Path, capsys: Any) -> Path:
    """A guard set: references that the base model happens to get right, so that any training makes them worse."""
    from finetune.transcribe import main

    rows = [
        {**row, "audio_filepath": str(clips / row["audio_filepath"])} for row in read_lines(clips / "manifest.jsonl")
    ]
    assert main(["--model", str(tiny_model), *(row["audio_filepath"] for row in rows)]) == 0
    texts = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    said = [{**row, "text": text} for row, text in zip(rows, texts, strict=True) if text.strip()]
    assert len(said) > 8, "fewer could not be significant"
    return write_manifest(tmp_path / "guard.jsonl", said)


def test_a_loss_on_the_guarded_domain_is_said(run_train, tiny_run, tmp_path, heard, capsys):
    """While the run goes on, at its end, in summary.json and on the page."""
    arguments = tiny_run(training={"max_steps": 12, "eval_steps": 4, "learning_rate": 0.05})
    assert run_train(*arguments, f"data.guard={heard}", "data.validation=null") == 0
    told = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert told["guard_wer_before"] < 0.2
    assert told["guard_wer_after"] > told["guard_wer_before"]
    guard = told["significance"]["guard"]
    assert guard["wer_a"] == pytest.approx(told["guard_wer_before"])
    assert guard["wer_b"] == pytest.approx(told["guard_wer_after"])
    assert guard["significant"]
    assert guard["p_value"] < 0.01
    assert 0 < guard["difference_interval"][0] <= guard["difference"] <= guard["difference_interval"][1]
    said = capsys.readouterr().err
    assert "the model lost on data.guard" in said
    (drift,) = (line for line in said.splitlines() if "drift: WER on guard" in line)
    assert "step 4" in drift
    assert "by more than chance (p = " in drift
    assert told["drift_warnings"]["guard_lost"] == 1
    rows = read_lines(tmp_path / "run" / "evaluations.jsonl")
    assert [r["step"] for r in rows if r["split"] == "guard" and r["language"] is None] == [0, 4, 8, 12]
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "Word error rate on guard" in page
    assert "against the base model: significantly worse by" in page


@pytest.mark.slow
def test_the_judged_split_has_intervals_and_a_p_value(run_train, tiny_run, tmp_path, capfd):
    """The run's summary equals a comparison of the utterances that the two models are found to say."""
    from finetune.evaluate import main

    arguments = tiny_run(
        training={"max_steps": 30, "eval_steps": 30, "learning_rate": 3e-3, "overwrite_output_dir": True}
    )
    for seed, steps in ((1, 2), (2, 30)):  # the second one overwrites the first, and what it kept of the base model
        assert run_train(*arguments, f"training.seed={seed}", f"training.max_steps={steps}") == 0
    told = json.loads((tmp_path / "run" / "summary.json").read_text())
    config = yaml.safe_load((tmp_path / "RUN.yaml").read_text())
    result = tmp_path / "compared.json"
    models = ["--model", config["model"]["name"], "--against", str(tmp_path / "run")]
    assert main([*models, "--data", config["data"]["test"], "--json", str(result), "--batch-size", "8"]) == 0
    compared, test = json.loads(result.read_text()), told["significance"]["test"]
    assert test["wer_a"] == told["wer_before"] != told["wer_after"] == test["wer_b"]
    for key in ("wer_a", "wer_b", "difference", "p_value", "clips", "words"):
        assert test[key] == pytest.approx(compared[key]), key
    assert told["wer_p_value"] == test["p_value"]
    for key, wer in (("wer_before_interval", "wer_before"), ("wer_after_interval", "wer_after")):
        assert told[key][0] <= told[wer] <= told[key][1]
    assert test["unmatched"] == 0
    assert told["significance"].keys() == {"test"}
    low, high = told["wer_after_interval"]
    said = capfd.readouterr().err
    assert f"{told['wer_after']:.3f} [{low:.3f}, {high:.3f}] after" in said
    assert "significantly better than the base model by" in said
    assert told["best_step"] == 30
    assert LAST_WAS_BEST in said.rpartition("WER on test:")[2]


@pytest.mark.slow
def test_the_guard_is_measured_at_the_last_step_where_an_earlier_one_is_chosen(
    run_train, tiny_run, tmp_path, heard, capsys
):
    """Any training makes both sets worse, so that the base model is kept."""
    from finetune.tools.report.plots import wer_plot
    from finetune.tools.report.read import read_run

    data = {"validation": str(heard), "guard": str(heard), "test": None}
    assert run_train(*tiny_run(data=data, training={"max_steps": 4, "eval_steps": 2, "learning_rate": 0.05})) == 0
    rows = read_lines(tmp_path / "run" / "evaluations.jsonl")
    guard = [(r["step"], r.get("model")) for r in rows if r["split"] == "guard" and r["language"] is None]
    assert guard == [(0, None), (2, None), (4, None), (0, "best")]
    assert LAST_WAS_BEST not in capsys.readouterr().err
    plot = wer_plot(read_run(tmp_path / "run"), "guard")
    assert plot is not None
    assert plot.traces[0]["x"] == [0, 2, 4]


@pytest.mark.slow
def test_a_continued_run_is_still_compared_with_the_base_model(run_train, tiny_run, tmp_path, heard):
    settings = {"max_steps": 12, "eval_steps": 3, "guard_steps": 6, "save_steps": 3, "learning_rate": 0.05}
    arguments = [*tiny_run(training=settings), f"data.guard={heard}", "data.validation=null"]

    class Died(Exception):
        pass

    def observe(trainer: Any) -> None:
        def step() -> Any:
            if trainer.progress.step == 4:
                raise Died
            return contextlib.nullcontext()

        around_steps(trainer, step)

    with pytest.raises(Died):
        run_train(*arguments, observe=observe)
    assert run_train(*arguments, "training.resume_from_checkpoint=true") == 0
    told = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert told["resumed_from"] == 3
    assert told["significance"]["guard"]["significant"]
    assert told["significance"]["test"]["clips"] == 24
    rows = read_lines(tmp_path / "run" / "evaluations.jsonl")
    assert [r["step"] for r in rows if r["split"] == "guard" and r["language"] is None] == [0, 6, 12], "guard_steps=6"


@pytest.mark.slow
def test_a_base_model_that_was_not_measured_or_whose_counts_are_spoiled(run_train, tiny_run, tmp_path, capfd):
    def spoil(trainer: Any) -> None:
        def step() -> Any:
            (tmp_path / "run" / "base-test.npz").write_bytes(b"not counts")
            return contextlib.nullcontext()

        around_steps(trainer, step)

    assert run_train(*tiny_run("training.eval_on_start=false")) == 0
    told = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert told["significance"] == {}
    assert told["wer_p_value"] is None
    assert told["wer_after_interval"][0] <= told["wer_after"] <= told["wer_after_interval"][1]
    assert not list((tmp_path / "run").glob("base-*.npz"))
    assert run_train(*tiny_run("training.overwrite_output_dir=true"), observe=spoil) == 0
    told = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert told["significance"] == {}
    assert "test is not compared with it: " in capfd.readouterr().err


@pytest.mark.slow
def test_evaluation_keeps_no_tensors(tiny_model, clips, tmp_path):
    """The bytes of all tensors alive do not grow with the clips that were decoded."""
    from finetune.data.batching import BatchLimits
    from finetune.data.options import StreamOptions
    from finetune.data.sources import open_source, parse_sources
    from finetune.data.stream import UtteranceStream
    from finetune.data.utterances import no_tokens
    from finetune.evaluation.recognise import score_stream
    from finetune.models.loading import load_model

    rows = [{**r, "audio_filepath": str(clips / r["audio_filepath"])} for r in read_lines(clips / "manifest.jsonl")]
    source = parse_sources(str(write_manifest(tmp_path / "long.jsonl", rows * 6)), "--data", "test")[0]
    model = load_model(str(tiny_model))
    options = StreamOptions(BatchLimits(clips=8), sample_rate=16_000, shuffle=False, keep_empty_text=True)
    alive: list[int] = []

    def on_utterance(*_: Any) -> None:
        if len(alive) % 24 == 0:
            gc.collect()
            tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
            alive.append(sum(t.untyped_storage().nbytes() for t in tensors))
        else:
            alive.append(alive[-1])

    stream = UtteranceStream([open_source(source, "--data")], options, no_tokens)
    board = score_stream(model, stream, normalization="basic", description="test", on_utterance=on_utterance)
    assert board.total.clips == 144
    assert alive[-1] <= alive[24] + 1000


def test_the_shipped_layout_of_parakeet_has_its_number_of_weights():
    """627,008,134 weights, 608,879,616 of them the encoder's, as in nvidia/parakeet-tdt-0.6b-v3 with 8,192 tokens."""
    from nemo.collections.asr.modules import ConformerEncoder, RNNTDecoder, RNNTJoint
    from omegaconf import OmegaConf
    from torch._subclasses.fake_tensor import FakeTensorMode

    path = LAYOUT.with_name("parakeet_tdt_0.6b_v3.yaml")
    root = OmegaConf.load(path)
    OmegaConf.resolve(root)
    parts = {}
    for name, cls in (("encoder", ConformerEncoder), ("decoder", RNNTDecoder), ("joint", RNNTJoint)):
        options = {k: v for k, v in OmegaConf.to_container(root.model[name]).items() if k != "_target_"}
        if name == "decoder":
            options["vocab_size"] = 8192
        if name == "joint":
            options.update(num_classes=8192, vocabulary=[str(i) for i in range(8192)])
            options["jointnet"].update(encoder_hidden=1024, pred_hidden=640)
        with FakeTensorMode():
            parts[name] = sum(p.numel() for p in cls(**options).parameters())
    assert parts["encoder"] == 608_879_616
    assert parts["decoder"] == 11_807_360
    assert sum(parts.values()) == 627_008_134


BIG = 600_000_000


@pytest.mark.parametrize(
    ("training", "model", "data", "given", "word"),
    [
        ({"learning_rate": 8e-5}, {}, {}, {"parameters": BIG, "clips_per_step": 16}, "NeMo issue 15382"),
        ({"learning_rate": 1e-5}, {}, {}, {"parameters": BIG, "clips_per_step": 16}, None),
        ({"learning_rate": 8e-5}, {}, {}, {"parameters": BIG, "clips_per_step": 128}, None),
        ({"encoder_learning_rate": 1e-3}, {}, {}, {"parameters": BIG, "clips_per_step": 16}, "learning rate 0.001"),
        ({"learning_rate": 5e-3}, {}, {}, {}, "learning rate 0.005 is high"),
        ({"learning_rate": 5e-3}, {"name": "layout.yaml"}, {}, {}, None),
        ({"warmup_ratio": 0.0}, {}, {}, {}, "no warm-up"),
        ({"warmup_ratio": 0.0, "warmup_steps": 5}, {}, {}, {}, None),
        ({"per_device_train_batch_size": 4}, {}, {}, {}, "freeze_batchnorm"),
        ({"per_device_train_batch_size": 4}, {"freeze_batchnorm": True}, {}, {}, None),
        ({}, {}, {"validation": None}, {}, "no data.validation"),
        ({}, {}, {}, {}, None),
        ({}, {"dtype": "bfloat16"}, {}, {}, "lost in rounding"),
        ({"optimizer": "adamw_8bit_ao"}, {"dtype": "bfloat16"}, {}, {}, None),
    ],
)
def test_advice(training, model, data, given, word):
    from finetune.training.run import warnings_for

    t = {
        "learning_rate": 1e-5,
        "warmup_steps": 0,
        "warmup_ratio": 0.1,
        "lr_scheduler_type": "cosine",
        "per_device_train_batch_size": 16,
        "optimizer": "adamw",
        **training,
    }
    for name in ("encoder_learning_rate", "decoder_learning_rate", "joint_learning_rate"):
        t.setdefault(name, None)
    m = {"name": "model.nemo", "freeze_batchnorm": False, "sync_batchnorm": False, "dtype": "float32", **model}
    config = SimpleNamespace(
        training=SimpleNamespace(**t),
        model=SimpleNamespace(**m),
        data=SimpleNamespace(**{"validation": "v", **data}),
    )
    facts = {"parameters": 3_000_000, "clips_per_step": 32, "total_steps": 1000, **given}
    found = warnings_for(config, **facts)
    assert len(found) == (word is not None)
    assert word is None or word in found[0]


def test_a_source_is_scored_in_its_own_normalization(run_train, tiny_run, tmp_path, clips):
    """Capitals and punctuation of the references count as characters where the source wants them as they are."""
    as_written = {"path": str(clips / "manifest.jsonl"), "wer_normalization": "none"}
    assert run_train(*tiny_run(data={"test": None, "guard": as_written}, training={"max_steps": 1})) == 0
    first = {r["split"]: r for r in read_lines(tmp_path / "run" / "evaluations.jsonl") if r["step"] == 0}
    assert first["validation"]["clips"] == first["guard"]["clips"]
    assert first["validation"]["cer"] != first["guard"]["cer"]


def test_sources_of_one_evaluation_share_their_normalization(run_train, tiny_run, clips, capsys):
    mixed = [str(clips / "manifest.jsonl"), {"path": str(clips / "manifest.jsonl"), "wer_normalization": "none"}]
    assert run_train(*tiny_run(data={"validation": mixed})) == 2
    assert "data.validation: give every source of the list the same wer_normalization" in capsys.readouterr().err
