"""The counters of a run."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Progress:
    """Everything about a run that a checkpoint keeps besides weights, optimizer and random states.

    The Trainer owns the one object of a run. Others hold a reference to it: it is restored in place and never
    replaced.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    rehearsed: int = 0
    audio_seconds: float = 0.0
    padded_seconds: float = 0.0
    rows_read: int = 0
    quarantined: int = 0
    quarantine_lines: int = 0
    infeasible: int = 0
    infeasible_ctc: int = 0
    skipped_steps: int = 0
    spikes: int = 0
    scale_skips: int = 0
    clipped_steps: int = 0
    out_of_memory: int = 0
    filtered: dict[str, int] = field(default_factory=dict)
    best_step: int | None = None
    best_wer: float | None = None
    best_weights: str = "raw"
    best_trained_wer: float | None = None
    wer_before: dict[str, Any] | None = None
    guard_before: float | None = None
    base_wer: dict[str, float] = field(default_factory=dict)
    guard_judged: list[dict[str, Any]] = field(default_factory=list)
    guard_judged_by: dict[str, Any] = field(default_factory=dict)
    drift_warnings: dict[str, int] = field(default_factory=dict)
    train_seconds: float = 0.0
    wall_seconds: float = 0.0
    last_evaluated: int = -1
    evaluation_due: bool = False
    diverged: str | None = None
    saving_seconds: float = 0.0
    failed_checkpoints: int = 0
    omega_state: str = ""

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of all counters as plain values."""
        return asdict(self)

    def restore(self, values: dict[str, Any]) -> None:
        """Take over the counters of a snapshot; what it lacks gets its default."""
        vars(self).update(vars(Progress(**values)))
