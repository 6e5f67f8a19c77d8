"""Decode a written export with the runtime that will run it, beside its original, and judge it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from finetune.errors import UserError
from finetune.evaluation.long_audio import LONGEST_AT_ONCE
from finetune.evaluation.scores import Utterance
from finetune.models.huggingface.writing import check_expressible, head_of_hybrid, write_hugging_face
from finetune.models.nemo_archive import archive_of, read_nemo
from finetune.tools.export import CLIPS
from finetune.tools.export.equal_texts import each_clip
from finetune.tools.export.gate.clips import AUDIO, Clips
from finetune.tools.export.gate.report import bytes_of, side_row, with_original
from finetune.tools.export.gate.sides import Request, SideFailed, run_alone, run_side
from finetune.tools.export.gate.verdict import Verdict, judge
from finetune.tools.export.own_data import own_data

log = logging.getLogger(__name__)


def choose_clips(model_name: str, data: list[str] | None) -> tuple[Any, str]:
    """Return the data of a gate, and the name of the setting for messages: --data, or the run's own data.validation.

    Raises:
        UserError: there is neither.
    """
    value, key = (list(data), "--data") if data else (own_data(model_name, "validation"), "data.validation")
    if not value:
        raise UserError(
            f"--data: an export is kept only if its runtime gives the model's texts, and {model_name} brings no "
            "validation clips. Name them with --data."
        )
    return value, key


def gather_clips(data: Any, split: str, rate: int, folder: Path, key: str = "--data", max_samples: int = -1) -> Clips:
    """Keep the samples of a data set's clips in a folder.

    Args:
        data, key: as `choose_clips` returns them.
        split: of a folder or hub data set.
        rate: of the model, in Hz.
        max_samples: read only so many clips; -1: all.

    Raises:
        UserError: there is no clip that can be used.
    """
    clips = Clips(str(folder), rate, "")
    folder.mkdir(parents=True, exist_ok=True)
    samples = 0
    with (folder / AUDIO).open("wb") as file:
        for clip in each_clip(data, split, rate, key, max_samples):
            clips.source = clip.source
            if len(clip.audio_S) > LONGEST_AT_ONCE * rate:
                clips.passed_over += 1
                continue
            clip.audio_S.numpy().tofile(file)
            samples += len(clip.audio_S)
            clips.ids.append(clip.id)
            clips.texts.append(clip.text)
            clips.languages.append(clip.language)
            clips.ends.append(samples)
    if not clips.ids:
        longer = clips.passed_over
        usable = f"of up to {LONGEST_AT_ONCE:g} s ({longer} are longer)" if longer else "that can be used"
        raise UserError(f"{key}: {data} holds no clip {usable}.", exit_code=1)
    clips.save()
    return clips


@dataclass
class Outcome:
    """What the gate says of one written export."""

    verdict: Verdict
    sides: list[dict[str, Any]]
    """Rows of the report: NeMo, transformers where the model can be expressed, and the export."""
    parts: list[dict[str, Any]] = field(default_factory=list)
    """Where export and original differ: part, state, difference, note."""

    @property
    def reason(self) -> str:
        """What was found, in one sentence."""
        if self.verdict.passed or not self.parts:
            return self.verdict.reason
        told = [part["note"] for part in self.parts if part["state"] == "differs"]
        equal = [part["part"] for part in self.parts if part["state"] == "equal"]
        told = told or ["nothing that was written differs, so it is the runtime's own search"]
        return f"{self.verdict.reason}: {'; '.join(told)}" + (f" (equal: {', '.join(equal)})" if equal else "")


class Gate:
    """The original, decoded once, beside which exports are judged.

    Args:
        model: as `model.name`.
        head: transducer or ctc, of a hybrid model.
        tokenizer: tokenizer directory, for a NeMo model YAML.
        clips: what is decoded.
        threads: of each side; None: as many as torch takes, which OMP_NUM_THREADS sets.
        look_ahead: of a streaming model, which is then decoded chunk by chunk.
    """

    def __init__(
        self,
        model: str,
        head: str | None,
        tokenizer: str | None,
        clips: Clips,
        *,
        batch: int = 1,
        threads: int | None = None,
        look_ahead: str | None = None,
    ):
        self.clips, self.threads = clips, threads or torch.get_num_threads()
        self.request = Request("nemo", model, clips.folder, self.threads, batch, head, tokenizer, look_ahead)
        log.info("decoding %d clips (%.0f s) with NeMo", len(clips), clips.seconds)
        self.original = run_side(self.request)
        self.transformers: dict[str, Any] | None = None

    def utterances(self, texts: list[str]) -> list[Utterance]:
        """Return the clips as a side recognised them."""
        c = self.clips
        return [Utterance(*row) for row in zip(c.ids, c.languages, c.texts, texts, strict=True)]

    def judge(self, side: dict[str, Any], *, exact: bool, max_loss: float) -> Verdict:
        """Compare a side's texts with NeMo's."""
        original, other = self.utterances(self.original["texts"]), self.utterances(side["texts"])
        return judge(original, other, exact=exact, max_loss=max_loss)

    def measure_transformers(self, nemo: Path, folder: Path) -> None:
        """Decode with transformers as well, where it can express the model.

        Args:
            nemo: the model as a .nemo file.
            folder: for the model in transformers' format.
        """
        try:
            file, _ = head_of_hybrid(read_nemo(nemo), self.request.head)
            check_expressible(file)
            write_hugging_face(file, folder)
            file.weights.clear()
            log.info("decoding the same clips with transformers")
            side = run_side(replace(self.request, kind="transformers", model=str(folder)))
        except Exception as error:  # a full disk has no class of its own there; nothing of this fails an export
            log.warning("transformers is not beside it: %s", str(error).splitlines()[0])
            return
        self.transformers = {**side, "disk_bytes": bytes_of(folder)}

    def check(self, directory: Path, runtime: str, *, exact: bool, max_loss: float) -> Outcome:
        """Decode an export and judge it.

        Args:
            directory: of the export.
            runtime: its name, for messages.
            exact: every text has to be equal.
            max_loss: points of WER.
        """
        log.info("decoding the same clips with %s", runtime)
        model = Path(self.request.model)
        archive = archive_of(model, "--model") or model
        rows = [side_row("NeMo", self.original, bytes_of(archive) if archive.exists() else None, None)]
        if self.transformers is not None:
            side = self.transformers
            rows.append(side_row("transformers", side, side["disk_bytes"], self.judge(side, exact=True, max_loss=0.0)))
        try:
            side = run_side(replace(self.request, kind="exported", model=str(directory)))
        except SideFailed as error:
            verdict = Verdict(False, f"{runtime} does not decode it ({error})", len(self.clips))
            rows.append({"name": runtime, "failed": str(error)})
            return Outcome(verdict, rows, self.compare_parts(directory, verdict))
        verdict = self.judge(side, exact=exact, max_loss=max_loss)
        with_original(rows, verdict)
        rows.append(side_row(runtime, side, bytes_of(directory), verdict))
        return Outcome(verdict, rows, self.compare_parts(directory, verdict))

    def compare_parts(self, directory: Path, verdict: Verdict) -> list[dict[str, Any]]:
        """Find in which part export and original differ, on the clips whose texts do and some others."""
        differing = {row["id"] for row in verdict.differing}
        first = [i for i, name in enumerate(self.clips.ids) if name in differing]
        others = [i for i, name in enumerate(self.clips.ids) if name not in differing]
        request = {**vars(self.request), "directory": str(directory), "chosen": sorted([*first, *others][:CLIPS])}
        try:
            return run_alone("finetune.tools.export.gate.one_parts", request, self.threads)["parts"]
        except SideFailed as error:
            log.warning("the parts of the export cannot be compared: %s", error)
            return []
