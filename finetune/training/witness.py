"""A small process beside each rank that knows how the rank ends, and tells the other ranks: started by finetune.training.ranks.

It is a process, for a rank that is killed or stopped can say nothing any more; and it needs nothing but the standard library, so that
it starts at once and holds 10 MB. The witness of rank 0 is the hub: those of the other ranks connect to it, beat once a second, and
report the end of their ranks. The hub judges, and sends all ranks one message with which they end.

Its first line on stdin are its settings (`Settings`, JSON). Later lines come from the rank: {"left": exit code, "cause": text}. Lines
on stdout go to the rank: {"port": N} from the hub, {"unwatched": reason}, and {"end": message}.
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
import sys
import time
from dataclasses import dataclass, field
from typing import Any

BEAT = 1.0
SETTLE = 0.5
"""Seconds for which another cause is awaited where a rank was ended by SIGTERM: that is how launchers end the rest."""
LEAVING_TOGETHER = 5.0
"""Seconds within which ranks that all fail for a reason of their own, such as a bad setting, are left to say so themselves."""
KILL_AFTER = 10.0
"""Seconds that a rank has to end of its own accord once it is told to."""
LINGER = 5.0
PAUSED = 5.0
"""A gap in the witness's own running (a suspended machine or job) from which on all silence is counted anew."""
LINE_LIMIT = 1 << 16
STOPPED = 75
ENDED_WELL = (0, STOPPED)
GONE = "its process and the witness beside it are gone"
SILENT = "not heard of for {:.0f} s: the machine or the network to it is down"

PIDFD_GET_INFO, PIDFD_INFO_EXIT, PIDFD_INFO_SIZE = 0xC040FF0B, 1 << 3, 64  # linux/pidfd.h, from Linux 6.15 on

HINTS = {
    signal.SIGKILL: "; the kernel sends it where memory runs out (dmesg), a scheduler at the end of the time",
    signal.SIGBUS: "; it comes where shared memory (/dev/shm) or a disk is full",
    signal.SIGSEGV: "; a library crashed",
}


@dataclass
class Settings:
    """What a witness is started with.

    Attributes:
        rank: that it stands beside.
        world: number of ranks.
        pid: of the rank's process.
        token: that ranks of this run know.
        timeout: seconds of silence after which a rank counts as lost.
        hub: address and port of rank 0's witness; None for itself.
        hub_host: its host's name.
        speaks: where rank 0 is lost, this witness says so in the log of its host.
    """

    rank: int
    world: int
    pid: int
    token: str
    timeout: float
    hub: tuple[str, int] | None = None
    hub_host: str = ""
    speaks: bool = True


@dataclass
class Member:
    """What the hub knows of a rank.

    Attributes:
        heard: when its witness was heard of last.
        stopped: since when the rank's process stands still.
        ended: when it did; None while it runs.
        code: its exit code, as a shell's; None where nobody knows.
        cause: in words.
        said: the rank said the cause itself, and ended of its own accord.
    """

    rank: int
    host: str
    pid: int
    heard: float
    lines: "Lines | None" = None
    stopped: float | None = None
    ended: float | None = None
    code: int | None = None
    cause: str = ""
    said: bool = False

    def note(self, now: float, stopped: bool = False, ended: dict[str, Any] | None = None) -> None:
        """Takes down what its witness says."""
        self.heard = now
        self.stopped = None if not stopped else self.stopped or now
        if ended is not None:
            self.ended, self.code, self.cause, self.said = now, ended["code"], ended["cause"], ended["said"]

    @property
    def name(self) -> str:
        return f"rank {self.rank} on host {self.host} (process {self.pid})"


class Lines:
    """JSON lines over a file descriptor that must never block."""

    def __init__(self, reader: int, writer: int):
        self.reader, self.writer, self.rest, self.open = reader, writer, b"", True
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)

    def read(self) -> list[dict[str, Any]]:
        """The lines that have come; sets `open` to False at the end of the file."""
        try:
            data = os.read(self.reader, LINE_LIMIT)
            self.open = bool(data)
        except BlockingIOError:
            return []
        except OSError:
            self.open = False
            return []
        *whole, self.rest = (self.rest + data).split(b"\n")
        found = []
        for line in whole:
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            if not isinstance(value, dict):
                self.open = False
                break
            found.append(value)
        if len(self.rest) > LINE_LIMIT:
            self.open = False
        return found

    def send(self, **values: Any) -> None:
        """Sends one line; what nobody takes is lost."""
        with contextlib.suppress(OSError):
            os.write(self.writer, json.dumps(values).encode() + b"\n")


