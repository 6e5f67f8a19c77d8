"""report.html, written anew after each evaluation, so that a run that died has one too."""

from collections.abc import Callable
from pathlib import Path

from finetune.training.callbacks import Callback


class ReportWriter(Callback):
    """Writes the page of a run on the main process: `write` takes its directory, and whether to log where it is."""

    def __init__(self, is_main: bool, output_dir: Path, write: Callable[[Path, bool], None]):
        self.is_main, self.output_dir, self.write = is_main, output_dir, write

    def on_evaluations_done(self) -> None:
        if self.is_main:
            self.write(self.output_dir, False)

    def on_train_end(self) -> None:
        if self.is_main:
            self.write(self.output_dir, True)
