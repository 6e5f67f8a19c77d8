"""What a run finds in its output directory, in its checkpoints and under model.name, and what it leaves there when it
fails."""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import read_lines, tiny_layout, write_manifest
from hostile_files import members_of, write_archive

from finetune.errors import UserError

NOTHING_TO_JUDGE_BY: dict[str, Any] = {"validation": None, "test": None}
RESUME = "training.resume_from_checkpoint=true"


# ---- output_dir and checkpoints ------------------------------------------------------------------------------------


def test_output_dir_of_another_run(
    failed: Callable[..., str], tiny_run: Callable[..., list[str]], tmp_path: Path
) -> None:
    arguments = tiny_run("training.max_steps=1", data=NOTHING_TO_JUDGE_BY)
    failed(0, *arguments)
    summary = (tmp_path / "run" / "summary.json").read_text()
    (tmp_path / "run" / "mine.txt").write_text("kept")
    message = failed(2, *arguments)
    assert f"training.output_dir: {tmp_path / 'run'} holds another run" in message
    for remedy in ("resume_from_checkpoint=true", "overwrite_output_dir=true", "name another directory"):
        assert remedy in message
    assert (tmp_path / "run" / "summary.json").read_text() == summary

    other = tmp_path / "other.yaml"
    layout = tiny_layout()
    layout["model"]["encoder"]["n_layers"] = 1
    other.write_text(yaml.safe_dump(layout))
    resume = "training.resume_from_checkpoint=true"
    message = failed(2, *arguments, resume, f"model.name={other}")
    assert f"{tmp_path / 'run' / 'checkpoints' / 'step-00000001'} does not fit this model" in message
    assert "Resume with the run file that wrote it, or start afresh with another training.output_dir" in message

    nowhere = tmp_path / "run" / "checkpoints" / "step-00000007"
    message = failed(2, *arguments, f"training.resume_from_checkpoint={nowhere}")
    assert f"training.resume_from_checkpoint: {nowhere} is no whole checkpoint" in message

    failed(0, *arguments, "training.overwrite_output_dir=true", "training.max_steps=2")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2
    assert (tmp_path / "run" / "mine.txt").read_text() == "kept"


def test_a_run_is_overwritten_only_once_everything_else_is_right(
    failed: Callable[..., str], tiny_run: Callable[..., list[str]], tmp_path: Path
) -> None:
    arguments = tiny_run("training.max_steps=1", data=NOTHING_TO_JUDGE_BY)
    failed(0, *arguments)
    kept = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file() and p.name != ".lock"}
    for wrong in ("data.train=no/such/file.jsonl", "model.name=no/such/file.nemo", "training.optimizer=adamw9"):
        failed(2, *arguments, "training.overwrite_output_dir=true", wrong)
        assert {p: p.read_bytes() for p in kept} == kept


def test_what_others_keep_in_the_output_directory_stays(
    failed: Callable[..., str], tiny_run: Callable[..., list[str]], tiny_model: Path, tmp_path: Path
) -> None:
    for name in ("logs/theirs.txt", "checkpoints/theirs.ckpt", "notes.html"):
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text("theirs")
    arguments = tiny_run("training.max_steps=1", data=NOTHING_TO_JUDGE_BY)
    failed(0, *arguments)
    for name in ("logs/theirs.txt", "checkpoints/theirs.ckpt", "notes.html"):
        assert (tmp_path / "run" / name).read_text() == "theirs"
    # A model is not trained on into the directory that would be cleared of it.
    model = f"model.name={tmp_path / 'run' / 'model.nemo'}"
    message = failed(2, *arguments, "training.overwrite_output_dir=true", model)
    assert "which would be overwritten. Name another training.output_dir" in message
    assert (tmp_path / "run" / "model.nemo").is_file()


