"""Workers of jobs that need no model. Their processes import this module, and not pytest with it.

python -m job_workers FOLDER    the job over FOLDER/manifest.jsonl, as a command runs it
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.data.sources import open_source, parse_sources
from finetune.errors import UserError
from finetune.logs import print_error
from finetune.tools.jobs.clips import Clips
from finetune.tools.jobs.engines import EngineSettings
from finetune.tools.jobs.job import Job
from finetune.tools.jobs.running import run_job


@dataclass
class TextWorker:
    """Return each text, and do what it says: raise, raise until there is a file `go`, kill this process, or kill it
    once only."""

    folder: Path

    def process(self, clips: Clips) -> Iterator[dict[str, Any]]:
        for source, place, _, row in clips.rows():
            text = row[source.columns["text"]]
            if "raise" in text or ("later" in text and not (self.folder / "go").exists()):
                raise ValueError("a clip that cannot be processed")
            if "kill" in text or ("once" in text and self.is_first(text)):
                self.end_process()
            if "wait" in text:
                while not (self.folder / "go").exists():
                    time.sleep(0.01)
            yield {"id": clips.ids[place], "source": place, "text": text, "duration": 1.0}

    def end_process(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def is_first(self, text: str) -> bool:
        try:
            (self.folder / text.replace(" ", "-")).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


@dataclass
class MakeTextWorker:
    folder: Path

    def __call__(self) -> TextWorker:
        with (self.folder / "made").open("a") as file:
            file.write(f"{os.getpid()}\n")
        return TextWorker(self.folder)


def make_job(folder: Path, **fields: Any) -> Job:
    """Make a job over folder/manifest.jsonl, 10 clips a shard, into folder/out."""
    manifest = folder / "manifest.jsonl"
    sources = [open_source(s, "--data") for s in parse_sources(str(manifest), "--data", "train") if manifest.exists()]
    values = {"settings": {"model": "m"}, "clips_a_shard": 10, "max_failed": 0.5, "sources": sources, **fields}
    return Job("label", folder / "out", make_worker=MakeTextWorker(folder), **values)


def main() -> int:
    try:
        run_job(make_job(Path(sys.argv[1])), EngineSettings(workers=1))
    except UserError as error:
        print_error(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
