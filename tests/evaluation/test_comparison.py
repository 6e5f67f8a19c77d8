"""Evaluating with intervals, and comparing two models: `python -m finetune.evaluate --against` and `--compare`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, read_lines, write_manifest

from finetune.evaluation.significance import permutation_p, rate_interval
from finetune.evaluation.utterance_counts import UtteranceCounts

BASE = ROOT / "examples" / "base" / "fastconformer_tdt_3m.nemo"


def evaluate(*arguments: Any) -> int:
    from finetune.evaluate import main

    return main([str(a) for a in arguments])


@pytest.fixture(scope="module")
def worse_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base model with noise on its weights."""
    from finetune.models.loading import load_model
    from finetune.models.nemo_archive import save_nemo

    model = load_model(str(BASE))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += 0.12 * parameter.std(correction=0) * noise
    path = tmp_path_factory.mktemp("worse") / "worse.nemo"
    save_nemo(model, path)
    return path


@pytest.fixture(scope="module")
def compared(worse_model: Path, clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base model against the worse one, on 24 clips: result.json, a.jsonl, b.jsonl."""
    folder = tmp_path_factory.mktemp("compared")
    assert (
        evaluate(
            "--model", BASE, "--against", worse_model, "--data", clips / "manifest.jsonl", "--json",
            folder / "result.json", "--utterances", folder / "a.jsonl", folder / "b.jsonl",
        )
        == 0
    )  # fmt: skip
    return folder


def test_two_models_decoded_and_compared(compared, capsys):
    told = json.loads((compared / "result.json").read_text())
    a, b = (read_lines(compared / name) for name in ("a.jsonl", "b.jsonl"))
    assert [row["id"] for row in a] == [row["id"] for row in b]
    errors = np.array([[row["word_errors"] for row in rows] for rows in (a, b)])
    words = sum(row["words"] for row in a)
    assert told["wer_a"] == pytest.approx(errors[0].sum() / words)
    assert told["wer_b"] == pytest.approx(errors[1].sum() / words)
    assert told["difference"] == pytest.approx(told["wer_b"] - told["wer_a"])
    assert told["p_value"] == pytest.approx(permutation_p(errors[1] - errors[0]))
    assert told["difference"] > 0.05, "the noise has to do harm for the test to mean much"
    assert [one["wer"] for one in told["models"]] == pytest.approx([told["wer_a"], told["wer_b"]])
    assert (told["better"] + told["worse"] + told["unchanged"], told["clips"]) == (24, 24)
    worst = told["most_worsened"][0]
    assert worst["more_errors"] == max(errors[1] - errors[0])
    (row,) = (row for row in b if row["id"] == worst["id"])
    assert worst["hypothesis_b"] == row["hypothesis"]
    assert set(told["by_language"]) == {"en", "fr"}


def test_kept_files_give_the_same_comparison(compared, capsys):
    result = compared / "again.json"
    assert evaluate("--compare", compared / "a.jsonl", compared / "b.jsonl", "--json", result) == 0
    told, before = (json.loads((compared / name).read_text()) for name in ("again.json", "result.json"))
    assert {k: v for k, v in told.items() if k not in ("a", "b")} == {
        k: v for k, v in before.items() if k not in ("a", "b", "models")
    }
    said = capsys.readouterr().out
    assert before["verdict"] in said
    assert f"{100 * told['wer_a']:.2f}" in said
    assert "most worsened" in said


def test_a_model_against_itself_is_no_different(compared, capsys):
    result = compared / "same.json"
    assert evaluate("--compare", compared / "a.jsonl", compared / "a.jsonl", "--json", result) == 0
    told = json.loads(result.read_text())
    assert (told["difference"], told["p_value"], told["significant"]) == (0, 1, False)
    assert told["difference_interval"] == [0, 0]
    assert (told["unchanged"], told["most_improved"], told["most_worsened"]) == (24, [], [])
    assert "no significant difference" in capsys.readouterr().out


def test_what_does_not_fit_together_is_counted_and_said(compared, tmp_path, capsys):
    rows = read_lines(compared / "b.jsonl")
    rows[3]["reference"] = "something else altogether"
    rows[4]["reference"] = f" {rows[4]['reference'].upper()} !"  # the same to `basic`
    other = write_manifest(tmp_path / "b.jsonl", [*rows[:22], {**rows[0], "id": "new"}, rows[1]])
    result = tmp_path / "result.json"
    assert evaluate("--compare", compared / "a.jsonl", other, "--json", result) == 0
    told = json.loads(result.read_text())
    assert (told["clips"], told["only_in_a"], told["only_in_b"], told["other_reference"]) == (21, 2, 2, 1)
    assert "not compared: 2 only in a, 2 only in b, 1 with another reference" in capsys.readouterr().out


def test_files_that_cannot_be_compared(compared, tmp_path, capsys):
    rows = read_lines(compared / "a.jsonl")
    good = compared / "a.jsonl"
    cases = {
        "cannot be read": tmp_path / "missing.jsonl",
        "no clip with words is in both": write_manifest(
            tmp_path / "x.jsonl", [{**r, "id": r["id"] + "x"} for r in rows]
        ),
        "line 2 of": write_manifest(tmp_path / "y.jsonl", [rows[0], "not json", rows[1]]),
        "line 1 of": write_manifest(tmp_path / "z.jsonl", [{"id": "a", "text": "b"}]),
        "was scored with --normalization basic": write_manifest(
            tmp_path / "n.jsonl", [{**r, "normalization": "lower"} for r in rows]
        ),
    }  # fmt: skip
    for said, path in cases.items():
        assert evaluate("--compare", good, path) == 2
        assert said in capsys.readouterr().err
    assert evaluate("--compare", good, cases["was scored with --normalization basic"], "--normalization", "none") == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "m"], "--model and --data are needed"),
        (["--compare", "a", "b", "--data", "d"], "--compare reads what was decoded before"),
        (["--model", "m", "--data", "d", "--utterances", "a", "b"], "a second one with --against"),
        (["--model", "m", "--data", "d", "--bootstrap", "-1"], "--bootstrap has to be 0 or more"),
        (["--model", "m", "--data", "d", "--bootstrap-by-id", "("], "no regular expression"),
        (["--model", "m", "--data", "d", "--dtype", "bfloat16", "--look-ahead", "all"], "leave out --dtype"),
    ],
)
def test_arguments_that_do_not_go_together(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        evaluate(*arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_intervals_speed_and_the_leaderboards_normalisation(clips, tmp_path, capsys):
    rows = [
        {**row, "audio_filepath": str(clips / row["audio_filepath"])} for row in read_lines(clips / "manifest.jsonl")
    ]
    rows[0]["text"], rows[1]["text"] = "[noise]", "It's okay, um"
    for row in rows[2:5]:
        del row["lang"]
    manifest, result, utterances = (tmp_path / name for name in ("m.jsonl", "r.json", "u.jsonl"))
    write_manifest(manifest, rows)
    assert (
        evaluate(
            "--model", BASE, "--data", manifest, "--normalization", "open_asr", "--json", result, "--utterances",
            utterances, "--bootstrap", 500, "--bootstrap-by-id", "^(..)",
        )
        == 0
    )  # fmt: skip
    told, kept = json.loads(result.read_text()), read_lines(utterances)
    assert (told["clips"], told["left_out"], len(kept)) == (23, 1, 24)
    assert kept[1]["words"] == 3, "it is okay"
    assert told["audio_seconds"] == pytest.approx(sum(row["duration"] for row in rows), rel=1e-3)
    assert 0 < told["decoding_seconds"] < told["seconds"]
    assert told["rtfx"] == pytest.approx(told["audio_seconds"] / told["decoding_seconds"])
    assert told["rtfx_whole"] == pytest.approx(told["audio_seconds"] / told["seconds"])
    assert told["blocks"] == len({row["id"][:2] for row in kept[1:]})
    said = capsys.readouterr().out
    assert "1 clip(s) without a reference after normalisation are left out" in said
    assert "3 clip(s) name no language: normalised as English" in said
    assert f"RTFx {told['rtfx']:.1f} decoding" in said
    assert "fewer than 20 clips or blocks" in said, "two blocks"
    plain = tmp_path / "plain.json"
    assert evaluate("--model", BASE, "--data", manifest, "--json", plain) == 0
    told = json.loads(plain.read_text())
    narrow = tmp_path / "narrow.json"
    assert evaluate("--model", BASE, "--data", manifest, "--json", narrow, "--dtype", "bfloat16") == 0
    in_bfloat16 = json.loads(narrow.read_text())
    assert (told["dtype"], in_bfloat16["dtype"]) == ("float32", "bfloat16")
    assert in_bfloat16["wer"] == pytest.approx(told["wer"], abs=0.02)
    counts = UtteranceCounts()
    from finetune.evaluation.scores import score_pair

    for row in kept:
        counts.add(row["id"], "", row["language"], score_pair(row["reference"], row["hypothesis"], "basic"))
    errors, words, *_ = counts.table().T
    assert told["wer_interval"] == pytest.approx(rate_interval(errors, words))
    assert told["wer_interval"][0] < told["wer"] < told["wer_interval"][1]
    assert told["by_language"]["fr"]["cer_interval"][0] < told["by_language"]["fr"]["cer"]
