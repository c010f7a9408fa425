"""Read the kernel's table of mounts, and find the file system of a path."""

import os
import re
from pathlib import Path
from typing import Final, NamedTuple

from weighin.units import KIB

MOUNTS: Final = Path("/proc/self/mountinfo")


class Mounted(NamedTuple):
    """The folder ``root`` of a file system is mounted at ``place``; ``device`` is its number, "8:1", and
    ``options`` are the file system's, not the mount's.
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


def file_system_of(path: Path) -> str:
    """Return the type of the file system of ``path``, or of its nearest folder that exists."""
    place = _device_of(path)[0].resolve()
    above = [one for one in read() if place.is_relative_to(one.place)]
    above.sort(key=lambda one: len(one.place.parts))  # the last mount at a folder hides the others
    return above[-1].kind if above else "unknown"


def read_ahead_bytes(path: Path, sysfs: Path = Path("/sys")) -> int:
    """Return how many bytes the kernel reads ahead on a page fault in a file at or below ``path``."""
    _, number = _device_of(path)
    disk = sysfs / "dev/block" / number
    # A partition has its disk's setting in the folder above.
    for folder in (sysfs / "class/bdi" / number, disk / "queue", disk / "../queue"):
        if text := text_of(folder / "read_ahead_kb"):
            return int(text) * KIB
    return 128 * KIB  # the default of Linux


def _device_of(path: Path) -> tuple[Path, str]:
    """Return ``path`` or its nearest existing parent folder, with the device number, such as "8:1"."""
    nearest = next(each for each in (path, *path.absolute().parents) if each.exists())
    number = nearest.stat().st_dev
    return nearest, f"{os.major(number)}:{os.minor(number)}"


def text_of(path: Path) -> str | None:
    """Return the stripped text of a file in /sys; None if the running kernel lacks it."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
