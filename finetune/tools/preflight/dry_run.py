"""`finetune/train.py --dry-run`: everything that a run does, once and small, with go or no-go for each part, before a night is lost."""

import logging
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune.callbacks.defaults import add_step_callbacks
from finetune.errors import UserError
from finetune.strategies.optimizers import unwrap_optimizer
from finetune.strategies.strategy import engine_with
from finetune.tools.preflight import auto_batch, dry_run_parts, trial
from finetune.training import checkpoints, run
from finetune.training.out_of_memory import is_out_of_memory, out_of_memory_message
from finetune.training.trainer import Trainer

log = logging.getLogger(__name__)


class Attempts:
    """What has been tried so far: a line each, with go or no-go and seconds.

    Args:
        config: the run's configuration, for the result.
        strategy: of the run.
    """

    def __init__(self, config: Any, strategy: Any):
        self.config, self.strategy = config, strategy
        self.accelerator: Any = None
        self.found: list[dict[str, Any]] = []
        self.warnings: list[str] = []
        self.begun = time.perf_counter()

    @property
    def failed(self) -> list[str]:
        """Names of the parts that are no-go."""
        return [part["part"] for part in self.found if not part["go"]]

    def attempt(self, name: str, function: Callable[..., tuple[str, dict[str, Any]]], *arguments: Any) -> bool:
        """Calls one part, which returns what to say and what to keep in the result; whether it is a go.

        What goes wrong in it is its no-go. Among several processes the others may wait in the middle of it, so that it ends the dry
        run then.
        """
        started = time.perf_counter()
        go, values = True, {}
        try:
            said, values = function(*arguments)
        except Exception as error:
            go, said = False, self.reason(error)
        seconds = time.perf_counter() - started
        self.found.append({"part": name, "go": go, "seconds": round(seconds, 2), "said": said, **values})
        (log.info if go else log.error)("%-6s  %-14s %5.1f s  %s", "go" if go else "NO-GO", name, seconds, said)
        if not go and self.accelerator is not None and self.accelerator.num_processes > 1:
            rank = self.accelerator.process_index
            path = trial.result_path(self.config, "dry_run")
            if not path.exists():  # else another rank has written it, and this one failed since that one is gone
                self.write()
            raise UserError(f"NO-GO: {name} on rank {rank}: {said}\nresult: {path}", exit_code=1)
        return go

    def reason(self, error: Exception) -> str:
        """Why a part is no-go: the user's message, or the error and where it came from."""
        if isinstance(error, UserError):
            return str(error)
        if is_out_of_memory(error) and self.accelerator is not None:
            gpu, engine = (
                self.accelerator.device.type == "cuda",
                engine_with(self.strategy.engine, self.accelerator.num_processes),
            )
            return out_of_memory_message(error, self.config, gpu, engine)
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({Path(place.filename).name}, line {place.lineno})"

    def warn(self, text: str) -> None:
        """Says what is no reason to stop."""
        self.warnings.append(text)
        log.warning("        %s", text)

    def write(self) -> Path:
        """Writes OUTPUT_DIR/dry_run.json."""
        result = {
            "verdict": "NO-GO" if self.failed else "GO",
            "no_go": self.failed,
            "warnings": self.warnings,
            "seconds": round(time.perf_counter() - self.begun, 1),
            "strategy": self.strategy.names,
            "parts": self.found,
        }
        return trial.write_result(self.config, "dry_run", result)


