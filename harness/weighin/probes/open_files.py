"""List the data files that a process has open or mapped, and the position of its next read."""

import contextlib
import os
import re
import stat
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Final

from weighin.probes.cgroup import read_kernel
from weighin.result import OpenFile
from weighin.text import one_line
from weighin.units import MIB

SMALLEST_BYTES: Final = MIB
"""Smaller files are not listed, because they explain little memory."""
_MOST_FILES: Final = 16
_MOST_DESCRIPTORS: Final = 512  # the first ones, because a server may have ten thousand
_ACCESS_MODE: Final = 0o3
_LIBRARY: Final = re.compile(r".*\.so(?:\.[\d.]+)?")
_MAPS_FIELDS: Final = 6


def open_files(pid: int) -> tuple[OpenFile, ...]:
    """Return up to 16 files of at least 1 MiB that a process reads or maps, the largest first.

    ``open_files`` returns only regular files. It leaves out programs, libraries, locale archives,
    and files that are open only for writing.

    Raises:
        OSError: the process has ended, or belongs to another user.
    """
    files: dict[str, OpenFile] = {}
    for path, mapped_bytes in _mapped(pid).items():
        with contextlib.suppress(OSError):  # the file was deleted
            size = _regular_size(f"/proc/{pid}/root{path}")
            if size >= SMALLEST_BYTES:
                files[path] = OpenFile(one_line(path), size, mapped_bytes=mapped_bytes)
    for path, file in _read(pid).items():
        mapped_bytes = files[path].mapped_bytes if path in files else 0
        files[path] = replace(file, mapped_bytes=mapped_bytes)
    return _largest(files)


def files_read(pid: int) -> tuple[OpenFile, ...]:
    """Return up to 16 files of at least 1 MiB that a process has open to read, the largest first.

    ``files_read`` is cheaper than ``open_files``, because it does not read /proc/PID/maps.

    Raises:
        OSError: the process has ended, or belongs to another user.
    """
    return _largest(_read(pid))


def _largest(files: dict[str, OpenFile]) -> tuple[OpenFile, ...]:
    found = sorted(files.values(), key=lambda file: -file.size_bytes)
    return tuple(found[:_MOST_FILES])


def _read(pid: int) -> dict[str, OpenFile]:
    files: dict[str, OpenFile] = {}
    for link in islice(Path(f"/proc/{pid}/fd").iterdir(), _MOST_DESCRIPTORS):
        with contextlib.suppress(OSError):  # the file was closed
            if (size := _regular_size(str(link))) < SMALLEST_BYTES:
                continue
            path = str(link.readlink()).removesuffix(" (deleted)")
            if _LIBRARY.fullmatch(path):  # the dynamic linker has it open to read its header
                continue
            position = _read_position(f"/proc/{pid}/fdinfo/{link.name}")
            if position is None:
                continue
            before = files.get(path)
            if before and before.position_bytes is not None:  # the file is open twice
                position = max(position, before.position_bytes)
            files[path] = OpenFile(one_line(path), size, position)
    return files


def _regular_size(path: str) -> int:
    """Return the size of a regular file, in bytes; 0 for a folder, socket, pipe or device."""
    found = os.stat(path)  # noqa: PTH116 (quicker than Path.stat)
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def _read_position(fdinfo: str) -> int | None:
    """Return the position of the next read; None for a file that is open only for writing."""
    fields = dict(line.split(":", 1) for line in read_kernel(Path(fdinfo)).splitlines()[:2])
    if int(fields["flags"], 8) & _ACCESS_MODE == os.O_WRONLY:
        return None
    return int(fields["pos"])


def _mapped(pid: int) -> dict[str, int]:
    """Return the mapped bytes of each data file, by path, from /proc/PID/maps."""
    mapped: dict[str, int] = {}
    programs: set[str] = set()
    for line in read_kernel(Path(f"/proc/{pid}/maps")).split("\n"):
        fields = line.split(maxsplit=_MAPS_FIELDS - 1)
        if len(fields) < _MAPS_FIELDS or not (path := fields[-1]).startswith("/"):
            continue
        if "x" in fields[1] or path.endswith(("/locale-archive", " (deleted)")):
            programs.add(path)
        start, _, end = fields[0].partition("-")
        mapped[path] = mapped.get(path, 0) + int(end, 16) - int(start, 16)
    return {path: size for path, size in mapped.items() if path not in programs}