@pytest.mark.slow
def test_epochs_resumed_with_larger_batches_go_on_down_the_same_curve(
    failed: Callable[..., str], tiny_run: Callable[..., list[str]], tmp_path: Path
) -> None:
    training = {"max_steps": -1, "num_train_epochs": 4, "per_device_train_batch_size": 2, "save_steps": 24}
    arguments = tiny_run(data={**NOTHING_TO_JUDGE_BY, "group_by_duration": False}, training=training)
    failed(0, *arguments)
    unbroken = {row["samples"]: row["learning_rate"] for row in read_lines(tmp_path / "run" / "metrics.jsonl")}
    checkpoints = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    for later in checkpoints[1:]:
        import shutil

        shutil.rmtree(later)
    assert checkpoints[0].name == "step-00000024"
    failed(0, *arguments, RESUME, "training.per_device_train_batch_size=4")
    resumed = {row["samples"]: row["learning_rate"] for row in read_lines(tmp_path / "run" / "metrics.jsonl")}
    later = [samples for samples in resumed if samples > 52 and samples - 4 in resumed]
    assert len(later) >= 8
    for samples in later:  # the rate of a step is that of the clips before it
        assert resumed[samples] == pytest.approx(unbroken[samples - 2], abs=1e-4)
    assert all(rate > 0 for samples, rate in resumed.items() if samples > 8)


def test_a_resume_that_is_refused_leaves_the_record_of_the_run(
    failed: Callable[..., str], tiny_run: Callable[..., list[str]], tmp_path: Path
) -> None:
    arguments = tiny_run("training.max_steps=2", data=NOTHING_TO_JUDGE_BY)
    failed(0, *arguments)
    record = (tmp_path / "run" / "config.yaml").read_text()
    damaged = tmp_path / "run" / "checkpoints" / "step-00000002" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    said = failed(1, *arguments, RESUME, "training.max_steps=4")
    assert "is damaged (step-00000002: model.safetensors has 1000 bytes instead of" in said
    assert "training.overwrite_output_dir=true" in said
    damaged.unlink()
    assert "step-00000002: model.safetensors is missing" in failed(1, *arguments, RESUME, "training.max_steps=4")
    assert (tmp_path / "run" / "config.yaml").read_text() == record


