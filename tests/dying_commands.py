"""Scripts that die for lack of memory, and the right explanation of each death.

The scripts are in ``commands/dying/``. Each marks the line that takes the memory with ``# TAKEN``,
and a line that calls that one with ``# CALLED``. ``page_cache_only.py`` is the one that lives.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pytest
import torch
from cells import MIB, page_cache

SCRIPTS = Path(__file__).parent / "commands" / "dying"
TAKEN = "# TAKEN"
CALLED = "# CALLED"


class Cause(StrEnum):
    """Why a command needs more memory than it has."""

    TWO_COPIES = "two copies"
    DTYPE = "dtype conversion"
    GROWTH = "growth"
    CHILD = "a child"
    SHARED = "shared memory"
    OUTER_LIMIT = "a limit around"
    IMPORT = "import"
    COPY_ON_WRITE = "copy-on-write"
    READ = "a whole file"
    PAGE_CACHE = "page cache only"


@dataclass(frozen=True, slots=True)
class Dying:
    """A script, its limit, and why it dies. ``inputs`` are the names of its ``Inputs``.

    If ``around_bytes`` is given, a cgroup around the command's own has this smaller limit.
    ``cold`` tells whether its inputs are to be out of the page cache, or all in it.
    """

    script: str
    limit_bytes: int
    cause: Cause
    inputs: tuple[str, ...] = ()
    around_bytes: int | None = None
    cold: bool = False

    @property
    def dies(self) -> bool:
        return self.cause is not Cause.PAGE_CACHE

    @property
    def tightest_bytes(self) -> int:
        """The limit that the command meets."""
        return self.around_bytes or self.limit_bytes

    def command(self, inputs: Mapping[str, Path]) -> tuple[str, ...]:
        """Return the command line, with the files that the fixture wrote."""
        arguments = (str(inputs[name]) for name in self.inputs)
        return (sys.executable, str(SCRIPTS / self.script), *arguments)

    def prepare(self, inputs: Mapping[str, Path]) -> None:
        """Bring the page cache of its files into its state. A warm file is charged to this process."""
        for file in (inputs[name] for name in self.inputs if inputs[name].is_file()):
            if self.cold:
                assert page_cache.drop([file]) == 0, (
                    "another process keeps the file in the page cache"
                )
            else:
                file.read_bytes()

    def lines(self) -> tuple[str, ...]:
        """Return the right answers to "where", as "file.py:14": the line that takes the memory first."""
        return (*_marked(self._files(), TAKEN), *_marked(self._files(), CALLED))

    def _files(self) -> tuple[Path, ...]:
        parts = {Cause.CHILD: ("parts/worker.py",), Cause.IMPORT: ("parts/lookup_tables.py",)}
        return tuple(SCRIPTS / name for name in (self.script, *parts.get(self.cause, ())))


def _marked(files: tuple[Path, ...], mark: str) -> list[str]:
    return [
        f"{file.name}:{number}"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if line.endswith(mark)
    ]


DYING = (
    Dying("double_load.py", 560 * MIB, Cause.TWO_COPIES, ("float32",)),
    Dying("dtype_conversion.py", 440 * MIB, Cause.DTYPE, ("bfloat16",)),
    Dying("tokenizer_cache.py", 300 * MIB, Cause.GROWTH),
    Dying("large_child.py", 300 * MIB, Cause.CHILD),
    Dying("shared_files.py", 300 * MIB, Cause.SHARED, ("shm",)),
    Dying("outer_limit.py", 700 * MIB, Cause.OUTER_LIMIT, around_bytes=300 * MIB),
    Dying("heavy_import.py", 300 * MIB, Cause.IMPORT),
    Dying("copied_by_workers.py", 300 * MIB, Cause.COPY_ON_WRITE),
    Dying("page_cache_only.py", 300 * MIB, Cause.PAGE_CACHE, ("file",), cold=True),
    Dying("leak_in_loop.py", 300 * MIB, Cause.GROWTH),
    Dying("whole_file.py", 300 * MIB, Cause.READ, ("file",)),
    Dying("slow_growth.py", 300 * MIB, Cause.GROWTH),
)
"""All scripts. Without a limit each of them ends well, with at most 1 GiB."""


@pytest.fixture(scope="session")
def inputs(disk: Path) -> Iterator[dict[str, Path]]:
    """Write the inputs of all scripts: 1 GiB, of which 600 MiB occupy no disk."""
    folder = Path(tempfile.mkdtemp(dir=disk, prefix="inputs-"))
    shm = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="weighin-test-"))
    inputs = {name: folder / f"{name}.pt" for name in ("float32", "bfloat16")}
    inputs |= {"file": folder / "file.bin", "shm": shm}
    layers = [f"layers.{number}" for number in range(16)]
    weights = {f"{name}.weight": torch.zeros(2048, 2048) for name in layers}
    torch.save(weights | {f"{name}.bias": torch.zeros(2048) for name in layers}, inputs["float32"])
    halves = {name: torch.zeros(4096, 2048, dtype=torch.bfloat16) for name in layers[:8]}
    torch.save(halves, inputs["bfloat16"])
    with inputs["file"].open("wb") as file:
        file.truncate(600 * MIB)
    yield inputs
    shutil.rmtree(folder)
    shutil.rmtree(shm)


def empty(inputs: Mapping[str, Path]) -> None:
    """Remove what a script wrote to shared memory."""
    for path in inputs["shm"].iterdir():
        path.unlink()
