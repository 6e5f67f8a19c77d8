"""`--smoke N`: a healthy run passes; a planted leak, a batch that does not fit and a loss that is not finite fail."""

import json

import pytest
import torch

from finetune.data.survey import survey_lengths
from finetune.tools.preflight.smoke import assess_steps

LEAKED_BYTES = 4000  # a step


@pytest.fixture
def smoked(run_train, tiny_run, tmp_path, capsys):
    """Runs a smoke test of the tiny model; returns what it said and its result."""

    def run(exit_code, steps, *arguments):
        code = run_train(*tiny_run(training={"max_steps": 500}), "--smoke", steps, *arguments)
        said = capsys.readouterr().err
        assert code == exit_code, said
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["smoke.json"]
        return said, json.loads((tmp_path / "run" / "smoke.json").read_text())

    return run


def test_a_healthy_run(smoked):
    said, found = smoked(0, 30)
    assert found["verdict"] == "good"
    assert found["planned_steps"] == 500
    assert found["rows_looked_at"] == 24
    steps = found["by_step"]
    assert len(steps) == 30
    # The longest clips come first, and need most.
    assert steps[0]["batch"]["longest_seconds"] == pytest.approx(found["longest_clip_seconds"], abs=0.01)
    assert all(row["batch"]["padded_seconds"] <= steps[0]["batch"]["padded_seconds"] for row in steps)
    peaks = [row["peak_tensors"] for row in steps]
    assert found["peak_step"] <= 4
    assert max(peaks) == found["peak_gib"] * 2**30 > 1.2 * min(peaks)
    # Nothing is left of any step beside the weights and the optimizer's states.
    assert len({row["tensors"] for row in steps}) == 1
    for words in ("24 of 24 clips", "stable", "headroom", "smoke test of 30 steps: good"):
        assert words in said
    assert "uncertain" not in said


