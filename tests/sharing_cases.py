"""What the tests of sharing have in common."""

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

REPO = "someone/tiny-model"
EVIL_LANGUAGE = "<img src=x onerror=alert(1)>|[a](http://b)`"
EVIL_FILE = "acme | <b>calls `x`.jsonl"
PRIVATE_FOLDER = "home-of-alice"


def copied(run: Path, to: Path, **changes: Any) -> Path:
    """A copy of a run, with some keys of its summary.json changed."""
    shutil.copytree(run, to)
    summary = json.loads((to / "summary.json").read_text())
    (to / "summary.json").write_text(json.dumps({**summary, **changes}))
    return to


def card_in(output: str) -> str:
    return (
        output.split("README.md:\n\n", 1)[1]
        .split("\n\nlook at this:")[0]
        .split("\n\nlicence of the base")[0]
        .split("\n\nmissing:")[0]
    )


def members(nemo: Path) -> dict[str, bytes]:
    with tarfile.open(nemo) as archive:
        return {Path(m.name).name: archive.extractfile(m).read() for m in archive if m.isfile()}
