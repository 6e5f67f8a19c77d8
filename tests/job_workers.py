"""Workers of jobs that need no model. Their processes import this module, and not pytest with it."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.tools.jobs.clips import Clips


@dataclass
class TextWorker:
    """Return each text, and do what it says: raise, kill this process, or kill it once only."""

    folder: Path

    def process(self, clips: Clips) -> Iterator[dict[str, Any]]:
        for source, place, _, row in clips.rows():
            text = row[source.columns["text"]]
            if "raise" in text:
                raise ValueError("a clip that cannot be processed")
            if "kill" in text:
                os.kill(os.getpid(), signal.SIGKILL)
            if "once" in text and self.is_first(text):
                os.kill(os.getpid(), signal.SIGKILL)
            if "wait" in text:
                while not (self.folder / "go").exists():
                    time.sleep(0.01)
            yield {"id": clips.ids[place], "source": place, "text": text, "duration": 1.0}

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