@pytest.mark.slow
def test_a_leak(smoked, monkeypatch):
    from finetune.training.trainer import Trainer

    step, kept = Trainer._optimizer_step, []

    def leaky(self, step_input):
        result = step(self, step_input)
        kept.append(torch.zeros(LEAKED_BYTES // 4))
        return result

    monkeypatch.setattr(Trainer, "_optimizer_step", leaky)
    said, found = smoked(1, 12)
    assert found["growth"]["leaking"]
    assert found["growth"]["mib_per_1000_steps"] == pytest.approx(1000 * LEAKED_BYTES / 2**20, rel=0.01)
    assert "leaking" in said
    assert "uncertain" in said  # 12 steps are few


def test_a_batch_that_does_not_fit(smoked, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("finetune.models.loss_module.LossModule.forward", full)
    said, found = smoked(1, 10)
    for words in (
        "step 1 does not fit, with the longest clips: 4 clips of up to 1.4 s",
        "tokens",
        "cells",
        "--strategy adamw_8bit",
    ):
        assert words in said
        assert words in found["problems"][0]


def test_a_loss_that_is_not_finite(smoked, monkeypatch):
    from finetune.models.loss_module import LossModule

    forward = LossModule.forward
    monkeypatch.setattr(LossModule, "forward", lambda *a, **k: forward(*a, **k) * float("nan"))
    said, found = smoked(1, 2)
    assert "not finite in step 1, 2 of 2" in found["problems"][0]
    assert "too few to tell" in said


def test_one_step_alone(smoked):
    said, found = smoked(0, 1)
    assert found["verdict"] == "good"
    assert found["growth"]["judged_steps"] == 1
    assert "1 step is too few to tell" in said
    weights = found["by_step"][0]["tensors"]
    _, found = smoked(0, 1, "training.l2_sp=1", "model.distillation=1")
    # The start of the pull and the frozen base, beside the weights and AdamW's two moments: 6 copies where it were 4.
    assert found["by_step"][0]["tensors"] > 1.4 * weights


@pytest.mark.slow
def test_halved_bounds_are_said(run_train, tiny_run, tmp_path, monkeypatch, capsys):
    def limit(trainer):
        """Memory that ends at 6 padded seconds of a batch, which the plan does not know."""
        forward = trainer.loss_module.forward

        def limited(audio_BS, *rest, **options):
            if audio_BS.numel() > 6 * 16_000:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return forward(audio_BS, *rest, **options)

        trainer.loss_module.forward = limited

    monkeypatch.setenv("PARAKEET_FINETUNE_CACHE", str(tmp_path / "cache"))
    settings = {"auto_batch": True, "memory_limit_gib": 1.0}
    run = tiny_run(data={"max_duration": 3.0, "batch_duration": 24.0}, training=settings)
    assert run_train(*run, "--smoke", "3", observe=limit) == 0
    said = capsys.readouterr().err
    found = json.loads((tmp_path / "run" / "smoke.json").read_text())
    planned, now = found["batch_bounds"]["planned"], found["batch_bounds"]["now"]
    assert found["out_of_memory"] >= 1
    assert now[-1][1] < planned[-1][1]
    assert "auto batch: memory ran out" in said
    assert f"{now[-1][1]:g} in place of {planned[-1][1]:g} up to 3 s" in said


def rows(resident, tensors=lambda i: 10**6):
    """Steps as `assess_steps` takes them; resident and tensors tell bytes after step i."""
    return [
        {
            **{"step": i + 1, "clips": "some", "batch": {}, "loss": 1.0, "reserved": None, "outside": None},
            **{"tensors": tensors(i), "peak_tensors": 2 * 10**6 + i % 7, "total": 2**34, "available": 2**33},
            **{"resident": resident(i), "peak_resident": resident(i) + 10**6},
        }
        for i in range(100)
    ]


MIB = 2**20


@pytest.mark.parametrize(
    ("resident", "leaking"),
    [
        (lambda i: 1000 * MIB, False),
        (lambda i: 1000 * MIB + i * i * 7919 % 40 * MIB, False),  # noise
        (lambda i: round(2000 * MIB * (1 - 0.5 * 0.9**i)), False),  # settles
        (lambda i: (1000 + 50 * (i > 60)) * MIB, False),  # one jump
        (lambda i: (1000 + 3 * i + i * i * 7919 % 20) * MIB, True),
    ],
)
def test_resident_memory_may_settle_but_not_grow(resident, leaking):
    found = assess_steps([rows(lambda i: 1000 * MIB), rows(resident)], gpu=False, planned=1000, scaled=False)
    assert found["growth"]["leaking"] == leaking
    assert (found["verdict"] == "bad") == leaking
    if leaking:
        assert found["growth"]["rank"] == 1
        assert found["growth"]["mib_per_1000_steps"] == pytest.approx(3000, rel=0.1)


def test_a_peak_above_the_memory_is_bad():
    steps = [
        {**row, "available": 10 * MIB, "peak_resident": row["resident"] + 11 * MIB} for row in rows(lambda i: MIB)
    ]
    found = assess_steps([rows(lambda i: MIB), steps], gpu=False, planned=1000, scaled=False)
    assert found["verdict"] == "bad"
    assert found["headroom_gib"] < 0
    assert "memory does not suffice" in found["problems"][0]
    # On a GPU others' memory counts: here they leave less than the tensors' peak.
    held = [{**row, "outside": row["total"] - 10**6, "reserved": 3 * 10**6} for row in rows(lambda i: MIB)]
    found = assess_steps([held], gpu=True, planned=1000, scaled=False)
    assert "the GPU's 16.0 GiB" in found["problems"][0]


def test_the_survey_finds_the_longest_clips_of_any_source(corpus, tiny, run_file):
    from types import SimpleNamespace

    from finetune.config.load import load_config
    from finetune.data.run_file import open_sources
    from finetune.data.survey import batch_of
    from finetune.training.data import make_stream

    def look(path):
        config, _ = load_config(
            run_file(data__train=str(path)), [], ["data.min_duration=0.01", "data.max_duration=0.45"]
        )
        one = SimpleNamespace(process_index=0, num_processes=1, device=torch.device("cpu"))
        stream = make_stream(one, model, config, open_sources(config)["train"], training=True)
        stream.encode = lambda text: [1]  # the texts are of no language
        survey = survey_lengths(stream)
        return survey, batch_of(stream, survey.by_seconds)

    model = tiny()
    seen = []
    for path in (corpus / "shards", corpus / "manifest.jsonl"):
        survey, batch = look(path)
        assert survey.looked == survey.rows == 47
        assert 0.4 < survey.longest <= 0.45  # longer ones are filtered out
        lengths = [n / model.preprocessor._sample_rate for n in batch.audio_lengths_B.tolist()]
        assert lengths[0] == pytest.approx(survey.longest, abs=0.001)
        assert lengths == sorted(lengths, reverse=True)
        seen.append(batch.ids)
    assert len(seen[0]) == 8  # training.per_device_train_batch_size
    assert sorted(seen[0]) == sorted(seen[1])


def test_a_bound_on_the_cells_makes_batches_of_shorter_clips_the_fullest(failed, tiny_run, tmp_path):
    data = {"batch_duration": 6.0, "batch_cells": 300, "max_duration": 6.0}
    failed(0, *tiny_run(data=data), "--smoke", "3")
    steps = json.loads((tmp_path / "run" / "smoke.json").read_text())["by_step"]
    longest, cells, fullest = (row["batch"] for row in steps)
    assert [row["clips"] for row in steps] == [
        "the longest clips",
        "the clips with the most lattice cells",
        "the most audio in a batch",
    ]
    assert fullest["longest_seconds"] < longest["longest_seconds"]
    assert longest["padded_seconds"] < fullest["padded_seconds"] <= 6.0
    assert max(batch["cells"] for batch in (longest, cells, fullest)) <= 300