@dataclass
class Rank:
    """The process that a witness stands beside."""

    pid: int
    handle: int = field(init=False)

    def __post_init__(self) -> None:
        self.handle = os.pidfd_open(self.pid)

    def is_gone(self) -> bool:
        return bool(select.select([self.handle], [], [], 0)[0])

    def is_stopped(self) -> bool:
        """By SIGSTOP or a terminal; not by a debugger."""
        return self._stat()[0] == "T"

    def _stat(self) -> list[str]:
        try:
            with open(f"/proc/{self.pid}/stat", encoding="utf-8", errors="replace") as file:
                return file.read().rpartition(")")[2].split()
        except OSError:
            return [""]

    def wait_status(self) -> int | None:
        """As of wait(2): while nobody has collected it from /proc, afterwards from the kernel where it keeps it (Linux 6.15)."""
        fields = self._stat()
        if fields[0] == "Z":
            return int(fields[-1])
        info = bytearray(struct.pack("Q", PIDFD_INFO_EXIT).ljust(PIDFD_INFO_SIZE, b"\0"))
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.handle, PIDFD_GET_INFO, info)
            if struct.unpack_from("Q", info)[0] & PIDFD_INFO_EXIT:
                return struct.unpack_from("i", info, PIDFD_INFO_SIZE - 4)[0]
        return None

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)


def cause_of(status: int | None) -> tuple[int | None, str]:
    """Exit code (as a shell's) and words for a wait status."""
    if status is None:
        return None, "ended without a word; the lines of its launcher say how"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name if number in list(signal.Signals) else "a real-time signal"
        return 128 + number, f"killed by signal {number} ({name}){HINTS.get(number, '')}"
    code = os.waitstatus_to_exitcode(status)
    return code, f"exit code {code}, without a word"


def verdict(members: list[Member], timeout: float, now: float) -> tuple[list[Member], str] | None:
    """The ranks that are lost, and why; None while there are none, or where all ended of their own accord.

    Args:
        members: all that have joined.
        timeout: seconds of silence or standing still.
        now: of the same clock as theirs.
    """
    present = [m for m in members if m.ended is None]
    failed = sorted((m for m in members if m.ended is not None and m.code not in ENDED_WELL), key=lambda m: m.ended)
    if failed:
        # A launcher ends the other ranks with SIGTERM, which is no cause where there is another.
        first = next((m for m in failed if m.code != 128 + signal.SIGTERM), failed[0])
        ended_by_launcher = first.code == 128 + signal.SIGTERM
        wait = LEAVING_TOGETHER if first.said and present else SETTLE if ended_by_launcher else 0.0
        settled = now - failed[0].ended >= wait
        alike = not present and all(m.said or m.code in ENDED_WELL for m in members)
        return ([first], first.cause) if settled and not alike else None
    asked = [m for m in members if m.ended is not None and m.code == STOPPED]
    if asked and present and now - min(m.ended for m in asked) > LEAVING_TOGETHER:
        return asked, "asked to stop by a signal while no step was being made"
    if any(now - m.heard > timeout for m in present):
        lost = [m for m in present if now - m.heard > timeout - 3 * BEAT]
        return lost, SILENT.format(timeout)
    stopped = [m for m in present if m.stopped is not None and now - m.stopped > timeout]
    if stopped and any(m.stopped is None for m in present):
        return stopped, f"stopped (SIGSTOP) for {timeout:.0f} s while others ran"
    return None


def message(lost: list[Member], cause: str) -> str:
    """What the user reads."""
    names = ", ".join(m.name for m in sorted(lost, key=lambda m: m.rank))
    if all(m.code == STOPPED for m in lost):
        return f"stopped: {names}: {cause}. The other ranks end with it; the last checkpoint counts."
    return f"error: {names}: {cause}. The other ranks end with it. training.resume_from_checkpoint=true continues from the last checkpoint."


