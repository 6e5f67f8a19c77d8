"""Cleaning labels: where texts differ, thresholds, kinds of problems, the page, and what decisions lead to."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from conftest import ROOT, read_lines, write_manifest

from finetune import clean
from finetune.data.leave_out import LeaveOut
from finetune.data.shards import NumberedRows, Shard
from finetune.evaluation.dataset import open_sources
from finetune.tools.cleaning.edits import MISSING, NOT_SAID, OTHER, Edit, edits_of, split_words
from finetune.tools.cleaning.energy import energy_of
from finetune.tools.cleaning.judging import Judgement, Problem, count_words, judge, possible_pairs
from finetune.tools.cleaning.mixtures import fit_mixture, probability
from finetune.tools.cleaning.outputs import sentences_of, write_outputs
from finetune.tools.cleaning.repeats import repeated
from finetune.tools.cleaning.second_look import audio_for_page, correct, name_exchanged, rows_at

BASE = ROOT / "examples" / "base" / "fastconformer_tdt_3m.nemo"


# ---- texts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "heard", "mended"),
    [
        ("press one to exit", "press one two to exit", "press one two to exit"),
        ("press one blue to exit", "press one to exit", "press one to exit"),
        ("press one to exit", "press nine to exit", "press nine to exit"),
        ("press blue one to exit", "press won to exit", "press one to exit"),  # beside a word that is misheard
        ("please enter your number followed by the pound key", "please enter your num", "please enter your number"),
        ("please enter your number", "your number", "your number"),
        ("Press one, to - exit.", "press one two to exit", "Press one, two to - exit."),
    ],
)
def test_an_edit_mends_what_differs(given: str, heard: str, mended: str) -> None:
    words = split_words(given)
    assert mended in {edit.applied_to(words) for edit in edits_of(words, split_words(heard))}


def test_texts_that_agree_have_no_edit_and_wrong_ones_no_single_words() -> None:
    assert edits_of(split_words("Press one."), split_words("press one")) == []
    other = edits_of(split_words("your call is important"), split_words("extension nine nine two please"))
    assert all(edit.kind == NOT_SAID and edit.end - edit.start > 1 for edit in other)


def test_repeats() -> None:
    assert repeated("thank you " * 6) == ("thank you", 6)
    assert repeated("no no no no") == ("no", 4)
    assert repeated("press one one one to exit") is None
    assert repeated("") is None


# ---- sound ----------------------------------------------------------------------------------------------------------


def test_energy_at_the_edges_and_speech_that_is_not_heard() -> None:
    rate = 16_000
    tone_S = 0.3 * np.sin(np.arange(3 * rate) * 0.1).astype(np.float32)
    quiet_S = np.zeros(rate // 2, dtype=np.float32)
    whole = energy_of(np.concatenate([quiet_S, tone_S, quiet_S]), rate, [0.5, 0.8])
    assert whole.head < -60
    assert whole.middle == pytest.approx(0, abs=1)
    assert whole.tail < -60
    assert whole.unheard == pytest.approx(3.5 - 1.2, abs=0.1)
    cut = energy_of((np.concatenate([quiet_S, tone_S]) * 32767).astype(np.int16), rate, np.arange(0.5, 3.5, 0.3))
    assert cut.tail == pytest.approx(0, abs=1)
    assert cut.unheard == 0
    assert cut.level == pytest.approx(whole.level, abs=0.1)


# ---- thresholds -----------------------------------------------------------------------------------------------------


def test_a_mixture_parts_two_groups() -> None:
    draw = np.random.default_rng(1)
    score_N = np.concatenate([np.zeros(600), draw.exponential(0.3, 200), draw.normal(3.0, 0.4, 60)])
    mixture = fit_mixture(score_N)
    assert mixture is not None
    posterior_N = probability(mixture.log_odds(score_N))
    assert (posterior_N[-60:] > 0.5).mean() > 0.95
    assert (posterior_N[:-60] > 0.5).sum() <= 3
    assert 1.0 < (mixture.threshold or 0) < 2.5
    assert (np.diff(mixture.log_odds(np.linspace(0.05, 9, 500))) >= -1e-12).all()


def test_scores_below_zero_show_what_good_labels_come_to() -> None:
    draw = np.random.default_rng(1)
    score_N = np.concatenate([draw.normal(-1.2, 0.5, 200), draw.normal(0.9, 0.5, 20), np.full(300, np.nan)])
    mixture = fit_mixture(score_N)
    assert mixture is not None
    assert 0 < (mixture.threshold or 0) < 0.4
    assert mixture.origin == pytest.approx(-1.2, abs=0.15)
    assert (mixture.log_odds(score_N[200:220]) > 0).mean() > 0.8
    assert fit_mixture(score_N[:200] - 0.5) is None


def test_a_mixture_needs_scores() -> None:
    assert fit_mixture(np.zeros(1000)) is None
    assert fit_mixture(np.array([5.0] * 4)) is None


# ---- kinds ----------------------------------------------------------------------------------------------------------

WORDS = "press enter your call number pound key star extension please hold message record again"


def row(n: int, **changes: Any) -> dict[str, Any]:
    """Scores of a clip whose label fits."""
    draw = np.random.default_rng(n)
    text = " ".join(draw.choice(WORDS.split(), 6, replace=False))
    loss = 2.0 + float(draw.exponential(0.8))
    return {
        "source": f"m.jsonl line {n + 1}",
        "id": f"clip{n}",
        "language": "en",
        "text": text,
        "heard": text,
        "duration": 3.0,
        "level": -20.0,
        "head": -50.0 - n % 7,
        "middle": -2.0 - n % 11,
        "tail": -50.0 + n % 9,
        "unheard": 0.0,
        "tokens": 12,
        "loss": loss,
        "heard_loss": 2.0,
        "other": 4.0,
        "edits": [],
        **changes,
    }


def edit(kind: str, start: int, end: int, words: tuple[str, ...] = (), gain: float = 14.0) -> dict[str, Any]:
    return {"kind": kind, "start": start, "end": end, "words": list(words), "gain": gain}


def rows_with_problems() -> list[dict[str, Any]]:
    """300 clips: in some the model mishears a word, twelve of each kind below are bad."""
    rows = [row(n) for n in range(300)]
    for n in range(0, 300, 5):
        gain = float(np.random.default_rng(n).normal(-4, 2.5))
        rows[n]["edits"] = [edit(kind, 1, 2, ("x",), gain) for kind in (MISSING, NOT_SAID, OTHER)]
    for n in range(12):
        rows[n] |= {"edits": [edit(NOT_SAID, 1, 2)], "loss": 18.0}
        rows[20 + n] |= {"edits": [edit(MISSING, 1, 1, ("said",))], "loss": 18.0}
        rows[40 + n] |= {"edits": [edit(NOT_SAID, 0, 2)], "loss": 18.0, "head": -3.0, "duration": 1.5}
        rows[60 + n] |= {"edits": [edit(NOT_SAID, 5, 6)], "loss": 18.0, "tail": -3.0, "duration": 1.5}
        rows[120 + n] |= {"edits": [edit(NOT_SAID, 4, 6)], "loss": 18.0}
        rows[80 + n] |= {"loss": 60.0, "heard": "something else is what the model heard here"}
    rows[100] |= {"level": -90.0}
    rows[101] |= {"text": "no no no no no no"}
    rows[104] |= {"text": "nine nine nine nine", "heard": "nine nine nine nine"}
    rows[102] |= {"text": "", "heard": "hello there", "loss": 30.0, "tokens": 0}
    rows[103] |= {"unheard": 6.0}
    return rows


def test_each_kind_is_named() -> None:
    rows = rows_with_problems()
    judgement = judge(lambda: rows)
    kinds = {p.row["id"]: p.kind for p in judgement.problems if p.confidence >= 0.5}
    for first, kind in (
        (0, NOT_SAID),
        (20, MISSING),
        (40, "cut_off"),
        (60, "cut_off"),
        (80, "wrong_text"),
        (120, NOT_SAID),
    ):
        assert [kinds.get(f"clip{first + n}") for n in range(12)] == [kind] * 12
    assert kinds["clip100"] == "silence"
    assert kinds["clip101"] == "repeated"
    assert kinds["clip102"] == kinds["clip103"] == "speech_without_words"
    bad = {f"clip{n + i}" for n in (0, 20, 40, 60, 80, 120) for i in range(12)} | {f"clip{n}" for n in range(100, 104)}
    assert bad <= kinds.keys()
    assert len(kinds) - len(bad) <= 2


def test_good_labels_are_left_alone() -> None:
    rows = [row(n) for n in range(300)]
    assert [p for p in judge(lambda: rows).problems if p.confidence >= 0.5] == []


def test_a_text_of_the_other_language_is_named() -> None:
    french = "appuyez veuillez votre numéro appel étoile dièse raccrocher poste message enregistrez nouveau"
    rows = rows_with_problems()
    for n in range(104, 200):
        text = " ".join(np.random.default_rng(n).choice(french.split(), 6, replace=False))
        rows[n] |= {"language": "fr", "text": text, "heard": text}
    for n in range(104, 110):
        rows[n] |= {"text": row(n)["text"], "loss": 60.0}
    kinds = {p.row["id"]: p.kind for p in judge(lambda: rows).problems if p.confidence >= 0.5}
    assert [kinds.get(f"clip{n}") for n in range(104, 110)] == ["other_language"] * 6
    assert kinds["clip80"] == "wrong_text"


def test_data_of_one_language_say_that_no_other_is_told() -> None:
    rows = rows_with_problems()
    judgement = judge(lambda: rows)
    assert "another language is listed as wrong_text" in " ".join(sentences_of(judgement, []))
    mixed = [r | {"language": "fr" if n % 2 else "en"} for n, r in enumerate(rows)]
    assert "another language" not in " ".join(sentences_of(judge(lambda: mixed), []))


def test_a_weak_model_says_so_and_judges_less() -> None:
    rows = [r | {"other": r["loss"] / 12 - 0.1} for r in rows_with_problems()]
    judgement = judge(lambda: rows)
    assert not judgement.judges_texts
    assert {p.kind for p in judgement.problems} <= {"silence", "repeated", "speech_without_words"}
    assert "too weak to judge these labels" in " ".join(sentences_of(judgement, []))
    deaf = [r | {"heard": "nothing of it"} for r in rows_with_problems()]
    judgement = judge(lambda: deaf)
    assert judgement.judges_texts
    assert not judgement.judges_words
    assert not {p.kind for p in judgement.problems} & {NOT_SAID, MISSING, OTHER, "cut_off"}
    assert "too weak to judge single words: its WER is" in " ".join(sentences_of(judgement, []))


def test_texts_that_nothing_can_be_compared_with_are_no_fault_of_the_model() -> None:
    rows = [r | {"other": None} for r in rows_with_problems()]
    judgement = judge(lambda: rows)
    assert not judgement.judges_texts
    said = " ".join(sentences_of(judgement, []))
    assert "No clip has a text that could be compared" in said
    assert "%" not in said
    assert "weak" not in said


def test_labels_worse_than_the_model_are_called_so() -> None:
    worse = Judgement(clips=10, words=100, wer=0.2, compared=10, power=1.0, label_words=15, model_words=5)
    assert "labels are worse than the model" in " ".join(sentences_of(worse, []))
    better = Judgement(clips=10, words=100, wer=0.2, compared=10, power=1.0, label_words=5, model_words=15)
    assert "worse" not in " ".join(sentences_of(better, [])[1:])


def test_words_of_unsure_problems_count_by_their_confidence() -> None:
    given = {"text": "one two three four"}
    problems = [
        Problem("wrong_text", 0.5, given, "", 0.0),
        Problem(OTHER, 1.0, given, "", 0.0, Edit(OTHER, 0, 1, ("a",))),
    ]
    judgement = Judgement(problems, clips=2, words=8, wer=1.0)
    count_words(judgement)
    assert (judgement.label_words, judgement.model_words) == (3, 5)


def test_exchanged_texts_are_looked_for_among_the_suspects() -> None:
    rows = rows_with_problems()
    rows[80] |= {"text": "your call is important to us", "heard": "the person at extension nine"}
    rows[81] |= {"text": "the person at extension nine", "heard": "your call is importend to"}
    suspects = [p for p in judge(lambda: rows).problems if p.kind == "wrong_text"]
    a, b = possible_pairs(suspects, 10)[0]
    assert {suspects[a].row["id"], suspects[b].row["id"]} == {"clip80", "clip81"}


class AgreesWith:
    """A listener to whom a text is as probable as the clip's true one, or far less."""

    rate = 16_000

    def __init__(self, true: dict[str, str]) -> None:
        self.true = true

    def losses(self, batch: Any, texts: list[str], clip_N: list[int]) -> list[float]:
        return [3.0 if self.true[batch.ids[n]] == text else 60.0 for text, n in zip(texts, clip_N, strict=True)]