def test_optimizer_settings_of_the_run_file_count_on_resume(
    failed: Callable[..., str], tiny_run: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from finetune.training.trainer import Trainer

    arguments = tiny_run("training.max_steps=2", data=NOTHING_TO_JUDGE_BY)
    failed(0, *arguments, "training.weight_decay=0.5")
    stepped_with: list[tuple[float, Any]] = []
    step = Trainer._optimizer_step

    def spy(self: Trainer, step_input: Any) -> Any:
        stepped_with.append(
            (max(g["weight_decay"] for g in self.optimizer.param_groups), self.optimizer.param_groups[0]["betas"])
        )
        return step(self, step_input)

    monkeypatch.setattr(Trainer, "_optimizer_step", spy)
    changed = ("training.max_steps=3", "training.weight_decay=0.25", "training.optimizer_args={betas: [0.8, 0.9]}")
    said = failed(0, *arguments, RESUME, *changed)
    assert stepped_with == [(0.25, (0.8, 0.9))]
    assert "training.weight_decay was 0.5 when the checkpoint was written and is 0.25 now" in said


def test_data_that_break_off_leave_a_checkpoint_to_go_on_from(
    failed: Callable[..., str], tiny_run: Callable[..., list[str]], clips: Path, tmp_path: Path
) -> None:
    """The second of two shards is damaged and then mended: every clip is trained once."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = read_lines(clips / "manifest.jsonl")
    for i in (0, 1):
        part = [
            {
                "id": r["id"],
                "audio": {"bytes": (clips / r["audio_filepath"]).read_bytes(), "path": None},
                "text": r["text"],
            }
            for r in rows[12 * i : 12 * i + 12]
        ]
        pq.write_table(pa.Table.from_pylist(part), tmp_path / f"{i}.parquet", row_group_size=4)
    whole = (tmp_path / "1.parquet").read_bytes()
    (tmp_path / "1.parquet").write_bytes(whole[:50] + bytes(len(whole) // 2) + whole[50 + len(whole) // 2 :])
    data = {**NOTHING_TO_JUDGE_BY, "train": str(tmp_path / "*.parquet")}
    # With this seed the sound shard comes first.
    training = {"max_steps": -1, "num_train_epochs": 1, "log_clips": True, "seed": 1}
    arguments = tiny_run("data.shuffle_buffer_size=4", data=data, training=training)
    message = failed(1, *arguments)
    assert "1.parquet" in message or "shard 2 of 2" in message
    assert "cannot be read from row" in message
    steps = len(read_lines(tmp_path / "run" / "clips.jsonl"))
    assert steps >= 1
    (tmp_path / "1.parquet").write_bytes(whole)
    said = failed(0, *arguments, RESUME)
    assert f"resumed from step-{steps:08d}" in said
    trained = [i for line in read_lines(tmp_path / "run" / "clips.jsonl") for b in line["ids_by_rank"][0] for i in b]
    assert sorted(trained) == sorted(r["id"] for r in rows)


def test_bad_clips_of_the_last_evaluation_count(
    failed: Callable[..., str], tiny_run: Callable[..., list[str]], clips: Path, tmp_path: Path
) -> None:
    rows = [{**r, "audio_filepath": str(clips / r["audio_filepath"])} for r in read_lines(clips / "manifest.jsonl")]
    judged = write_manifest(tmp_path / "judged.jsonl", [*rows[:3], {**rows[0], "id": "lost", "audio_filepath": "no"}])
    arguments = tiny_run(data={"validation": None, "test": str(judged)}, training={"eval_on_start": False})
    said = failed(0, *arguments)
    assert "1 of 4 clips of test cannot be used, more than data.max_bad_fraction=0.05" in said
    assert [line["id"] for line in read_lines(tmp_path / "run" / "quarantine.jsonl")] == ["lost"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["quarantined"] == 1


def test_export_does_not_overwrite_its_own_source(
    failed: Callable[..., str], tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    from finetune.export import main

    (tmp_path / "run").mkdir()
    shutil.copy(tiny_model, tmp_path / "run" / "model.nemo")
    for name in (tmp_path / "run", tmp_path / "run" / "model.nemo"):
        assert main(["--model", str(name), "--output", str(tmp_path / "run")]) == 2
        assert "is the model itself. Name another directory" in capsys.readouterr().err
    assert (tmp_path / "run" / "model.nemo").read_bytes() == tiny_model.read_bytes()


def test_a_checkpoint_that_is_being_removed_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process killed in the middle of a removal: here the removal of the files fails."""
    import shutil

    from finetune.training import checkpoints

    for step in (1, 2):
        folder = checkpoints.checkpoint_path(tmp_path, step)
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text("{}")
    monkeypatch.setattr(shutil, "rmtree", lambda *a, **k: None)
    checkpoints.remove_old_checkpoints(tmp_path, 1)
    assert [p.name for p in checkpoints.checkpoints_of(tmp_path)] == ["step-00000002"]
    monkeypatch.undo()
    checkpoints.remove_old_checkpoints(tmp_path, 1)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


def test_nothing_to_resume_from(
    failed: Callable[..., str], tiny_run: Callable[..., list[str]], tmp_path: Path
) -> None:
    arguments = tiny_run("training.max_steps=1", data=NOTHING_TO_JUDGE_BY)
    said = failed(0, *arguments, "training.resume_from_checkpoint=true")
    assert f"there is no whole checkpoint in {tmp_path / 'run'}; the run starts at step 0" in said
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["resumed_from"] is None


def test_output_dir_that_cannot_be_one(
    refused: Callable[..., str], tiny_run: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    message = refused(*tiny_run(f"training.output_dir={tmp_path / 'file'}"))
    assert f"training.output_dir: {tmp_path / 'file'} cannot be written" in message


@pytest.fixture
def holder(
    tiny_run: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[multiprocessing.Process]:
    """Another process in the middle of a run into tmp_path/run."""
    from finetune import train

    parent, arrived = os.getpid(), multiprocessing.get_context("fork").Event()
    forked = multiprocessing.get_context("fork").Value("i", 0)

    def build(*_: Any) -> None:
        if os.getpid() == parent:
            raise UserError("came as far as the model", exit_code=1)
        child = os.fork()  # as a loader worker, it outlives its parent for a while
        if child:
            forked.value = child
            arrived.set()
        time.sleep(3600)

    monkeypatch.setattr("finetune.training.run.build_model", build)
    arguments = tiny_run()
    process = multiprocessing.get_context("fork").Process(target=train.main, args=(arguments,), daemon=True)
    process.start()
    assert arrived.wait(900)
    yield process
    process.kill()
    if forked.value > 0:
        os.kill(forked.value, signal.SIGKILL)


def test_second_process_in_the_same_output_dir(
    holder: multiprocessing.Process, failed: Callable[..., str], tiny_run: Callable[..., list[str]], tmp_path: Path
) -> None:
    message = failed(2, *tiny_run())
    assert f"training.output_dir: {tmp_path / 'run'} is in use by another process" in message
    assert "name another directory" in message
    assert "came as far" in failed(1, *tiny_run(f"training.output_dir={tmp_path / 'elsewhere'}"))
    # The lock dies with its holder.
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()  # with a time limit it would wait for the forked child, which keeps its pipe open
    assert "came as far" in failed(1, *tiny_run())


# ---- models --------------------------------------------------------------------------------------------------------


def test_wrong_models(failed: Callable[..., str], tiny_run: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / "garbage.nemo").write_bytes(b"this is no tar file")
    (tmp_path / "layout.yaml").write_text("encoder: {}\n")
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "config.json").write_text("{}")
    without_tokenizer = tiny_layout()
    without_tokenizer["model"]["tokenizer"]["dir"] = None
    (tmp_path / "speechless.yaml").write_text(yaml.safe_dump(without_tokenizer))
    cases = {
        "nowhere.nemo": ["there is no file or directory {}"],
        "nowhere.yaml": ["there is no file {}"],
        "nowhere/at/all": ["there is no file or directory {}"],
        "garbage.nemo": ["{} cannot be read as a NeMo model"],
        "layout.yaml": ["{}", "no key `model:`"],
        "unfinished": ["the directory {} holds no .nemo file", "finished run"],
        "transformers": ["{} is a Hugging Face model of the type None", "parakeet_tdt (ParakeetForTDT)", ".nemo"],
        "speechless.yaml": ["model.tokenizer", "{}", "tokenizer.model"],
    }
    wrong = []
    for name, expected in cases.items():
        path = str(tmp_path / name)
        message = failed(2, *tiny_run(model={"name": path}, data=NOTHING_TO_JUDGE_BY))
        wrong += [(name, message) for words in expected if words.format(path) not in message]
    assert wrong == []


def test_a_file_that_is_no_model(
    failed: Callable[..., str], tiny_run: Callable[..., list[str]], tmp_path: Path
) -> None:
    path = tmp_path / "weights.ckpt"
    path.write_text("not a model")
    message = failed(2, *tiny_run(model={"name": str(path)}, data=NOTHING_TO_JUDGE_BY))
    assert f"model.name: {path}" in message
    assert ".nemo" in message
    assert "there is no file" not in message


def test_model_names_that_no_hub_has(failed: Callable[..., str], tiny_run: Callable[..., list[str]]) -> None:
    message = failed(2, *tiny_run(model={"name": "parakeet"}, data=NOTHING_TO_JUDGE_BY))
    assert "model.name: there is no file or directory parakeet" in message
    assert "nvidia/parakeet-tdt-0.6b-v3" in message
    message = failed(1, *tiny_run(model={"name": "nobody/no-such-model"}, data=NOTHING_TO_JUDGE_BY))
    assert "model.name: nobody/no-such-model is no local file, and loading it from the hub failed" in message
    assert "Check the name and the network, or download the .nemo file and give its path" in message


def test_models_of_another_kind(
    failed: Callable[..., str], tiny_run: Callable[..., list[str]], tiny_model: Path, tmp_path: Path
) -> None:
    files = members_of(tiny_model)
    config = yaml.safe_load(files["./model_config.yaml"])
    config["target"] = "nemo.collections.asr.models.aed_multitask_models.EncDecMultiTaskModel"
    archive = write_archive(
        tmp_path / "canary.nemo", {**files, "./model_config.yaml": yaml.safe_dump(config).encode()}
    )
    message = failed(2, *tiny_run(model={"name": str(archive)}, data=NOTHING_TO_JUDGE_BY))
    assert f"model.name: {archive} is a EncDecMultiTaskModel, which is not supported" in message

    lost = tiny_layout()
    lost["model"]["loss"]["tdt_kwargs"]["durations"] = [0, 1, 2]
    (tmp_path / "lost.yaml").write_text(yaml.safe_dump(lost))
    message = failed(2, *tiny_run(model={"name": str(tmp_path / "lost.yaml")}, data=NOTHING_TO_JUDGE_BY))
    assert "durations [0, 1, 2]" in message
    assert "loss.tdt_kwargs.durations" in message
