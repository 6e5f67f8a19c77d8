"""The way of a cleaning: the job over all clips, the judgement, a second look at the suspects, and the files."""

import argparse
from collections import Counter
from dataclasses import dataclass, replace

from finetune.data.retry import Unreachable
from finetune.data.sources import split_to_read
from finetune.errors import UserError
from finetune.evaluation.dataset import open_sources
from finetune.tools.cleaning.judging import Judgement, count_words, judge
from finetune.tools.cleaning.listening import SPEEDS, ListenerSettings
from finetune.tools.cleaning.outputs import SHOWN, write_outputs
from finetune.tools.cleaning.second_look import audio_for_page, certain, correct, name_exchanged
from finetune.tools.command_line import device_of, writing
from finetune.tools.jobs.engines import EngineSettings
from finetune.tools.jobs.job import Job
from finetune.tools.jobs.running import run_job


@dataclass
class Found:
    """What a cleaning came to."""

    judgement: Judgement
    said: list[str]
    kinds: list[tuple[str, int]]
    failed: int
    """Clips that could not be judged."""


def find_problems(arguments: argparse.Namespace, engine: EngineSettings, device: str | None) -> Found | None:
    """Find problems and write the files; None where other parts of the job are not done.

    Raises:
        UserError: model, data or output cannot be used, or too many clips fail.
    """
    a = arguments
    settings = ListenerSettings(a.model, a.tokenizer, a.head, a.language, a.batch_size, device)
    sources = open_sources(a.data, split_to_read(a.data, a.split, "train"))
    depends_on = {"model": a.model, "tokenizer": a.tokenizer, "head": a.head, "language": a.language, "speeds": SPEEDS}
    job = Job("clean", a.output, depends_on, sources, settings, max_samples=a.max_samples, max_failed=a.max_failed)
    totals = run_job(job, engine)
    if not totals.is_whole:
        return None
    judgement = judge(job.results)
    listener = replace(settings, device=device_of(a))()
    try:
        name_exchanged(judgement.problems, sources, listener)
        listed = judgement.problems = certain(judgement.problems)
        count_words(judgement)
        corrections = correct(listed, sources)
        with writing("--output", a.output):
            audio = audio_for_page(listed[:SHOWN], sources, a.output, listener.rate)
            said = write_outputs(judgement, listed, corrections, audio, a.output)
    except Unreachable as error:
        raise UserError(f"{error}. What is done is kept; the same line goes on there.", exit_code=1) from error
    return Found(judgement, said, Counter(p.kind for p in listed).most_common(), len(totals.failed))
