"""Receive the phases that a command's processes report, and read the kernel's high-water marks.

A process waits at the begin and at the end of a phase (see ``weighin.phase_reporter``) until
weighin has read the process's peak RSS and the peak of the command's cgroup. At the begin of a phase,
weighin also resets the two peaks.
"""

import selectors
import socket
import struct
import threading
from pathlib import Path
from typing import Final

import msgspec

from weighin.phase_reporter import address
from weighin.probes.cgroup import MemoryCgroup, PeakMark, start_time
from weighin.program_phases import VARIABLE
from weighin.protocol import ACKNOWLEDGEMENT
from weighin.result import Phase, Track
from weighin.run.program_track import Begin, End, ProcessTrack

_SOCKET: Final = "phases"
_LONGEST_MESSAGE: Final = 8192
_MOST_CONNECTIONS: Final = 512
_INTERVAL_S: Final = 0.02  # between two readings of a process in a phase, which may die inside it
_CREDENTIALS: Final = struct.Struct("3i")  # pid, user, group: struct ucred


class PhaseListener:
    """Listens at a socket in ``folder``, from ``watch`` until ``close``.

    The first process that begins a phase is the main process, and only its phases have the peaks of
    the command's cgroup. A process that begins a phase earlier waits until ``watch`` is called.

    Attributes:
        folder: the folder that contains the socket. A container must mount it at the same path.
        peak_bytes: the highest of all readings of the cgroup's peak, because on cgroup v1 each
            phase resets the kernel's peak for all readers. The value is final after ``close``.
        warnings: texts about figures of phases that are missing or not exact; empty until
            ``close``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.warnings: tuple[str, ...] = ()
        self._path = folder / _SOCKET
        self._server = _listening(self._path)
        self._woken, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._thread: threading.Thread | None = None
        self._group: PeakMark | None = None
        self._tracks: dict[tuple[int, int], ProcessTrack] = {}
        self._by_connection: dict[socket.socket, ProcessTrack] = {}

    @property
    def environment(self) -> dict[str, str]:
        """The environment variable that names the socket to the command's processes."""
        return {VARIABLE: str(self._path)}

    @property
    def peak_bytes(self) -> int | None:
        return self._group.highest_bytes if self._group else None

    @property
    def highest_rss_bytes(self) -> dict[int, int]:
        """The highest RSS of each process that began a phase, by pid; each phase resets VmHWM."""
        return {pid: track.highest_rss_bytes for (pid, _), track in self._tracks.items()}

    @property
    def last_phase(self) -> str | None:
        """The phase in which the command's main process ended; None if it ended outside all phases."""
        main = next(iter(self._tracks.values()), None)
        return main.died_in if main else None

    def watch(self, cgroup: MemoryCgroup | None) -> None:
        """Start the thread that answers the phase messages of the command's processes (``cgroup``)."""
        if cgroup:
            self._group = PeakMark(cgroup)
        self._thread = threading.Thread(target=self._listen, name="weighin phases", daemon=True)
        self._thread.start()

    def close(self) -> tuple[tuple[Phase, ...], tuple[Track, ...]]:
        """Stop listening; return the phases of the command's main process, and those of each other
        process.

        Phases are sorted by their begin. A phase that is still open ends now; if its process has
        ended, the phase ends at the process's last reading. Call ``close`` before the cgroup is
        removed.
        """
        if self._server.fileno() >= 0:
            self._stop()
        tracks = [Track(pid, track.phases) for (pid, _), track in self._tracks.items()]
        return (tracks[0].phases if tracks else ()), tuple(tracks[1:])

    def _stop(self) -> None:
        if self._thread:
            self._wake.send(b"\0")
            self._thread.join()
        for each in (*self._by_connection, self._server, self._woken, self._wake):
            each.close()
        self._selector.close()
        self._path.unlink(missing_ok=True)
        for track in self._tracks.values():
            track.close()
        if self._group:
            self._group.read()
            self._group.close()
        self.warnings = tuple(text for track in self._tracks.values() for text in track.warnings)

    def _listen(self) -> None:
        self._selector.register(self._server, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        while True:
            is_in_phase = any(track.is_in_phase for track in self._tracks.values())
            ready = self._selector.select(_INTERVAL_S if is_in_phase else None)
            for key, _ in ready:
                if key.fileobj is self._woken:
                    return
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj is self._server:
                    self._accept()
                else:
                    self._receive(key.fileobj)
            for track in self._tracks.values():
                track.sample()

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:  # the process ended while it waited, or this process has no free descriptor
            return
        size = _CREDENTIALS.size
        pid, _, _ = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        )
        ticks = _start_time(pid)
        if ticks is None or len(self._by_connection) >= _MOST_CONNECTIONS:
            connection.close()
            return
        connection.setblocking(False)
        is_main = not self._tracks
        track = self._tracks.setdefault(
            (pid, ticks), ProcessTrack(pid, self._group if is_main else None)
        )
        self._by_connection[connection] = track
        self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, connection: socket.socket) -> None:
        try:
            message = connection.recv(_LONGEST_MESSAGE)
            # Any process of the command can write to the socket.
            self._by_connection[connection].take(msgspec.json.decode(message, type=Begin | End))
            connection.send(ACKNOWLEDGEMENT, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
            pass
        else:
            return
        self._selector.unregister(connection)
        del self._by_connection[connection]
        connection.close()


def _start_time(pid: int) -> int | None:
    try:
        return start_time(pid) if pid else None  # 0 stands for a process of another pid namespace
    except OSError:  # /proc hides other users' processes
        return None


def _listening(path: Path) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with address(str(path)) as place:
            server.bind(place)
        server.listen(4096)  # the most processes that may connect before ``watch``
        server.setblocking(False)
    except BaseException:
        server.close()
        raise
    return server
