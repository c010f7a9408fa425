"""Listen to what is measured (``weighin.phase_reporter``): phases and their peaks, and what a worker tells of a load.
A wrong message is refused, because any process of a command, and any strategy, could send one.
"""

import json
import re
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from msgspec import Struct, convert

from weighin.files import parse_json
from weighin.phase_reporter import AWAITED, LONGEST_MESSAGE, MET, SOCKET, address, read_figures
from weighin.probes.cgroup import Counters, grown, start_time
from weighin.records.metrics import largest
from weighin.result import Memory, Outcome, Phase, Written, phases_of
from weighin.text import one_line
from weighin.worker.phases import named_by_strategy

_CREDENTIALS: Final = struct.Struct("3i")  # pid, user, group: struct ucred
_LONGEST_TEXT: Final = 1000  # characters; an error's message has its file and line
_LARGEST: Final = 2**63 - 1  # the range of a counter of the kernel, and of a record
_MOST_PHASES: Final = 1000  # of one program, because a training loop may have millions


class End(Struct, forbid_unknown_fields=True):
    """The end of a program's phase, with what its process read of itself."""

    id: int
    t_ns: int
    faults: tuple[int, int]
    peak_rss_bytes: int
    memory: Memory


class Begin(End, forbid_unknown_fields=True):
    name: str
    resets: bool  # False if the process could not reset its mark


class Ended(Struct, forbid_unknown_fields=True):
    """How a rank ended, told by the process that started it."""

    rank: int
    code: int | None
    signal: int | None
    stderr_tail: str


class Told(Struct, forbid_unknown_fields=True):
    """What a worker tells of itself and its load, a part at a time; lists grow by each part."""

    rank: int | None = None  # its number, if it loads a model with others; in its first message
    phase: str = ""  # which begins; its end is a message of its own
    notes: list[str] = []
    # Before the load:
    baseline: Memory | None = None
    baseline_ns: int = 0  # when it was read
    import_ns: int | None = None
    environment: dict[str, Any] = {}
    # The load, which is ready when every byte was read, or of a save, is on the disk:
    load_ns: int | None = None  # without the time spent between phases
    ready_at_ns: int | None = None
    touch_ns: int | None = None  # from the load's end until it is ready
    written: Written | None = None
    pss_bytes: int | None = None  # of a rank, when all are ready
    points: list[tuple[int, int, int]] = []  # time, CUDA bytes of its allocator, and of the driver
    # After the load:
    gradients: str = ""
    children_private_bytes: tuple[int, ...] = ()
    first_use_ns: int | None = None
    marks_ns: int | None = None  # spent between phases; the last thing that a good load tells
    outcome: Outcome | None = None  # of a failed one
    message: str = ""
    summary: str = ""  # of the allocator, if GPU memory ran out


Message = Begin | End | Phase | Ended | Told
_KINDS: Final[dict[str, type]] = {
    **{"begin": Begin, "end": End, "phase": Phase, "ended": Ended},
    **dict.fromkeys(("told", *MET), Told),
}


def decode(packet: bytes) -> tuple[str, Message | None]:
    """Return a message's kind and content, with texts of one printable line; None as the content of a wrong one."""
    kind = ""
    try:
        fields = parse_json(packet)
        kind = fields.pop("event")
        for name in ("name", "phase", "message"):
            if isinstance(text := fields.get(name), str):
                fields[name] = one_line(text, _LONGEST_TEXT)
        json.dumps(fields, ensure_ascii=False).encode()  # fails for a lone surrogate
        message: Message = convert(fields, _KINDS[kind])
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return str(kind), None
    if isinstance(message, Told):
        message.notes = [one_line(note, _LONGEST_TEXT) for note in message.notes]
    is_valid = all(0 <= number <= _LARGEST for number in _integers(fields))  # a record can hold it
    return kind, message if is_valid else None


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _integers(each)


@dataclass(slots=True)
class _Open:
    """A program's phase that has not ended; its peaks are the largest readings since it began."""

    begun: Begin
    before: Counters
    peak_rss_bytes: int = 0
    peak_cgroup_bytes: int | None = None


