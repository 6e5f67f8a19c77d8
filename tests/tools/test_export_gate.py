"""The gate of exports: what it lets through, and that it names what is broken."""

import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, read_lines, slow, write_manifest
from export_cases import damaged, write_export

from finetune.errors import UserError
from finetune.evaluation.scores import Utterance

BASE = ROOT / "examples" / "base" / "fastconformer_tdt_3m.nemo"


def utterances(texts: list[str], references: list[str] | None = None) -> list[Utterance]:
    references = references or [f"one two three four {i}" for i in range(len(texts))]
    return [Utterance(f"clip-{i}", "en", *pair) for i, pair in enumerate(zip(references, texts, strict=True))]


def texts_with_errors(clips: int, wrong: int) -> list[str]:
    """Recognised texts, of which the first have one wrong word of five."""
    return [f"one two three {'for' if i < wrong else 'four'} {i}" for i in range(clips)]


# ---- the verdict ---------------------------------------------------------------------------------------------------


def test_equal_texts_pass_and_bound_the_share_that_differs():
    from finetune.tools.export.gate.verdict import judge

    same = utterances(texts_with_errors(60, 3))
    exact = judge(same, same, exact=True, max_loss=0.0)
    assert exact.passed
    assert exact.reason == "texts equal on all 60 clips"
    lossy = judge(same, same, exact=False, max_loss=0.2)
    assert lossy.passed
    assert lossy.share_bound == pytest.approx(1 - 0.05 ** (1 / 60))


def test_marks_of_the_unknown_piece_and_blanks_are_no_difference():
    from finetune.tools.export.gate.verdict import judge

    one, said = utterances(["a ⁇ b", "c d"] * 10), ["a b", "c d"] * 10
    assert judge(one, utterances(["a<unk> b ", "c  d"] * 10), exact=True, max_loss=0.0).passed
    assert judge(one, utterances(said), exact=True, max_loss=0.0).passed
    assert not judge(one, utterances([*said[:-1], "c  e"]), exact=True, max_loss=0.0).passed


def test_fp32_may_not_differ_on_one_clip():
    from finetune.tools.export.gate.verdict import judge

    verdict = judge(
        utterances(texts_with_errors(500, 0)), utterances(texts_with_errors(500, 1)), exact=True, max_loss=9
    )
    assert not verdict.passed
    assert verdict.reason.startswith("texts differ on 1 of 500 clips")
    assert [row["id"] for row in verdict.differing] == ["clip-0"]
    assert verdict.share_bound is None


def test_clips_that_say_nothing_prove_nothing():
    """Equal texts on a few clips, or texts without a word."""
    from finetune.tools.export.gate.verdict import judge

    for exact in (True, False):
        few = judge(utterances(["a b"] * 19), utterances(["a b"] * 19), exact=exact, max_loss=1.0)
        assert (few.passed, few.clips_needed) == (False, 20)
        assert "19 clips are too few" in few.reason
        silent = judge(utterances([" "] * 20), utterances([""] * 20), exact=exact, max_loss=1.0)
        assert not silent.passed
        assert "no text has a word" in silent.reason
        assert judge(utterances(["a"] * 20), utterances(["a"] * 20), exact=exact, max_loss=1.0).passed


@pytest.mark.parametrize(("clips", "wrong", "max_loss", "passed", "said"), [
    (2000, 8, 0.2, True, "within --max-loss 0.2"),
    (2000, 60, 0.2, False, "more clips would not change that"),
    (200, 1, 0.2, False, "clips are too few"),
])  # fmt: skip
def test_a_loss_is_judged_by_the_upper_end_of_its_interval(clips, wrong, max_loss, passed, said):
    from finetune.tools.export.gate.verdict import judge

    original, exported = utterances(texts_with_errors(clips, 0)), utterances(texts_with_errors(clips, wrong))
    verdict = judge(original, exported, exact=False, max_loss=max_loss)
    assert verdict.passed is passed
    assert said in verdict.reason
    if verdict.comparison and wrong:
        assert verdict.comparison["difference"] == pytest.approx(wrong / (5 * clips))