def test_texts_that_fit_each_others_audio_are_exchanged(data: Path) -> None:
    sources = open_sources([str(data)], "train")
    lines = read_lines(data)
    write_manifest(data, [{**line, "id": f"clip{n}"} for n, line in enumerate(lines)])
    texts = {"clip0": "b", "clip1": "a", "clip2": "another text", "clip3": "d"}
    true = {"clip0": "a", "clip1": "b", "clip2": "c", "clip3": "another text"}  # the text of 2 fits 3, not 3's 2
    rows = [row(n, text=text, source=f"{data} line {n + 1}", loss=60.0) for n, text in enumerate(texts.values())]
    problems = [Problem("wrong_text", 0.3, each, "", 1.0, of_text=True) for each in rows]
    name_exchanged(problems, sources, AgreesWith(true))  # pyright: ignore[reportArgumentType]
    assert [p.kind for p in problems] == ["exchanged", "exchanged", "wrong_text", "wrong_text"]
    assert [p.partner for p in problems] == [f"{data} line 2", f"{data} line 1", None, None]
    assert problems[0].confidence > 0.99


# ---- the model ------------------------------------------------------------------------------------------------------


def test_gains_are_differences_of_losses() -> None:
    from finetune.data.batch import collate
    from finetune.data.position import FINISHED
    from finetune.data.utterances import DecodedUtterance
    from finetune.tools.cleaning.listening import ListenerSettings

    listener = ListenerSettings(str(BASE), device="cpu")()
    texts = ["press one to exit", "your call", ""]
    draw = torch.Generator().manual_seed(1)
    clips = [
        DecodedUtterance(f"c{n}", text, "en", (0.1 * torch.randn(seconds * 16_000, generator=draw)).numpy(), [])
        for n, (text, seconds) in enumerate(zip(texts, (3, 2, 1), strict=True))
    ]
    for clip in clips:
        clip.tokens = listener.encode(clip.text)
    batch = collate(clips, 0, FINISHED)
    rows = listener.listen(batch, ["a line 1", "a line 2", "a line 3"])
    assert [r["source"] for r in rows] == ["a line 1", "a line 2", "a line 3"]
    assert [r["duration"] for r in rows] == [3.0, 2.0, 1.0]
    assert [r["tokens"] for r in rows] == [len(clip.tokens) for clip in clips]
    assert listener.losses(batch, texts, range(3)) == pytest.approx([r["loss"] for r in rows], abs=0.01)
    found = rows[0]["edits"]
    for entry in found:
        mended = Edit(entry["kind"], entry["start"], entry["end"], tuple(entry["words"])).applied_to(texts[0].split())
        loss = listener.losses(batch, [mended, *texts[1:]], range(3))[0]
        assert rows[0]["loss"] - loss == pytest.approx(entry["gain"], abs=0.01)
    other = listener.losses(batch, [texts[1], texts[0], texts[2]], range(3))[0]
    assert rows[0]["other"] * len(clips[1].tokens) == pytest.approx(other, abs=0.01)


