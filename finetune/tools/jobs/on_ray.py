"""The Ray engine: actors that hold a worker each, on the nodes of a cluster.

Every node has to see the project, its packages, the model and the data under the same paths as this process: a shared
file system. Results come back to this process, which writes them.
"""

import contextlib
import importlib.util
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

from finetune import signals
from finetune.data.reader import Group
from finetune.errors import UserError
from finetune.logs import set_up_logging
from finetune.tools.jobs.clips import Pieces
from finetune.tools.jobs.engines import Died, Done, EngineSettings, Event, Ready
from finetune.tools.jobs.job import Job
from finetune.tools.jobs.work import MakeWorker, Outcome, Task, answer

log = logging.getLogger(__name__)

SECONDS_TO_ANSWER = 10.0
SECONDS_TO_JOIN = 60.0
JOIN = "import sys, ray; ray.init(address=sys.argv[1], logging_level='error', log_to_driver=False)"


class _Actor:
    """A worker in an actor's process."""

    def begin(self, folder: str, make_worker: MakeWorker, group: Group) -> None:
        """Make the worker. What fails here is told as it is; of a constructor that fails Ray tells that the actor
        died.

        Args:
            folder: where relative paths begin, if it is there: each node has its own copy of a --working-dir.
        """
        set_up_logging()
        if os.path.isdir(folder):
            os.chdir(folder)
        self.worker, self.group = make_worker(), group

    def answer(self, task: Task) -> Outcome | Pieces:
        return answer(self.worker, self.group, task)


class RayEngine:
    """One actor a worker, spread over the nodes; one that is lost is started anew, where there is room."""

    def __init__(self, job: Job, settings: EngineSettings):
        self.ray = ray = import_ray()
        self.joined = not ray.is_initialized()
        if self.joined:
            join(settings.address)
        self.settings = settings
        cpus, gpus = self._resources()
        if not cpus:
            raise UserError("the Ray cluster has no node with a CPU for a worker: start its nodes.", exit_code=1)
        self.on_gpus = gpus > 0
        self.workers = settings.workers or gpus or len(cpus)
        a_node = -(-self.workers // len(cpus))
        # Ray gives an actor as many threads as CPUs.
        threads = 1 if gpus else max(min(cpus) // a_node, 1)
        self.make = ray.remote(_Actor).options(
            num_cpus=threads,
            num_gpus=share_of_a_gpu(self.workers, gpus),
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(own_paths())}},
        )
        self.work = os.getcwd(), ray.put(job.make_worker), ray.put(job.group)
        self.actors: dict[int, Any] = {}
        self.asked: dict[Any, tuple[int, bool]] = {}
        """By the reference of an answer: the worker, and whether it is that it is made."""
        self.started = 0

    def _resources(self) -> tuple[list[int], int]:
        """Return the CPUs of each node that is there now and has any, and all GPUs that may be used."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        cpus = [int(node["CPU"]) for node in nodes if node.get("CPU", 0) >= 1]
        return cpus, 0 if self.settings.device == "cpu" else sum(int(node.get("GPU", 0)) for node in nodes)

    def start(self) -> int:
        worker, self.started = self.started, self.started + 1
        self.actors[worker] = self.make.remote()
        self.asked[self.actors[worker].begin.remote(*self.work)] = worker, True
        return worker

    def submit(self, worker: int, task: Task) -> None:
        self.asked[self.actors[worker].answer.remote(task)] = worker, False

    def wait(self, seconds: float) -> list[Event]:
        asked = list(self.asked)
        self.ray.wait(asked, timeout=seconds)  # for one; to wait for all would leave who is ready idle
        there, _ = self.ray.wait(asked, num_returns=len(asked), timeout=0)
        if self.settings.workers is None:  # nodes come and go
            cpus, gpus = self._resources()
            self.workers = max(gpus if self.on_gpus else len(cpus), 1)
        return [self._event(reference, *self.asked.pop(reference)) for reference in there]

    def _event(self, reference: Any, worker: int, is_made: bool) -> Event:
        errors = self.ray.exceptions
        try:
            found = self.ray.get(reference)
        except errors.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise error.cause from None
            raise UserError(f"a worker process failed: {error}", exit_code=1) from None
        except errors.RayError as error:
            self._end(worker)
            return Died(worker, f"lost ({type(error).__name__})")
        return Ready(worker) if is_made else Done(worker, found)

    def _end(self, worker: int) -> None:
        with contextlib.suppress(self.ray.exceptions.RayError):
            self.ray.kill(self.actors.pop(worker))

    def close(self) -> None:
        for worker in list(self.actors):
            self._end(worker)
        if self.joined:
            self.ray.shutdown()


def share_of_a_gpu(workers: int, gpus: int) -> float:
    """Return what each of so many workers has of a GPU, so that there is room for all of them."""
    return 1 / max(-(-workers // gpus), 1) if gpus else 0


def import_ray() -> Any:
    """Return the package.

    Raises:
        UserError: it is not there.
    """
    if importlib.util.find_spec("ray") is None:
        raise UserError("--engine ray needs a package: pip install -c constraints.txt -e '.[ray]'.")
    import ray
    import ray.exceptions

    return ray


def own_paths() -> list[str]:
    """Return where this process finds modules beside Python's own places and the packages installed there."""
    paths = dict.fromkeys(os.path.abspath(path) for path in sys.path)
    return [path for path in paths if not path.startswith((sys.prefix, sys.base_prefix))]


@contextlib.contextmanager
def _own_handlers() -> Iterator[None]:
    """Keep this process's handlers of signals: Ray has one that ends it."""
    before = {number: signal.getsignal(number) for number in signals.SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def join(address: str | None) -> None:
    """Connect to a cluster, or start one on this machine.

    Raises:
        UserError: it does not answer.
    """
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # actors without a GPU: as the node has it
    if address is not None:
        _check(address)
    # The nodes' own messages are in Ray's dashboard and its folder of logs.
    with _own_handlers():
        ray.init(address=address or "local", logging_level=logging.ERROR, log_to_driver=False)
    url = ray.get_runtime_context().gcs_address if address else ray.worker.global_worker.node.webui_url
    log.info("Ray: %s", f"the cluster at {url}" if address else f"on this machine, its dashboard at http://{url}")


def _check(address: str) -> None:
    """Raise UserError where no cluster answers. Another process joins first: Ray waits long, and may end its own."""
    ways_out = "See that the cluster runs (ray status), and that this machine reaches the port of its head (6379)."
    if address != "auto":
        host, _, port = address.rpartition(":")
        if "/" in address or not host or not port.isdecimal():
            raise UserError(f"--address: {address} is neither auto nor HOST:PORT, such as 10.0.0.1:6379.")
        try:
            socket.create_connection((host, int(port)), SECONDS_TO_ANSWER).close()
        except OSError as error:
            raise UserError(f"--address: no Ray cluster answers at {address}: {error}. {ways_out}", 1) from error
    command = [sys.executable, "-c", JOIN, address]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_TO_JOIN)
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"--address: the Ray cluster {address} did not answer within {SECONDS_TO_JOIN:.0f} s. {ways_out}", 1
        ) from error
    if ended.returncode:
        why = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
        raise UserError(f"--address: the Ray cluster {address} cannot be joined: {why}. {ways_out}", 1)
