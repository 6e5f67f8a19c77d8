"""python -m finetune.search: what it tries, what it makes of it, and that it goes on after a kill."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT

from finetune.config.load import load_config
from finetune.evaluation.utterance_counts import BEST, BEST_TRAINED
from finetune.search import main
from finetune.tools.command_line import run_command

STAND_IN = (sys.executable, str(ROOT / "tests" / "search_stand_in.py"))
OWN_RATE = 1e-3


@pytest.fixture
def search(run_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`search(*arguments, wishes={...}, **keys)` searches with a stand-in for the training; returns the exit code."""

    def call(
        *arguments: str,
        wishes: dict[str, Any] | None = None,
        output: str = "search",
        steps: int | None = 40,
        **keys: Any,
    ) -> int:
        monkeypatch.setenv("STAND_IN", json.dumps(wishes or {}))
        path = run_file(data__validation="validation.jsonl", training__learning_rate=OWN_RATE, **keys)
        words = ["--config", str(path), "--output", str(tmp_path / output), *arguments]
        words += ["--steps", str(steps)] if steps is not None else []
        return run_command(lambda: main(words, STAND_IN))

    return call


@pytest.fixture
def told(tmp_path: Path) -> Callable[[], dict[str, Any]]:
    """Reads search.json."""
    return lambda: json.loads((tmp_path / "search" / "search.json").read_text())


def rates(folder: Path) -> Path:
    """A space of learning rates alone."""
    path = folder / "space.yaml"
    path.write_text("training.learning_rate: {low: 1e-4, high: 1e-1, log: true}\n")
    return path


