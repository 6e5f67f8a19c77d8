"""Rank monitor: a small process beside each rank that tells the other ranks how it ends. Started by client.py.

It is a process of its own because a rank that is killed or stopped can report nothing, and it uses the standard
library only, so that it starts at once and takes 10 MB. Every monitor sends the coordinator, which runs in the monitor
of rank 0, a heartbeat each second and the end of its rank. The coordinator decides which rank is lost and sends all
ranks one message to end with.

The first line on stdin holds the settings (`Settings`, JSON). Later lines come from the rank: {"left": exit code,
"cause": text}. Lines on stdout go to the rank: {"port": N} and {"joined": number of ranks} from the coordinator,
{"unwatched": reason}, and {"end": message, "code": exit code}.
"""

import contextlib
import fcntl
import json
import os
import select
import selectors
import signal
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

HEARTBEAT = 1.0
SIGTERM_WAIT = 0.5
"""Seconds to wait for another cause where SIGTERM ended a rank: launchers end the remaining ranks with it."""
LEAVING_TOGETHER = 5.0
"""Seconds in which ranks that all fail for a reason of their own, such as a bad setting, may report it themselves."""
KILL_AFTER = 10.0
"""Seconds a rank has to end by itself once it is told to."""
LINGER = 5.0
PAUSED = 5.0
"""Seconds between two turns of this process that mean it was suspended itself; all silence is then counted anew."""
LINE_LIMIT = 1 << 16
MAX_UNAUTHENTICATED, UNAUTHENTICATED_SECONDS, UNAUTHENTICATED_BYTES = 64, 5.0, 1 << 10
"""Limits for peers that have not sent the token: connections beyond the number of ranks, seconds, bytes of a line."""

STOPPED = 75
"""Exit code of a run that was asked to stop, as `finetune.signals.EXIT_CODE`."""
ENDED_WELL = (0, STOPPED)
SILENT = "not heard of for {:.0f} s: the machine or the network to it is down"
GONE = "its process and the rank monitor beside it are gone"
RESUME = "training.resume_from_checkpoint=true continues from the last checkpoint."
HINTS = {
    signal.SIGKILL: "; the kernel sends it where memory runs out (dmesg), a scheduler at the end of the time",
    signal.SIGBUS: "; it comes where shared memory (/dev/shm) or a disk is full",
    signal.SIGSEGV: "; a library crashed",
}
PIDFD_GET_INFO, PIDFD_INFO_EXIT, PIDFD_INFO_SIZE = 0xC040FF0B, 1 << 3, 64  # linux/pidfd.h, from Linux 6.15 on
IGNORED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGPIPE")


@dataclass
class Settings:
    """What a rank monitor is started with.

    Attributes:
        pid: process of the rank.
        token: secret shared by the ranks of this run.
        timeout: seconds of silence after which a rank is lost.
        coordinator: address and port; None for rank 0.
        coordinator_host: host name of rank 0.
        reports: write the loss of rank 0 to this host's log.
    """

    rank: int
    world: int
    pid: int
    token: str
    timeout: float
    coordinator: tuple[str, int] | None = None
    coordinator_host: str = ""
    reports: bool = True


@dataclass
class Ending:
    """How a rank ended.

    Attributes:
        code: exit code as a shell gives it; None where unknown.
        cause: in words.
        reported: the rank reported the cause itself and ended by itself.
    """

    code: int | None
    cause: str
    reported: bool = False


@dataclass
class Member:
    """What the coordinator knows of a rank; times in seconds of one monotonic clock.

    Attributes:
        heard: last heartbeat of its monitor.
        lines: connection to its monitor.
        stopped: since when its process has been stopped (SIGSTOP) while others ran.
        leaving: exit code with which it is about to end well; it waits for no other rank.
        ended: when it ended; None while it runs.
        ending: how it ended.
    """

    rank: int
    host: str
    pid: int
    heard: float
    lines: "JsonLines | None" = None
    stopped: float | None = None
    leaving: int | None = None
    ended: float | None = None
    ending: Ending | None = None

    def update(
        self, now: float, stopped: bool = False, leaving: int | None = None, ended: dict[str, Any] | None = None
    ) -> None:
        """Record a report of its monitor."""
        self.heard, self.leaving = now, leaving
        self.stopped = None if not stopped else self.stopped or now
        if ended is not None:
            self.ended, self.ending = now, Ending(**ended)

    @property
    def code(self) -> int | None:
        return self.ending.code if self.ending else None

    @property
    def name(self) -> str:
        return f"rank {self.rank} on host {self.host} (process {self.pid})"


