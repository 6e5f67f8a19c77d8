"""report.html and the pages of several runs: what stands in them, and what a browser makes of them."""

import html
import itertools
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import read_lines, write_manifest
from run_callbacks import around_steps

HOSTILE = "<img src=x onerror=\"document.title='taken over'\">"
PARTS = {"parameters": 1.0, "gradients": 1.0, "optimizer": 2.0, "activations": 3.5, "joint": 0.5, "temporary": 0.25}


class Died(Exception):
    """Ends a run in the middle."""


@pytest.fixture(scope="module")
def run_file(tiny_model: Path, clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps with an evaluation every three; two clips are bad, and one has markup for an id."""
    folder = tmp_path_factory.mktemp("report")
    rows: list[Any] = read_lines(clips / "manifest.jsonl")
    for row in rows:
        row["audio_filepath"] = str(clips / row["audio_filepath"])
    rows[0]["id"] = HOSTILE
    bad = [{**rows[1], "id": f"gone-{i}{HOSTILE}", "audio_filepath": f"no/such-{i}.flac"} for i in range(2)]
    manifest = str(write_manifest(folder / "manifest.jsonl", [*rows, *bad]))
    run = {
        "model": {"name": str(tiny_model)},
        "data": {
            **dict.fromkeys(("train", "validation", "test", "guard"), manifest),
            "text_normalization": "basic", "max_bad_fraction": 0.5, "allow_overlap": True,
        },
        "training": {
            "output_dir": str(folder / "done"),
            "max_steps": 6,
            "eval_steps": 3,
            "save_steps": 3,
            "per_device_train_batch_size": 8,
            "per_device_eval_batch_size": 12,
            "learning_rate": 1e-3,
            "encoder_learning_rate": 3e-4,
            "logging_steps": 1,
            "dataloader_num_workers": 0,
            "num_threads": 1,
            "report_to": "none",
        },
    }  # fmt: skip
    path = folder / "RUN.yaml"
    path.write_text(yaml.safe_dump(run), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def done(run_file: Path, run_train_for_module: Callable[..., int]) -> Path:
    """A finished run, with a plan beside it."""
    assert run_train_for_module("--config", run_file) == 0
    folder = run_file.with_name("done")
    plan = {
        "gpu": "a GPU",
        "strategies": [{"strategy": "adamw", "peak_memory_gib": sum(PARTS.values()), "parts_gib": PARTS}],
    }
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def died(run_file: Path, run_train_for_module: Callable[..., int]) -> Path:
    """A run that died in its fifth step; its last line is half written."""
    folder = run_file.with_name("died")

    def observe(trainer: Any) -> None:
        @contextmanager
        def step() -> Iterator[None]:
            if trainer.progress.step == 4:
                raise Died
            yield

        around_steps(trainer, step)

    with pytest.raises(Died):
        run_train_for_module("--config", run_file, f"training.output_dir={folder}", observe=observe)
    return folder


def report(*arguments: Any) -> int:
    from finetune.report import main

    return main([str(a) for a in arguments])


def texts(page: Path) -> str:
    """What a page says, without scripts, styles and markup."""
    text = re.sub(r"<(script|style)\b.*?</\1>", " ", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


# ---- what stands in it ----------------------------------------------------------------------------------------------


def test_the_page_tells_what_the_files_tell(done):
    assert report(done) == 0
    said, summary = texts(done / "report.html"), json.loads((done / "summary.json").read_text())
    assert f"WER on test {100 * summary['wer_after']:.1f} %" in said
    assert f"base {100 * summary['wer_before']:.1f} %" in said
    assert f"Best step {summary['best_step']} " in said
    for language, wer in summary["wer_by_language"].items():
        assert re.search(rf" {language} {100 * wer['before']:.2f} {100 * wer['after']:.2f} ", said), language
    assert "2 clips could not be used" in said
    assert "In quarantine by reason" in said
    assert f"finetune.transcribe --model {done} " in said
    assert "Predicted: 8.25 GiB for a GPU" in said
    assert "Seed 42." in said
    assert "encoder_learning_rate: 0.0003" in said  # config.yaml stands in it
    rates = read_lines(done / "metrics.jsonl")[0]["learning_rates"]
    assert set(rates) == {"encoder", "decoder", "joint"}
    assert rates["encoder"] < rates["joint"] == rates["decoder"]


@pytest.mark.slow
def test_the_guard_curve_reaches_the_chosen_model(done):
    """The closing evaluation is a point of the curve where the model in training was not measured at its step."""
    from finetune.tools.report.plots import wer_plot
    from finetune.tools.report.read import read_run

    run, summary = read_run(done), json.loads((done / "summary.json").read_text())
    plot = wer_plot(run, "guard")
    assert plot is not None
    everything = plot.traces[0]
    assert dict(zip(everything["x"], everything["y"]))[summary["best_step"]] == 100 * summary["guard_wer_after"]
    assert everything["x"] == sorted(set(everything["x"]))


def test_new_pieces_of_the_vocabulary_are_named(tmp_path):
    (tmp_path / "config.yaml").write_text("training: {output_dir: x}")
    (tmp_path / "tokenizer").mkdir()
    growth = {"pieces_before": 1024, "pieces_added": 3, "new_characters": ["ő", "ű"]}
    for grown, says in (
        (growth, "extended by 3 pieces to 1,027; new characters: ő ű"),
        ({**growth, "new_pieces": ["ő", "ű", "▁ő"]}, "extended by 3 pieces to 1,027; new pieces: ő ű ▁ő"),
        (None, "replaced: 1,027 pieces"),
    ):
        found = {"pieces": 1027, **({"growth": grown} if grown else {})}
        (tmp_path / "tokenizer" / "report.json").write_text(json.dumps(found))
        assert report(tmp_path) == 0
        assert f"Vocabulary {says} Strategy" in texts(tmp_path / "report.html")


def test_lengths_of_the_batches_add_up_to_the_audio_of_the_run(done):
    from finetune.tools.report.plots import batch_sums
    from finetune.tools.report.read import read_run

    sums, summary = batch_sums(read_run(done)), json.loads((done / "summary.json").read_text())
    batches, clips, audio, padded = (sum(values[i] for values in sums.values()) for i in range(4))
    assert batches == 6
    assert clips == summary["samples"]
    assert audio == pytest.approx(3600 * summary["audio_hours"], rel=1e-3)
    assert 1 - audio / padded == pytest.approx(summary["padding_fraction"], abs=1e-3)


def test_confusions_add_up_to_the_errors_of_the_evaluation(done):
    for split in ("validation", "test"):
        found = json.loads((done / f"errors-{split}.json").read_text())
        row = [r for r in read_lines(done / "evaluations.jsonl") if r["split"] == split and r["language"] is None][-1]
        assert found["step"] == row["step"]
        for kind in ("substitutions", "deletions", "insertions"):
            assert len(found[kind]) < 100  # all of them are listed
            assert sum(line[-1] for line in found[kind]) == row[kind], kind
        assert 0 < len(found["clips"]) <= 20
        for clip in found["clips"]:
            spoken = [said for said, _ in clip["pairs"] if said]
            assert len(spoken) == clip["words"]
            assert sum(said != heard for said, heard in clip["pairs"]) == clip["word_errors"]


@pytest.mark.slow
def test_a_run_that_died_has_its_page(died, capsys):
    """Written at the last evaluation before its death; written anew it tells of the steps since, too."""
    page = died / "report.html"
    assert "Not done: the last that is known is step 3 of 6" in texts(page)
    assert "WER on validation" in texts(page)
    with (died / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": NaN}\n{"step": 6, "lo')
    (died / "environment.json").unlink()
    (died / "evaluations.jsonl").write_text("\n", encoding="utf-8")
    assert report(died) == 0
    assert "Not done: the last that is known is step 5" in texts(page)
    assert "Nothing has been evaluated yet" in texts(page)
    assert str(page) in capsys.readouterr().out


def test_a_folder_that_is_no_run(tmp_path, done, capsys):
    assert report(done, tmp_path) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path} is no run's folder")
    assert report(done, "--output", tmp_path / "missing" / "page.html") == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_ends_no_run(run_file, run_train, tmp_path, capsys):
    folder = tmp_path / "run"
    (folder / "report.html" / "in the way").mkdir(parents=True)
    short = ["training.max_steps=1", "training.save_steps=0", "data.max_eval_samples=4"]
    assert run_train("--config", run_file, f"training.output_dir={folder}", "training.report_clips=0", *short) == 0
    assert (folder / "summary.json").is_file()
    assert (
        capsys.readouterr().err.count("report.html cannot be written") == 3
    )  # the base model, the last step, the end
    assert not list(folder.glob("errors-*"))  # report_clips=0


def test_runs_side_by_side(done, run_file, tmp_path, monkeypatch, capsys):
    other = tmp_path / "stages" / "stage-2"
    shutil.copytree(done, other, ignore=shutil.ignore_patterns("checkpoints", "model.nemo"))
    config = yaml.safe_load((other / "config.yaml").read_text())
    config["training"]["learning_rate"] = 0.125
    config["data"]["train"] = {"path": "s3://me:hunter2@bucket/x", "access_token": "hunter3"}
    config["data"]["test"] = "s3://me:hunter2@bucket/other.jsonl"
    (other / "config.yaml").write_text(yaml.safe_dump(config))
    page = tmp_path / "compare.html"
    assert report(done, tmp_path / "stages", "--output", page) == 0  # a plan's folder stands for its stages
    said = texts(page)
    assert "2 runs side by side" in said
    assert "training.learning_rate 0.001 0.125" in said
    assert "training.max_steps" not in said  # the same in both
    assert re.search(
        r"These runs were judged on different data: .*other\.jsonl, 24 clips.*error rates do not compare", said
    )
    assert "The guard sets differ" not in said
    summary = json.loads((done / "summary.json").read_text())
    guard, manifest = summary["guard_wer_after"], run_file.with_name("manifest.jsonl")
    assert re.search(rf"Judged on test: {manifest} test: \S+other\.jsonl WER, base model", said)
    assert f"Guard set {manifest} {manifest} WER on guard" in said
    tested = summary["significance"]["guard"]
    changed = ("worse" if tested["difference"] > 0 else "better") if tested["significant"] else "no significant change"
    words = rf"{100 * guard:.2f} % \(\S+ %\), {changed}"
    assert re.search(rf"WER on guard \(change\) {words}.* {words}", said)
    environment = json.loads((other / "environment.json").read_text())
    source = "data.train={path: 'https://bucket/x?sig=hunter4&se=1', secret: hunter5}"
    environment["command"] = ["train.py", source, "--hf-token", "hunter6", "data.max_duration=20"]
    (other / "environment.json").write_text(json.dumps(environment))
    assert report(other) == 0
    for name in (page, other / "report.html"):
        assert "hunter" not in name.read_text()
    assert "data.max_duration=20" in texts(other / "report.html")
    out, err = capsys.readouterr()
    assert out.startswith(str(page))
    assert err.count(" warning: These runs were judged on different data: ") == 1
    assert "hunter" not in err
    config["data"]["guard"] = "another.jsonl"
    (other / "config.yaml").write_text(yaml.safe_dump(config))
    page.unlink()
    monkeypatch.chdir(tmp_path)
    assert report(other, done) == 0
    assert capsys.readouterr().out.startswith(str(other / "compare.html"))
    assert not page.exists(), "nothing is written into the working directory"
    assert re.search(r"The guard sets differ: .*Error rates on them do not compare", texts(other / "compare.html"))


# ---- its parts ------------------------------------------------------------------------------------------------------


def test_thinned_curves_keep_peaks_and_gaps():
    from finetune.tools.report.plots import thin

    rng = random.Random(0)
    values = [rng.gauss(0, 1) for _ in range(100_000)]
    values[777], values[50_000], values[31_415] = 99.0, -99.0, None
    steps, kept = thin(list(range(len(values))), values)
    assert len(kept) <= 2000
    assert [values[step] for step in steps] == kept
    assert steps == sorted(set(steps))
    assert {777, 50_000, 31_415, len(values) - 1} <= set(steps)
    assert thin([1, 2], [3.0, None]) == ([1, 2], [3.0, None])


def test_a_page_of_a_long_run_stays_small(tmp_path):
    lines = [
        {
            "step": step, "loss": random.random(), "grad_norm": 1.0, "learning_rate": 1e-3, "rss_gib": 1.5,
            "peak_rss_gib": 1.5,
        }
        for step in range(1, 20_001)
    ]  # fmt: skip
    write_manifest(tmp_path / "metrics.jsonl", lines)
    assert report(tmp_path) == 0
    import plotly

    library = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    assert (tmp_path / "report.html").stat().st_size - library.stat().st_size < 1_000_000


@pytest.mark.slow
def test_the_page_of_20_000_clips_is_below_10_mb_and_needs_no_other_file(done, tmp_path):
    """Every clip a step, all of them in quarantine for a reason of its own, and every worst clip with its audio."""
    rng = random.Random(0)
    folder = tmp_path / "run"
    shutil.copytree(done, folder, ignore=shutil.ignore_patterns("checkpoints", "model.nemo", "report.html"))
    metrics, evaluations = read_lines(done / "metrics.jsonl")[-1], read_lines(done / "evaluations.jsonl")[:3]
    steps = range(1, 20_001)
    write_manifest(folder / "metrics.jsonl", [{**metrics, "step": s, "loss": rng.random()} for s in steps])
    rows = [{**row, "step": s} for s in range(0, 20_001, 100) for row in evaluations]
    mistakes = json.loads((done / "errors-test.json").read_text())
    write_manifest(folder / "evaluations.jsonl", [*rows, *read_lines(done / "evaluations.jsonl")[-9:]])
    letters = "abcdefghijklmnopqrstuvwxyz"
    reasons = ["".join(rng.choices(letters, k=30)) for _ in steps]
    bad = [
        {"id": f"clip-{i}", "source": f"train.jsonl line {i}", "reason": reason} for i, reason in enumerate(reasons)
    ]
    write_manifest(folder / "quarantine.jsonl", bad)
    clip = {**mistakes["clips"][0], "audio": "data:audio/mpeg;base64," + "A" * 100_000}
    (folder / "errors-test.json").write_text(json.dumps({**mistakes, "clips": [clip] * 200}))
    assert report(folder) == 0
    page = folder / "report.html"
    assert page.stat().st_size < 10e6
    content = page.read_text(encoding="utf-8")
    assert content.count('src="data:audio/') == 29
    assert "19,950 other reasons" in content
    without_scripts = re.sub(r"<script\b.*?</script>", "", content, flags=re.DOTALL)
    addresses = re.findall(r"""<\w[^<>]*?\s(?:src|href|action|poster)=["']?([^"'> ]+)""", without_scripts)
    assert {a[:6] for a in addresses if not a.startswith("#")} == {"data:a", "data:,"}
    assert "url(" not in without_scripts
    assert "default-src 'none'" in content  # a browser refuses whatever else the page would fetch


def test_a_page_that_takes_long_is_written_less_often(tmp_path, monkeypatch):
    """A hundredth of the time at most, and in any case at the end; one that is quick is written each time."""
    from finetune.tools.report import page

    clock, written, takes = [0.0], [], [0.0]

    def write(folder: Path) -> Path:
        clock[0] += takes[0]
        written.append(clock[0])
        return tmp_path / "report.html"

    (tmp_path / "report.html").touch()
    monkeypatch.setattr(page.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(page, "write_run_page", write)
    for took, pages in ((0.5, 21), (5.0, 5)):
        monkeypatch.setattr(page, "_written", {})
        takes[0] = took
        written.clear()
        for _ in range(20):
            clock[0] += 100
            page.write_report(tmp_path)
        page.write_report(tmp_path, announce=True)
        assert len(written) == pages


def test_mistakes_of_ranks_are_those_of_one_process_and_stay_few():
    """The same clips in two parts give the same list; of all audio only that of the worst is kept."""
    from finetune.evaluation.mistakes import LONGEST_AUDIO, Mistakes
    from finetune.evaluation.scores import WerAccumulator

    rng = random.Random(1)
    words = ["one", "two", "three", "four", "five"]
    clips = [[" ".join(rng.choices(words, k=rng.randint(0, 9))) for _ in range(2)] for _ in range(200)]
    audio_S = torch.randn(16_000 * 30) / 10

    def board(numbers: range) -> WerAccumulator:
        made = WerAccumulator("basic", mistakes=Mistakes(3, 16_000))
        for number in numbers:
            made.add(f"clip{number}", "en", *clips[number], audio_S)
        assert len(made.mistakes.clips) == 3
        assert all(len(clip["heard_S"]) == LONGEST_AUDIO * 16_000 for clip in made.mistakes.clips)
        made.mistakes.encode_audio()
        return made

    whole, parts = board(range(200)), [board(range(first, 200, 2)) for first in range(2)]
    parts[0].merge(parts[1])
    assert parts[0].mistakes.result() == whole.mistakes.result()
    worst = whole.mistakes.clips
    badness = [clip["word_errors"] ** 2 / max(clip["words"], 1) for clip in worst]
    assert badness == sorted(badness, reverse=True)
    from finetune.evaluation.scores import score_pair

    most = max(c.word_errors**2 / max(c.words, 1) for c in (score_pair(*pair, "basic") for pair in clips))
    assert badness[0] == most
    assert all(clip["seconds"] == 30 and clip["audio"].startswith("data:audio/") for clip in worst)


# ---- in a browser ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The system's Chromium. Where CI is set there has to be one."""
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        if os.environ.get("CI"):
            pytest.fail(
                "no chromium, chromium-browser or google-chrome on this machine; install one (apt-get install "
                "chromium)"
            )
        pytest.skip("no chromium, chromium-browser or google-chrome on this machine")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """`opened(path, **context)` opens a page whose plots are drawn; nothing may be said on its console or fetched."""
    complaints: list[str] = []
    contexts = []

    def open_page(path: Path, **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(900_000)  # ms
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else complaints.append(r.url[:200]))
        page.goto(path.as_uri())
        if options.get("java_script_enabled", True):
            page.locator("html[data-plots]").wait_for(state="attached", timeout=900_000)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints


DRAWN = """() => Object.fromEntries([...document.querySelectorAll('.plot')].map(plot => [plot.id, [
    plot.data.length,
    [...plot.querySelectorAll('.scatterlayer .trace, .barlayer .trace')].filter(t => t.querySelector('path')).length,
    plot.getBoundingClientRect().height > 100 && plot.querySelector('svg').getBoundingClientRect().width > 200,
]]))"""
PLOTS = {
    "loss",
    "wer",
    "wer-guard",
    "guard",
    "rates",
    "throughput",
    "memory",
    "gradient",
    "waiting",
    "memory-bar",
    "lengths",
}


def test_every_plot_is_drawn_in_light_and_dark(done, opened):
    report(done)
    page = opened(done / "report.html", color_scheme="light")
    drawn = page.evaluate(DRAWN)
    assert drawn.keys() == PLOTS
    for name, (traces, shown, large) in drawn.items():
        assert shown == traces > 0, name
        assert large, name
    assert drawn["rates"][0] == 3
    assert drawn["memory-bar"][0] == len(PARTS) + 1
    ink = (
        "() => getComputedStyle(document.querySelector('#loss .xtick text')).fill"
        " + getComputedStyle(document.body).backgroundColor"
    )
    light = page.evaluate(ink)
    page.emulate_media(color_scheme="dark")
    page.locator("html[data-dark=true]").wait_for(state="attached")
    assert page.evaluate(ink) != light
    assert page.evaluate(DRAWN) == drawn
    assert page.title() == "Run done"  # no markup of the data has become markup of the page
    assert page.locator("code", has_text="onerror").count() + page.locator("td", has_text="onerror").count() > 0
    assert page.locator("img").count() == 0


@pytest.mark.slow
def test_the_worst_clips_play(done, opened):
    report(done)
    clips = json.loads((done / "errors-test.json").read_text())["clips"]
    page = opened(done / "report.html")
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.locator("audio").count() == len(clips)
    lengths = page.evaluate(
        """() => Promise.all([...document.querySelectorAll('audio')].slice(0, 3).map(audio => new Promise((resolve,
        reject) => {
            audio.onloadedmetadata = () => resolve(audio.duration);
            audio.onerror = () => reject(audio.error.message);
            audio.load();
        })))"""
    )
    assert lengths == pytest.approx([clip["seconds"] for clip in clips[:3]], abs=0.25)
    played = page.evaluate(
        """() => new Promise((resolve, reject) => {
            const audio = document.querySelector('audio');
            audio.muted = true;
            audio.ontimeupdate = () => audio.currentTime > 0.05 && resolve(true);
            audio.play().catch(reject);
        })"""
    )
    assert played


@pytest.mark.slow
def test_on_a_phone_by_keyboard_and_without_javascript(done, opened):
    report(done)
    phone = opened(done / "report.html", viewport={"width": 360, "height": 740})
    assert phone.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert phone.evaluate(DRAWN).keys() == PLOTS
    plain = opened(done / "report.html", java_script_enabled=False, viewport={"width": 1200, "height": 800})
    plain.keyboard.press("Tab")
    assert plain.locator(":focus").inner_text() == "Skip to the content"
    plain.keyboard.press("Tab")
    assert plain.locator(":focus").inner_text() == "Result"
    assert not plain.locator("#loss").is_visible()
    summary = plain.locator("summary", has_text="Training loss as a table")
    summary.focus()
    plain.keyboard.press("Enter")
    table = plain.locator("figure", has=summary).locator("table")
    assert table.is_visible()
    assert table.locator("tbody tr").count() == 6
    # What a screen reader is told: a name for each section, plot and player, and headings in order.
    snapshot = plain.locator("main").aria_snapshot()
    assert len(re.findall(r"- region \"", snapshot)) >= 9
    levels = [int(level) for level in re.findall(r"- heading .*\[level=(\d)\]", snapshot)]
    assert all(following <= level + 1 for level, following in itertools.pairwise(levels))
    assert plain.evaluate(
        "[...document.querySelectorAll('[id]')].length == new Set([...document.querySelectorAll('[id]')].map(e => "
        "e.id)).size"
    )
    assert plain.locator("audio:not([aria-label]), .plot:not([aria-label])").count() == 0


@pytest.mark.slow
def test_a_comparison_is_drawn(done, died, opened, tmp_path):
    page = tmp_path / "compare.html"
    assert report(done, died, "--output", page) == 0
    drawn = opened(page).evaluate(DRAWN)
    assert drawn.keys() == {"loss", "wer", "rates", "throughput", "memory"}
    for name, (traces, shown, large) in drawn.items():
        assert shown == traces > 0, name
        assert large, name
    assert drawn["loss"][0] == 2


def test_a_guard_without_a_limit_has_its_picture(tmp_path):
    from finetune.tools.report.guard_plot import axes_of, draw_guard_plot, guard_plot, points_of
    from finetune.tools.report.read import read_run

    found = [
        (0, "validation", 0.5),
        (0, "guard", 0.1),
        (5, "validation", 0.3),
        (5, "guard", 0.3),
        (9, "validation", 0.2),
    ]
    rows = [{"step": step, "split": split, "language": None, "wer": wer} for step, split, wer in found]
    write_manifest(tmp_path / "evaluations.jsonl", rows)
    (tmp_path / "summary.json").write_text("{}", encoding="utf-8")
    points = [(p["kind"], p["x"], p["y"]) for p in points_of(read_run(tmp_path))]
    assert points == [("base", 0.5, 0.1), ("taken", 0.3, 0.3)], "the last is not measured on the guard yet"

    write_manifest(tmp_path / "evaluations.jsonl", [*rows, {**rows[1], "step": 9, "wer": 0.4, "model": "best"}])
    (tmp_path / "summary.json").write_text('{"best_step": 9, "best_weights": "raw"}', encoding="utf-8")
    run = read_run(tmp_path)
    points = points_of(run)
    assert [p["kind"] for p in points] == ["base", "step", "taken"]
    plot = guard_plot(points, run.highest_guard_wer, axes_of(run))
    assert plot is not None
    assert "shapes" not in plot.layout
    assert plot.layout["yaxis"]["title"]["text"] == "WER on guard, %"
    draw_guard_plot(points, run.highest_guard_wer, tmp_path / "guard.svg", axes_of(run))
