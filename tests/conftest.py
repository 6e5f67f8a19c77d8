"""Fixtures that the tests share: a tiny NeMo model, a few real clips, and whole trainings inside this process.

Importing NeMo takes ten seconds, so everything that needs it runs in the one test process where it can.
"""

import io
import json
import logging
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import yaml

# Before anything imports huggingface_hub: no test asks the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
# A shell that starts the tests in the background lets them, and all that they start, ignore SIGINT.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]
VOICE_PROMPTS = ROOT / "examples" / "voice_prompts" / "data"
TOKENIZER = ROOT / "examples" / "base" / "tokenizer"
sys.path.append(str(ROOT / "scripts" / "models"))  # families
LAYOUT = ROOT / "finetune" / "configs" / "models" / "fastconformer_tdt_3m.yaml"

# Settings under which nothing of a run is random.
DETERMINISTIC = {"spec_augment": False, "dropout": 0.0, "freeze_batchnorm": True}
ONLY_TRAIN = {"validation": None, "test": None, "shuffle": False, "group_by_duration": False}
_plain_losses: list[float] = []

LONGEST_CLIP = 1.5  # seconds
CLIPS = 24


def tiny_layout(dropout: float = 0.1) -> dict[str, Any]:
    """A NeMo model YAML of 76 thousand parameters, in the layout of the one that ships.

    Args:
        dropout: probability in encoder, prediction network and joint.
    """
    layout = yaml.safe_load(LAYOUT.read_text(encoding="utf-8"))
    model = layout["model"]
    model["model_defaults"].update(enc_hidden=32, pred_hidden=32, joint_hidden=32)
    model["encoder"].update(d_model=32, n_layers=2, n_heads=2, subsampling_conv_channels=16)
    model["encoder"].update(dropout=dropout, dropout_pre_encoder=dropout, dropout_att=dropout)
    model["decoder"]["prednet"]["dropout"] = dropout
    model["joint"]["jointnet"]["dropout"] = dropout
    model["preprocessor"]["dither"] = 0.0  # its noise would hide small differences
    model["tokenizer"]["dir"] = str(TOKENIZER)
    return layout


def slow(*values: Any) -> Any:
    """A case of `parametrize` that runs with the slow tests alone."""
    return pytest.param(*values, marks=pytest.mark.slow)


def own_port(launcher: str) -> list[str]:
    """The option with which ranks of accelerate or deepspeed meet at a free port: all would take 29500, and tests that
    run side by side would stop each other."""
    option = {"accelerate": "--main_process_port", "deepspeed": "--master_port"}.get(launcher)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return [option, str(probe.getsockname()[1])] if option else []


@pytest.fixture(scope="session")
def make_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds a tiny .nemo with random weights, once a session for each dropout: `make_tiny_model(dropout=0.0)`."""
    folder = tmp_path_factory.mktemp("tiny_model")
    built: dict[float, Path] = {}

    def make(dropout: float = 0.1) -> Path:
        if dropout not in built:
            from finetune.models.loading import load_model
            from finetune.models.nemo_archive import save_nemo

            layout = folder / f"tiny-dropout-{dropout}.yaml"
            layout.write_text(yaml.safe_dump(tiny_layout(dropout)), encoding="utf-8")
            with _random_state_kept():
                torch.manual_seed(0)
                save_nemo(load_model(str(layout)), layout.with_suffix(".nemo"))
            built[dropout] = layout.with_suffix(".nemo")
        return built[dropout]

    return make


@pytest.fixture(scope="session")
def tiny_model(make_tiny_model: Callable[..., Path]) -> Path:
    """A .nemo of 76 thousand random weights, dropout 0.1."""
    return make_tiny_model()


@pytest.fixture(scope="session")
def archive_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`archive_of("hybrid-rnnt", tokenizer=None, speaking=False)` builds a small archive as NVIDIA publishes them, of
    scripts/models/families.py, once a session."""
    import families

    folder = tmp_path_factory.mktemp("families")

    def build(name: str, tokenizer: str | None = None, speaking: bool = False) -> Path:
        path = folder / f"{name}-{tokenizer}-{speaking}.nemo"
        if not path.is_file():
            with _random_state_kept():
                families.build(name, families.sample_texts(), path, tokenizer, speaking)
        return path

    return build


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with 24 short real clips, English and French, as 16 kHz FLAC files, and manifest.jsonl."""
    import pyarrow.parquet as pq

    folder = tmp_path_factory.mktemp("clips")
    rows: list[dict[str, Any]] = []
    for language in ("en", "fr"):
        short = (
            row
            for path in sorted(VOICE_PROMPTS.glob("train-*.parquet"))
            for row in pq.read_table(path).to_pylist()
            if row["language"] == language and row["duration"] <= LONGEST_CLIP
        )
        for _, row in zip(range(CLIPS // 2), short):
            samples_S, rate = soundfile.read(io.BytesIO(row["audio"]["bytes"]), dtype="float32")
            name = row["id"].replace("/", "-") + ".flac"
            soundfile.write(folder / name, samples_S, rate)
            rows.append(
                {
                    "audio_filepath": name,
                    "duration": len(samples_S) / rate,
                    "text": row["text"],
                    "lang": language,
                    "id": row["id"],
                }
            )
    write_manifest(folder / "manifest.jsonl", rows)
    return folder


def write_manifest(path: Path, rows: list[Any]) -> Path:
    """Writes a manifest; a row that is a string goes in as it is."""
    lines = (row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class _random_state_kept:
    """Puts the random states of Python, NumPy and torch back at its end."""

    def __enter__(self) -> None:
        self.states = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def __exit__(self, *_: Any) -> None:
        random.setstate(self.states[0])
        np.random.set_state(self.states[1])
        torch.set_rng_state(self.states[2])


@pytest.fixture(autouse=True)
def _threads_kept() -> Iterator[None]:
    """With more threads than free cores, threads that wait for each other make every later test ten times slower."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def reset_process() -> None:
    """Forgets what Accelerate and torch.distributed keep for a whole process."""
    from accelerate.state import AcceleratorState, GradientState

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _trainings() -> Iterator[Callable[..., int]]:
    """`run_train("--config", ...)` calls finetune.train.main in this process and returns its exit code.

    `observe` is main's.

    Afterwards the process is as before: Accelerate's state, random states, environment, threads and logging.
    """
    from finetune import train

    project = logging.getLogger("finetune")

    def run(*arguments: Any, observe: Callable[[Any], None] | None = None) -> int:
        environment, threads = dict(os.environ), torch.get_num_threads()
        handlers, propagate, level = project.handlers[:], project.propagate, project.level
        with _random_state_kept():
            try:
                return train.main([str(a) for a in arguments], observe)
            except SystemExit as stop:  # argparse
                return int(stop.code or 0)
            finally:
                reset_process()
                os.environ.clear()
                os.environ.update(environment)
                torch.set_num_threads(threads)
                project.handlers[:], project.propagate = handlers, propagate
                project.setLevel(level)

    yield run
    reset_process()