# ---- decisions ------------------------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = []
    for n in range(5):
        soundfile.write(tmp_path / f"{n}.wav", np.full(8000, 0.1), 16_000)
        rows.append({"audio_filepath": f"{n}.wav", "duration": 0.5, "text": f"Text {'abcde'[n]}.", "speaker": "s"})
    return write_manifest(tmp_path / "data.jsonl", rows)


def decide(path: Path, data: Path, **decisions: tuple[int, str | None]) -> Path:
    lines = [
        {"source": f"{data} line {line}", "decision": name} | ({"text": text} if text else {})
        for name, (line, text) in decisions.items()
    ]
    return write_manifest(path, lines)


def test_decisions_make_a_manifest_beside_the_old_one(data: Path, tmp_path: Path, capsys: Any) -> None:
    before = data.read_bytes()
    decisions = decide(tmp_path / "decisions.jsonl", data, keep=(1, None), drop=(2, None), take=(3, "Mended."))
    problems = write_manifest(
        tmp_path / "problems.jsonl", [{"source": f"{data} line {n}", "reason": "r", "text": "t"} for n in (1, 3, 4)]
    )
    output = tmp_path / "out"
    for files in ((decisions, problems), (problems, decisions)):
        arguments = ["--decisions", *map(str, files), "--data", str(data), "--output", str(output)]
        assert clean.main(arguments) == 0
        written = read_lines(output / "cleaned.jsonl")
        assert [(r["text"], Path(r["audio_filepath"])) for r in written] == [
            ("Text a.", tmp_path / "0.wav"),
            ("Mended.", tmp_path / "2.wav"),
            ("Text e.", tmp_path / "4.wav"),
        ]
        assert all(r["speaker"] == "s" for r in written)
        assert data.read_bytes() == before
        assert "3 clips, 1 of them with a new text; 2 left out" in capsys.readouterr().out


