"""The gate of exports: what it lets through, and that it names what is broken."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT, read_lines, write_manifest
from export_cases import damaged

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

    one = utterances(["a ⁇ b", "c d"], ["a b", "c d"])
    other = utterances(["a<unk> b ", "c  d"], ["a b", "c d"])
    assert judge(one, other, exact=True, max_loss=0.0).passed
    assert not judge(one, utterances(["a b", "c  e"], ["a b", "c d"]), exact=True, max_loss=0.0).passed


def test_fp32_may_not_differ_on_one_clip():
    from finetune.tools.export.gate.verdict import judge

    verdict = judge(
        utterances(texts_with_errors(500, 0)), utterances(texts_with_errors(500, 1)), exact=True, max_loss=9
    )
    assert not verdict.passed
    assert verdict.reason.startswith("texts differ on 1 of 500 clips")
    assert [row["id"] for row in verdict.differing] == ["clip-0"]
    assert verdict.share_bound is None


@pytest.mark.parametrize(("clips", "wrong", "max_loss", "passed", "said"), [
    (2000, 8, 0.2, True, "within --max-loss 0.2"),
    (2000, 60, 0.2, False, "more clips would not change that"),
    (200, 1, 0.2, False, "clips are too few"),
    (19, 0, 0.2, False, "19 clips are too few"),
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
    (folder / "graphs").mkdir()
    graphs = graphs_of(str(BASE), folder / "graphs", "onnx")
    for to in ("onnx", "sherpa"):
        (folder / to).mkdir()
        write_layout(graphs, folder / to, to, "fp32")
    gathered = gather_clips([str(clips / "manifest.jsonl")], "validation", 16000, folder / "clips")
    request = {"model": str(BASE), "head": None, "tokenizer": None, "clips": gathered.folder, "threads": 1, "batch": 1}
    original = measure({**request, "kind": "nemo"})
    return SimpleNamespace(folder=folder, graphs=graphs, clips=gathered, request=request, original=original)


def parts_of(case: SimpleNamespace, directory: Path) -> dict[str, dict[str, Any]]:
    from finetune.tools.export.gate.one_parts import compare_all

    rows = compare_all({**case.request, "directory": str(directory), "chosen": list(range(8))})
    return {row["part"]: row for row in rows}


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
    hidden = {"features"} if to == "sherpa" else set()
    assert {name for name, row in parts.items() if row["state"] == "equal"} == parts.keys() - hidden
    assert {name for name, row in parts.items() if row["state"] == "not shown"} == hidden
    assert parts.keys() == {"token table", "settings", "features", "encoder outputs", "decoder and joint"}


@pytest.mark.parametrize("to", ["onnx", "sherpa"])
@pytest.mark.parametrize(("what", "part", "said"), [
    ("scale", "encoder outputs", "differ by 0."),
    ("joint", "decoder and joint", "cells change by it alone"),
    ("tokens", "token table", "128 of 128 tokens (0 is "),
    ("features", "settings", " in place of "),
])  # fmt: skip
def test_a_broken_export_is_named(case, tmp_path, to, what, part, said):
    parts = parts_of(case, damaged(case.folder / to, tmp_path, what))
    allowed = {part, "features"}
    assert parts[part]["state"] == "differs"
    assert said in parts[part]["note"]
    assert {row["state"] for name, row in parts.items() if name not in allowed} == {"equal"}
    if what == "features" and to == "onnx":
        assert parts["features"]["note"].startswith("features differ in shape ([128, ")


def test_a_reason_names_what_differs_and_what_is_equal(case, tmp_path):
    from finetune.tools.export.gate.gate import Outcome
    from finetune.tools.export.gate.verdict import Verdict

    parts = list(parts_of(case, damaged(case.folder / "onnx", tmp_path, "tokens")).values())
    reason = Outcome(Verdict(False, "texts differ on 24 of 24 clips", 24), [], parts).reason
    assert reason.startswith("texts differ on 24 of 24 clips: token table differs: 128 of 128 tokens")
    assert reason.endswith("(equal: settings, features, encoder outputs, decoder and joint)")
    hidden = list(parts_of(case, case.folder / "sherpa").values())
    reason = Outcome(Verdict(False, "texts differ on 3 of 24 clips", 24), [], hidden).reason
    assert "nothing that was written differs, so it is the runtime's own features and search" in reason


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
