"""Read the kernel's table of mounts, and find the file system of a path."""

import os
import re
from pathlib import Path
from typing import Final, NamedTuple

from weighin.units import KIB

MOUNTS: Final = Path("/proc/self/mountinfo")
_SYSFS: Final = Path("/sys")


class Mounted(NamedTuple):
    root: str  # the folder of the file system that is mounted at ``place``
    place: Path
    kind: str
    source: str
    options: list[str]  # of the file system, not of the mount


def read() -> list[Mounted]:
    return parse(os.fsdecode(MOUNTS.read_bytes()))


def parse(text: str) -> list[Mounted]:
    found = []
    # Split only at "\n" and " ", because paths may contain Unicode's other line ends and blanks.
    for line in filter(None, text.split("\n")):
        before, _, after = line.partition(" - ")
        _, _, _, root, place, *_ = before.split(" ")
        kind, source, options = after.split(" ", 2)
        place = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), place)  # \040: a blank
        found.append(Mounted(root, Path(place), kind, source, options.split(",")))
    return found


def file_system_of(path: Path) -> str:
    """Return the type of the file system of ``path``, or of its nearest folder that exists."""
    place = _nearest(path).resolve()
    above = [one for one in read() if place.is_relative_to(one.place)]
    above.sort(key=lambda one: len(one.place.parts))  # the last mount at a folder hides the others
    return above[-1].kind if above else "unknown"


def read_ahead_bytes(path: Path) -> int:
    """Return how many bytes the kernel reads ahead on a page fault in a file at or below ``path``."""
    device = _nearest(path).stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    # A partition has its disk's setting in the folder above.
    for folder in (
        f"class/bdi/{number}",
        f"dev/block/{number}/queue",
        f"dev/block/{number}/../queue",
    ):
        if text := text_of(_SYSFS / folder / "read_ahead_kb"):
            return int(text) * KIB
    return 128 * KIB  # the default of Linux


def _nearest(path: Path) -> Path:
    return next(each for each in (path, *path.absolute().parents) if each.exists())


def text_of(path: Path) -> str | None:
    """Return the stripped text of a file in /sys; None if the running kernel lacks it."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