class Witness:
    """What all witnesses do: look at the rank, take its words, end it."""

    def __init__(self, settings: Settings):
        self.settings, self.rank, self.host = settings, Rank(settings.pid), socket.gethostname()
        self.words = Lines(0, 1)
        self.left: dict[str, Any] | None = None
        self.kill_at = self.over_at = float("inf")
        self.turned = time.monotonic()
        self.selector = selectors.DefaultSelector()
        for source in (0, self.rank.handle):
            self.selector.register(source, selectors.EVENT_READ)

    def turn(self) -> tuple[float, bool]:
        """Waits until there is something to do, half a beat at most; the time, and whether this process itself stood still."""
        for key, _ in self.selector.select(BEAT / 2):
            if key.data is not None:
                key.data()
        before, self.turned = self.turned, time.monotonic()
        if self.turned > self.kill_at:
            self.rank.kill()
        return self.turned, self.turned - before > PAUSED

    def forget(self, source: Any) -> None:
        """Waits for a source no more."""
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(source)

    def look(self) -> dict[str, Any] | None:
        """How the rank ended; None while it runs, or is about to end well."""
        for word in self.words.read():
            self.left = {"code": word["left"], "cause": word["cause"], "said": True}
        if not self.words.open:
            self.forget(0)
        gone = self.rank.is_gone()
        if gone:
            self.forget(self.rank.handle)
        if self.left is not None and (gone or self.left["code"] not in ENDED_WELL):
            return self.left
        if not gone:
            return None
        code, cause = cause_of(self.rank.wait_status())
        return {"code": code, "cause": cause, "said": False}

    def end_rank(self, text: str, code: int = 1) -> None:
        """Has the rank end itself with an exit code, and kills it where it does not."""
        self.words.send(end=text, code=code)
        self.kill_at = time.monotonic() + (0.0 if self.rank.is_stopped() else KILL_AFTER)
        self.over_at = time.monotonic() + KILL_AFTER + LINGER