def find_lost(members: list[Member], timeout: float, now: float) -> tuple[list[Member], str] | None:
    """Return the ranks that are lost and the cause, or None where none is lost or all ended by themselves.

    Args:
        timeout: seconds of silence or of standing still.
        now: of the members' clock.
    """
    running = [m for m in members if m.ended is None]
    ended = sorted(((m.ended, m.ending, m) for m in members if m.ended is not None and m.ending), key=lambda e: e[0])
    failed = [e for e in ended if e[1].code not in ENDED_WELL]
    if failed:
        # A launcher ends the remaining ranks with SIGTERM, which is not the cause where there is another.
        _, first, member = next((e for e in failed if e[1].code != 128 + signal.SIGTERM), failed[0])
        wait = LEAVING_TOGETHER if first.reported and running else 0.0
        if first.code == 128 + signal.SIGTERM:
            wait = max(wait, SIGTERM_WAIT)
        all_reported = not running and all(e.reported or e.code in ENDED_WELL for _, e, _ in ended)
        return ([member], first.cause) if now - failed[0][0] >= wait and not all_reported else None
    asked = [(since, m) for since, ending, m in ended if ending.code == STOPPED]
    if asked and now - asked[0][0] > LEAVING_TOGETHER and any(m.leaving is None for m in running):
        return [m for _, m in asked], "asked to stop by a signal while no step was being made"
    if any(now - m.heard > timeout for m in running):
        return [m for m in running if now - m.heard > timeout - 3 * HEARTBEAT], SILENT.format(timeout)
    stopped = [m for m in running if m.stopped is not None and now - m.stopped > timeout]
    if stopped and any(m.stopped is None for m in running):
        return stopped, f"stopped (SIGSTOP) for {timeout:.0f} s while others ran"
    return None


def loss_message(lost: list[Member], cause: str) -> str:
    """Return what the user reads about lost ranks."""
    names = ", ".join(m.name for m in sorted(lost, key=lambda m: m.rank))
    if all(m.code == STOPPED for m in lost):
        return f"stopped: {names}: {cause}. The other ranks end with it; the last checkpoint counts."
    return f"error: {names}: {cause}. The other ranks end with it. {RESUME}"