def page_texts(page: Path) -> str:
    return re.sub(r"<(script|style)\b.*?</\1>", " ", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_a_better_learning_rate_is_found_and_written(search, told, tmp_path, capsys):
    assert search("--trials", "10", "--space", str(rates(tmp_path)), data__test="test.jsonl") == 0
    found, folder = told(), tmp_path / "search"
    trials = {t["number"]: t for t in found["trials"]}
    assert len(trials) == 10
    assert trials[0]["settings"] == {}, "the run file's own values come first"
    words = json.loads((folder / "trial-0000" / "arguments.json").read_text())
    assert {"data.test=null", "training.stop_if_diverged=true"} <= {*words}
    assert not [w for w in words if w.startswith("training.learning_rate")]
    steps = {w for n in trials for w in json.loads((folder / f"trial-{n:04d}" / "arguments.json").read_text())}
    assert [w for w in steps if w.startswith("training.max_steps")] == ["training.max_steps=40"], "equal for all"
    best = trials[found["best"]]
    assert best["wer"] == min(t["wer"] for t in trials.values() if t["wer"] is not None)
    rate = best["settings"]["training.learning_rate"]
    assert abs(rate / 1e-2 - 1) < abs(OWN_RATE / 1e-2 - 1)

    # Each clip's errors follow the WER, so the difference is far beyond chance, also for the best of nine.
    comparison = found["comparison"]
    assert comparison["p_value_corrected"] == pytest.approx(min(1, 9 * comparison["p_value"]))
    assert comparison["wer_a"] == pytest.approx(0.3, abs=1e-3)
    assert f"Trial {found['best']} is better than the run file's own values" in found["advice"][0]

    config, _ = load_config(folder / "best.yaml", [], [])
    assert config.training.learning_rate == rate
    assert config.training.max_steps == -1, "as long as the run file's own"
    assert config.data.test == "test.jsonl"
    assert config.training.output_dir == "out-searched"

    models = [path.parent.name for path in folder.glob("trial-*/model.nemo")]
    assert models == [f"trial-{found['best']:04d}"]
    said = capsys.readouterr()
    assert "best.yaml" in said.out
    assert "5 to go, about" in said.err
    text = page_texts(folder / "search.html")
    assert "is better than the run file" in text
    plots = re.search(r'id="plots">(.*?)</script>', (folder / "search.html").read_text(encoding="utf-8"), re.DOTALL)
    assert plots is not None
    kinds = {trace["type"] for plot in json.loads(plots[1]) for trace in plot["traces"]}
    assert kinds <= {"scatter", "bar"}, "the page's policy forbids what others need"
    good = [t for t in trials.values() if t["state"] == "complete"]
    assert ("mattered most" in text) == (len(good) >= 10)


@pytest.mark.slow
def test_too_few_trials_make_no_claim_and_the_defaults_may_be_as_good(search, told, tmp_path):
    space = tmp_path / "space.yaml"
    space.write_text("training.weight_decay: [0.01, 0.02]\n")  # without an effect
    assert search("--trials", "3", "--space", str(space)) == 0
    advice = " ".join(told()["advice"])
    assert advice.startswith("None of the 2 others is better")
    assert "mattered most" not in advice
    assert "it takes 10" in advice


def test_bad_trials_count_say_why_and_are_never_the_best(search, told, tmp_path, capsys):
    wishes = {"out_of_memory": 5e-3, "diverges": 2e-3}
    assert search("--trials", "5", "--space", str(rates(tmp_path)), wishes=wishes) == 0
    found = told()
    bad = [t for t in found["trials"] if t["state"] == "bad"]
    assert len(found["trials"]) == 5
    assert any(t["reason"].startswith("diverged: WER 2") for t in bad)
    assert found["trials"][found["best"]]["state"] == "complete"
    assert "out of memory: the GPU is out of memory" in capsys.readouterr().err or len(bad) == 1
    # 3e-3 is the first guess beside the run file's own rate.
    assert found["trials"][1]["state"] == "bad"


@pytest.mark.slow
def test_where_all_trials_are_bad_the_commonest_reason_is_the_message(search, tmp_path, capsys):
    assert search("--trials", "3", "--space", str(rates(tmp_path)), wishes={"out_of_memory": 0}) == 1
    said = capsys.readouterr().err
    assert "all 3 trials are bad. The commonest reason: out of memory: the GPU is out of memory" in said
    assert not (tmp_path / "search" / "best.yaml").exists()


def test_a_run_file_that_the_training_refuses_ends_the_search(search, tmp_path, capsys):
    assert search("--trials", "3", wishes={"refuses": 0}) == 2
    assert "the run file's own settings are refused: data.train: there is nothing" in capsys.readouterr().err


@pytest.mark.slow
def test_what_was_refused_is_tried_again(search, told, tmp_path):
    space = ("--space", str(rates(tmp_path)))
    for _ in range(3):  # also the guesses beside the run file's own values
        assert search("--trials", "3", *space, wishes={"refuses": 0}) == 2
    assert search("--trials", "3", *space) == 0
    found = told()
    finished = {t["number"]: t for t in found["trials"] if t["state"] == "complete"}
    assert len(finished) == 3
    assert finished[found["default"]]["settings"] == {}
    assert found["base_wer"] == 0.5


def test_a_run_by_epochs_needs_the_steps_of_a_trial(search, tmp_path, capsys):
    assert search("--trials", "1", steps=None) == 2
    assert "Give --steps" in capsys.readouterr().err
    assert search("--trials", "1", "--space", str(rates(tmp_path)), steps=None, training__max_steps=40) == 0


@pytest.mark.slow
def test_best_yaml_is_the_best_trial_where_a_strategy_sets_the_same(search, told, tmp_path):
    space = tmp_path / "space.yaml"
    choices = {"trained": {"model.freeze_encoder": False, "model.unfreeze_encoder_layers": 0}}
    choices["last two"] = {"model.freeze_encoder": True, "model.unfreeze_encoder_layers": 2}
    space.write_text(yaml.safe_dump({"training.learning_rate": [1e-2], "encoder": choices}))
    strategies, overrides = ["partial_unfreeze", "adamw_8bit"], ["model.unfreeze_encoder_layers=3"]
    words = [word for name in strategies for word in ("--strategy", name)]
    assert search("--trials", "4", "--space", str(space), *words, *overrides) == 0
    best = told()["trials"][told()["best"]]["settings"]
    head = [
        line for line in (tmp_path / "search" / "best.yaml").read_text().splitlines() if line.startswith("# python")
    ]
    printed = shlex.split(head[0].split("best.yaml")[1])
    named = [printed[i + 1] for i, word in enumerate(printed) if word == "--strategy"]
    assert named == strategies
    written, _ = load_config(tmp_path / "search" / "best.yaml", named, [word for word in printed if "=" in word])
    own = [*overrides, *(f"{key}={json.dumps(value)}" for key, value in best.items())]
    tried, _ = load_config(tmp_path / "RUN.yaml", strategies, [*own, "training.output_dir=out-searched"])
    assert written.as_dict() == tried.as_dict()


@pytest.mark.slow
def test_what_goes_with_the_length_of_a_run_is_scaled(search, told, tmp_path):
    space = tmp_path / "space.yaml"
    lines = {"both": {"half": {"training.warmup_steps": 20, "training.l2_sp": 5.0, "training.learning_rate": 1e-2}}}
    space.write_text(yaml.safe_dump(lines))
    keys = {"training__max_steps": 400, "training__warmup_steps": 100, "training__l2_sp": 0.1}
    assert search("--trials", "8", "--space", str(space), **keys) == 0
    folder, found = tmp_path / "search", told()
    default = json.loads((folder / "trial-0000" / "arguments.json").read_text())
    assert {"training.warmup_steps=10", "training.l2_sp=1.0", "training.max_steps=40"} <= set(default)
    assert found["best"] != found["default"]
    written, _ = load_config(folder / "best.yaml", [], [])
    assert (written.training.warmup_steps, written.training.l2_sp, written.training.max_steps) == (200, 0.5, 400)
    assert "# training.l2_sp=5.0 was tried in 40 steps; in 400 that is 0.5." in (folder / "best.yaml").read_text()


def test_a_factor_does_not_depend_on_the_order_of_the_space(run_file):
    from finetune.tools.search.space import Parameter, settings_of

    config, _ = load_config(run_file(training__learning_rate=OWN_RATE), [], [])
    rate = Parameter("training.learning_rate", OWN_RATE, 1e-4, 1e-1, log=True)
    joint = Parameter("training.joint_learning_rate", 1.0, 0.1, 10, log=True, times=rate.name)
    values = {rate.name: 1e-2, joint.name: 0.5}
    for space in ([rate, joint], [joint, rate]):
        assert settings_of(space, values, config) == {rate.name: 1e-2, joint.name: 5e-3}


def test_trials_are_compared_after_training_where_the_base_model_is_better(search, told, tmp_path):
    assert search("--trials", "2", "--space", str(rates(tmp_path)), wishes={"base": 0.24}) == 0
    found = told()
    own, best = (found["trials"][n]["wer"] for n in (0, found["best"]))
    assert best < own
    assert [found["comparison"][key] for key in ("wer_a", "wer_b")] == [own, best], "not the base model's"
    assert f"Trial {found['best']} is better than the run file's own values" in found["advice"][0]
    assert "No trial is better than the base model, whose WER is 0.2400" in " ".join(found["advice"])
    # Counts of another evaluation than the one that a trial is judged by.
    shutil.copy(tmp_path / "search" / "trial-0000" / BEST, tmp_path / "search" / "trial-0000" / BEST_TRAINED)
    assert search("--trials", "2", "--space", str(rates(tmp_path)), wishes={"base": 0.24}) == 0
    assert told()["comparison"] is None
    assert "Whether that is chance is not tested" in told()["advice"][0]


@pytest.mark.slow
def test_the_guard_s_limit_decides(search, told, tmp_path):
    keys = {"data__guard": "guard.jsonl", "data__guard_limit": "+5 %"}
    # 0.2 + 5 x rate stays within 0.21 up to a rate of 2e-3, while the WER is best at 1e-2.
    assert search("--trials", "6", "--space", str(rates(tmp_path)), wishes={"guard": 5.0}, **keys) == 0
    found = told()
    best = found["trials"][found["best"]]
    assert best["excess"] <= 0
    assert any(t["excess"] is not None and t["excess"] > 0 and t["wer"] < best["wer"] for t in found["trials"])
    shutil.rmtree(tmp_path / "search")
    assert search("--trials", "2", "--space", str(rates(tmp_path)), wishes={"guard": 5e3}, **keys) == 1
    assert "No trial keeps data.guard_limit" in told()["advice"][0]


def test_a_limit_that_is_met_exactly_is_kept(tmp_path):
    from finetune.config.guard_limit import parse_guard_limit
    from finetune.tools.search.trials import read_evaluations

    wers = {0: (0.5, 0.1), 1: (0.4, 0.1 + 0.1 + 0.1), 2: (0.3, 0.4)}
    rows = [
        {"step": step, "split": split, "wer": wer}
        for step, both in wers.items()
        for split, wer in zip(("validation", "guard"), both, strict=True)
    ]
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    best = read_evaluations(tmp_path, parse_guard_limit("+0.2")).best
    assert best is not None
    assert (best.step, best.excess) == (1, 0.0)


@pytest.mark.slow
def test_where_none_within_the_limit_beats_the_base_model_that_is_said(search, told, tmp_path):
    keys = {"data__guard": "guard.jsonl", "data__guard_limit": "+5 %"}
    assert search("--trials", "2", "--space", str(rates(tmp_path)), wishes={"guard": 5.0, "base": 0.25}, **keys) == 0
    assert "No trial within the limit is better than the base model" in " ".join(told()["advice"])


def test_another_version_of_the_run_file_is_refused_by_the_keys_that_differ(search, capsys):
    assert search("--trials", "1") == 0
    capsys.readouterr()
    assert search("--trials", "2", model__dropout=0.2) == 2
    said = capsys.readouterr().err
    assert "model.dropout: null there, 0.2 now" in said
    assert "training." not in said
    assert search("--trials", "2", "training.logging_steps=7") == 0, "what changes no result may change"


@pytest.mark.slow
def test_two_folders_share_a_study(search, tmp_path):
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    assert search("--trials", "2", "--storage", url, output="one") == 0
    assert search("--trials", "4", "--storage", url, output="two") == 0
    found = [json.loads((tmp_path / name / "search.json").read_text()) for name in ("one", "two")]
    assert [len(f["trials"]) for f in found] == [2, 4]
    assert found[0]["study"] == found[1]["study"]
    assert not list((tmp_path / "two").glob("trial-000[01]"))
    assert "Whether that is chance is not tested" in found[1]["advice"][0]


@pytest.mark.slow
def test_the_last_trial_of_a_machine_that_is_gone_is_tried_again(search, told, tmp_path, monkeypatch, capsys):
    import optuna
    from sqlalchemy import text

    from finetune.tools.search import running

    url, space = f"sqlite:///{tmp_path / 'shared.db'}", ("--space", str(rates(tmp_path)))
    assert search("--trials", "1", "--storage", url, *space, output="one") == 0
    storage = optuna.storages.RDBStorage(url, heartbeat_interval=60)
    study = optuna.load_study(study_name=storage.get_all_studies()[0].study_name, storage=storage)
    gone = study.ask()  # by a machine that is heard of a last time
    rate = gone.suggest_float("training.learning_rate", 1e-4, 1e-1, log=True)
    gone.set_user_attr("owner", "another machine")
    storage.record_heartbeat(gone._trial_id)
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        assert len(waited) < 3, "it waits for ever"
        assert len(study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))) == 2
        if len(waited) == 2:
            with storage.engine.begin() as database:
                database.execute(text("UPDATE trial_heartbeats SET heartbeat = datetime('now', '-1 hour')"))

    monkeypatch.setattr(running, "sleep", sleep)
    assert search("--trials", "3", "--storage", url, *space) == 0
    assert len(waited) == 2, "only while a machine that is heard of has the last one"
    trials = told()["trials"]
    assert [t["state"] for t in trials] == ["complete", "fail", "complete", "complete"]
    assert trials[3]["params"] == {"training.learning_rate": rate}
    said = capsys.readouterr().err
    assert said.count("waiting for 1 trial(s) of other machines") == 1
    assert "trial 1 was cut short; its settings are tried again" in said


