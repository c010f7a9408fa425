"""Mount a folder a second time through FUSE, read-only, with the rate and the latency of a slower disk.

The answer to a request is due after the time of its bytes at the rate, plus the latency. All requests
share the rate, but their latencies pass at the same time. FUSE divides a read into requests of at most
128 KiB. The real files are read with direct reads, so that they do not fill the page cache; the mounted
files have one as on any disk.

``Mount`` starts this module as a program. It reports when the folder is mounted, answers each event of
its parent with the reads that still wait, and unmounts the folder when its parent ends.
"""

import contextlib
import ctypes
import errno
import itertools
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from ctypes.util import find_library
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from mmap import MAP_PRIVATE, PAGESIZE, mmap
from pathlib import Path
from typing import Any, Final

from weighin import child_process, install
from weighin.child_process import Parent, last_line
from weighin.errors import IsolationUnavailable
from weighin.probes import mounts
from weighin.probes.cgroup import is_left_behind, owned_name
from weighin.units import KIB, format_latency, format_rate, format_seconds

LARGEST_READ_BYTES: Final = 128 * KIB  # of one request in libfuse 2
_DEVICE: Final = Path("/dev/fuse")
_SUBTYPE: Final = "weighin"
_START_S: Final = 20.0
_ANSWER_S: Final = 2.0
_LONG_NS: Final = 500_000_000  # a read stalls if it exceeds the latency by this time
_LEAD_NS: Final = 90_000  # the measured time of a 4 KiB read through FUSE without rate and latency
# The most concurrent read-ahead requests; the kernel's default of 12 would limit the rate.
_BACKGROUND: Final = 64
_NO_SLACK_NS: Final = 1  # by default, Linux may wake a sleeping thread 50 us late
_PRIORITY: Final = -15
_PR_SET_TIMERSLACK: Final = 29
_FIELDS: Final = ("mode", "nlink", "size", "uid", "gid", "blocks")
_TIMES: Final = ("mtime", "ctime", "atime")
_CACHED_S: Final = 3600  # the files do not change while a cell runs
_CONNECTIONS: Final = Path("/sys/fs/fuse/connections")
_MNT_FORCE: Final = 1  # linux/fs.h; FUSE then fails every request that waits
_MNT_DETACH: Final = 2
_libc = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Pace:
    """The speed of a disk; None leaves that of the real disk. A read that ends behind the file offset
    ``stall_from_bytes`` is never answered.
    """

    bytes_per_s: int | None = None
    latency_ns: int | None = None
    stall_from_bytes: int | None = None

    def __bool__(self) -> bool:
        return self != Pace()

    def __str__(self) -> str:
        rate = format_rate(self.bytes_per_s) if self.bytes_per_s else ""
        latency = format_latency(self.latency_ns) if self.latency_ns else ""
        return ", ".join(filter(None, (rate, latency)))


class Mount:
    """A mount of a folder at ``folder``, served by ``pid``, whose files can be read."""

    def __init__(self, source: Path, pace: Pace, root: Path) -> None:
        self._source, self._pace = source.absolute(), pace
        name = owned_name(next(_numbers))
        self.folder = root / name / self._source.name
        # Mode 0700: a parent folder of ``source`` may keep other users out, but not from this mount.
        self.folder.parent.mkdir(mode=0o700, parents=True)
        self.folder.mkdir()
        command = child_process.module("weighin.slow_disk")
        self._child = child_process.Child(command, child_process.environment())
        self.pid = self._child.pid
        places = {"source": str(self._source), "folder": str(self.folder)}
        self._child.send("mount", name=name, **places, pace=asdict(pace))
        self._device: int | None = None
        is_mounted = False
        try:
            with contextlib.suppress(TimeoutError):
                is_mounted = self._child.receive(_START_S) is not None
        finally:
            if not is_mounted:
                self.close()
        if not is_mounted:
            raise IsolationUnavailable(
                f"FUSE could not mount {self._source} a second time:"
                f" {last_line(self._child.printed) or 'no answer'}",
                "weighin doctor tests whether FUSE works on this machine",
            )
        # From mountinfo, because a stat could wait forever.
        found = (one.minor for one in mounts.read() if one.place == self.folder)
        self._device = next(found, None)

    def waiting(self) -> list[tuple[str, int, int]]:
        """Return path, offset and arrival (monotonic ns) of each unanswered read, the oldest first."""
        self._child.send("waiting")
        event: dict[str, Any] = {}
        with contextlib.suppress(TimeoutError):
            event = self._child.receive(_ANSWER_S) or {}
        return list(map(tuple, event.get("reads", ())))

    def stalled(self) -> str:
        """Describe the oldest read without an answer, if it is late by 0.5 s; empty if none is."""
        for path, offset, arrival_ns in self.waiting()[:1]:
            waited_ns = time.monotonic_ns() - arrival_ns
            if waited_ns > (self._pace.latency_ns or 0) + _LONG_NS:
                read = f"the read of {self._source / path.lstrip('/')} at offset {offset}"
                return f"{read} has had no answer for {format_seconds(waited_ns)}"
        return ""

    def close(self) -> None:
        """Make waiting reads fail, unmount, and end the FUSE process; a second call has no effect."""
        if not self.folder.parent.exists():
            return
        _unmount(self.folder, self._device)
        with contextlib.suppress(TimeoutError):  # the process still waits for the real disk
            self._child.close()
        _remove(self.folder.parent)