run_train = pytest.fixture(name="run_train")(_trainings)
run_train_for_module = pytest.fixture(scope="module", name="run_train_for_module")(_trainings)
run_train_for_session = pytest.fixture(scope="session", name="run_train_for_session")(_trainings)


@pytest.fixture
def tiny_run(tiny_model: Path, clips: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """`tiny_run(*key_values, model={...}, data={...}, training={...})` writes tmp_path/RUN.yaml and returns arguments.

    The tiny model learns the 24 clips in batches of 4 for two steps, into tmp_path/run; they are train,
    validation and test at once.
    """

    def arguments(*overrides: str, **sections: dict[str, Any]) -> list[str]:
        manifest = str(clips / "manifest.jsonl")
        run: dict[str, dict[str, Any]] = {
            "model": {"name": str(tiny_model)},
            "data": {
                **dict.fromkeys(("train", "validation", "test"), manifest),
                "allow_overlap": True,
                "text_normalization": "basic",
            },
            "training": {
                "output_dir": str(tmp_path / "run"),
                "max_steps": 2,
                "per_device_train_batch_size": 4,
                "per_device_eval_batch_size": 8,
                "learning_rate": 1e-3,
                "logging_steps": 1,
                "dataloader_num_workers": 0,
                "num_threads": 1,
                "report_to": "none",
            },
        }
        for name, values in sections.items():
            run[name].update(values)
        path = tmp_path / "RUN.yaml"
        path.write_text(yaml.safe_dump(run), encoding="utf-8")
        return ["--config", str(path), *overrides]

    return arguments


@pytest.fixture
def tiny(tiny_model: Path) -> Callable[[], Any]:
    """Loads the tiny model, in training mode, without anything random in it."""
    from finetune.models.loading import load_model
    from finetune.models.nemo import prepare_for_training, set_train_mode

    def load(dropout: float = 0.0) -> Any:
        model = load_model(str(tiny_model))
        prepare_for_training(model, spec_augment=False, dropout=dropout, freeze_batchnorm=False)
        set_train_mode(model)
        return model

    return load


@pytest.fixture
def train(run_train: Callable[..., int], tiny_run: Callable[..., Any], tmp_path: Path) -> Callable[..., Path]:
    """Trains the tiny model for 20 steps without anything random; returns the run's directory."""

    def run(name: str, *arguments: str, model: dict[str, Any] | None = None, **training: Any) -> Path:
        settings = {"max_steps": 20, "output_dir": str(tmp_path / name), "learning_rate": 3e-3, **training}
        settings = {"save_steps": 0, "eval_on_start": False, **settings}
        run_file = tiny_run(model={**DETERMINISTIC, **(model or {})}, data=ONLY_TRAIN, training=settings)
        assert run_train(*run_file, *arguments) == 0
        return tmp_path / name

    return run


@pytest.fixture
def plain_losses(train: Callable[..., Path]) -> list[float]:
    """Losses of plain AdamW, trained once for all tests."""
    if not _plain_losses:
        run = train("plain", "--strategy", "adamw")
        _plain_losses.extend(row["loss"] for row in read_lines(run / "metrics.jsonl"))
        assert _plain_losses[-1] < 0.9 * _plain_losses[0], "it has to learn something for the comparison to mean much"
    return _plain_losses


@pytest.fixture
def trainings(tiny_run: Callable[..., list[str]], tmp_path: Path) -> Callable[..., dict[str, list[dict[str, Any]]]]:
    """`trainings(name=(processes, *arguments), ...)` runs them into tmp_path/NAME; returns what each rank tells."""
    from engine_cases import run_trainings

    return partial(run_trainings, tiny_run, tmp_path)


@pytest.fixture
def bare_zero3(tmp_path: Path) -> str:
    """The strategy's DeepSpeed file with thresholds at which a small model too is taken apart."""
    from engine_cases import NOTHING_STAYS

    values = json.loads((ROOT / "ds_configs" / "zero3.json").read_text())
    values["zero_optimization"].update(NOTHING_STAYS)
    (tmp_path / "zero3.json").write_text(json.dumps(values))
    return str(tmp_path / "zero3.json")


@pytest.fixture
def failed(run_train: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Calls train.py, which has to end with this exit code; returns what it says."""

    def run(exit_code: int, *arguments: Any) -> str:
        capsys.readouterr()
        code = run_train(*arguments)
        said = capsys.readouterr().err
        assert code == exit_code, said
        assert "Traceback" not in said
        assert code == 0 or "error: " in said
        return said.rsplit("error: ", 1)[-1] if code else said

    return run


@pytest.fixture
def refused(failed: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Calls train.py, which has to end with 2 before it makes a model; returns the message."""

    def build(*_: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("finetune.training.run.build_model", build)
    return lambda *arguments: failed(2, *arguments)


@pytest.fixture
def run_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes tmp_path/RUN.yaml: a run file without problems, with some keys set to other values."""

    def write(**keys: Any) -> Path:
        values: dict[str, Any] = {
            "model": {"name": "m.nemo"},
            "data": {"train": "train.jsonl"},
            "training": {"output_dir": "out"},
        }
        for key, value in keys.items():
            section, name = key.split("__")
            values[section][name] = value
        path = tmp_path / "RUN.yaml"
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        return path

    return write


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """What the project logs."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    project, handler = logging.getLogger("finetune"), Keep()
    level = project.level
    project.addHandler(handler)
    project.setLevel(logging.INFO)
    yield found
    project.removeHandler(handler)
    project.setLevel(level)


def problem(path: Path, *overrides: str, strategies: tuple[str, ...] = ()) -> str:
    """The message with which a configuration is refused."""
    from finetune.config.load import load_config
    from finetune.errors import UserError

    with pytest.raises(UserError) as caught:
        load_config(path, list(strategies), list(overrides))
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same 47 clips of noise, 0.05 s to 0.5 s, as parquet shards with splits, a manifest and a spoiled one."""
    from stream_cases import HELD_OUT, RATE, ROWS, SHARDS, flac, write_parquet

    folder = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(0)
    rows = []
    for i in range(ROWS + HELD_OUT):
        samples_S = 0.1 * random.standard_normal(int(RATE * random.uniform(0.05, 0.5)))
        name = f"clip{i:02d}"
        (folder / f"{name}.flac").write_bytes(flac(samples_S))
        rows.append(
            {
                "id": name,
                "audio": {"bytes": flac(samples_S), "path": None},
                "text": f"text {i}",
                "language": "en" if i % 3 else "fr",
                "duration": len(samples_S) / RATE,
            }
        )
    train, held_out = rows[:ROWS], rows[ROWS:]
    bounds = [0, 9, 10, 25, 40, ROWS]
    for i in range(SHARDS):
        path = folder / "shards" / "data" / f"train-{i:05d}-of-{SHARDS:05d}.parquet"
        write_parquet(path, train[bounds[i] : bounds[i + 1]])
    write_parquet(folder / "shards" / "data" / "validation-00000-of-00001.parquet", held_out)
    lines: list[Any] = [
        {
            "audio_filepath": f"{r['id']}.flac",
            "id": r["id"],
            "text": r["text"],
            "lang": r["language"],
            "duration": r["duration"],
        }
        for r in train
    ]
    write_manifest(folder / "manifest.jsonl", lines)
    for i, line in (
        (3, "not json"),
        (20, {**lines[20], "audio_filepath": "gone.flac"}),
        (46, {**lines[46], "text": 5}),
    ):
        lines[i] = line
    for i in (8, 30):
        lines[i] = {**lines[i], "duration": 99.0}
    write_manifest(folder / "spoiled.jsonl", lines)
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first, so that no core idles at the end.

    Those that need DeepSpeed's optimizer come last, while one of them compiles it.
    """
    long = ("test_launchers.py", "test_loss_sharded.py", "test_gpu_kernels.py")

    def turn(item: pytest.Item) -> int:
        if item.path.name not in long:
            return 2
        if "deepspeed" not in item.name and "zero3" not in item.name:
            return 1
        return 0 if "equals_adamw" in item.name else 3

    items.sort(key=turn)


@pytest.fixture(scope="module")
def one_thread():
    """For tiny tensors: on a busy machine waiting for a second thread costs more than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