@dataclass(slots=True, eq=False)
class Reported:
    """What one process has reported: a worker's phases, which it measures itself, or a program's, which may overlap."""

    pid: int = 0  # of a rank that has not reported anything
    told: Told = field(default_factory=Told)
    current: str | None = None  # the phase of a worker that began last
    stderr_tail: str = ""
    highest_rss_bytes: int = 0
    died_in: str | None = None
    before: Counters = field(default_factory=Counters)  # at the end of a worker's last phase
    open: dict[int, _Open] = field(default_factory=dict)  # a program's phases, by number
    _phases: list[Phase] = field(default_factory=list)
    _in_phase: bool = False
    _last: End | None = None  # reading of a program's process

    @property
    def phases(self) -> tuple[Phase, ...]:
        return tuple(sorted(self._phases, key=lambda phase: (phase.start_ns, -phase.end_ns)))

    @property
    def where(self) -> str:
        """Where a worker is, in words: "in phase 'read'", "after phase 'read'", "before its first phase"."""
        if self.current is None:
            return "before its first phase"
        return f"{'in' if self._in_phase else 'after'} phase {self.current!r}"

    @property
    def is_done(self) -> bool:
        return self.told.marks_ns is not None

    @property
    def load_phases(self) -> Sequence[Phase]:
        return phases_of(self._phases) if self.told.baseline else ()

    @property
    def ready_ns(self) -> int | None:
        load_ns, touch_ns = self.told.load_ns, self.told.touch_ns
        return None if load_ns is None or touch_ns is None else load_ns + touch_ns

    def note(self, text: str) -> None:
        """Keep a warning for the record, once, such as that figures are missing or not exact."""
        if text not in self.told.notes:
            self.told.notes.append(text)

    def take(self, part: Told) -> None:
        unset = Told()
        for name in part.__struct_fields__:
            value = getattr(part, name)
            if isinstance(value, list):
                getattr(self.told, name).extend(value)
            elif value != getattr(unset, name):
                setattr(self.told, name, value)
        if part.phase:
            self.current, self._in_phase = part.phase, True

    def add(self, phase: Phase, now: Counters) -> None:
        """Add a worker's phase, which has ended."""
        self._phases.append(
            replace(
                phase,
                end=replace(phase.end, cgroup_bytes=now.usage_bytes),
                peak_cgroup_bytes=now.peak_bytes,
                workingset_refault_file=grown(self.before.refaults, now.refaults),
            )
        )
        self.before, self._in_phase = now, False

    def begin(self, begun: Begin, now: Counters) -> None:
        """Begin a program's phase, by a name that is valid and not that of a phase of weighin."""
        if not begun.resets:
            self.note(
                "a process could not reset its peak RSS (clear_refs): its phases have the peak since its start"
            )
        if before := self.open.pop(begun.id, None):  # a phase from before the process called exec
            self._close(before, now)
        self._read(begun, now)
        try:
            named_by_strategy(begun.name)
        except ValueError:
            allowed = re.sub(r"[^A-Za-z0-9 _.+/()-]", "_", begun.name)
            begun.name = f"phase {allowed}"[:64].rstrip()
            self.note(
                "names of phases were changed: a name has at most 64 letters, digits, spaces and"
                " _ . + / ( ) -, and is not that of one of weighin's own phases"
            )
        begun.t_ns = time.monotonic_ns()
        self.open[begun.id] = _Open(begun, now)

    def end(self, ended: End, now: Counters) -> None:
        """End a program's phase; do nothing if the phase has not begun."""
        self._read(ended, now)
        if one := self.open.pop(ended.id, None):
            self._close(one, now)

    def sample(self) -> bool:
        """Read the figures of a process in a phase, in which it may die; return whether it lives."""
        try:
            read = read_figures(self.pid)
        except (OSError, KeyError):  # a zombie has no memory
            return False
        memory, peak_bytes = Memory(**read["memory"]), read["peak_rss_bytes"]
        self._read(End(0, time.monotonic_ns(), read["faults"], peak_bytes, memory), Counters())
        return True

    def close(self, now: Counters) -> None:
        """End the open phases of a process that has ended."""
        self.died_in = [*self.open.values()][-1].begun.name
        self.note(
            f"process {self.pid} ended inside its phase {self.died_in!r}, whose peak RSS is therefore"
            " sampled"
        )
        while self.open:
            self._close(self.open.popitem()[1], now)

    def _read(self, reading: End, now: Counters) -> None:
        self.highest_rss_bytes = max(self.highest_rss_bytes, reading.peak_rss_bytes)
        reading.memory = replace(reading.memory, cgroup_bytes=now.usage_bytes)
        self._last = reading
        for phase in self.open.values():
            phase.peak_rss_bytes = max(phase.peak_rss_bytes, reading.peak_rss_bytes)
            phase.peak_cgroup_bytes = largest((phase.peak_cgroup_bytes, now.peak_bytes))

    def _close(self, one: _Open, now: Counters) -> None:
        """Add a program's phase as it was read last."""
        if len(self._phases) >= _MOST_PHASES:
            self.note(f"a process had more than {_MOST_PHASES} phases: later ones are not recorded")
            return
        begun, last = one.begun, self._last or one.begun
        self._phases.append(
            Phase(
                name=begun.name,
                start_ns=begun.t_ns,
                end_ns=min(max(begun.t_ns, last.t_ns), time.monotonic_ns()),  # it may be invalid
                peak_rss_bytes=one.peak_rss_bytes or last.memory.rss_bytes,
                end=replace(last.memory, cgroup_bytes=last.memory.cgroup_bytes or now.usage_bytes),
                minor_faults=max(0, last.faults[0] - begun.faults[0]),  # the process sent both
                major_faults=max(0, last.faults[1] - begun.faults[1]),
                peak_cgroup_bytes=largest((one.peak_cgroup_bytes, now.peak_bytes)),
                workingset_refault_file=grown(one.before.refaults, now.refaults),
            )
        )