def check(*, in_container: bool) -> None:
    """Raise IsolationUnavailable if a slow disk (``in_container``: read by one) does not work here."""
    why, repair = "", "apt-get install fuse"
    if find_spec("mfusepy") is None:
        why, repair = "mfusepy is not installed", install.command("disk")
    elif find_library("fuse") is None:
        why, repair = "libfuse 2 is not installed", "apt-get install libfuse2"
    elif os.geteuid() and not _fusermount():
        why = "fusermount is not installed"
    else:
        try:
            os.close(os.open(_DEVICE, os.O_RDWR))
        except OSError as error:
            why, repair = f"{_DEVICE}: {error.strerror}", "modprobe fuse; in a container, start it"
            repair += " with --device /dev/fuse --cap-add SYS_ADMIN"
            if isinstance(error, PermissionError) and os.geteuid():
                repair = "run weighin as root"
        if not why and in_container and not _may_allow_others():
            why = "the user of a container may not read this user's FUSE file systems"
            repair = "write user_allow_other into /etc/fuse.conf, or use --isolation cgroup"
    if why:
        message = f"weighin slows a disk down with FUSE, which does not work here: {why}"
        raise IsolationUnavailable(message, repair)


def remove_stale(root: Path) -> list[str]:
    """Remove the mounts, and their folders in ``root``, of killed runs; return a line for each mount."""
    removed = []
    for one in mounts.read():
        is_ours = one.kind == f"fuse.{_SUBTYPE}" and re.fullmatch(r"\d+-\d+-\d+\.\S+", one.source)
        if is_ours and is_left_behind(one.source):
            _unmount(one.place, one.minor)
            _remove(one.place.parent)
            removed.append(f"slow disk at {one.place}")
    for folder in sorted(root.glob("*")):
        if is_left_behind(folder.name):
            _remove(folder)
    return removed


def _remove(folder: Path) -> None:
    """Remove a folder and the mount points in it; stop at one where something is still mounted."""
    with contextlib.suppress(OSError):
        for each in folder.iterdir():
            each.rmdir()
        folder.rmdir()


def _unmount(mountpoint: Path, device: int | None = None) -> None:
    """Unmount at once. Reads that still wait fail, so that their processes can end; without ``device``, the
    minor number, only root can make them fail.
    """
    if device is not None:
        with contextlib.suppress(OSError):  # fusectl is not mounted, or the connection has ended
            (_CONNECTIONS / str(device) / "abort").write_text("1")
    failed = _libc.umount2(os.fsencode(mountpoint), _MNT_FORCE | _MNT_DETACH)
    if failed and (command := _fusermount()):
        subprocess.run([command, "-uz", str(mountpoint)], capture_output=True, check=False)


def _fusermount() -> str | None:
    return shutil.which("fusermount") or shutil.which("fusermount3")


def _may_allow_others() -> bool:
    lines = mounts.text_of(Path("/etc/fuse.conf")) or ""
    return os.geteuid() == 0 or "user_allow_other" in map(str.strip, lines.splitlines())


