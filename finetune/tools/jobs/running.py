"""Running a job: shards go to workers, what kills a worker is found by halving, and what is done is written."""

import contextlib
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable

from finetune import signals
from finetune.data.quarantine import Reasons, exceeds_bad_fraction
from finetune.errors import UserError
from finetune.tools.jobs.clips import halves
from finetune.tools.jobs.engines import Died, Done, Engine, EngineSettings, Event, Ready
from finetune.tools.jobs.job import Job, Totals
from finetune.tools.jobs.local import LocalEngine
from finetune.tools.jobs.progress import Progress
from finetune.tools.jobs.work import Outcome, Task

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
DEATHS_OF_A_TASK = 2  # before it is cut in halves, or the clip is noted that it holds
DEATHS_IN_A_ROW = 25  # of a shard of a million clips, whose first one kills, 24 without a result in between
STARTS_IN_A_ROW = 3  # that end before a worker is made


def make_engine(job: Job, settings: EngineSettings) -> Engine:
    """Return the engine of a job.

    Raises:
        UserError: there is none, or a cluster does not answer.
    """
    if settings.engine == "ray":
        from finetune.tools.jobs.on_ray import RayEngine

        return RayEngine(job, settings)
    return LocalEngine(job, settings)


def run_job(
    job: Job, settings: EngineSettings, make_engine: Callable[[Job, EngineSettings], Engine] = make_engine
) -> Totals:
    """Do what is missing of a job; return what is there then.

    With `settings.part` other processes may do the rest: `Totals.is_whole` says whether all is there, and then
    `job.results()` has it.

    Raises:
        UserError: the directory holds another job or cannot be written, no worker can be made, storage does not
            answer, too many clips fail, or a signal came (exit code 75): what is done is kept.
        KeyboardInterrupt: Ctrl-C; what is done is kept.
    """
    job.begin()
    part, parts = settings.part
    own = range(part, len(job.shards), parts)
    with job.alone(settings.part), signals.listening(), signals.saving_first():
        if settings.retry_failed:
            job.forget_failed(own)
        before = job.totals().seconds
        missing = [n for n in own if not job.is_done(n)]
        if missing:
            with contextlib.closing(make_engine(job, settings)) as engine, Progress(job, missing) as progress:
                _Run(job, engine, missing, progress).go()
    totals = job.finish()
    totals.seconds_now = totals.seconds - before
    _check_failures(job, totals, all_read=totals.is_whole)
    if totals.is_whole and job.said_clips not in (None, totals.clips):
        log.warning("the data say that they have %d clips, and %d were read", job.said_clips, totals.clips)
    return totals


