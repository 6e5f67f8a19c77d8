"""The clips of a gate, kept in a folder so that each side reads the same samples in a process of its own.

Nothing heavy is imported: the memory of a side is that of its runtime. S samples.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

AUDIO, ROWS = "audio.f32", "clips.json"


@dataclass
class Clips:
    """Clips one after the other in one file of float32 samples."""

    folder: str
    rate: int
    """Hz."""
    source: str
    """Where they come from, for messages."""
    ids: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """References."""
    languages: list[str] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """Samples up to the end of each clip."""
    passed_over: int = 0
    """Clips that are too long to be decoded at once."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def seconds(self) -> float:
        """Seconds of all clips together."""
        return self.ends[-1] / self.rate if self.ends else 0.0

    def audio(self, i: int) -> np.ndarray:
        """Return the samples of a clip, (S,) float32 in [-1, 1]."""
        start = self.ends[i - 1] if i else 0
        path = Path(self.folder) / AUDIO
        return np.fromfile(path, dtype=np.float32, count=self.ends[i] - start, offset=4 * start)

    def save(self) -> None:
        """Write what is known of the clips beside their samples."""
        (Path(self.folder) / ROWS).write_text(json.dumps(asdict(self)), encoding="utf-8")


def load_clips(folder: Path) -> Clips:
    """Read what `Clips.save` wrote."""
    return Clips(**json.loads((folder / ROWS).read_text(encoding="utf-8")))