def test_a_storage_that_cannot_be_used_keeps_its_password(search, capsys):
    url = "postgresql://me:hunter2secret@localhost:9/x?password=another5ecret"
    assert search("--trials", "1", "--storage", url) == 1
    said = "".join(capsys.readouterr())
    assert "--storage: postgresql://" in said
    assert "hunter2secret" not in said
    assert "another5ecret" not in said


def test_without_optuna_the_extra_is_named(search, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert search() == 1
    assert "'.[search]'" in capsys.readouterr().err


def test_what_is_wrong_with_a_space_is_said_at_once(search, tmp_path, capsys):
    space = tmp_path / "space.yaml"
    lines = {
        "training.learning_rat": [1e-3, 2e-3],
        "training.warmup_ratio": {"low": 0.1, "high": 3},
        "encoder": {"frozen": {"model.freeze_encoder": True, "model.lora_rank": 8}},
        "training.weight_decay": {"low": 0.2, "high": 0.1},
    }
    space.write_text(yaml.safe_dump(lines))
    assert search("--space", str(space)) == 2
    said = capsys.readouterr().err
    for text in (
        "Did you mean training.learning_rate",
        "training.warmup_ratio",
        "exclude each other",
        "low below high",
    ):
        assert text in said


def test_the_default_space_leaves_out_what_the_run_file_excludes(run_file):
    from finetune.tools.search.space import default_space

    def names(**keys: Any) -> set[str]:
        config, _ = load_config(run_file(**keys), [], [])
        return {p.name for p in default_space(config, 40)}

    assert {"training.learning_rate", "encoder", "model.freeze_batchnorm"} <= names()
    assert "model.freeze_batchnorm" not in names(model__sync_batchnorm=True)
    assert "encoder" not in names(model__adapter="adapter", model__lora_rank=4)
    assert "data.rehearsal_share" not in names()
    assert "training.warmup_steps" in names(training__warmup_steps=5)
    assert not {"training.max_steps", "training.num_train_epochs"} & names()


def test_no_pull_is_offered_once_and_the_automatic_one_with_a_limit(run_file):
    from finetune.tools.search.space import default_space

    def pulls(**keys: Any) -> list[Any]:
        config, _ = load_config(
            run_file(data__guard="guard.jsonl", data__validation="validation.jsonl", **keys), [], []
        )
        return next(list(p.choices) for p in default_space(config, 40) if p.name == "training.l2_sp")

    without, limited = pulls(), pulls(data__guard_limit="+5 %")
    assert len(without) == 4
    assert None not in without
    assert set(limited) == {None, *without}


# ---- kills ------------------------------------------------------------------------------------------------------

START = """
import sys
from finetune.search import main, run_command
sys.exit(run_command(lambda: main(sys.argv[2:], (sys.executable, sys.argv[1]))))
"""


def started(script: str, *words: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", START, script, *words]
    return subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **environment}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, signal.SIGINT, signal.SIGTERM],
)
def test_a_search_goes_on_after_a_signal(number, search, told, run_file, tmp_path):
    path = run_file(data__validation="validation.jsonl", training__learning_rate=OWN_RATE)
    output, gate = tmp_path / "search", tmp_path / "gate"
    words = ["--config", str(path), "--output", str(output), "--steps", "40"]
    assert search("--trials", "1") == 0
    process = started(STAND_IN[1], *words, "--trials", "3", STAND_IN=json.dumps({"waits_for": str(gate)}))
    wait_for((output / "trial-0001" / "evaluations.jsonl").exists, process)
    process.send_signal(number)
    _, said = process.communicate()
    expected = {signal.SIGKILL: -signal.SIGKILL, signal.SIGINT: 130, signal.SIGTERM: 75}[number]
    assert process.returncode == expected, said
    if number != signal.SIGKILL:
        assert len([t for t in told()["trials"] if t["state"] == "complete"]) == 1
        assert "start the same command again" in said
    assert search("--trials", "3") == 0
    trials = told()["trials"]
    assert sorted(t["state"] for t in trials) == ["complete", "complete", "complete", "fail"]
    cut_short = next(t for t in trials if t["state"] == "fail")
    again = [t for t in trials if t["params"] == cut_short["params"] and t["state"] == "complete"]
    assert len(again) == 1
    assert not gate.exists(), "the training that waited for it has ended with the search"


@pytest.mark.slow
def test_a_real_search_is_killed_and_goes_on(tiny_run, tmp_path):
    arguments = tiny_run(data={"test": None}, training={"max_steps": 8})
    output = tmp_path / "search"
    words = [*arguments, "--output", str(output), "--trials", "3"]
    train = str(ROOT / "finetune" / "train.py")
    process = started(train, *words)
    wait_for((output / "trial-0001" / "metrics.jsonl").exists, process)
    process.kill()
    process.communicate()
    process = started(train, *words)
    out, said = process.communicate()
    assert process.returncode == 0, said
    assert "was cut short; its settings are tried again" in said
    found = json.loads((output / "search.json").read_text())
    finished = [t for t in found["trials"] if t["state"] in ("complete", "pruned", "bad")]
    assert len(finished) == 3
    assert not [t["reason"] for t in finished if t["state"] == "bad"]
    assert found["base_wer"] is not None
    assert found["environment"]["versions"]["torch"]
    assert str(output / "best.yaml") in out
    done = subprocess.run(
        [sys.executable, train, "--config", str(output / "best.yaml")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
