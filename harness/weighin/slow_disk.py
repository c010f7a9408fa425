"""Mount a folder a second time through FUSE, read-only, with the rate and the latency of a slower disk.

The answer to a request is due after the time of its bytes at the rate, which all requests share, plus the
latency, which passes for all at the same time. FUSE divides a read into requests of at most 128 KiB. The
real files are read with direct reads, which do not fill the page cache; the mounted files have one as on
any disk. ``Mount`` starts this module as a program, which unmounts the folder when its parent ends.
"""

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
from ctypes.util import find_library
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from mmap import MAP_PRIVATE, PAGESIZE, mmap
from pathlib import Path
from typing import Any, Final

from weighin import child_process, install
from weighin.child_process import Parent, last_line
from weighin.errors import IsolationUnavailable
from weighin.probes.cgroup import is_left_behind, mounts, owned_name
from weighin.units import KIB, format_latency, format_rate

LARGEST_READ_BYTES: Final = 128 * KIB  # of one request in libfuse 2
_SUBTYPE: Final = "weighin"
_LEAD_NS: Final = 90_000  # the measured time of a 4 KiB read through FUSE without a pace
_FIELDS: Final = (
    "st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_blocks", "st_mtime_ns", "st_ctime_ns", "st_atime_ns",
)  # fmt: skip
_libc = ctypes.CDLL(None)
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
    """A mount at ``folder``, whose files can be read. The process ``pid`` serves it."""

    def __init__(self, source: Path, pace: Pace, root: Path) -> None:
        source = source.absolute()
        name = owned_name(next(_numbers))
        self.folder = root / name / source.name
        # Mode 0700: a parent folder of ``source`` may keep other users out, but not from this mount.
        self.folder.parent.mkdir(mode=0o700, parents=True)
        self.folder.mkdir()
        command = child_process.module("weighin.slow_disk")
        self._child = child_process.Child(command, child_process.environment())
        self.pid = self._child.pid
        places = {"source": str(source), "folder": str(self.folder)}
        self._child.send("mount", name=name, **places, pace=asdict(pace))
        with contextlib.ExitStack() as failed:
            failed.callback(self.close)
            with contextlib.suppress(TimeoutError):
                if self._child.receive(20.0):  # it is mounted
                    failed.pop_all()
                    return
        why = last_line(self._child.printed) or "no answer"
        message = f"FUSE could not mount {source} a second time: {why}"
        repair = "weighin doctor tests whether FUSE works on this machine"
        raise IsolationUnavailable(message, repair)

    def close(self) -> None:
        """Make waiting reads fail, unmount, and end the FUSE process; a second call has no effect."""
        if not self.folder.parent.exists():
            return
        _unmount(self.folder)
        with contextlib.suppress(TimeoutError):  # the process still waits for the real disk
            self._child.close()
        _remove(self.folder.parent)


def check(*, in_container: bool) -> None:
    """Raise IsolationUnavailable if a slow disk does not work here, read by a container or not."""
    if find_spec("mfusepy") is None:
        why, repair = "mfusepy is not installed", install.command("disk")
    elif find_library("fuse") is None:
        why, repair = "libfuse 2 is not installed", "apt-get install libfuse2"
    elif not os.access("/dev/fuse", os.R_OK | os.W_OK):
        why = "this user cannot open /dev/fuse"
        repair = "modprobe fuse; a container needs --device /dev/fuse --cap-add SYS_ADMIN"
    elif in_container and os.geteuid():
        why, repair = "a container reads only what root has mounted", "use --isolation cgroup"
    else:
        return
    message = f"weighin slows a disk down with FUSE, which does not work here: {why}"
    raise IsolationUnavailable(message, repair)


def remove_stale(root: Path) -> list[str]:
    """Remove the mounts, and their folders in ``root``, of killed runs; return a line for each mount."""
    removed = []
    for one in mounts():
        if one.kind == f"fuse.{_SUBTYPE}" and is_left_behind(one.source):
            _unmount(one.place)
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


def _unmount(mountpoint: Path) -> None:
    """Unmount at once. Reads that still wait fail, so that their processes can end: by root's force, or
    when the process that serves them has ended.
    """
    failed = _libc.umount2(os.fsencode(mountpoint), 1 | 2)  # MNT_FORCE | MNT_DETACH in linux/fs.h
    if failed and (command := shutil.which("fusermount")):  # with which libfuse 2 itself mounts
        subprocess.run([command, "-uz", str(mountpoint)], capture_output=True, check=False)


class _PassThrough:
    use_ns = True

    def __init__(self, source: str, pace: Pace) -> None:
        self._source, self._pace = source, pace
        self._free_ns = 0  # when the disk has sent the last byte of all earlier requests
        self._lock = threading.Lock()

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        with self._answered(0):
            found = os.fstat(fh) if fh else Path(self._source + path).stat()
        return {name.removesuffix("_ns"): getattr(found, name) for name in _FIELDS}

    def readdir(self, path: str, _fh: int) -> list[str]:
        with self._answered(0):
            return [".", "..", *(each.name for each in Path(self._source + path).iterdir())]

    def open(self, path: str, _flags: int) -> int:
        with self._answered(0):
            try:
                return os.open(self._source + path, os.O_RDONLY | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:  # EINVAL: this file system has no O_DIRECT
                    raise
                return os.open(self._source + path, os.O_RDONLY)

    def release(self, _path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def read(self, _path: str, size: int, offset: int, fh: int) -> bytes:
        stall_from = self._pace.stall_from_bytes
        if stall_from is not None and offset + size > stall_from:
            threading.Event().wait()
        # A direct read (O_DIRECT) reads whole pages into whole pages; any other fills the page cache.
        before = offset % PAGESIZE
        length = -(-(before + size) // PAGESIZE) * PAGESIZE
        with self._answered(size), mmap(-1, length, MAP_PRIVATE) as area:
            count = os.preadv(fh, [area], offset - before)
            os.posix_fadvise(fh, offset, size, os.POSIX_FADV_DONTNEED)
            return area[before : min(before + size, count)]

    @contextlib.contextmanager
    def _answered(self, length: int) -> Iterator[None]:
        """Wait until the answer to a request is due: on an idle disk, earlier by the time that FUSE itself takes."""
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
        parent.receive()  # at the parent's end
        _unmount(Path(told["folder"]))
        os._exit(0)  # a normal exit would wait for the reads that are never answered

    threading.Thread(target=listen, daemon=True).start()
    # A real disk does not wait for a processor. Only root may say so.
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -15)
    # PR_SET_TIMERSLACK to 1 ns: by default, Linux may wake a sleeping thread 50 us late. FUSE's inherit it.
    _libc.prctl(29, 1, 0, 0, 0)
    mfusepy.FUSE(
        files,
        told["folder"],
        foreground=True,
        fsname=told["name"],
        subtype=_SUBTYPE,
        ro=True,
        allow_other=os.geteuid() == 0,  # the user of a container, for example
        default_permissions=True,
        kernel_cache=True,
        max_background=64,  # read-ahead requests; the kernel's default of 12 would limit the rate
        attr_timeout=3600,  # the files do not change while a cell runs
        entry_timeout=3600,
    )


if __name__ == "__main__":
    main()
