"""Mount a folder read-only through FUSE, with the rate and the latency of a slower disk.

    python -m weighin.disk.passthrough FOLDER MOUNTPOINT --rate 200MB/s --latency 5ms

The answer to a request is due after the time of its bytes at the rate, plus the latency. All
requests share the rate of the slow disk, but the latencies of several requests pass at the same
time. FUSE divides a read into requests of at most 128 KiB. The FUSE process reads the real files
with direct reads, so that they do not fill the page cache. The mounted files have a page cache as
on any disk: buffered and mapped reads fill it, and direct reads do not. SIGINT and SIGTERM unmount
the folder and end the process.

weighin starts the FUSE process with ``--name``. With ``--name``, the FUSE process reports when the
folder is mounted, answers each line of its parent with the reads that still wait, and unmounts the
folder when its parent ends.
"""

import argparse
import contextlib
import ctypes
import errno
import itertools
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from mmap import MAP_PRIVATE, PAGESIZE, mmap
from pathlib import Path
from typing import Any, Final

from weighin.child_process import Parent
from weighin.units import KIB, format_latency, format_rate, parse_bytes, parse_rate, parse_seconds

LARGEST_READ_BYTES: Final = 128 * KIB  # of one request in libfuse 2
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


@dataclass(frozen=True, slots=True)
class Pace:
    """The speed of a disk. All requests share the rate, and each request also waits for the latency.

    None leaves the rate or the latency of the real disk. A read that ends behind the file offset
    ``stall_from_bytes`` is never answered; with None, every read is answered.
    """

    bytes_per_s: int | None = None
    latency_ns: int | None = None
    stall_from_bytes: int | None = None

    def __bool__(self) -> bool:
        return self != Pace()

    def __str__(self) -> str:
        """Return the rate and the latency as texts for the command line: "200MB/s, 5ms"."""
        rate = format_rate(self.bytes_per_s) if self.bytes_per_s else ""
        latency = format_latency(self.latency_ns) if self.latency_ns else ""
        return ", ".join(filter(None, (rate, latency)))


class Schedule:
    """Computes when the answer to each request is due; several threads may use one schedule.

    FUSE itself delays a request and its answer by ``lead_ns`` in total. Each answer is therefore due
    ``lead_ns`` earlier, if the disk is idle when the request arrives.
    """

    def __init__(self, pace: Pace, lead_ns: int = 0) -> None:
        self._ns_per_byte = 1_000_000_000 / pace.bytes_per_s if pace.bytes_per_s else 0.0
        self._latency_ns = pace.latency_ns or 0
        self._lead_ns = lead_ns
        self._free_ns = 0  # when the disk has sent the last byte of all earlier requests
        self._lock = threading.Lock()

    def due_ns(self, arrival_ns: int, length: int) -> int:
        """Return the time (monotonic ns) at which the answer to a request for ``length`` bytes is due."""
        with self._lock:
            start_ns = max(arrival_ns - self._lead_ns, self._free_ns)
            self._free_ns = start_ns + round(length * self._ns_per_byte)
            return self._free_ns + self._latency_ns


class PassThrough:
    """The operations of the FUSE file system, which ``mfusepy`` calls in several threads."""

    use_ns = True

    def __init__(self, source: str, pace: Pace) -> None:
        self._source = source
        self._schedule = Schedule(pace, _LEAD_NS)
        self._stall_from = pace.stall_from_bytes
        self._numbers = itertools.count()
        # The reads without an answer, in the order of arrival: path, offset, time of arrival in ns.
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
        number = next(self._numbers)
        self.waiting[number] = (path, offset, time.monotonic_ns())
        try:
            if self._stall_from is not None and offset + size > self._stall_from:
                threading.Event().wait()
            with self._answered(size):
                return self._read(size, offset, fh)
        finally:
            del self.waiting[number]

    def _read(self, size: int, offset: int, fh: int) -> bytes:
        """Return the requested bytes, from a read of whole pages into a buffer of whole pages. A direct
        read (O_DIRECT) requires whole pages.
        """
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
        """Run the ``with`` block, which serves a request of the kernel, and then wait until the
        answer is due.
        """
        due_ns = self._schedule.due_ns(time.monotonic_ns(), length)
        yield
        if (left_ns := due_ns - time.monotonic_ns()) > 0:
            time.sleep(left_ns / 1e9)


def may_allow_others() -> bool:
    """Return whether FUSE can let other users, such as the user of a container, read a mount."""
    if os.geteuid() == 0:
        return True
    try:
        lines = Path("/etc/fuse.conf").read_text().splitlines()
    except OSError:
        return False
    return "user_allow_other" in (line.strip() for line in lines)


def unmount(mountpoint: Path, device: int | None = None) -> None:
    """Unmount a FUSE file system at once. Reads that still wait fail, so that the processes that
    wait can end.

    The same file system may stay mounted in other mount namespaces, where all reads then fail.
    ``device`` is its minor device number, without which only root can make the waiting reads fail.
    """
    if device is not None:
        with contextlib.suppress(OSError):  # fusectl is not mounted, or the connection has ended
            (_CONNECTIONS / str(device) / "abort").write_text("1")
    path = os.fsencode(mountpoint)
    if _libc.umount2(path, _MNT_FORCE | _MNT_DETACH) == 0:
        return
    if command := shutil.which("fusermount") or shutil.which("fusermount3"):
        subprocess.run([command, "-uz", str(mountpoint)], capture_output=True, check=False)


def main() -> None:
    """Mount a folder, and answer requests until the file system is unmounted."""
    parser = argparse.ArgumentParser(prog="python -m weighin.disk.passthrough", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", help="the folder to mount a second time")
    parser.add_argument("mountpoint", help="an empty folder, at which the files appear")
    rate = "the rate of all requests together: 200MB/s"
    parser.add_argument("--rate", type=parse_rate, help=rate)
    parser.add_argument("--latency", type=parse_seconds, help="the latency of each request: 5ms")
    stall = "never answer a read that ends behind this offset: 64MiB"
    parser.add_argument("--stall-from", type=parse_bytes, help=stall)
    parser.add_argument("--name", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    import mfusepy  # installed by weighin[disk]

    pace = Pace(given.rate, given.latency, given.stall_from)
    files = PassThrough(str(Path(given.folder).resolve()), pace)
    if given.name:
        parent = Parent()
        files.init = lambda _: parent.send("mounted")  # type: ignore[attr-defined]

        def listen() -> None:
            while parent.receive() is not None:
                parent.send("waiting", reads=list(files.waiting.values()))
            unmount(Path(given.mountpoint))
            os._exit(0)  # a normal exit would wait for the reads that are never answered

        threading.Thread(target=listen, daemon=True).start()
    # A real disk does not wait for a processor. Only root may say so.
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
    _libc.prctl(_PR_SET_TIMERSLACK, _NO_SLACK_NS, 0, 0, 0)  # FUSE's threads inherit it
    mfusepy.FUSE(
        files,
        given.mountpoint,
        foreground=True,
        fsname=given.name or "weighin",
        subtype="weighin",
        ro=True,
        allow_other=may_allow_others(),
        default_permissions=True,
        kernel_cache=True,
        max_background=_BACKGROUND,
        **dict.fromkeys(("attr_timeout", "entry_timeout"), _CACHED_S),
    )


if __name__ == "__main__":
    main()