def say(text: str) -> None:
    """To the run's own log, which the rank shares with its witness."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


class Hub(Witness):
    """The witness of rank 0."""

    def __init__(self, settings: Settings):
        super().__init__(settings)
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self.server = socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=settings.world)
        self.server.setblocking(False)
        self.selector.register(self.server, selectors.EVENT_READ, self.accept)
        self.own = Member(settings.rank, self.host, settings.pid, time.monotonic())
        self.members = {settings.rank: self.own}
        self.judged = False
        self.words.send(port=self.server.getsockname()[1])

    def run(self) -> None:
        """Until the run is over, or all that could be told are told."""
        beat_at = 0.0
        while self.turned < self.over_at and not self.is_done():
            now, paused = self.turn()
            if paused:
                for member in self.members.values():
                    member.heard, member.stopped = now, None
            self.look_at_own(now)
            if now >= beat_at:
                beat_at = now + BEAT
                self.send_all(beat=1)
            if not self.judged:
                self.judge(now)

    def send_all(self, **values: Any) -> None:
        """One line to each of the other witnesses."""
        for member in self.members.values():
            if member.lines is not None:
                member.lines.send(**values)

    def look_at_own(self, now: float) -> None:
        """The own rank, as the other witnesses look at theirs."""
        self.own.heard = now
        end = self.look() if self.own.ended is None else None
        if end is not None:
            self.own.note(now, ended=end)
        elif self.own.ended is None:
            self.own.note(now, stopped=self.rank.is_stopped())

    def accept(self) -> None:
        """Whoever connects has to know the token; nobody else is heard."""
        with contextlib.suppress(OSError):
            connection, _ = self.server.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            lines = Lines(connection.fileno(), connection.fileno())
            known: list[Member] = []
            self.selector.register(connection, selectors.EVENT_READ, lambda: self.hear(connection, lines, known))

    def hear(self, connection: socket.socket, lines: Lines, known: list[Member]) -> None:
        """Lines of the witness behind a connection; `known` holds its rank once it has said who it is."""
        now = time.monotonic()
        for line in lines.read():
            if known:
                known[0].note(now, **line)
            elif line.get("token") == self.settings.token:
                known.append(Member(line["rank"], line["host"], line["pid"], now, lines))
                self.members[line["rank"]] = known[0]
            else:
                lines.open = False
                break
        if not lines.open:
            if known:
                known[0].lines = None
                if known[0].ended is None:
                    known[0].note(now, ended={"code": None, "cause": GONE, "said": False})
            self.forget(connection)
            connection.close()

    def judge(self, now: float) -> None:
        """Where a rank is lost, ends all others, with one message in the log of each host."""
        members = sorted(self.members.values(), key=lambda m: -m.rank)
        found = verdict(members, self.settings.timeout, now)
        if found is None:
            return
        self.judged, text = True, message(*found)
        code = STOPPED if all(m.code == STOPPED for m in found[0]) else 1
        say(text)
        speakers = {m.host: m.rank for m in members if m.lines is not None}  # the lowest of each host
        for member in members:
            if member.lines is not None:
                member.lines.send(
                    end=text, code=code, say=member.host != self.host and speakers[member.host] == member.rank
                )
        self.end_rank(text, code)

    def is_done(self) -> bool:
        """Whether there is nothing left to tell."""
        members = self.members.values()
        if self.own.ended is None:
            return False
        if not self.judged and self.own.code in ENDED_WELL:
            if self.own.code == STOPPED and any(m.ended is None for m in members):
                return False  # `judge` looks after those that wait for a rank that was stopped
            self.send_all(over=1)
            return True
        if not self.judged:
            return all(m.ended is not None and (m.said or m.code in ENDED_WELL) for m in members)
        return all(m.lines is None for m in members)


class Client(Witness):
    """The witness of any other rank."""

    def __init__(self, settings: Settings):
        super().__init__(settings)
        connection = self.connect()
        self.hub = Lines(connection.fileno(), connection.fileno())
        self.selector.register(connection, selectors.EVENT_READ)
        self.connection = connection
        self.hub.send(token=settings.token, rank=settings.rank, host=self.host, pid=settings.pid)
        self.turned = time.monotonic()

    def connect(self) -> socket.socket:
        """Tries for as long as a rank may be silent."""
        assert self.settings.hub is not None
        deadline = time.monotonic() + self.settings.timeout
        while True:
            try:
                connection = socket.create_connection(self.settings.hub, timeout=5.0)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return connection
            except OSError as error:
                if time.monotonic() > deadline or self.rank.is_gone():
                    address, port = self.settings.hub
                    self.words.send(unwatched=f"{address}, port {port} cannot be reached: {error}")
                    raise SystemExit(0) from error
            time.sleep(BEAT / 2)

    def run(self) -> None:
        """Until the own rank has ended and the hub knows, or the hub has nothing more to say."""
        heard, beat_at, ended, over = time.monotonic(), 0.0, False, False
        while self.turned < self.over_at and not over:
            now, paused = self.turn()
            end = None if ended else self.look()
            if end is not None:
                ended = True
                self.hub.send(ended=end)
                # After a loss the hub may still have a word for the log of this host.
                self.over_at = now if end["code"] in ENDED_WELL else min(self.over_at, now + LEAVING_TOGETHER + LINGER)
            elif now >= beat_at and not ended:
                beat_at = now + BEAT
                self.hub.send(stopped=self.rank.is_stopped())
            for line in self.hub.read():
                heard = now
                over = over or "over" in line
                if "end" in line:
                    if line["say"]:
                        say(line["end"])
                    self.end_rank(line["end"], line["code"])
            heard = now if paused else heard
            if not self.hub.open:
                self.forget(self.connection)
            if ended and self.kill_at < now + KILL_AFTER:
                over = over or self.rank.is_gone()
            elif (
                not over
                and self.kill_at == float("inf")
                and (not self.hub.open or now - heard > self.settings.timeout)
            ):
                if ended:
                    return
                self.end_without_hub()

    def end_without_hub(self) -> None:
        """Rank 0, and with it the one that would have judged, is lost."""
        s = self.settings
        why = SILENT.format(s.timeout) if self.hub.open else GONE
        text = (
            f"error: rank 0 on host {s.hub_host}: {why}. The ranks on host {self.host} end with it. "
            "training.resume_from_checkpoint=true continues from the last checkpoint."
        )
        if s.speaks:
            say(text)
        self.end_rank(text)


def main() -> None:
    """Stands beside a rank until it has ended and the others know."""
    for number in (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGPIPE,
    ):
        signal.signal(number, signal.SIG_IGN)
    values = json.loads(sys.stdin.buffer.raw.readline())  # type: ignore[attr-defined]
    settings = Settings(**{**values, "hub": tuple(values["hub"]) if values["hub"] else None})
    with contextlib.suppress(ProcessLookupError):
        (Client if settings.hub else Hub)(settings).run()


if __name__ == "__main__":
    main()
