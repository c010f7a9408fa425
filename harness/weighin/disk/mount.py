"""Mount a folder a second time through FUSE, as a slow disk; remove the mounts of killed runs."""

import contextlib
import os
import re
import shutil
from ctypes.util import find_library
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from time import monotonic_ns
from typing import Final

from weighin import child_process, install
from weighin.child_process import decode_event, last_line
from weighin.disk.passthrough import Pace, may_allow_others, unmount
from weighin.errors import IsolationUnavailable
from weighin.probes import mounts
from weighin.probes.cgroup import is_left_behind, owned_name
from weighin.units import format_latency, format_rate, format_seconds

_DEVICE: Final = Path("/dev/fuse")
_KIND: Final = "fuse.weighin"
_START_S: Final = 20.0
_ANSWER_S: Final = 2.0
_LONG_NS: Final = 500_000_000  # a read stalls if it exceeds the latency by this time
_numbers = count()


class Mount:
    """A FUSE mount of a folder; reads from the mount have the rate and latency of a slower disk.

    Attributes:
        folder: the mount point, in which all files have the names that they have in the source folder.
        pid: the pid of the process that serves the mount.
    """

    def __init__(self, source: Path, pace: Pace, root: Path) -> None:
        """Mount the folder ``source`` below ``root``; return when the mounted files can be read.

        Raises:
            IsolationUnavailable: the FUSE process ended, or did not mount the folder within 20 s.
        """
        self._source, self._pace = source.absolute(), pace
        name = owned_name(next(_numbers))
        self.folder = root / name / self._source.name
        # Mode 0700: a parent folder of ``source`` may keep other users out, but not from this mount.
        self.folder.parent.mkdir(mode=0o700, parents=True)
        self.folder.mkdir()
        options = {
            "rate": pace.bytes_per_s and format_rate(pace.bytes_per_s),
            "latency": pace.latency_ns and format_latency(pace.latency_ns),
            "stall-from": pace.stall_from_bytes,
            "name": name,
        }
        given = [f"--{option}={value}" for option, value in options.items() if value]
        folders = str(self._source), str(self.folder)
        command = child_process.module("weighin.disk.passthrough", *given, *folders)
        self._child = child_process.Child(command, child_process.environment())
        self.pid = self._child.pid
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
                f" {last_line(self._child.stderr_tail) or 'no answer'}",
                "weighin doctor tests whether FUSE works on this machine",
            )
        # From mountinfo, because a stat could wait forever.
        found = (one.minor for one in mounts.read() if one.place == self.folder)
        self._device = next(found, None)

    def waiting(self) -> list[tuple[str, int, int]]:
        """Return path, offset and arrival (monotonic ns) of each unanswered read, the oldest first.

        The list is empty if the FUSE process is silent for 2 s.
        """
        self._child.send(b"waiting\n")
        try:
            event = decode_event(self._child.receive(_ANSWER_S) or b"") or {}
        except TimeoutError:
            return []
        return [(path, offset, since_ns) for path, offset, since_ns in event.get("reads", ())]

    def stalled(self) -> str:
        """Describe the oldest read without an answer, if it is late by 0.5 s; empty if none is."""
        for path, offset, arrival_ns in self.waiting()[:1]:
            if (waited_ns := monotonic_ns() - arrival_ns) > (self._pace.latency_ns or 0) + _LONG_NS:
                file = self._source / path.lstrip("/")
                return (
                    f"the read of {file} at offset {offset} has had no answer for"
                    f" {format_seconds(waited_ns)}"
                )
        return ""

    def close(self) -> None:
        """Make waiting reads fail, unmount, and end the FUSE process; a second call has no effect."""
        if not self.folder.parent.exists():
            return
        unmount(self.folder, self._device)
        with contextlib.suppress(TimeoutError):  # the process still waits for the real disk
            self._child.close()
        _remove(self.folder.parent)


def check(*, in_container: bool) -> None:
    """Raise IsolationUnavailable if FUSE, and so a slow disk, does not work on this machine.

    ``in_container`` tells whether a Docker container will read the mounted files.
    """
    why, repair = "", "apt-get install fuse"
    if find_spec("mfusepy") is None:
        why, repair = "mfusepy is not installed", install.command("disk")
    elif find_library("fuse") is None:
        why, repair = "libfuse 2 is not installed", "apt-get install libfuse2"
    elif os.geteuid() and not (shutil.which("fusermount") or shutil.which("fusermount3")):
        why = "fusermount is not installed"
    else:
        try:
            os.close(os.open(_DEVICE, os.O_RDWR))
        except OSError as error:
            why, repair = f"{_DEVICE}: {error.strerror}", "modprobe fuse; in a container, start it"
            repair += " with --device /dev/fuse --cap-add SYS_ADMIN"
            if isinstance(error, PermissionError) and os.geteuid():
                repair = "run weighin as root"
        if not why and in_container and not may_allow_others():
            why = "the user of a container may not read this user's FUSE file systems"
            repair = "write user_allow_other into /etc/fuse.conf, or use --isolation cgroup"
    if why:
        message = f"weighin slows a disk down with FUSE, which does not work here: {why}"
        raise IsolationUnavailable(message, repair)


def remove_stale(root: Path) -> list[str]:
    """Remove the mounts, and their folders in ``root``, of killed runs; return a line for each mount."""
    removed = []
    for one in mounts.read():
        is_ours = one.kind == _KIND and re.fullmatch(r"\d+-\d+-\d+\.\S+", one.source)
        if is_ours and is_left_behind(one.source):
            unmount(one.place, one.minor)
            _remove(one.place.parent)
            removed.append(f"slow disk at {one.place}")
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if is_left_behind(folder.name):
            _remove(folder)
    return removed


def _remove(folder: Path) -> None:
    """Remove a folder and the mount points in it; stop at one where something is still mounted."""
    with contextlib.suppress(OSError):
        for each in folder.iterdir():
            each.rmdir()
        folder.rmdir()