def test_a_text_with_half_a_character_is_written(data: Path, tmp_path: Path) -> None:
    data.write_text(data.read_text().replace("Text b.", "b\\ud800"))
    decisions, output = decide(tmp_path / "decisions.jsonl", data, drop=(1, None)), tmp_path / "out"
    assert clean.main(["--decisions", str(decisions), "--data", str(data), "--output", str(output)]) == 0
    assert read_lines(output / "cleaned.jsonl")[0]["text"] == "b\ud800"


def test_decisions_about_other_data_are_refused(
    data: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    decisions, output = decide(tmp_path / "decisions.jsonl", data, keep=(1, None), drop=(2, None)), tmp_path / "out"
    arguments = ["--decisions", str(decisions), "--output", str(output), "--data"]
    assert clean.main([*arguments, str(data)]) == 0
    before = (output / "cleaned.jsonl").read_bytes()
    assert clean.main([*arguments, data.name]) == 2
    said = capsys.readouterr().err
    assert f"none of the 2 decisions is about a row of --data: they name rows such as {data} line 1" in said
    assert [p.name for p in output.iterdir()] == ["cleaned.jsonl"]
    assert (output / "cleaned.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "line", ['{"source": 1, "decision": "drop"}', '{"source": "a line 1", "decision": "burn"}', "[]", "no JSON",
             '{"source": "a line 1", "decision": "take"}']
)  # fmt: skip
def test_a_file_of_other_things_is_refused(data: Path, tmp_path: Path, capsys: Any, line: str) -> None:
    file = tmp_path / "decisions.jsonl"
    file.write_text(line + "\n")
    assert clean.main(["--decisions", str(file), "--data", str(data), "--output", str(tmp_path / "out")]) == 2
    assert f"line 1 of {file}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_old_manifest_is_not_written_over(data: Path, tmp_path: Path, capsys: Any) -> None:
    data = data.rename(tmp_path / "cleaned.jsonl")
    decisions = decide(tmp_path / "decisions.jsonl", data, drop=(1, None))
    assert clean.main(["--decisions", str(decisions), "--data", str(data), "--output", str(tmp_path)]) == 2
    assert "the old manifest stays" in capsys.readouterr().err
    assert len(read_lines(data)) == 5