class _PassThrough:
    use_ns = True

    def __init__(self, source: str, pace: Pace) -> None:
        self._source, self._pace = source, pace
        self._free_ns = 0  # when the disk has sent the last byte of all earlier requests
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        # The reads without an answer, in the order of arrival: path, offset, time in monotonic ns.
        self.waiting: dict[int, tuple[str, int, int]] = {}
        self._buffered: set[int] = set()  # the descriptors without O_DIRECT
        # Buffers to use again. FUSE's threads change, so that none can keep a buffer.
        self._areas: list[mmap] = []

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        with self._answered(0):
            found = os.fstat(fh) if fh else Path(self._source + path).stat()
        fields = {f"st_{name}": getattr(found, f"st_{name}") for name in _FIELDS}
        return fields | {f"st_{name}": getattr(found, f"st_{name}_ns") for name in _TIMES}

    def readdir(self, path: str, _fh: int) -> list[str]:
        with self._answered(0):
            return [".", "..", *(each.name for each in Path(self._source + path).iterdir())]

    def open(self, path: str, flags: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        with self._answered(0):
            try:
                return os.open(self._source + path, os.O_RDONLY | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:  # EINVAL: this file system has no O_DIRECT
                    raise
            descriptor = os.open(self._source + path, os.O_RDONLY)
            self._buffered.add(descriptor)
            return descriptor

    def release(self, _path: str, fh: int) -> int:
        self._buffered.discard(fh)
        os.close(fh)
        return 0

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        number, stall_from = next(self._numbers), self._pace.stall_from_bytes
        self.waiting[number] = (path, offset, time.monotonic_ns())
        try:
            if stall_from is not None and offset + size > stall_from:
                threading.Event().wait()
            with self._answered(size):
                return self._read(size, offset, fh)
        finally:
            del self.waiting[number]

    def _read(self, size: int, offset: int, fh: int) -> bytes:
        """Read whole pages into whole pages, as a direct read (O_DIRECT) requires."""
        before = offset % PAGESIZE
        length = -(-(before + size) // PAGESIZE) * PAGESIZE
        area = self._areas.pop() if self._areas and length <= LARGEST_READ_BYTES else None
        area = area or mmap(-1, max(length, LARGEST_READ_BYTES), MAP_PRIVATE)
        with memoryview(area) as view:
            count = os.preadv(fh, [view[:length]], offset - before)
            data = bytes(view[before : min(before + size, count)])
        if len(area) == LARGEST_READ_BYTES:
            self._areas.append(area)
        if fh in self._buffered:
            os.posix_fadvise(fh, offset, size, os.POSIX_FADV_DONTNEED)
        return data

    @contextlib.contextmanager
    def _answered(self, length: int) -> Iterator[None]:
        """Wait until the answer to a request for so many bytes is due: on an idle disk, earlier by ``_LEAD_NS``, by
        which FUSE itself delays it.
        """
        rate, latency_ns = self._pace.bytes_per_s, self._pace.latency_ns or 0
        with self._lock:
            start_ns = max(time.monotonic_ns() - _LEAD_NS, self._free_ns)
            self._free_ns = start_ns + (round(length * 1e9 / rate) if rate else 0)
            due_ns = self._free_ns + latency_ns
        yield
        if (left_ns := due_ns - time.monotonic_ns()) > 0:
            time.sleep(left_ns / 1e9)


def main() -> None:
    parent = Parent()
    if (told := parent.receive()) is None:  # it has ended
        return
    import mfusepy  # installed by weighin[disk]

    files = _PassThrough(os.path.realpath(told["source"]), Pace(**told["pace"]))
    files.init = lambda _: parent.send("mounted")  # type: ignore[attr-defined]

    def listen() -> None:
        while parent.receive() is not None:
            parent.send("waiting", reads=list(files.waiting.values()))
        _unmount(Path(told["folder"]))
        os._exit(0)  # a normal exit would wait for the reads that are never answered

    threading.Thread(target=listen, daemon=True).start()
    # A real disk does not wait for a processor. Only root may say so.
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
    _libc.prctl(_PR_SET_TIMERSLACK, _NO_SLACK_NS, 0, 0, 0)  # FUSE's threads inherit it
    mfusepy.FUSE(
        files,
        told["folder"],
        foreground=True,
        fsname=told["name"],
        subtype=_SUBTYPE,
        ro=True,
        allow_other=_may_allow_others(),
        default_permissions=True,
        kernel_cache=True,
        max_background=_BACKGROUND,
        **dict.fromkeys(("attr_timeout", "entry_timeout"), _CACHED_S),
    )


if __name__ == "__main__":
    main()
