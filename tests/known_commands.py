"""C programs that take known amounts of memory, and the known answer of each.

The head of each file in ``commands/programs/`` says what the program takes and when. ``build`` compiles
them, statically: so their libraries add no page cache.
"""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

MIB = 1024**2
PROGRAMS = Path(__file__).parent / "commands" / "programs"
BUILT = os.environ.get("WEIGHIN_TEST_PROGRAMS", "")
"""A folder of these programs, built elsewhere for a machine without a compiler; else empty."""
FILE = "FILE"
"""The argument that stands for a file of ``FILE_BYTES``."""
FILE_BYTES = 128 * MIB

VISIBLE_MS = 100
"""Sampling is to see a peak that lasts at least this long."""


@dataclass(frozen=True, slots=True)
class Known:
    """One call of a program, and its memory when it uses most of it.

    ``file_bytes`` is page cache, charged if nobody had read the file before. ``process_bytes`` are
    the anonymous and shared memory of each process as its own RSS counts it, the largest first.
    ``peak_ms`` is the shortest time for which the peak lasts. Of memory of an unusual ``kind``, which
    is the word for most of it, ``unusual_bytes`` cannot be reclaimed, and ``peak_bytes`` are charged
    without a limit.
    """

    name: str
    arguments: tuple[str, ...]
    peak_ms: float
    anon_bytes: int = 0
    shmem_bytes: int = 0
    file_bytes: int = 0
    process_bytes: tuple[int, ...] = ()
    kind: str = ""
    unusual_bytes: int = 0
    peak_bytes: int = 0

    @property
    def id(self) -> str:
        return " ".join((self.name, *self.arguments))

    @property
    def needed_bytes(self) -> int:
        """The memory that cannot be given back: what the command needs."""
        return self.anon_bytes + self.shmem_bytes + self.unusual_bytes

    def command(self, programs: Path, file: Path) -> tuple[str, ...]:
        """Return the command line, with the programs that were built in the folder ``programs``."""
        replaced = (str(file) if each == FILE else each for each in self.arguments)
        return (str(programs / self.name), *replaced)


def _spend(ms: int) -> Known:
    return Known("spend", ("256", str(ms)), ms, 320 * MIB, process_bytes=(320 * MIB,))


KNOWN = (
    _spend(1),
    _spend(5),
    _spend(20),
    _spend(800),
    Known("forks", ("128", "3", "2000"), 2000, 320 * MIB, process_bytes=(128 * MIB,) * 4),
    Known("maps", (FILE,), 800, FILE_BYTES // 2, 0, FILE_BYTES, (FILE_BYTES // 2,)),
    Known("shares", ("48", "2000"), 2000, 0, 96 * MIB, process_bytes=(96 * MIB,) * 2),
    Known("reads", (FILE,), 800, MIB, 0, FILE_BYTES, (MIB,)),
    Known("child", ("256", "2000"), 2000, 264 * MIB, process_bytes=(256 * MIB, 8 * MIB)),
    Known("daemon", ("64",), 2000, 64 * MIB, process_bytes=(64 * MIB,)),
)
"""All programs of plain memory. The page cache of FILE is charged if it was dropped before. A container's
/dev/shm has 64 MiB."""


def _unusual(call: str, kind: str, needed_mib: int, peak_mib: int = 0) -> Known:
    name, *arguments = call.split()
    peak_bytes = (peak_mib or needed_mib) * MIB
    return Known(
        name, (*arguments,), 0, kind=kind, unusual_bytes=needed_mib * MIB, peak_bytes=peak_bytes
    )


UNUSUAL = (
    _unusual("pipes 150", "kernel", 151),
    _unusual("sockets 100", "kernel", 102),
    _unusual("tables 100", "kernel", 100),
    _unusual(f"locks {FILE}", "locked", FILE_BYTES // MIB),
    _unusual("returns 200 200", "anonymous", 200, 400),
    _unusual("returns 100 200", "anonymous", 200, 300),
    _unusual("writes 100", "shared", 101),
)


def within(figure: int, known_bytes: int, more_bytes: int = MIB) -> bool:
    """Tell whether a figure is right within 1 % and 1 MiB."""
    return abs(figure - known_bytes) <= 0.01 * known_bytes + more_bytes


def build(folder: Path) -> Path:
    for source in sorted(PROGRAMS.glob("*.c")):
        command = ("gcc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-static")
        subprocess.run((*command, "-o", str(folder / source.stem), str(source)), check=True)
    return folder