# ---- the page -------------------------------------------------------------------------------------------------------


MENDED = """\ufeffMended & <taken>, \u200fשלום\u200b: 'a' "b"\r\n\\n."""


@pytest.fixture
def hidden(data: Path) -> Path:
    """`data` under a name with a sign that cannot be seen."""
    return data.rename(data.with_name("da\u200bta.jsonl"))


@pytest.fixture
def page(hidden: Path, tmp_path: Path) -> Path:
    """The page of three problems of `hidden`, with texts and a name that would act on it."""
    data = hidden
    rows = rows_with_problems()
    rows[0] |= {"source": f"{data} line 1", "heard": "<img src=x onerror=document.title='bad'>", "id": "a\"'><b>"}
    rows[20] |= {"source": f"{data} line 2"}
    rows[80] |= {"source": f"{data} line 3"}
    judgement = judge(lambda: rows)
    listed = [p for p in judgement.problems if p.row["source"].startswith(str(data))]
    corrections = {f"{data} line 2": MENDED}
    write_outputs(judgement, listed, corrections, {f"{data} line 1": "0.wav"}, tmp_path)
    return tmp_path / "clean.html"


def test_problems_can_be_left_out(page: Path, hidden: Path) -> None:
    rows = read_lines(page.with_name("problems.jsonl"))
    assert [r["kind"] for r in rows] == [NOT_SAID, MISSING, "wrong_text"]
    keys = {"source", "reason", "id", "kind", "confidence", "text", "heard", "difference", "score", "correction"}
    assert all(keys <= r.keys() for r in rows)
    left_out = LeaveOut(str(page.with_name("problems.jsonl")), "data.leave_out")
    found = [left_out.reason(f"{hidden} line {n}") for n in range(1, 6)]
    assert found == ["in_leave_out"] * 3 + [None] * 2


