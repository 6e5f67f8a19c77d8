"""A small process beside each rank that knows how the rank ends, and tells the other ranks: started by finetune.rank_monitor.client.

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
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # As the last one: no file of this project can pass for a part of the standard library.
    sys.path.append(str(Path(__file__).parents[2]))

from finetune.rank_monitor.membership import (
    BEAT,
    ENDED_WELL,
    LEAVING_TOGETHER,
    LINE_LIMIT,
    SILENT,
    STOPPED,
    Lines,
    Member,
    message,
    verdict,
)

KILL_AFTER = 10.0
"""Seconds that a rank has to end of its own accord once it is told to."""
LINGER = 5.0
PAUSED = 5.0
"""A gap in the witness's own running (a suspended machine or job) from which on all silence is counted anew."""
STRANGERS, STRANGER_SECONDS, STRANGER_BYTES = 64, 5.0, 1 << 10
"""What is granted to those that connect and have not said the token: how many beyond the number of ranks, how long, how long a line."""
GONE = "its process and the witness beside it are gone"

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


class Witness:
    """What all witnesses do: look at the rank, take its words, end it."""

    def __init__(self, settings: Settings):
        self.settings, self.rank, self.host = settings, Rank(settings.pid), socket.gethostname()
        self.words = Lines(0, 1)
        self.left: dict[str, Any] | None = None
        self.beat_at = 0.0
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
            self.beat_at = 0.0  # the hub is to know it now
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

    @property
    def leaving(self) -> int | None:
        """Exit code with which the rank is about to end well; None as long as it has not said so."""
        return self.left["code"] if self.left is not None and self.left["code"] in ENDED_WELL else None

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
        self.server = socket.create_server(
            ("", 0), family=family, dualstack_ipv6=dual, backlog=settings.world + STRANGERS
        )
        self.server.setblocking(False)
        self.selector.register(self.server, selectors.EVENT_READ, self.accept)
        self.own = Member(settings.rank, self.host, settings.pid, time.monotonic())
        self.members = {settings.rank: self.own}
        self.strangers: dict[socket.socket, float] = {}
        self.judged = False
        self.words.send(port=self.server.getsockname()[1])

    def run(self) -> None:
        """Until the run is over, or all that could be told are told."""
        while self.turned < self.over_at and not self.is_done():
            now, paused = self.turn()
            if paused:
                for member in self.members.values():
                    member.heard, member.stopped = now, None
                self.strangers = dict.fromkeys(self.strangers, now)
            self.look_at_own(now)
            self.send_strangers_away(now)
            if now >= self.beat_at:
                self.beat_at = now + BEAT
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
            if self.judged:  # before it ended, for it was about to
                self.over_at = min(self.over_at, now + KILL_AFTER + LINGER)
        elif self.own.ended is None:
            self.own.note(now, stopped=self.rank.is_stopped(), leaving=self.leaving)

    def accept(self) -> None:
        """Whoever connects has to know the token; nobody else is heard."""
        with contextlib.suppress(OSError):
            connection, _ = self.server.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            lines = Lines(connection.fileno(), connection.fileno(), STRANGER_BYTES)
            known: list[Member] = []
            self.strangers[connection] = time.monotonic()
            self.selector.register(connection, selectors.EVENT_READ, lambda: self.hear(connection, lines, known))

    def send_strangers_away(self, now: float) -> None:
        """Those who have not said the token in time, and the oldest where there are too many."""
        too_many = len(self.strangers) - self.settings.world - STRANGERS
        for number, (connection, since) in enumerate(list(self.strangers.items())):
            if number < too_many or now - since > STRANGER_SECONDS:
                self.hang_up(connection)

    def hang_up(self, connection: socket.socket) -> None:
        """Ends a connection."""
        self.strangers.pop(connection, None)
        self.forget(connection)
        connection.close()

    def hear(self, connection: socket.socket, lines: Lines, known: list[Member]) -> None:
        """Lines of the witness behind a connection; `known` holds its rank once it has said who it is."""
        now = time.monotonic()
        for line in lines.read():
            if known:
                known[0].note(now, **line)
            elif line.get("token") == self.settings.token:
                known.append(Member(line["rank"], line["host"], line["pid"], now, lines))
                self.members[line["rank"]] = known[0]
                lines.limit = LINE_LIMIT
                del self.strangers[connection]
            else:
                lines.open = False
                break
        if not lines.open:
            if known:
                known[0].lines = None
                if known[0].ended is None:
                    known[0].note(now, ended={"code": known[0].leaving, "cause": GONE, "said": False})
            self.hang_up(connection)

    def judge(self, now: float) -> None:
        """Where a rank is lost, ends all others but those about to end well, with one message in the log of each host."""
        members = sorted(self.members.values(), key=lambda m: -m.rank)
        found = verdict(members, self.settings.timeout, now)
        if found is None:
            return
        self.judged, text = True, message(*found)
        code = STOPPED if all(m.code == STOPPED for m in found[0]) else 1
        say(text)
        speakers = {
            m.host: m.rank for m in members if m.lines is not None and m.leaving is None
        }  # the lowest of each host
        for member in members:
            if member.lines is not None and member.leaving is None:
                member.lines.send(
                    end=text, code=code, say=member.host != self.host and speakers[member.host] == member.rank
                )
        if self.own.leaving is None:
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
        heard, ended, over = time.monotonic(), False, False
        while self.turned < self.over_at and not over:
            now, paused = self.turn()
            end = None if ended else self.look()
            if end is not None:
                ended = True
                self.hub.send(ended=end)
                # After a loss the hub may still have a word for the log of this host.
                self.over_at = now if end["code"] in ENDED_WELL else min(self.over_at, now + LEAVING_TOGETHER + LINGER)
            elif now >= self.beat_at and not ended:
                self.beat_at = now + BEAT
                self.hub.send(stopped=self.rank.is_stopped(), leaving=self.leaving)
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
                if self.leaving is None:
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
