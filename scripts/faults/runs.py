"""The training that faults are tried on, its attempts in processes of their own, and the comparison of two runs."""

import atexit
import contextlib
import io
import json
import math
import os
import re
import signal
import sys
import tarfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from injection import Events, Moment, read_events
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
VOICE_PROMPTS = ROOT / "examples" / "voice_prompts" / "data"
TOKENIZER = ROOT / "examples" / "base" / "tokenizer"
LAYOUT = ROOT / "finetune" / "configs" / "models" / "fastconformer_tdt_3m.yaml"

STEPS = 16
LONGEST_ATTEMPT = 900.0  # seconds; ends a hang
CLIPS = 24
LONGEST_CLIP = 1.5  # seconds

ROWS = ("step", "samples", "epoch", "loss", "grad_norm", "learning_rate")
"""What has to be equal of a line of metrics.jsonl; the rest are times and memory."""
FIGURES = (
    "steps", "total_steps", "samples", "epochs", "audio_hours", "wer_before", "wer_after", "cer_before", "cer_after",
    "wer_by_language", "best_step", "best_validation_wer", "best_weights", "padding_fraction", "quarantined",
    "filtered", "infeasible", "skipped_steps", "final_loss", "wer_before_interval", "wer_after_interval",
    "wer_p_value", "significance",
)  # fmt: skip
"""What has to be equal of summary.json."""


# ---- the training ---------------------------------------------------------------------------------------------------