def test_the_page_escapes_and_holds_what_it_shows(page: Path) -> None:
    html = page.read_text(encoding="utf-8")
    assert "<img" not in html
    assert "&lt;img src=x onerror" in html
    assert "Content-Security-Policy" in html
    assert html.count('class="clip problem"') == 3
    assert 'src="0.wav"' in html


def test_decisions_of_the_page_come_back(page: Path, hidden: Path, tmp_path: Path, opened: Callable[..., Any]) -> None:
    shown = opened(page)
    assert shown.title() == "Labels to look at"
    shown.keyboard.press("k")
    shown.keyboard.press("t")
    shown.keyboard.press("d")
    assert shown.locator("#counter").inner_text() == "3 of 3 decided"
    shown.locator("#p3").press("u")
    assert shown.locator("#counter").inner_text() == "2 of 3 decided"
    shown.locator("#p3 button", has_text="drop").click()
    length = "a => new Promise(done => { a.onloadedmetadata = () => done(a.duration); a.preload = 'auto'; a.load(); })"
    assert shown.locator("#p1 audio").evaluate(length) == pytest.approx(0.5)
    with shown.expect_download() as download:
        shown.locator("#download").click()
    decisions = tmp_path / "decisions.jsonl"
    download.value.save_as(decisions)
    assert [r["decision"] for r in read_lines(decisions)] == ["keep", "take", "drop"]
    output = tmp_path / "out"
    assert clean.main(["--decisions", str(decisions), "--data", str(hidden), "--output", str(output)]) == 0
    texts = [r["text"] for r in read_lines(output / "cleaned.jsonl")]
    assert texts == ["Text a.", MENDED, "Text d.", "Text e."]


@pytest.fixture
def opened() -> Iterator[Callable[..., Any]]:
    """`opened(path)` opens a page in a tab of the system's Chromium; nothing may be said on its console."""
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("no chromium, chromium-browser or google-chrome on this machine")
        pytest.skip("no chromium, chromium-browser or google-chrome on this machine")
    complaints: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        tabs = browser.new_context()

        def open_page(path: Path) -> Any:
            shown = tabs.new_page()
            shown.on("console", lambda message: complaints.append(message.text))
            shown.on("pageerror", lambda error: complaints.append(str(error)))
            shown.goto(path.as_uri())
            return shown

        yield open_page
        browser.close()
    assert not complaints


@pytest.mark.slow
def test_the_last_decision_is_undone_and_all_are_there_when_the_page_is_opened_again(
    page: Path, opened: Callable[..., Any]
) -> None:
    shown = opened(page)
    shown.keyboard.press("d")
    shown.keyboard.press("k")
    shown.keyboard.press("u")  # the next clip has the focus
    assert shown.locator("#counter").inner_text() == "1 of 3 decided"
    assert shown.evaluate("document.activeElement.id") == "p2"
    shown.keyboard.press("t")
    shown.reload()
    assert shown.locator("#counter").inner_text() == "2 of 3 decided"
    assert [shown.locator(f"#p{n} .said").inner_text() for n in (1, 2, 3)] == ["dropped", "text taken", ""]
    # A second tab: each takes over what the other one decides, and writes over nothing of it.
    other = opened(page)
    shown.locator("#p1").press("k")
    other.locator("#counter", has_text="2 of 3 decided").wait_for()
    other.locator("#p1 .said", has_text="kept").wait_for()
    other.locator("#p3").press("d")
    other.locator("#p2").press("u")
    shown.locator("#p3 .said", has_text="dropped").wait_for()
    shown.locator("#p1").press("d")
    shown.reload()
    assert [shown.locator(f"#p{n} .said").inner_text() for n in (1, 2, 3)] == ["dropped", "", "dropped"]


