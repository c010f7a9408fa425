"""Read the kernel's table of what is mounted where, in the mount namespace of this process."""

import os
import re
from pathlib import Path
from typing import Final, NamedTuple

MOUNTS: Final = Path("/proc/self/mountinfo")


class Mounted(NamedTuple):
    """One mount: the folder ``root`` of a file system of this ``kind`` is shown at ``place``.

    ``device`` is the number of its device, "8:1". The options are those of the file system.
    """

    device: str
    root: str
    place: Path
    kind: str
    source: str
    options: list[str]


def read() -> list[Mounted]:
    """Return all mounts, in the order in which they were mounted."""
    return parse(os.fsdecode(MOUNTS.read_bytes()))


def parse(text: str) -> list[Mounted]:
    """Return the mounts in a text of this table."""
    # Split at "\n" and " " only: Unicode's other line ends and blanks may occur in mount names.
    return [_mounted(line) for line in text.split("\n") if line]


def _mounted(line: str) -> Mounted:
    before, _, after = line.partition(" - ")
    _, _, device, root, place, *_ = before.split(" ")
    kind, source, options = after.split(" ", 2)
    place = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), place)  # blanks
    return Mounted(device, root, Path(place), kind, source, options.split(","))
