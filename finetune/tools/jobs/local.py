"""The local engine: worker processes on this machine."""

import contextlib
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import cast

import torch

from finetune.data.worker_lifetime import begin_task_process
from finetune.errors import UserError
from finetune.logs import set_up_logging
from finetune.tools.jobs.engines import Died, Done, EngineSettings, Event, Ready
from finetune.tools.jobs.job import Job
from finetune.tools.jobs.work import Task, answer


class LocalEngine:
    """Spawned processes, each with threads and a GPU of its own, so that a clip that ends one ends nothing else."""

    def __init__(self, job: Job, settings: EngineSettings):
        self.gpus = _visible_gpus(settings.device)
        self.workers = settings.workers or max(len(self.gpus), 1)
        self.work = pickle.dumps((job.make_worker, job.group))
        self.context = multiprocessing.get_context("spawn")
        self.running: dict[int, tuple[SpawnProcess, Connection]] = {}

    def start(self) -> int:
        worker = next(n for n in range(self.workers) if n not in self.running)
        own, other = cast("tuple[Connection, Connection]", self.context.Pipe())
        process = self.context.Process(target=_serve, args=(other, os.getpid(), self.work), daemon=False)
        with _environment(self._variables(worker)):
            process.start()
        other.close()  # the process's own copy alone: its end is the end of the pipe
        self.running[worker] = process, own
        return worker

    def _variables(self, worker: int) -> dict[str, str]:
        threads = str(max(len(os.sched_getaffinity(0)) // self.workers, 1))
        variables = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": threads}
        return variables | {"CUDA_VISIBLE_DEVICES": self.gpus[worker % len(self.gpus)] if self.gpus else ""}

    def submit(self, worker: int, task: Task) -> None:
        with contextlib.suppress(OSError):  # it has ended, which `wait` tells
            self.running[worker][1].send(task)

    def wait(self, seconds: float) -> list[Event]:
        pipes = {own: worker for worker, (_, own) in self.running.items()}
        return [self._event(pipes[own], own) for own in wait(list(pipes), seconds) if isinstance(own, Connection)]

    def _event(self, worker: int, pipe: Connection) -> Event:
        try:
            found = pipe.recv()
        except (OSError, EOFError):
            process, _ = self.running.pop(worker)
            process.join()
            pipe.close()
            return Died(worker, _how(process.exitcode))
        if isinstance(found, UserError):
            raise found
        return Ready(worker) if found is None else Done(worker, found)

    def close(self) -> None:
        for process, pipe in self.running.values():
            process.kill()
            process.join()
            pipe.close()
        self.running.clear()


def _visible_gpus(device: str | None) -> list[str]:
    """Return the GPUs for `--device`, as CUDA_VISIBLE_DEVICES names them."""
    kind, _, number = (device or "cuda").partition(":")
    if kind != "cuda":
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named.split(",")[: torch.cuda.device_count()] if named else list(map(str, range(torch.cuda.device_count())))
    return gpus[int(number) :][:1] if number else gpus


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables for the processes that are started within."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _how(code: int | None) -> str:
    """Say how a process ended, by its exit code."""
    if code == -9:
        return "killed, most likely for want of memory"
    return f"ended by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"


def _serve(pipe: Connection, parent: int, work: bytes) -> None:
    """Make the worker and do tasks until the engine closes the pipe; None tells that the worker is made."""
    begin_task_process(parent)
    set_up_logging()
    with contextlib.suppress(EOFError, BrokenPipeError):
        try:
            make_worker, group = pickle.loads(work)
            worker = make_worker()
            pipe.send(None)
            while True:
                task: Task = pipe.recv()
                pipe.send(answer(worker, group, task))
        except (EOFError, BrokenPipeError):
            raise
        except UserError as error:
            pipe.send(error)
        except Exception as error:
            pipe.send(UserError(f"a worker process failed: {error}\n{traceback.format_exc()}", exit_code=1))
