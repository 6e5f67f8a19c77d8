"""Runs with data.guard_limit, which model they choose and what they say of it; and runs that diverge."""

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import read_lines, write_manifest
from run_callbacks import around_steps

LEARNS = {"max_steps": 12, "eval_steps": 4, "save_steps": 4, "learning_rate": 3e-3, "seed": 2}


@pytest.fixture(scope="module")
def guard(tiny_model: Path, clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A guard whose references are what the base model hears, so that any training makes it worse; one has an error
    more, as a relative limit of nothing is nothing."""
    from finetune.transcribe import main

    rows = [{**r, "audio_filepath": str(clips / r["audio_filepath"])} for r in read_lines(clips / "manifest.jsonl")]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(["--model", str(tiny_model), *(row["audio_filepath"] for row in rows)]) == 0
    texts = [json.loads(line)["text"] for line in said.getvalue().splitlines()]
    heard = [{**row, "text": text} for row, text in zip(rows, texts, strict=True) if text.strip()]
    return write_manifest(tmp_path_factory.mktemp("guard") / "guard.jsonl", heard)


@pytest.fixture
def limited(tiny_run: Callable[..., list[str]], guard: Path) -> Callable[..., list[str]]:
    """Arguments of a run under a limit, without a test set."""

    def arguments(limit: str, *more: str, **training: Any) -> list[str]:
        data = {"guard": str(guard), "guard_limit": limit, "test": None}
        return tiny_run(*more, data=data, training={**LEARNS, **training})

    return arguments


def rows_of(run: Path, split: str, **marks: Any) -> list[dict[str, Any]]:
    """Lines of evaluations.jsonl, over all languages."""
    rows = [r for r in read_lines(run / "evaluations.jsonl") if r["split"] == split and r["language"] is None]
    return [r for r in rows if all(r.get(key) == value for key, value in marks.items())]


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    from finetune.models.loading import load_model

    return load_model(str(path)).state_dict()


def test_the_base_model_is_kept_where_no_other_keeps_the_limit(run_train, limited, tmp_path, tiny_model, capfd):
    run = tmp_path / "run"
    assert run_train(*limited("+0.01", "training.average_checkpoints=2", "training.ema_decay=0.5")) == 0
    told = json.loads((run / "summary.json").read_text())
    found = told["guard_limit"]
    print(json.dumps({**found, "judged": None}, indent=1), [
        (r["step"], r["weights"], r["validation_wer"], r["guard_wer"], r["kept"]) for r in found["judged"]])
    print(capfd.readouterr().err)
    assert 0