def write_log(text: str) -> None:
    """Write a line to the run's log: stderr, which the rank shares with its monitor."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


class JsonLines:
    """JSON lines of at most `limit` bytes over two file descriptors, which may be one, without ever blocking."""

    def __init__(self, reader: int, writer: int, limit: int = LINE_LIMIT):
        self.reader, self.writer, self.limit, self.rest, self.open = reader, writer, limit, b"", True
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)

    def read(self) -> list[dict[str, Any]]:
        """Return the lines that have come. At the end of the file or a bad line, set `open` to False."""
        try:
            data = os.read(self.reader, self.limit)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        self.open = bool(data)
        *whole, self.rest = (self.rest + data).split(b"\n")
        found: list[dict[str, Any]] = []
        for line in whole:
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if not isinstance(value, dict):
                self.open = False
                break
            found.append(value)
        self.open = self.open and len(self.rest) <= self.limit
        return found

    def send(self, **values: object) -> None:
        """Send one line, or drop it where nobody reads."""
        with contextlib.suppress(OSError):
            os.write(self.writer, json.dumps(values).encode() + b"\n")


class RankProcess:
    """The process of the rank, held by a pidfd."""

    def __init__(self, pid: int):
        self.pid, self.handle = pid, os.pidfd_open(pid)

    def is_gone(self) -> bool:
        return bool(select.select([self.handle], [], [], 0)[0])

    def is_stopped(self) -> bool:
        """Return whether SIGSTOP or a terminal stopped it; a debugger does not count."""
        return self._stat()[0] == "T"

    def _stat(self) -> list[str]:
        try:
            with open(f"/proc/{self.pid}/stat", encoding="utf-8", errors="replace") as file:
                return file.read().rpartition(")")[2].split()
        except OSError:
            return [""]

    def wait_status(self) -> int | None:
        """Return the status of wait(2), from /proc until it is reaped, then from the kernel (Linux 6.15)."""
        fields = self._stat()
        if fields[0] == "Z":
            return int(fields[-1])
        info = bytearray(struct.pack("Q", PIDFD_INFO_EXIT).ljust(PIDFD_INFO_SIZE, b"\0"))
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.handle, PIDFD_GET_INFO, info)
            if struct.unpack_from("Q", info)[0] & PIDFD_INFO_EXIT:
                return struct.unpack_from("i", info, PIDFD_INFO_SIZE - 4)[0]
        return None

    def ending(self) -> Ending:
        """Return how it ended, from its wait status."""
        status = self.wait_status()
        if status is None:
            return Ending(None, "ended without a report; the lines of its launcher say how")
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            known = next((s for s in signal.Signals if s == number), None)
            name, hint = (known.name, HINTS.get(known, "")) if known else ("a real-time signal", "")
            return Ending(128 + number, f"killed by signal {number} ({name}){hint}")
        code = os.waitstatus_to_exitcode(status)
        return Ending(code, f"exit code {code}, without a report")

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)


class Coordinator:
    """Keeps the membership of all ranks, in the monitor of rank 0, whose selector calls `accept` and `receive`."""

    def __init__(self, settings: Settings, selector: selectors.BaseSelector, to_rank: JsonLines):
        self.settings, self.selector, self.to_rank = settings, selector, to_rank
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        backlog = settings.world + MAX_UNAUTHENTICATED
        self.server = socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=backlog)
        self.server.setblocking(False)
        selector.register(self.server, selectors.EVENT_READ, self.accept)
        self.members: dict[int, Member] = {}
        self.unauthenticated: dict[socket.socket, float] = {}
        self.beat_at = 0.0
        self.loss_sent = False
        self.over_at = float("inf")
        to_rank.send(port=self.server.getsockname()[1])

    def accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self.server.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.add(connection)

    def add(self, connection: socket.socket) -> None:
        """Listen to a connection; the peer has to send the token before anything else is read."""
        lines = JsonLines(connection.fileno(), connection.fileno(), UNAUTHENTICATED_BYTES)
        member: list[Member] = []
        self.unauthenticated[connection] = time.monotonic()
        self.selector.register(connection, selectors.EVENT_READ, lambda: self.receive(connection, lines, member))

    def receive(self, connection: socket.socket, lines: JsonLines, member: list[Member]) -> None:
        """Read a peer's lines; `member` holds its rank once it has authenticated."""
        now = time.monotonic()
        for line in lines.read():
            if member:
                member[0].update(now, **line)
            elif line.get("token") == self.settings.token:
                member.append(Member(line["rank"], line["host"], line["pid"], now, lines))
                self.members[line["rank"]] = member[0]
                lines.limit = LINE_LIMIT
                del self.unauthenticated[connection]
                self.to_rank.send(joined=len(self.members))
            else:
                lines.open = False
                break
        if not lines.open:
            if member:
                member[0].lines = None
                if member[0].ended is None:
                    member[0].update(now, ended=vars(Ending(member[0].leaving, GONE)))
            self.disconnect(connection)

    def disconnect(self, connection: socket.socket) -> None:
        self.unauthenticated.pop(connection, None)
        self.selector.unregister(connection)
        connection.close()

    def turn(self, now: float, paused: bool) -> bool:
        """Look after all ranks; return whether nothing is left to report to anyone."""
        if paused:
            for member in self.members.values():
                member.heard, member.stopped = now, None
            self.unauthenticated = dict.fromkeys(self.unauthenticated, now)
        too_many = len(self.unauthenticated) - self.settings.world - MAX_UNAUTHENTICATED
        for number, (connection, since) in enumerate(list(self.unauthenticated.items())):
            if number < too_many or now - since > UNAUTHENTICATED_SECONDS:
                self.disconnect(connection)
        if now >= self.beat_at:
            self.beat_at = now + HEARTBEAT
            self.send_all(beat=1)
        running = [m for m in self.members.values() if m.ended is None]
        if all(m.stopped is not None for m in running):
            # All ranks are suspended together, and are not continued in the same instant: the clocks wait.
            for member in running:
                member.stopped = now
        if not self.loss_sent:
            self.end_all_if_lost(now)
        return self.is_done(now)

    def send_all(self, **values: object) -> None:
        for member in self.members.values():
            if member.lines is not None:
                member.lines.send(**values)

    def end_all_if_lost(self, now: float) -> None:
        """Where a rank is lost, end all others but those about to end well, with one message in each host's log."""
        members = sorted(self.members.values(), key=lambda m: -m.rank)
        lost = find_lost(members, self.settings.timeout, now)
        if lost is None:
            return
        self.loss_sent, text = True, loss_message(*lost)
        code = STOPPED if all(m.code == STOPPED for m in lost[0]) else 1
        write_log(text)
        here = socket.gethostname()
        waiting = [m for m in members if m.lines is not None and m.leaving is None]
        reporters = {m.host: m.rank for m in waiting if m.host != here}  # the lowest rank of each other host
        for member in waiting:
            if member.lines is not None:
                member.lines.send(end=text, code=code, report=reporters.get(member.host) == member.rank)

    def is_done(self, now: float) -> bool:
        members = self.members.values()
        own = self.members.get(self.settings.rank)
        if own is None or own.ended is None:
            return False
        if self.loss_sent:
            self.over_at = min(self.over_at, now + KILL_AFTER + LINGER)
            return now > self.over_at or all(m.lines is None for m in members)
        if own.code not in ENDED_WELL:
            return all(m.ending is not None and (m.ending.reported or m.code in ENDED_WELL) for m in members)
        if own.code == STOPPED and any(m.ended is None for m in members):
            return False  # `end_all_if_lost` ends those that wait for a rank that was stopped
        self.send_all(over=1)
        return True