def test_the_number_of_clips_that_is_needed_is_enough():
    """With so many clips of the same kind the verdict is the other one; with half of them it is not."""
    from finetune.tools.export.gate.verdict import judge

    def judged(clips: int) -> Any:
        wrong = [clips % 20 == 0 for clips in range(clips)]
        better = [clips % 20 == 10 for clips in range(clips)]
        original = [f"one two three {'for' if b else 'four'} {i}" for i, b in enumerate(better)]
        exported = [f"one two three {'for' if w else 'four'} {i}" for i, w in enumerate(wrong)]
        return judge(utterances(original), utterances(exported), exact=False, max_loss=1.0)

    few = judged(100)
    assert not few.passed
    needed = few.clips_needed
    assert needed is not None
    assert f"{needed:,}" in few.reason
    assert not judged(needed // 2).passed
    assert judged(int(1.3 * needed)).passed


def test_without_references_a_difference_cannot_be_judged():
    from finetune.tools.export.gate.verdict import judge

    texts, empty = texts_with_errors(30, 0), [""] * 30
    assert judge(utterances(texts, empty), utterances(texts, empty), exact=False, max_loss=1.0).passed
    with pytest.raises(UserError, match="no clip has a reference"):
        judge(utterances(texts, empty), utterances(texts_with_errors(30, 2), empty), exact=False, max_loss=1.0)


# ---- exports, whole and broken -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def case(tmp_path_factory, clips) -> SimpleNamespace:
    """The small base model for both runtimes, the clips of the gate, and NeMo's texts."""
    from finetune.tools.export.gate.gate import gather_clips
    from finetune.tools.export.gate.one_side import measure
    from finetune.tools.export.layouts import write_layout
    from finetune.tools.export.onnx import graphs_of

    folder = tmp_path_factory.mktemp("exports")
    graphs = {}
    for to in ("onnx", "sherpa"):
        for name in (to, f"{to}-graphs"):
            (folder / name).mkdir()
        graphs[to] = graphs_of(str(BASE), folder / f"{to}-graphs", to)
        write_layout(graphs[to], folder / to, to, "fp32")
    gathered = gather_clips([str(clips / "manifest.jsonl")], "validation", 16000, folder / "clips")
    request = {"model": str(BASE), "head": None, "tokenizer": None, "clips": gathered.folder, "threads": 1, "batch": 1}
    original = measure({**request, "kind": "nemo"})
    return SimpleNamespace(folder=folder, graphs=graphs["onnx"], clips=gathered, request=request, original=original)


def parts_of(case: SimpleNamespace, directory: Path) -> dict[str, dict[str, Any]]:
    from finetune.tools.export.gate.one_parts import compare_all

    rows = compare_all({**case.request, "directory": str(directory), "chosen": list(range(8))})
    return {row["part"]: row for row in rows}


@pytest.mark.slow
def test_a_side_is_measured(case):
    from finetune.tools.export.gate.one_side import measure

    side = measure({**case.request, "kind": "exported", "model": str(case.folder / "onnx")})
    assert side["texts"] == case.original["texts"]
    assert len(set(side["texts"])) > 12
    assert side["runtime"].startswith("onnx-asr 0.")
    assert case.original["runtime"].startswith("NeMo ")
    assert side["rtfx"] == pytest.approx(case.clips.seconds / side["decode_seconds"])
    assert 0 < side["loaded_bytes"] <= side["peak_bytes"]


@pytest.mark.parametrize("to", ["onnx", "sherpa"])
def test_parts_of_a_sound_export_are_equal(case, to):
    parts = parts_of(case, case.folder / to)
    own = {"features"} if to == "sherpa" else set()
    assert {name for name, row in parts.items() if row["state"] == "equal"} == parts.keys() - own
    assert all("features of its own, on which NeMo itself writes" in parts[name]["note"] for name in own)
    assert parts.keys() == {"token table", "settings", "features", "encoder outputs", "decoder and joint"}


@pytest.mark.parametrize("to", [slow("onnx"), "sherpa"])
def test_parts_of_a_ctc_export(case, archive_of, tmp_path, to):
    """sherpa-onnx reads a frame less, for which the file moves a text's end."""
    model = archive_of("ctc", speaking=True)
    write_export(model, tmp_path / to, to)
    other = SimpleNamespace(request={**case.request, "model": str(model)})
    parts = parts_of(other, tmp_path / to)
    assert parts.keys() == {"token table", "settings", "features", "encoder outputs"}
    own = {"features"} if to == "sherpa" else set()
    assert {name for name, row in parts.items() if row["state"] != "equal"} <= own, parts
    broken = parts_of(other, damaged(tmp_path / to, tmp_path, "scale"))["encoder outputs"]
    assert broken["state"] == "differs"
    assert "of 8 texts change by it alone" in broken["note"]


@pytest.mark.parametrize(("to", "what", "part", "said"), [
    ("onnx", "scale", "encoder outputs", "differ by 0."),
    ("onnx", "tokens", "token table", "128 of 128 tokens (0 is "),
    ("onnx", "features", "settings", " in place of "),
    ("sherpa", "joint", "decoder and joint", "cells change by it alone"),
    slow("onnx", "joint", "decoder and joint", "cells change by it alone"),
    slow("sherpa", "scale", "encoder outputs", "differ by 0."),
    slow("sherpa", "tokens", "token table", "128 of 128 tokens (0 is "),
    slow("sherpa", "features", "settings", " in place of "),
])  # fmt: skip
def test_a_broken_export_is_named(case, tmp_path, to, what, part, said):
    parts = parts_of(case, damaged(case.folder / to, tmp_path, what))
    allowed = {part, "features"}
    assert parts[part]["state"] == "differs"
    assert said in parts[part]["note"]
    assert {row["state"] for name, row in parts.items() if name not in allowed} == {"equal"}
    if what == "features" and to == "onnx":
        assert parts["features"]["note"].startswith("features differ in shape ([128, ")


@pytest.mark.slow
def test_a_reason_names_what_differs_and_what_is_equal(case, tmp_path):
    from finetune.tools.export.gate.gate import Outcome
    from finetune.tools.export.gate.verdict import Verdict

    parts = list(parts_of(case, damaged(case.folder / "onnx", tmp_path, "tokens")).values())
    reason = Outcome(Verdict(False, "texts differ on 24 of 24 clips", 24), [], parts).reason
    assert reason.startswith("texts differ on 24 of 24 clips: token table differs: 128 of 128 tokens")
    assert reason.endswith("(equal: settings, features, encoder outputs, decoder and joint)")
    own = list(parts_of(case, case.folder / "sherpa").values())
    reason = Outcome(Verdict(False, "texts differ on 3 of 24 clips", 24), [], own).reason
    assert reason.startswith("texts differ on 3 of 24 clips: sherpa-onnx computes features of its own, on which NeMo")
    assert reason.endswith("(equal: token table, settings, encoder outputs, decoder and joint)")
    equal = [row for row in own if row["state"] == "equal"]
    reason = Outcome(Verdict(False, "texts differ on 3 of 24 clips", 24), [], equal).reason
    assert "nothing that was written differs, so it is the runtime's own search" in reason


def test_files_that_cannot_be_read_are_named(case, tmp_path):
    broken = damaged(case.folder / "onnx", tmp_path, "tokens")
    (broken / "encoder-model.onnx").write_bytes(b"no graph")
    with pytest.raises(UserError, match=r"encoder-model\.onnx cannot be loaded"):
        parts_of(case, broken)
    for path in broken.glob("*.onnx"):
        path.unlink()
    with pytest.raises(UserError, match=r"no \.onnx file"):
        parts_of(case, broken)


def test_clips_of_the_gate(case, clips, tmp_path):
    from finetune.tools.export.gate.clips import load_clips
    from finetune.tools.export.gate.gate import choose_clips, gather_clips

    again = load_clips(Path(case.clips.folder))
    assert again == case.clips
    assert len(again) == 24
    assert sum(len(again.audio(i)) for i in range(24)) == again.ends[-1] == pytest.approx(again.seconds * 16000)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(f"data:\n  validation: {clips / 'manifest.jsonl'}\n")
    (run / "model.nemo").write_bytes(b"")
    assert choose_clips(str(run), None) == choose_clips(str(run / "model.nemo"), None)
    assert choose_clips(str(run), None) == (str(clips / "manifest.jsonl"), "data.validation")
    with pytest.raises(UserError, match=r"brings no validation clips\. Name them with --data"):
        choose_clips(str(BASE), None)
    rows = [
        {**row, "audio_filepath": str(clips / row["audio_filepath"])} for row in read_lines(clips / "manifest.jsonl")
    ]
    nothing = write_manifest(tmp_path / "gone.jsonl", [{**rows[0], "audio_filepath": "gone.flac"}])
    with pytest.raises(UserError, match="holds no clip that can be used"):
        gather_clips([str(nothing)], "validation", 16000, tmp_path / "none")


# ---- layers in float32 ---------------------------------------------------------------------------------------------


def search(
    harmful: set[str], clips: int = 100, float_bytes: int = 120, static: set[str] | None = None
) -> tuple[Any, list[dict[str, Any]], list[list[str]]]:
    """Search with 12 blocks, of which an export passes once the harmful ones are in float32; `static`: those of static
    int8, None without clips to calibrate on."""
    from finetune.tools.export.gate.gate import Outcome
    from finetune.tools.export.gate.mixed import Block, search_precision
    from finetune.tools.export.gate.verdict import Verdict

    written: list[list[str]] = []
    asked: list[bool] = []

    def write(keep: Any, fixed: bool) -> int:
        asked.append(fixed)
        written.append(list(keep))
        return 30 + 10 * len(keep)

    def check() -> Outcome:
        hurts = (static or set()) if asked[-1] else harmful
        left = hurts - {node.partition("/")[0] for node in written[-1]}
        verdict = Verdict(not left, "differ" if left else "equal", clips, [{"id": "clip-0"}] if left else [])
        verdict.comparison = {"difference_interval": [-0.01, len(left) / 100]}
        return Outcome(verdict, [], [])

    def rank(fixed: bool) -> list[Block]:
        return [Block(f"b{i}", [f"b{i}/x"], 1 / (i + 1)) for i in range(12)]

    return *search_precision(write, check, lambda: static is not None, rank, float_bytes), written


def test_static_int8_is_tried_where_dynamic_does_not_pass():
    outcome, tries, written = search({"b0"}, static=set())
    assert outcome.verdict.passed
    assert [(row["inputs"], row["kept"]) for row in tries] == [("dynamic", "none"), ("static", "none")]
    assert len(search(set(), static=set())[1]) == 1, "dynamic passes"
    # Blocks stay in float of that which loses less.
    for harmful, static, taken in (({"b0", "b1"}, {"b0"}, "static"), ({"b0"}, {"b0", "b1"}, "dynamic")):
        outcome, tries, written = search(harmful, static=static)
        assert outcome.verdict.passed
        assert [row["inputs"] for row in tries] == ["dynamic", "static", taken]
        assert written == [[], [], ["b0/x"]]


def test_blocks_stay_in_float_step_by_step_until_it_passes():
    outcome, tries, written = search({"b0", "b2"})
    assert outcome.verdict.passed
    assert written == [[], ["b0/x"], ["b0/x", "b1/x"], ["b0/x", "b1/x", "b2/x", "b3/x"]]
    assert [row["kept"] for row in tries] == ["none", "b0", "b0, b1", "b0, b1, b2, b3"]
    assert [row["bytes"] for row in tries] == [30, 40, 50, 70]
    assert [row["reason"] for row in tries] == ["differ", "differ", "differ", "equal"]


def test_plain_int8_that_passes_is_left_alone():
    outcome, tries, _ = search(set())
    assert outcome.verdict.passed
    assert len(tries) == 1


def test_no_layer_is_measured_where_plain_int8_is_too_large():
    _, tries, written = search({"b0"}, float_bytes=39)
    assert (len(tries), written) == (1, [[]])


def test_values_that_are_no_numbers_are_named():
    from finetune.tools.export.gate.one_parts import Difference

    for bad in (np.nan, np.inf):
        found = Difference()
        assert found.add(np.ones(3), np.ones(3))
        assert not found.add(np.ones(3), np.array([1, bad, 1]))
        row = found.row("encoder outputs", "texts")
        assert (row["state"], row["note"]) == ("differs", "encoder outputs are infinite or no numbers on 1 clips")


def test_the_search_ends_where_int8_has_lost_its_purpose():
    from finetune.tools.export.gate.mixed import advice

    outcome, tries, written = search({"b11"})
    assert not outcome.verdict.passed
    assert [len(nodes) for nodes in written] == [0, 1, 2, 4, 8], "110 of 120 bytes are beyond three quarters"
    assert advice(tries).startswith(
        "5 ways of int8 were tried, the last dynamic with 8 of 12 (b0, b1, b2, b3, ...) in float32"
    )
    assert [len(nodes) for nodes in search({"none of them"}, float_bytes=1000)[2]] == [0, 1, 2, 4, 8, 12]
    assert len(search({"b0"}, clips=19)[1]) == 1, "too few clips for any precision: no other is tried"


@pytest.mark.slow
def test_the_layer_that_is_hurt_most_is_found(case, tmp_path):
    """One column of a layer's weights is made much larger than all activations of others: 8 bits cannot hold it."""
    import numpy as np
    import onnx
    from onnx import numpy_helper

    from finetune.tools.export.gate.one_ranking import nodes_of, rank

    source = tmp_path / "encoder.onnx"
    model = onnx.load(str(case.graphs.files["encoder"]))
    layers = [name for name in nodes_of(case.graphs.files["encoder"]) if name.startswith("layer")]
    assert len(layers) >= 4
    wrong = next(n for n in model.graph.node if n.name.endswith("/layers.1/feed_forward2/linear2/MatMul"))
    weight = next(t for t in model.graph.initializer if t.name == wrong.input[1])
    values = numpy_helper.to_array(weight).copy()
    values[:, :] += 50 * np.abs(values).max() * (np.arange(values.shape[0]) % 2 * 2 - 1)[:, None]
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    onnx.save(model, str(source))
    request = {**case.request, "graph": str(source), "work": str(tmp_path), "chosen": [0, 1]}
    found = rank(request)
    assert found[0]["name"] == "layer 1"
    assert {row["name"] for row in found} == set(nodes_of(source))
    assert all(row["harm"] > 0 for row in found)
    assert found == sorted(found, key=lambda row: -row["harm"])


# ---- the report and the command ------------------------------------------------------------------------------------


def test_the_report_is_a_page_that_needs_nothing_else(case, tmp_path):
    from finetune.tools.export.gate.gate import Outcome
    from finetune.tools.export.gate.report import (
        hashes_of,
        machine,
        read_report,
        side_row,
        with_original,
        write_report,
    )
    from finetune.tools.export.gate.verdict import judge

    evil = "<script>alert(1)</script>"
    original, exported = utterances(["a b", evil]), utterances(["a b", "c"])
    verdict = judge(original, exported, exact=True, max_loss=0.0)
    rows = [side_row("NeMo", case.original, 10, None), side_row("onnx-asr", case.original, 5, verdict)]
    with_original(rows, verdict)
    rows.append({"name": "sherpa-onnx", "failed": "exit code 255"})
    report = {
        "passed": False, "reason": Outcome(verdict, rows, []).reason, "notes": ["A note."], "runtime": "onnx-asr",
        "precision": "fp32", "model": evil, "data": "d", "clips": 2, "audio_seconds": 3.0, "passed_over": 0,
        "threads": 1, "batch": 1, "sides": rows, "parts": [], "differing": verdict.differing, "machine": machine(),
        "tries": [{"inputs": "static", "kept": "layer 3", "bytes": 5_000_000, "reason": "texts differ"}],
        "files": hashes_of(case.folder / "onnx"), "command": "python -m finetune.export",
    }  # fmt: skip
    write_report(tmp_path, report)
    page = (tmp_path / "export.html").read_text(encoding="utf-8")
    assert evil not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "src=" not in page.replace('src="data:', "")
    for told in ("texts differ on 1 of 2 clips", "A note.", "static", "layer 3", "encoder-model.onnx", "1 of 2"):
        assert told in page, told
    again = read_report(tmp_path, "--model")
    assert again["sides"][1]["equal"] == 1
    assert "texts" not in again["sides"][0]


def export(*arguments: object) -> int:
    from finetune.export import main

    return main([str(a) for a in arguments])


@pytest.mark.slow
def test_the_command_keeps_what_passes_and_only_the_report_of_what_does_not(clips, tmp_path, capsys):
    data = ["--data", str(clips / "manifest.jsonl")]
    out = tmp_path / "kept"
    assert export("--model", BASE, "--to", "onnx", "--output", out, *data) == 0
    said = capsys.readouterr().out
    assert "texts equal on all 24 clips" in said
    names = {path.name for path in out.iterdir()}
    assert names >= {"encoder-model.onnx", "vocab.txt", "config.json", "example.py", "README.md", "export.json"}
    report = json.loads((out / "export.json").read_text(encoding="utf-8"))
    assert report["passed"]
    assert [side["name"] for side in report["sides"]] == ["NeMo", "transformers", "onnx-asr"]
    assert [side["equal"] for side in report["sides"][1:]] == [24, 24]
    assert {part["state"] for part in report["parts"]} == {"equal"}
    assert report["sides"][2]["peak_bytes"] < report["sides"][0]["peak_bytes"]
    # Again, whole and broken: nothing in it changes.
    assert export("--model", BASE, "--check", out, *data) == 0
    capsys.readouterr()
    assert export("--model", BASE, "--check", out, "--output", out, *data) == 2
    assert "is not empty" in capsys.readouterr().err
    broken = damaged(out, tmp_path, "tokens")
    assert export("--model", BASE, "--check", broken, "--output", tmp_path / "report", *data) == 1
    said = capsys.readouterr().err
    assert "token table differs: 128 of 128 tokens" in said
    assert "files were changed after the export: vocab.txt is another" in said
    assert {path.name for path in (tmp_path / "report").iterdir()} == {"export.json", "export.html"}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")], "nothing half-written stays"


@pytest.mark.slow
def test_int8_that_cannot_hold_a_model_is_not_kept(clips, tmp_path, capsys):
    """One activation of each feed-forward module is made 3,000 times as large as the others, and its weights as much
    smaller: the same model in float, and nothing is left of the others in 8 bits."""
    import torch

    from finetune.models.loading import load_model
    from finetune.models.nemo_archive import save_nemo

    model: Any = load_model(str(BASE))
    with torch.no_grad():
        for layer in model.encoder.layers:
            for norm, forward in (
                (layer.norm_feed_forward1, layer.feed_forward1),
                (layer.norm_feed_forward2, layer.feed_forward2),
            ):
                norm.weight[0] *= 3000
                norm.bias[0] *= 3000
                forward.linear1.weight[:, 0] /= 3000
    save_nemo(model, tmp_path / "odd.nemo")
    out = tmp_path / "int8"
    wanted = ["--to", "onnx", "--precision", "int8", "--max-loss", "0", "--data", clips / "manifest.jsonl"]
    wanted += ["--calibrate", clips / "manifest.jsonl"]
    assert export("--model", tmp_path / "odd.nemo", "--output", out, *wanted) == 1
    said = capsys.readouterr().err
    assert "The model was not kept" in said
    assert "ways of int8 were tried" in said
    assert {path.name for path in out.iterdir()} == {"export.json", "export.html"}
    report = json.loads((out / "export.json").read_text(encoding="utf-8"))
    assert not report["passed"]
    assert [(row["inputs"], row["kept"]) for row in report["tries"]][:2] == [("dynamic", "none"), ("static", "none")]
    assert len(report["tries"]) > 2
    sizes = [row["bytes"] for row in report["tries"][1:]]
    assert sizes == sorted(sizes)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
def test_sigterm_leaves_nothing(clips, tmp_path):
    words = [sys.executable, "-m", "finetune.export", "--model", BASE, "--to", "onnx", "--output", tmp_path / "out"]
    words += ["--data", clips / "manifest.jsonl"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([str(word) for word in words], cwd=ROOT, stderr=log, stdout=log)
    while process.poll() is None and not list(tmp_path.glob(".out.work-*/graphs")):
        time.sleep(0.05)
    process.terminate()
    assert process.wait() == 143, (tmp_path / "log").read_text()
    assert "interrupted: SIGTERM" in (tmp_path / "log").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_an_export_is_checked_as_it_was_made(case, tmp_path):
    """Its head, and the limit that it was accepted with, where the command names none."""
    from finetune.tools.export.gated import Wanted, as_before

    shutil.copytree(case.folder / "onnx", tmp_path / "tdt")
    (tmp_path / "ctc").mkdir()
    (tmp_path / "ctc" / "model.int8.onnx").write_bytes(b"")
    wanted = Wanted("m", "onnx", "int8")
    assert [as_before(wanted, tmp_path / kind).head for kind in ("tdt", "ctc")] == ["transducer", "ctc"]
    assert as_before(wanted, tmp_path / "tdt").limit["max_loss"] == 0.2
    for loss in (1, 0.5, None):
        report = {"passed": True, "reason": "", "files": {}, "max_loss": loss}
        (tmp_path / "tdt" / "export.json").write_text(json.dumps(report))
        assert as_before(wanted, tmp_path / "tdt").limit["max_loss"] == (0.2 if loss is None else loss)
        assert as_before(replace(wanted, max_loss=3), tmp_path / "tdt").limit["max_loss"] == 3
    with pytest.raises(UserError, match=r"--head: .* holds a model with a CTC head"):
        as_before(replace(wanted, head="transducer"), tmp_path / "ctc")


def test_clips_for_static_int8_are_the_runs_own(clips, tmp_path, caplog):
    """Or those of --calibrate; without either there is a warning, and no static int8."""
    from finetune.tools.export.gated import Wanted, calibration_clips

    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(f"data:\n  train: {clips / 'manifest.jsonl'}\n")
    assert len(calibration_clips(Wanted(str(run), "onnx"), 16000, tmp_path / "own") or []) == 24
    named = Wanted(str(BASE), "onnx", calibrate=[str(clips / "manifest.jsonl")])
    assert len(calibration_clips(named, 16000, tmp_path / "named") or []) == 24
    with caplog.at_level("WARNING", "finetune"):
        assert calibration_clips(Wanted(str(BASE), "onnx"), 16000, tmp_path / "none") is None
        (run / "config.yaml").write_text("data:\n  train: gone.jsonl\n")
        assert calibration_clips(Wanted(str(run), "onnx"), 16000, tmp_path / "gone") is None
    assert caplog.text.count("static int8 is not tried") == 2
    assert "gone.jsonl" in caplog.text
    with pytest.raises(UserError, match=r"--calibrate: .*gone\.jsonl"):
        calibration_clips(replace(named, calibrate=["gone.jsonl"]), 16000, tmp_path / "wrong")


@pytest.mark.parametrize("entry", [3, {}, {"bytes": 3}])
def test_a_damaged_report_is_one_message(tmp_path, entry):
    from finetune.tools.export.gate.report import read_report

    (tmp_path / "export.json").write_text(json.dumps({"passed": True, "reason": "", "files": {"a.onnx": entry}}))
    with pytest.raises(UserError, match=r"export\.json is damaged: it has no size and SHA-256 of a\.onnx"):
        read_report(tmp_path, "--model")


def test_what_is_asked_for_wrongly_is_refused_before_anything_is_loaded(clips, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("")
    data = ["--data", str(clips / "manifest.jsonl")]
    assert export("--model", BASE, "--to", "onnx", "--output", tmp_path / "full", *data) == 2
    assert "is not empty" in capsys.readouterr().err
    assert export("--model", BASE, "--to", "onnx", "--output", tmp_path / "out") == 2
    assert "brings no validation clips" in capsys.readouterr().err
    assert export("--model", BASE, "--to", "onnx", "--output", tmp_path / "out", "--data", "gone.jsonl") == 2
    assert "gone.jsonl" in capsys.readouterr().err
    assert export("--model", BASE, "--check", tmp_path / "full", *data) == 2
    assert "is no directory of" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    for words, said in (
        (["--to", "nemo", "--data", "d"], "are not for --to nemo"),
        (["--to", "hf", "--max-loss", "1"], "are for --to onnx and sherpa"),
        (["--to", "onnx", "--max-loss", "1"], "has to give equal texts"),
        (["--to", "onnx", "--check", "d"], "leave out --to"),
        (["--to", "onnx", "--look-ahead", "6"], "is for --to sherpa"),
        (["--to", "sherpa", "--look-ahead", "6", "--precision", "fp16"], "fp32 or int8"),
        (["--to", "onnx", "--precision", "int8", "--max-loss", "-1"], "from 0 to 100"),
        (["--to", "onnx", "--calibrate", "d"], "is for --precision int8"),
        (["--to", "hf", "--tokenizer", "t"], "--to hf does not take"),
        (["--to", "onnx", "--hotwords-score", "1"], "is for --to hotwords"),
    ):
        with pytest.raises(SystemExit) as stop:
            export("--model", BASE, "--output", tmp_path / "out", *words)
        assert stop.value.code == 2
        assert said in capsys.readouterr().err


def test_a_disk_that_fills_leaves_nothing(case, clips, tmp_path, monkeypatch, capsys):
    import finetune.tools.export.gated as gated

    def traced(*_: Any) -> Any:
        return case.graphs

    def full(graphs: Any, directory: Path, *_: Any) -> None:
        (directory / "encoder-model.onnx").write_bytes(b"half")
        raise OSError(28, "No space left on device", str(directory))

    monkeypatch.setattr(gated, "graphs_of", traced)
    monkeypatch.setattr(gated, "Gate", lambda *_, **__: SimpleNamespace(measure_transformers=lambda *_: None))
    monkeypatch.setattr(gated, "write_layout", full)
    data = ["--data", str(clips / "manifest.jsonl")]
    assert export("--model", BASE, "--to", "onnx", "--output", tmp_path / "out", *data) == 1
    said = capsys.readouterr().err
    assert "No space left on device" in said
    assert "Nothing was kept" in said
    assert list(tmp_path.iterdir()) == []
