"""Read the kernel's table of mounts, /proc/self/mountinfo, of this process's mount namespace."""

import os
import re
from pathlib import Path
from typing import Final, NamedTuple

MOUNTS: Final = Path("/proc/self/mountinfo")


class Mounted(NamedTuple):
    """One mount: the folder ``root`` of a file system of type ``kind`` is mounted at ``place``.

    ``device`` is the file system's device number, such as "8:1". ``options`` are the options of the
    file system, not of the mount.
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
    """Return all mounts, in the order in which they were mounted."""
    return parse(os.fsdecode(MOUNTS.read_bytes()))


def parse(text: str) -> list[Mounted]:
    # Split only at "\n" and " ", because paths may contain Unicode's other line ends and blanks.
    return [_mounted(line) for line in text.split("\n") if line]


def _mounted(line: str) -> Mounted:
    before, _, after = line.partition(" - ")
    _, _, device, root, place, *_ = before.split(" ")
    kind, source, options = after.split(" ", 2)
    place = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), place)  # a blank is \040
    return Mounted(device, root, Path(place), kind, source, options.split(","))