class RankMonitor:
    """Watches one rank: takes its reports, passes its end on to the coordinator, and ends it when told to."""

    def __init__(self, settings: Settings):
        self.settings, self.rank, self.host = settings, RankProcess(settings.pid), socket.gethostname()
        self.to_rank = JsonLines(0, 1)
        self.selector = selectors.DefaultSelector()
        self.coordinator: Coordinator | None = None
        if settings.coordinator is None:
            self.coordinator = Coordinator(settings, self.selector, self.to_rank)
            self.connection, other_end = socket.socketpair()
            self.coordinator.add(other_end)
        else:
            self.connection = self.connect(*settings.coordinator)
        self.lines = JsonLines(self.connection.fileno(), self.connection.fileno())
        self.lines.send(token=settings.token, rank=settings.rank, host=self.host, pid=settings.pid)
        for source in (0, self.rank.handle, self.connection):
            self.selector.register(source, selectors.EVENT_READ)
        self.report: Ending | None = None
        self.heard = time.monotonic()
        self.beat_at = 0.0
        self.kill_at = self.over_at = float("inf")
        self.ended = self.over = False

    def connect(self, address: str, port: int) -> socket.socket:
        """Connect to the coordinator; retry for as long as a rank may be silent."""
        deadline = time.monotonic() + self.settings.timeout
        while True:
            try:
                connection = socket.create_connection((address, port), timeout=5.0)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return connection
            except OSError as error:
                if time.monotonic() > deadline or self.rank.is_gone():
                    self.to_rank.send(unwatched=f"{address}, port {port} cannot be reached: {error}")
                    raise SystemExit(0) from error
            time.sleep(HEARTBEAT / 2)

    def run(self) -> None:
        """Run until the rank has ended and nothing is left to report to anyone."""
        done, turned = False, time.monotonic()
        while not done:
            for key, _ in self.selector.select(HEARTBEAT / 2):
                if key.data is not None:
                    key.data()
            before, turned = turned, time.monotonic()
            paused = turned - before > PAUSED
            if not self.over:
                self.turn(turned, paused)
            done = self.over if self.coordinator is None else self.coordinator.turn(turned, paused)

    def turn(self, now: float, paused: bool) -> None:
        """Report the rank, and do what the coordinator says."""
        if now > self.kill_at:
            self.rank.kill()
        ending = None if self.ended else self.ending()
        if ending is not None:
            self.ended = True
            self.lines.send(ended=ending)
            # After a loss the coordinator may still have a message for the log of this host.
            well = ending["code"] in ENDED_WELL
            self.over_at = now if well else min(self.over_at, now + LEAVING_TOGETHER + LINGER)
        elif now >= self.beat_at and not self.ended:
            self.beat_at = now + HEARTBEAT
            self.lines.send(stopped=self.rank.is_stopped(), leaving=self.leaving)
        for line in self.lines.read():
            self.heard = now
            self.over = self.over or "over" in line
            if "end" in line:
                if line["report"]:
                    write_log(line["end"])
                self.end_rank(line["end"], line["code"])
        self.heard = now if paused else self.heard
        if not self.lines.open:
            self.unregister(self.connection)
        if self.kill_at < float("inf"):  # it was told to end
            self.over = self.over or (self.ended and self.rank.is_gone())
        elif not self.lines.open or now - self.heard > self.settings.timeout:
            self.over = self.over or self.ended
            if not self.over and self.leaving is None:
                self.end_without_coordinator()
        self.over = self.over or now >= self.over_at
        if self.over:
            self.unregister(self.connection)
            self.connection.close()

    def unregister(self, source: int | socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(source)

    def ending(self) -> dict[str, Any] | None:
        """Return how the rank ended (fields of `Ending`); None while it runs or is about to end well."""
        gone = self.rank.is_gone()  # asked before reading: what a rank that is gone has reported is there by now
        for line in self.to_rank.read():
            self.report = Ending(line["left"], line["cause"], reported=True)
            self.beat_at = 0.0  # the coordinator has to know now
        if not self.to_rank.open:
            self.unregister(0)
        if gone:
            self.unregister(self.rank.handle)
        if self.report is not None and (gone or self.report.code not in ENDED_WELL):
            return vars(self.report)
        return vars(self.rank.ending()) if gone else None

    @property
    def leaving(self) -> int | None:
        """Exit code with which the rank is about to end well; None until it has reported one."""
        return self.report.code if self.report is not None and self.report.code in ENDED_WELL else None

    def end_rank(self, text: str, code: int = 1) -> None:
        """Tell the rank to end with an exit code, and kill it where it does not."""
        self.to_rank.send(end=text, code=code)
        self.kill_at = time.monotonic() + (0.0 if self.rank.is_stopped() else KILL_AFTER)
        self.over_at = time.monotonic() + KILL_AFTER + LINGER

    def end_without_coordinator(self) -> None:
        """End the rank because rank 0, and with it the coordinator, is lost."""
        cause = SILENT.format(self.settings.timeout) if self.lines.open else GONE
        where = f"rank 0 on host {self.settings.coordinator_host}"
        text = f"error: {where}: {cause}. The ranks on host {self.host} end with it. {RESUME}"
        if self.settings.reports:
            write_log(text)
        self.end_rank(text)


def main() -> None:
    """Watch a rank until it has ended and the others know."""
    for name in IGNORED:
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    with open(0, "rb", buffering=0, closefd=False) as stdin:  # unbuffered: later lines are for `JsonLines`
        settings = Settings(**json.loads(stdin.readline()))
    with contextlib.suppress(ProcessLookupError):
        RankMonitor(settings).run()


if __name__ == "__main__":
    main()