class _Run:
    """The state of a job that is being done: what waits, who does what, and parts of shards."""

    def __init__(self, job: Job, engine: Engine, missing: list[int], progress: Progress):
        self.job, self.engine, self.progress = job, engine, progress
        self.waiting = deque(Task(n, job.shards[n]) for n in missing)
        self.loading: set[int] = set()
        self.idle: list[int] = []
        self.busy: dict[int, Task] = {}
        self.parts: dict[int, list[tuple[Task, Outcome]]] = defaultdict(list)
        """Of shards that were cut: what is done."""
        self.open: Counter[int] = Counter(dict.fromkeys(missing, 1))
        """Tasks of each shard that are not done."""
        self.deaths = self.bad_starts = 0
        self.at_once = engine.workers - 1  # a node that is lost takes all of its workers with it

    def go(self) -> None:
        while self.waiting or self.busy:
            self._give_work()
            events = self.engine.wait(POLL_SECONDS)
            self.at_once = max(self.at_once, self.engine.workers - 1)
            self._stop_if_asked()
            for event in events:
                self._take(event)
            self.progress.show(len(self.busy) + len(self.idle), self.engine.workers)

    def _stop_if_asked(self) -> None:
        name = signals.requested()
        if name is None:
            return
        done = sum(map(self.job.is_done, range(len(self.job.shards))))
        kept = f"{done} of {len(self.job.shards)} shards are done; the same line goes on there"
        if name == "SIGINT":
            raise KeyboardInterrupt(kept)
        raise UserError(f"{name} came: {kept}.", signals.EXIT_CODE)

    def _give_work(self) -> None:
        while self.waiting and self.idle:
            worker = self.idle.pop()
            self.busy[worker] = self.waiting.popleft()
            self.engine.submit(worker, self.busy[worker])
        at_work = len(self.idle) + len(self.busy) + len(self.loading)
        for _ in range(min(self.engine.workers - at_work, len(self.waiting) - len(self.loading))):
            self.loading.add(self.engine.start())

    def _take(self, event: Event) -> None:
        if isinstance(event, Ready):
            self.loading.remove(event.worker)
            self.idle.append(event.worker)
            self.bad_starts = 0
        elif isinstance(event, Done):
            self.deaths = 0
            self.idle.append(event.worker)
            self._finish(self.busy.pop(event.worker), event.found)
        elif event.worker in self.busy:
            self._mourn(self.busy.pop(event.worker), event)
        else:
            self.idle = [worker for worker in self.idle if worker != event.worker]
            self.loading.discard(event.worker)
            self.bad_starts += 1
            if self.bad_starts >= STARTS_IN_A_ROW + self.at_once:
                raise UserError(
                    f"{self.bad_starts} worker processes in a row were {event.how} before they had their model. With "
                    "fewer --workers, each has more memory.",
                    exit_code=1,
                )

    def _mourn(self, task: Task, event: Died) -> None:
        """Let a task be tried again, in halves from the second death on, down to the clip that ends the worker."""
        self.deaths, task.deaths = self.deaths + 1, task.deaths + 1
        place = self.place_of(task)
        log.warning("a worker process was %s, at %s or behind; it is tried again", event.how, place)
        if self.deaths >= DEATHS_IN_A_ROW + self.at_once:
            raise UserError(
                f"{self.deaths} worker processes in a row ended without a result, the last one {event.how} at "
                f"{place} or behind. What is done is kept: the same line goes on there.",
                exit_code=1,
            )
        if task.deaths < DEATHS_OF_A_TASK:
            self.waiting.appendleft(task)
        elif task.only_count:
            self._note(task, f"reading it ends the worker process ({event.how})")
        elif any(piece.stop is None for piece in task.pieces):
            self.waiting.appendleft(Task(task.shard, task.pieces, only_count=True))
        else:
            self._cut(task, event.how)

    def _cut(self, task: Task, how: str) -> None:
        parts = [Task(task.shard, pieces, DEATHS_OF_A_TASK - 1) for pieces in halves(task.pieces)]
        if not parts:
            self._note(task, f"it ends the worker process ({how})")
            return
        for part in parts:
            if sum(piece.rows() or 0 for piece in part.pieces) == 1:
                part.deaths = 0  # a clip is blamed for deaths of its own only
        self.open[task.shard] += 1
        self.waiting.extendleft(reversed(parts))

    def place_of(self, task: Task) -> str:
        piece = task.pieces[0]
        return self.job.group[piece.shard][1].place(piece.start)

    def _note(self, task: Task, reason: str) -> None:
        place = self.place_of(task)
        failure = {"kind": "killed", "id": place, "source": place, "reason": reason}
        self._finish(task, Outcome(failed=[failure], clips=1))

    def _finish(self, task: Task, found: Outcome | list) -> None:
        """Keep the outcome of a task, and write that of its shard if nothing of it is missing."""
        if not isinstance(found, Outcome):  # the rows are counted
            self._cut(Task(task.shard, found), "killed")
            return
        number = task.shard
        self.parts[number].append((task, found))
        self.open[number] -= 1
        self.progress.add(found)
        if not self.open[number]:
            parts = sorted(self.parts.pop(number), key=lambda part: part[0].pieces[0])
            self.job.write(number, sum((outcome for _, outcome in parts), Outcome()))
        _check_failures(self.job, self.progress.totals, all_read=False)


def _check_failures(job: Job, totals: Totals, all_read: bool) -> None:
    """Raise UserError where more clips failed than may."""
    failed = len(totals.failed)
    if exceeds_bad_fraction(failed, totals.clips, job.max_failed, all_read):
        reasons = Reasons()
        for record in totals.failed:
            reasons.add(record["kind"], f"{record['id']}: {record['reason']}")
        raise UserError(
            f"{failed} of {totals.clips} clips failed, more than --max-failed {job.max_failed:g}: {reasons}. What is "
            "done is kept. Where the cause is mended, add --retry-failed; other data need another --output. To go on "
            "without these clips, raise --max-failed.",
            exit_code=1,
        )