def write_data(folder: Path) -> None:
    """Write manifest.jsonl of 24 short clips and one whose file is missing (a quarantine); held_out.jsonl of six."""
    import pyarrow.parquet as pq
    import soundfile

    folder.mkdir(parents=True)
    rows = []
    for language in ("en", "fr"):
        short = (
            row
            for path in sorted(VOICE_PROMPTS.glob("train-*.parquet"))
            for row in pq.read_table(path).to_pylist()
            if row["language"] == language and row["duration"] <= LONGEST_CLIP
        )
        for row, _ in zip(short, range(CLIPS // 2), strict=False):
            samples_S, rate = soundfile.read(io.BytesIO(row["audio"]["bytes"]), dtype="float32")
            name = row["id"].replace("/", "-") + ".flac"
            soundfile.write(folder / name, samples_S, rate)
            rows.append(
                {
                    "id": row["id"],
                    "audio_filepath": name,
                    "duration": len(samples_S) / rate,
                    "text": row["text"],
                    "lang": language,
                }
            )
    _write_lines(folder / "held_out.jsonl", rows[:3] + rows[-3:])
    rows.insert(9, {**rows[9], "id": "gone", "audio_filepath": "gone.flac"})
    _write_lines(folder / "manifest.jsonl", rows)


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def write_model(folder: Path) -> Path:
    """A .nemo of 76 thousand random weights in the layout of the base model."""
    from finetune.models.loading import load_model
    from finetune.models.nemo_archive import save_nemo

    layout = yaml.safe_load(LAYOUT.read_text(encoding="utf-8"))
    model = layout["model"]
    model["model_defaults"].update(enc_hidden=32, pred_hidden=32, joint_hidden=32)
    model["encoder"].update(d_model=32, n_layers=2, n_heads=2, subsampling_conv_channels=16)
    model["tokenizer"]["dir"] = str(TOKENIZER)
    (folder / "tiny.yaml").write_text(yaml.safe_dump(layout), encoding="utf-8")
    torch.manual_seed(0)
    save_nemo(load_model(str(folder / "tiny.yaml")), folder / "tiny.nemo")
    return folder / "tiny.nemo"


def write_run_file(folder: Path) -> Path:
    """A run file with all that is random switched on, and saving and evaluations every few steps."""
    clips = folder / "clips"
    run = {
        "model": {"name": str(folder / "tiny.nemo"), "dropout": 0.1, "spec_augment": True, "omega": 0.3},
        "data": {
            "train": str(clips / "manifest.jsonl"),
            "validation": str(clips / "held_out.jsonl"),
            "test": str(clips / "held_out.jsonl"),
            "allow_overlap": True,
            "text_normalization": "basic",
            "shuffle_buffer_size": 8,
            "group_by_duration": True,
            "max_bad_fraction": 0.1,
        },
        "training": {
            "max_steps": STEPS,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 12,
            "learning_rate": 3e-3,
            "ema_decay": 0.9,
            "logging_steps": 3,
            "log_clips": True,
            "eval_steps": 8,
            "save_steps": 2,
            "save_total_limit": 4,
            "resume_from_checkpoint": True,
            "dataloader_num_workers": 2,
            "num_threads": 1,
            "report_to": "none",
        },
    }
    path = folder / "RUN.yaml"
    path.write_text(yaml.safe_dump(run), encoding="utf-8")
    return path


@dataclass
class Laboratory:
    """A folder with the model, the data and the run file, and the unbroken run once it is made."""

    folder: Path
    seed: int
    run_file: Path = field(init=False)
    unbroken: Path = field(init=False)
    unbroken_seconds: float = 0.0
    events: list[tuple[float, int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        write_data(self.folder / "clips")
        self.run_file = write_run_file(self.folder)
        self.unbroken = self.folder / "unbroken"

    def arguments(self, output_dir: Path, *overrides: str) -> list[str]:
        """The command line of a training into a directory."""
        return ["--config", str(self.run_file), f"training.output_dir={output_dir}", *overrides]


# ---- attempts -------------------------------------------------------------------------------------------------------


@dataclass
class Attempt:
    """One process that trained, or tried to.

    Attributes:
        code: exit code; of a process that a signal ended, minus its number.
        said: what it wrote to the terminal.
        events: what it did (`fault_injection.Events`).
        seconds: of its life.
        orphans: processes of it that were still there 15 s after its end.
    """

    code: int
    said: str
    events: list[tuple[float, int, str]]
    seconds: float
    orphans: int

    @property
    def resumed_from(self) -> int:
        """Step that it continued from; 0 where it began anew."""
        found = re.search(r"resumed from step-(\d+)", self.said)
        return int(found.group(1)) if found else 0

    @property
    def last_checkpoint(self) -> int:
        """Step of the newest checkpoint that got its name, or that it continued from."""
        steps = [checkpoint_of(event, "renamed:") for _, _, event in self.events]
        return max([self.resumed_from, *(s for s in steps if s is not None)])

    @property
    def last_synced_checkpoint(self) -> int:
        """Step of the newest checkpoint whose name was pushed to the disk, or that it continued from."""
        named = synced = self.resumed_from
        for _, _, event in self.events:
            named = max(named, checkpoint_of(event, "renamed:") or 0)
            synced = named if event == "fsynced:checkpoints" else synced
        return synced

    @property
    def last_step(self) -> int:
        """Steps done at its end."""
        return max([self.resumed_from, *(step for _, step, _ in self.events)])


def checkpoint_of(event: str, prefix: str) -> int | None:
    """The step of the checkpoint that an event is about, or None."""
    found = re.fullmatch(re.escape(prefix) + r"checkpoints/step-(\d+)", event)
    return int(found.group(1)) if found else None


Prepare = Callable[[Events], None]


class Process:
    """A fork of this process that does some work; NeMo, which takes ten seconds to import, is imported already.

    Args:
        work: returns the exit code.
        said: file for its output.
        environment: variables to set.
    """

    def __init__(self, work: Callable[[], int], said: Path, environment: dict[str, str] | None = None):
        self.said, self.started = said, time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._live(work, environment or {})

    def _live(self, work: Callable[[], int], environment: dict[str, str]) -> None:
        code = 1
        try:
            os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            output = os.open(self.said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.environ.update(environment)
            code = work()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                atexit._run_exitfuncs()
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def running(self) -> bool:
        """Whether it has not ended."""
        pid, status = (0, 0) if hasattr(self, "code") else os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self.code = os.waitstatus_to_exitcode(status)
        return not hasattr(self, "code")

    def send(self, number: signal.Signals) -> None:
        """A signal to it alone."""
        if self.running():
            os.kill(self.pid, number)

    def wait(self, timeout: float = LONGEST_ATTEMPT) -> int:
        """Its exit code; it is killed, which is -9, where it takes longer."""
        deadline = time.monotonic() + timeout
        while self.running() and time.monotonic() < deadline:
            time.sleep(0.02)
        if self.running():
            print(f"    killed after {timeout:.0f} s without an end", flush=True)
            self.send(signal.SIGKILL)
            while self.running():
                time.sleep(0.02)
        self.seconds = time.monotonic() - self.started
        return self.code

    def orphans(self, patience: float = 15.0) -> int:
        """Processes of its session that are there after it has ended and some time has passed; they are ended."""
        deadline = time.monotonic() + patience
        while (left := self._session()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return len(left)

    def _session(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) == self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


class Training(Process):
    """A training into a directory.

    Args:
        laboratory: its run file.
        output_dir: of the run.
        plans: what happens at which of its events.
        prepare: called in the process before the training begins.
        overrides: key=value.
        environment: variables to set.
        rank: distinguishes the logs of several processes of one run.
    """

    def __init__(
        self,
        laboratory: Laboratory,
        output_dir: Path,
        plans: list[tuple[Moment, Callable[[], None]]] | None = None,
        prepare: Prepare | None = None,
        overrides: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        rank: int = 0,
    ):
        number = len(list(laboratory.folder.glob(f"{output_dir.name}.r{rank}-*.txt")))
        self.log = laboratory.folder / f"{output_dir.name}.r{rank}-{number}.events"
        arguments = laboratory.arguments(output_dir, *overrides)

        def work() -> int:
            from finetune import train

            events = Events(output_dir, self.log, plans or [])
            if prepare is not None:
                prepare(events)
            events.watch_files()
            return train.main(arguments, events.watch_model)

        super().__init__(work, self.log.with_suffix(".txt"), environment)

    def result(self, timeout: float = LONGEST_ATTEMPT) -> Attempt:
        """The attempt, once it has ended."""
        code = self.wait(timeout)
        orphans = self.orphans()
        said = self.said.read_text(encoding="utf-8", errors="replace") if self.said.is_file() else ""
        return Attempt(code, said, read_events(self.log), self.seconds, orphans)


def steps_reached(log: Path) -> int:
    """Steps that a training has done according to its event log."""
    events = read_events(log)
    return max((step for _, step, _ in events), default=-1)


# ---- comparison -----------------------------------------------------------------------------------------------------


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def nemo_weights(path: Path) -> dict[str, torch.Tensor]:
    """The weights in a .nemo."""
    with tarfile.open(path) as archive:
        member = next(m for m in archive.getmembers() if m.name.endswith("model_weights.ckpt"))
        return torch.load(archive.extractfile(member), map_location="cpu", weights_only=True)


def differences(one: Path, other: Path, tolerance: float = 0.0, steps: int = STEPS) -> list[str]:
    """Where two finished runs differ: final weights, clips, losses, evaluations, quarantine, summary and model.nemo.

    Args:
        tolerance: largest difference of a number, relative to 1 or to its size where that is more; 0 for bit-equal.
        steps: of the runs.
    """
    found = []

    def compare(what: str, read: Callable[[Path], Any]) -> None:
        try:
            values = read(one), read(other)
        except (OSError, ValueError, KeyError, StopIteration, tarfile.TarError, RuntimeError, EOFError) as error:
            found.append(f"{what} cannot be read ({type(error).__name__}: {str(error)[:120]})")
            return
        if not _equal(*values, tolerance):
            found.append(what)

    last = f"checkpoints/step-{steps:08d}"
    compare("final weights", lambda run: load_file(run / last / "model.safetensors"))
    compare("moving average", lambda run: load_file(next((run / last).glob("*ema*.safetensors"))))
    compare("losses", lambda run: [[row[k] for k in ROWS] for row in read_lines(run / "metrics.jsonl")])
    compare("model.nemo", lambda run: nemo_weights(run / "model.nemo"))
    compare("clips", lambda run: read_lines(run / "clips.jsonl"))
    compare("quarantine", lambda run: read_lines(run / "quarantine.jsonl"))
    compare("evaluations", lambda run: [_without_times(r) for r in read_lines(run / "evaluations.jsonl")])
    compare("summary", lambda run: _of(run / "summary.json", FIGURES))
    compare("best.json", lambda run: _of(run / "checkpoints" / "best.json", ("step", "validation_wer", "weights")))
    for name in ("report.html", "config.yaml", "environment.json"):
        if not (other / name).is_file() or not (other / name).read_text(encoding="utf-8").strip("\0 \n"):
            found.append(f"{name} is missing or empty")
    leftovers = sorted(str(p.relative_to(other)) for p in other.rglob(".*") if p.name != ".lock")
    if leftovers:
        found.append(f"left over: {', '.join(leftovers)}")
    return found


def _of(path: Path, keys: tuple[str, ...]) -> list[Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    return [content[key] for key in keys]


def _without_times(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if "second" not in k and k != "time"}


def _equal(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(v, other[k], tolerance) for k, v in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_equal(a, b, tolerance) for a, b in zip(one, other))
    if isinstance(one, torch.Tensor):
        if not tolerance:
            return one.dtype == other.dtype and torch.equal(one, other)
        return torch.allclose(one.double(), other.double(), rtol=tolerance, atol=tolerance)
    if tolerance and isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
    return one == other