def dry_run(config: Any, strategy: Any, observe: Callable[[Trainer], None] | None = None) -> int:
    """Tries the run, says go or no-go, and writes OUTPUT_DIR/dry_run.json.

    Args:
        config: of the run, whose directory stays as it is.
        strategy: of the run.
        observe: called with the Trainer when it is made.

    Returns:
        Exit code: 0 go, 1 no-go.
    """
    settings = trial.trial_config(config, "dry_run")
    attempts = Attempts(config, strategy)
    kept: dict[str, Any] = {}

    def configuration() -> tuple[str, dict[str, Any]]:
        kept["accelerator"] = attempts.accelerator = run.build_accelerator(settings, strategy)
        return _configuration(attempts, settings, strategy)

    def sources() -> tuple[str, dict[str, Any]]:
        kept["sources"] = run.open_sources(settings)
        return _sources(kept["sources"])

    if not attempts.attempt("configuration", configuration):
        attempts.attempt("sources", sources)
        return close(attempts)
    with trial.trial_folder(attempts.accelerator, settings):
        opened = attempts.attempt("sources", sources)

        def model() -> tuple[str, dict[str, Any]]:
            kept["model"] = run.build_model(attempts.accelerator, settings)
            parameters = run.count_parameters(kept["model"])
            return f"{settings.model.name}: {parameters / 1e6:.1f} M parameters", {"parameters": parameters}

        loaded = attempts.attempt("model", model)
        if opened and loaded:
            attempts.attempt(
                "tokenizer",
                dry_run_parts.tokenizer_coverage,
                attempts,
                settings,
                kept["model"],
                kept["sources"]["train"],
            )
            attempts.attempt(
                "clips", dry_run_parts.decode_clips, attempts, settings, kept["model"], kept["sources"]["train"]
            )

            def engine() -> tuple[str, dict[str, Any]]:
                auto_batch.set_bounds(attempts.accelerator, settings, strategy)
                kept["steps"] = run.plan_steps(attempts.accelerator, settings, kept["sources"])
                kept["trainer"] = run.build_trainer(
                    attempts.accelerator, kept["model"], kept["sources"], settings, kept["steps"]
                )
                add_step_callbacks(kept["trainer"])
                kept["trainer"].begin(None)
                if observe is not None:
                    observe(kept["trainer"])
                name = type(unwrap_optimizer(kept["trainer"].optimizer)).__name__
                return f"{name}, {kept['steps']:,} steps", {"steps": kept["steps"]}

            if attempts.attempt("engine", engine):
                try_steps(attempts, kept["trainer"])
    code = close(attempts)
    attempts.accelerator.end_training()
    return code


def try_steps(attempts: Attempts, trainer: Trainer) -> None:
    """Everything that needs the trainer."""
    # Before the first step, as a run does: its WER is the base model's.
    evaluated = attempts.attempt("evaluation", dry_run_parts.evaluate_some, attempts, trainer)
    costs = attempts.found[-1] if evaluated else {}
    steps = attempts.attempt("worst batch", dry_run_parts.worst_batch, attempts, trainer)
    if steps and attempts.attempt("checkpoint", dry_run_parts.save_and_read, trainer):
        costs = {**costs, **attempts.found[-1]}
    attempts.attempt("model file", dry_run_parts.export, trainer)
    if steps:
        attempts.attempt("time", dry_run_parts.time_steps, trainer, costs)


def close(attempts: Attempts) -> int:
    """The last lines and the result; returns the exit code."""
    if attempts.accelerator is None or attempts.accelerator.is_main_process:
        path = attempts.write()
        seconds = time.perf_counter() - attempts.begun
        if attempts.failed:
            log.error("NO-GO after %.0f s: %s. See the lines above, and %s", seconds, ", ".join(attempts.failed), path)
        else:
            some = f", {len(attempts.warnings)} warning(s)" if attempts.warnings else ""
            log.info(
                "GO after %.0f s%s: all %d parts of the run work here. %s", seconds, some, len(attempts.found), path
            )
    return 1 if attempts.failed else 0


def _configuration(attempts: Attempts, settings: Any, strategy: Any) -> tuple[str, dict[str, Any]]:
    t, accelerator = settings.training, attempts.accelerator
    output_dir = Path(attempts.config.training.output_dir)
    resumed = attempts.config.training.resume_from_checkpoint
    begun = (output_dir / "config.yaml").is_file() or bool(checkpoints.checkpoints_of(output_dir))
    if begun and not resumed and not attempts.config.training.overwrite_output_dir:
        attempts.warn(
            f"{output_dir} holds a run: the training will want training.resume_from_checkpoint=true, training.overwrite_output_dir=true "
            "or another training.output_dir"
        )
    precision = "bf16" if t.bf16 else "fp16" if t.fp16 else "fp32"
    said = (
        f"strategy {'+'.join(strategy.names) or 'none'}, engine {engine_with(strategy.engine, accelerator.num_processes)}, {accelerator.num_processes} "
        f"process(es) on {accelerator.device.type}, {precision}, optimizer {t.optimizer}"
    )
    return said, {"processes": accelerator.num_processes, "device": str(accelerator.device)}


def _sources(sources: dict[str, list[Any]]) -> tuple[str, dict[str, Any]]:
    rows = {
        key: None if None in (counts := [s.clips for s in opened]) else sum(counts) for key, opened in sources.items()
    }
    said = ", ".join(f"{key} {'an unknown number of' if n is None else f'{n:,}'} rows" for key, n in rows.items())
    return said, {"rows": rows}
