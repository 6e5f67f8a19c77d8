"""Plans of stages: more and more data, each stage judged, the whole resumed, one stage alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import read_lines

from finetune.errors import UserError
from finetune.training.stages import Stage, run_stages, stages_of

PLAN = [{"max_samples": 8}, {"max_samples": 16, "seen": "skip"}, {"max_samples": -1, "training": {"max_steps": 3}}]


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def clips_of(folder: Path) -> set[str]:
    return {
        i
        for line in read_lines(folder / "clips.jsonl")
        for rank in line["ids_by_rank"]
        for batch in rank
        for i in batch
    }


def test_a_plan_from_end_to_end(failed: Any, tiny_run: Any, tmp_path: Path) -> None:
    """Three stages in one command; stopped behind the second, the plan goes on with the third; one alone is refused
    before its turn."""
    training = {
        "max_steps": -1,
        "num_train_epochs": 1,
        "stages": PLAN,
        "stage_margin": 9.0,
        "log_clips": True,
        "save_steps": 1,
    }
    run = tmp_path / "run"
    arguments = tiny_run(data={"test": None}, training=training)
    assert "stage 1 has not been finished" in failed(2, *arguments, "--stage", "2")
    failed(0, *arguments)
    first, second, third = (run / f"stage-{n}" for n in (1, 2, 3))
    assert len(clips_of(first)) == len(clips_of(second)) == 8
    assert not clips_of(first) & clips_of(second)
    assert clips_of(third) - clips_of(first) - clips_of(second)
    assert (summary(first)["samples"], summary(second)["samples"], summary(third)["steps"]) == (8, 8, 3)
    assert summary(second)["effective_settings"]["model"]["name"] == str(first)
    assert summary(second)["wer_before"] == summary(first)["wer_after"]
    times = {n: (run / f"stage-{n}" / "summary.json").stat().st_mtime_ns for n in (1, 2)}
    (third / "summary.json").unlink()
    said = failed(0, *arguments, "training.resume_from_checkpoint=true")
    assert "stage 1 of 3 is finished" in said
    assert {n: (run / f"stage-{n}" / "summary.json").stat().st_mtime_ns for n in (1, 2)} == times
    assert summary(third)["resumed_from"] == 3
    assert "holds another run" in failed(2, *arguments)
    before = summary(second)
    failed(0, *arguments, "--stage", "2", "training.overwrite_output_dir=true", "training.seed=5")
    assert (
        summary(second)["effective_settings"]["training"]["seed"]
        == 5
        != before["effective_settings"]["training"]["seed"]
    )


def write(folder: Path, **values: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(values))


def test_a_stage_that_makes_the_model_worse_ends_the_plan(tmp_path: Path) -> None:
    rates = {1: 0.30, 2: 0.33, 3: 0.20}
    trained = []

    def train(stage: Stage) -> None:
        trained.append(stage.name)
        write(stage.folder, wer_before=0.5, wer_after=rates[stage.number])

    stages = stages_of(PLAN, tmp_path)
    with pytest.raises(
        UserError, match=r"stage 2 made WER worse, 0.300 to 0.330, .*training.stage_margin=0.02.*stage 1"
    ) as caught:
        run_stages(stages, train, resume=False, margin=0.02)
    assert caught.value.exit_code == 1
    assert trained == ["stage 1", "stage 2"]
    run_stages(stages, train, resume=True, margin=0.05)
    assert trained == ["stage 1", "stage 2", "stage 3"]
    rates[1] = 0.6
    with pytest.raises(UserError, match=r"stage 1 made WER worse, 0.500 to 0.600.*the base"):
        run_stages(stages, train, resume=False, margin=0.05, only=1)
    with pytest.raises(UserError, match="goes on by itself with true"):
        run_stages(stages, train, resume="runs/x/checkpoints/step-00000001", margin=0.05)
    with pytest.raises(UserError, match="stages 1 to 3"):
        run_stages(stages, train, resume=False, margin=0.05, only=4)


def test_stages_of_an_older_plan_are_not_taken_for_finished(tmp_path: Path) -> None:
    trained = []

    def train(stage: Stage) -> None:
        trained.append(stage.name)
        if len(trained) == 5:
            raise KeyboardInterrupt
        write(stage.folder, wer_before=0.5, wer_after=0.3, run=len(trained))

    stages = stages_of(PLAN, tmp_path)
    run_stages(stages, train, resume=False, margin=0.1)
    with pytest.raises(KeyboardInterrupt):
        run_stages(stages, train, resume=False, margin=0.1)
    (stages[1].folder / "summary.json").unlink(missing_ok=True)
    run_stages(stages, train, resume=True, margin=0.1)
    assert trained == [f"stage {n}" for n in (1, 2, 3, 1, 2, 2, 3)]
    assert summary(tmp_path / "stage-3.old-1")["run"] == 3
    assert summary(tmp_path / "stage-3")["run"] == 7


def test_no_stage_follows_one_that_diverged(tmp_path: Path) -> None:
    trained = []

    def train(stage: Stage) -> None:
        trained.append(stage.name)
        write(stage.folder, wer_before=0.5, wer_after=0.3)

    stages = stages_of(PLAN, tmp_path)
    write(stages[0].folder, wer_before=0.5, wer_after=0.5, diverged="training diverges: the loss is large")
    for options in ({"resume": True}, {"resume": True, "only": 2}, {"resume": False, "only": 2}):
        with pytest.raises(UserError, match=r"stage 1 \(.*\): training diverges: the loss is large") as caught:
            run_stages(stages, train, margin=0.02, **options)
        assert caught.value.exit_code == 1
    assert not trained
    run_stages(stages, train, resume=False, margin=0.02)
    assert trained == ["stage 1", "stage 2", "stage 3"]


def test_stages_are_judged_on_the_validation_data(tmp_path: Path) -> None:
    def train(stage: Stage) -> None:
        write(stage.folder, wer_before=0.5, wer_after=0.4 - 0.1 * stage.number, best_validation_wer=0.1 * stage.number)

    with pytest.raises(UserError, match=r"stage 2 made WER worse, 0.100 to 0.200"):
        run_stages(stages_of(PLAN, tmp_path), train, resume=False, margin=0.05)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ([{"max_sample": 3}], ("stage 1", "max_sample")),
        ([3], ("stage 1", "mapping")),
        ([{"max_samples": 8}, {"max_samples": 8, "seen": "skip"}], ("stage 2", "nothing is left")),
        ([{"max_samples": -1}, {"max_samples": -1, "seen": "skip"}], ("stage 2", "nothing is left")),
        ([{"max_samples": 8, "seen": "no"}], ("repeat or skip",)),
    ],
)
def test_plans_that_are_refused(refused: Any, tiny_run: Any, plan: Any, words: tuple[str, ...]) -> None:
    message = refused(*tiny_run(training={"stages": plan}))
    assert all(word in message for word in words), message


def test_stages_at_the_top_of_the_run_file_and_wrong_settings_in_them(
    refused: Any, tiny_run: Any, tmp_path: Path
) -> None:
    arguments = tiny_run()
    run_file = Path(arguments[1])
    run_file.write_text(run_file.read_text() + "stages: [{max_samples: 4, training: {max_step: 2}}]\n")
    message = refused(*arguments)
    assert "stage 1: unknown key training.max_step" in message
    assert "no training.stages" in refused(*tiny_run(), "--stage", "1")