def test_audio_that_a_browser_cannot_find_is_copied(data: Path, tmp_path: Path) -> None:
    lines = read_lines(data)
    lines[1] |= {"offset": 0.1, "duration": 0.25}
    lines[2] |= {"duration": 0.3}
    write_manifest(data, lines)
    sources = open_sources([str(data)], "train")
    problems = [Problem("silence", 1.0, {"source": f"{data} line {n}"}, "", 0.0) for n in (1, 2, 3)]
    folder = tmp_path / "a page"
    folder.mkdir()
    found = audio_for_page(problems, sources, folder, 16_000)
    assert found == {
        f"{data} line 1": "../0.wav",
        f"{data} line 2": "audio/00000.flac",
        f"{data} line 3": "audio/00001.flac",
    }
    assert [soundfile.info(folder / "audio" / f"0000{n}.flac").frames for n in (0, 1)] == [4000, 4800]


def test_a_text_is_offered_only_where_something_was_heard(data: Path) -> None:
    write_manifest(data, [{**line, "text": ""} if n == 1 else line for n, line in enumerate(read_lines(data))])
    heard = {"heard": "hello there", "loss": 30.0}
    rows = [row(0, unheard=6.0, **heard), row(1, text="", **heard)]
    rows = [{**each, "source": f"{data} line {n + 1}"} for n, each in enumerate(rows)]
    problems = judge(lambda: rows).problems
    assert [p.kind for p in problems] == ["speech_without_words"] * 2
    assert correct(problems, open_sources([str(data)], "train")) == {f"{data} line 2": "hello there"}


def test_the_second_look_goes_on_behind_damage(data: Path) -> None:
    sources = open_sources([str(data), str(data)], "train")
    (shard,) = sources[0].shards
    sources[0].shards = [replace(shard, file="damaged", read=partial(damaged, shard))]
    wanted = {"damaged line 1", f"{data} line 2"}
    assert {place for _, place, _ in rows_at(sources, wanted)} == wanted


def damaged(shard: Shard, first: int) -> NumberedRows:
    yield from list(shard.read(first))[:1]
    raise ValueError("the rest is damaged")


# ---- the command ----------------------------------------------------------------------------------------------------


def test_arguments_that_do_not_go_together(data: Path, tmp_path: Path, capsys: Any) -> None:
    for arguments, said in (
        (["--data", str(data)], "--model to find"),
        (["--data", str(data), "--model", "m", "--decisions", "d"], "--model to find"),
        (["--model", "m"], "--data is needed"),
        (["--data", str(data), "--model", "m", "--write-audio"], "--write-audio goes with"),
        (
            ["--data", str(data), "--decisions", "d", "--max-samples", "9", "--shard", "0/2", "--workers", "2"],
            "--decisions goes without --max-samples, --workers, --shard:",
        ),
    ):
        with pytest.raises(SystemExit, match="2"):
            clean.main([*arguments, "--output", str(tmp_path / "out")])
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_command_goes_on_and_refuses_another_job(data: Path, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "out"
    arguments = ["--model", str(BASE), "--data", str(data), "--output", str(output), "--device", "cpu"]
    assert clean.main(arguments) == 0
    result = json.loads((output / "clean.json").read_text())
    assert result["clips"] == 5
    shard = (output / "shards" / "00000.jsonl").read_bytes()
    assert clean.main(arguments) == 0
    assert (output / "shards" / "00000.jsonl").read_bytes() == shard
    assert clean.main([*arguments, "--head", "transducer"]) == 2
    assert "head was None, is transducer" in capsys.readouterr().err