class Listener:
    """Listens from ``watch`` to ``close``; no rank gets an answer to a message in ``MET`` before all have sent it."""

    def __init__(self, folder: Path, ranks: int = 1) -> None:
        self.path = folder / SOCKET
        self.by_process: dict[tuple[int, int], Reported] = {}  # by pid and start time
        self.ranks = [Reported() for _ in range(ranks)]  # or the first process that connects
        self.error: BaseException | None = None  # of the function that takes the messages
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with address(str(self.path)) as place:
            self._server.bind(place)
        self._server.listen(4096)  # the most processes that may connect before ``watch``
        self._server.setblocking(False)
        self._woken, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._connections = set[socket.socket]()
        self._waiting = set[socket.socket]()  # a rank that says it twice is still one
        self._thread: threading.Thread | None = None

    def watch(
        self, take: Callable[[Reported, Message], None], counters: Callable[[Reported], Counters]
    ) -> None:
        """Start the thread that calls ``take`` with each message, and then answers it."""
        self._take, self._counters = take, counters
        thread = threading.Thread(target=self._listen, name="messages", daemon=True)
        thread.start()
        self._thread = thread  # only now, because ``close`` waits for its end

    def close(self) -> None:
        """Take the messages that were sent before now, and end all phases; a second call does nothing."""
        if self._server.fileno() < 0:
            return
        if self._thread:
            self._wake.send(b"\0")
            self._thread.join()
        # Before the cgroup is removed, whose counters are read:
        for reported in self.by_process.values():
            if reported.open:
                reported.close(self._counters(reported))
        for each in (*self._connections, self._server, self._woken, self._wake):
            each.close()
        self._selector.close()
        self.path.unlink(missing_ok=True)

    def _listen(self) -> None:
        """Take what arrives; when woken, only what had been sent until then."""
        deadline: float | None = None
        try:
            while deadline is None or time.monotonic() < deadline:
                in_phase = any(each.open for each in self.by_process.values())
                wait_s = 0.02 if in_phase else None  # its process may die inside a phase
                ready = self._selector.select(wait_s if deadline is None else 0)
                if deadline and not ready:
                    return
                for key, _ in ready:
                    if key.data:
                        key.data()
                    else:  # woken
                        self._selector.unregister(self._woken)
                        deadline = time.monotonic() + 1.0  # for what a worker sent before its end
                for each in self.by_process.values():
                    if each.open and not each.sample():
                        each.close(self._counters(each))
        except BaseException as error:  # the main thread raises it
            self.error = error

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:  # the process ended while it waited, or this process has no free descriptor
            return
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, ticks = _CREDENTIALS.unpack(peer)[0], None
        if pid:  # 0 stands for a process of another pid namespace
            with suppress(OSError):  # /proc hides other users' processes
                ticks = start_time(pid) or -1  # it has ended, and its messages wait
        if ticks is None or len(self._connections) >= 512:  # a program may open too many
            connection.close()
            return
        connection.setblocking(False)
        self._connections.add(connection)
        receive = partial(self._receive, connection, (pid, ticks))
        self._selector.register(connection, selectors.EVENT_READ, receive)
        if (pid, ticks) not in self.by_process:
            is_main = not self.by_process and len(self.ranks) == 1
            reported = self.ranks[0] if is_main else Reported()
            self.by_process[pid, ticks], reported.pid = reported, pid

    def _receive(self, connection: socket.socket, process: tuple[int, int]) -> None:
        try:
            packet = connection.recv(LONGEST_MESSAGE)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        reported, (kind, message) = self.by_process[process], decode(packet)
        meets = kind in MET and len(self.ranks) > 1
        if message is None:
            if packet:
                reported.note(
                    "a process sent a message with an impossible or unknown value, which weighin did"
                    " not take: phases may be missing"
                )
            is_worker = reported.current is not None or reported.told.baseline
            if not packet or not is_worker or meets:
                self._drop(connection)
                return
        elif isinstance(message, Told) and message.rank is not None:
            if message.rank >= len(self.ranks) or self.ranks[message.rank].pid:
                self._drop(connection)
                return
            self.by_process[process] = self.ranks[message.rank]
            self.ranks[message.rank].pid = process[0]
            return
        else:
            self._take(reported, message)
        answered = {connection} if kind in AWAITED else set()
        if meets:
            self._waiting.add(connection)
            answered = self._waiting if len(self._waiting) == len(self.ranks) else set()
        for each in [*answered]:
            self._waiting.discard(each)
            try:
                each.send(b"\n", socket.MSG_NOSIGNAL)
            except OSError:  # it has ended
                self._drop(each)

    def _drop(self, connection: socket.socket) -> None:
        if connection in self._connections:  # it may have ended while it waited for other ranks
            self._connections.remove(connection)
            self._selector.unregister(connection)
            connection.close()
