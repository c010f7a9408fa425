"""Read the kernel's table of mounts, and find the file system and the disk of a path."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from weighin.units import KIB

MOUNTS: Final = Path("/proc/self/mountinfo")
_READ_AHEAD_BYTES: Final = 128 * KIB  # the default of Linux
_SYSFS: Final = Path("/sys")
_KINDS: Final = {
    "overlay": "overlay",
    "tmpfs": "tmpfs",
    "ramfs": "tmpfs",
    "nfs": "NFS",
    "nfs4": "NFS",
    "9p": "shared by the host",
    "virtiofs": "shared by the host",
    "cifs": "network",
    "smb3": "network",
    "ceph": "network",
    "lustre": "network",
}


class Mounted(NamedTuple):
    """The folder ``root`` of a file system is mounted at ``place``; ``device`` is its number, such as
    "8:1", and ``options`` are the options of the file system, not of the mount.
    """

    device: str
    root: str
    place: Path
    kind: str
    source: str
    options: list[str]

    @property
    def minor(self) -> int:
        return int(self.device.partition(":")[2])


def read() -> list[Mounted]:
    return parse(os.fsdecode(MOUNTS.read_bytes()))


def parse(text: str) -> list[Mounted]:
    found = []
    # Split only at "\n" and " ", because paths may contain Unicode's other line ends and blanks.
    for line in filter(None, text.split("\n")):
        before, _, after = line.partition(" - ")
        _, _, device, root, place, *_ = before.split(" ")
        kind, source, options = after.split(" ", 2)
        place = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), place)  # \040: a blank
        found.append(Mounted(device, root, Path(place), kind, source, options.split(",")))
    return found


def describe(path: Path) -> dict[str, Any]:
    """Return the file system and the whole disk of ``path``, or of its nearest folder that exists; in
    memory or on a network, there is no ``device``.
    """
    nearest, number = device_of(path)
    name, device = file_system_of(read(), nearest.resolve()), disk_of(number)
    is_fuse = name.partition(".")[0] in ("fuse", "fuseblk")
    rotational = text_of(_SYSFS / "class/block" / device / "queue/rotational") if device else None
    return {
        "file_system": name,
        "kind": "FUSE" if is_fuse else _KINDS.get(name, "local"),
        "device": device or None,
        "rotational": rotational == "1" if rotational else None,
    }


def file_system_of(found: Iterable[Mounted], path: Path) -> str:
    above = [one for one in found if path.is_relative_to(one.place)]
    above.sort(key=lambda one: len(one.place.parts))  # the last mount at a folder hides the others
    return above[-1].kind if above else "unknown"


def disk_of(number: str, sysfs: Path = _SYSFS) -> str:
    """Return the disk's name for the device number of a disk or of its partition; "" for others."""
    folder = sysfs / "dev/block" / number
    if not folder.exists():
        return ""
    resolved = folder.resolve()
    return resolved.parent.name if (resolved / "partition").exists() else resolved.name


def read_ahead_bytes(path: Path, sysfs: Path = Path("/sys")) -> int:
    """Return how many bytes the kernel reads ahead on a page fault in a mapped file at or below
    ``path``.
    """
    _, number = device_of(path)
    folders = "class/bdi", "dev/block", "dev/block"
    # A partition has its disk's setting in the folder above, the last path.
    names = "read_ahead_kb", "queue/read_ahead_kb", "../queue/read_ahead_kb"
    for folder, name in zip(folders, names, strict=True):
        if text := text_of(sysfs / folder / number / name):
            return int(text) * KIB
    return _READ_AHEAD_BYTES


def device_of(path: Path) -> tuple[Path, str]:
    """Return ``path`` or its nearest existing parent folder, with the device number, such as "8:1"."""
    nearest = next(each for each in (path, *path.absolute().parents) if each.exists())
    number = nearest.stat().st_dev
    return nearest, f"{os.major(number)}:{os.minor(number)}"


def text_of(path: Path) -> str | None:
    """Return the stripped text of a file in /sys; None if the running kernel lacks the file."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
