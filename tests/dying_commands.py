"""Scripts that die for lack of memory, and the right explanation of each death.

The scripts are in ``commands/dying/``. Each marks the lines that take the memory with ``# TAKEN``, the
most of it first, and a line that calls such a one with ``# CALLED``. Where a script may die earlier for
another cause, under a lower limit, the mark of that line names it: ``# TAKEN: import``; where nothing
proves a cause, ``# TAKEN: none``. ``# HELD`` marks a line at which
the program still has it all. ``page_cache_only.py`` is the one that lives.
"""

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import pytest
import torch
from cells import MIB, page_cache
from safetensors.torch import save_file

SCRIPTS = Path(__file__).parent / "commands" / "dying"
_MARK = re.compile(r".*# (?P<mark>TAKEN|CALLED|HELD)(?:: (?P<causes>.*))?")


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
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Line:
    """A marked line, "file.py:14", and the causes that are right if the memory was taken there."""

    place: str
    causes: tuple[str, ...]
    calls: bool


@dataclass(frozen=True, slots=True)
class Dying:
    """A script, its limit, and why it dies. ``inputs`` are the names of its inputs.

    ``also`` are other causes that are true of it too, and ``parts`` the files that it runs.
    If ``around_bytes`` is given, a cgroup around the command's own has this smaller limit.
    ``cold`` tells whether its inputs are to be out of the page cache, or all in it.
    """

    script: str
    limit_bytes: int
    cause: Cause
    inputs: tuple[str, ...] = ()
    around_bytes: int | None = None
    cold: bool = False
    also: tuple[Cause, ...] = ()
    parts: tuple[str, ...] = ()

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

    def all_causes(self) -> set[str]:
        return {self.cause, *self.also, *(name for line in self.marked() for name in line.causes)}

    def marked(self) -> list[Line]:
        """Return the marked lines, with the right answers to "why" for each."""
        lines = []
        for file in (SCRIPTS / name for name in (self.script, *self.parts)):
            for number, text in enumerate(file.read_text().splitlines(), 1):
                if match := _MARK.fullmatch(text):
                    causes = tuple(match["causes"].split(" or ")) if match["causes"] else ()
                    lines.append((f"{file.name}:{number}", causes, match["mark"] == "CALLED"))
        own = (self.cause, *self.also)
        every = (*own, *(cause for _, causes, _ in lines for cause in causes))
        return [
            Line(place, causes or (every if calls else own), calls)
            for place, causes, calls in lines
        ]


DYING = (
    Dying("double_load.py", 560 * MIB, Cause.TWO_COPIES, ("float32",)),
    Dying("dtype_conversion.py", 440 * MIB, Cause.DTYPE, ("bfloat16",)),
    Dying("tokenizer_cache.py", 300 * MIB, Cause.GROWTH),
    Dying("large_child.py", 300 * MIB, Cause.CHILD, parts=("parts/worker.py",), also=(Cause.GROWTH,)),
    Dying("shared_files.py", 300 * MIB, Cause.SHARED, ("shm",)),
    Dying("outer_limit.py", 700 * MIB, Cause.OUTER_LIMIT, around_bytes=300 * MIB, also=(Cause.GROWTH,)),
    Dying("heavy_import.py", 300 * MIB, Cause.IMPORT, parts=("parts/lookup_tables.py",)),
    Dying("copied_by_workers.py", 300 * MIB, Cause.COPY_ON_WRITE),
    Dying("page_cache_only.py", 300 * MIB, Cause.PAGE_CACHE, ("file",), cold=True),
    Dying("leak_in_loop.py", 300 * MIB, Cause.GROWTH),
    Dying("whole_file.py", 300 * MIB, Cause.READ, ("file",)),
    Dying("slow_growth.py", 300 * MIB, Cause.GROWTH),
    Dying("pretrained_model.py", 500 * MIB, Cause.TWO_COPIES, ("float32",)),
    Dying("safetensors_model.py", 250 * MIB, Cause.NONE, ("safetensors",)),
    Dying("array_features.py", 350 * MIB, Cause.DTYPE, ("array",)),
    Dying("json_rows.py", 250 * MIB, Cause.READ, ("json",), also=(Cause.GROWTH,)),
    Dying("loader_workers.py", 300 * MIB, Cause.COPY_ON_WRITE),
    Dying("two_ranks.py", 250 * MIB, Cause.GROWTH, also=(Cause.CHILD,)),
    Dying("server_and_indexer.py", 380 * MIB, Cause.GROWTH, parts=("parts/indexer.py",), also=(Cause.CHILD,)),
    Dying("optimizer_step.py", 400 * MIB, Cause.NONE),
    Dying("report_at_exit.py", 250 * MIB, Cause.GROWTH),
    Dying("kept_outputs.py", 300 * MIB, Cause.GROWTH),
)  # fmt: skip
"""All scripts. Without a limit each of them ends well, with at most 1 GiB."""


@pytest.fixture(scope="session")
def inputs(disk: Path) -> Iterator[dict[str, Path]]:
    """Write the inputs of all scripts: 1.5 GiB, of which 700 MiB occupy no disk."""
    folder = Path(tempfile.mkdtemp(dir=disk, prefix="inputs-"))
    shm = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="weighin-test-"))
    yield write(folder, shm)
    shutil.rmtree(folder)
    shutil.rmtree(shm)


def write(folder: Path, shm: Path) -> dict[str, Path]:
    """Write all inputs into ``folder``; ``shm`` is the folder that ``shared_files.py`` fills."""
    inputs = {name: folder / f"{name}.pt" for name in ("float32", "bfloat16")}
    inputs |= {"file": folder / "file.bin", "shm": shm}
    inputs |= {"safetensors": folder / "model.safetensors", "array": folder / "features.npy"}
    inputs |= {"json": folder / "rows.json"}
    if inputs["json"].exists():
        return inputs
    layers = [f"layers.{number}" for number in range(16)]
    weights = {f"{name}.weight": torch.zeros(2048, 2048) for name in layers}
    torch.save(weights | {f"{name}.bias": torch.zeros(2048) for name in layers}, inputs["float32"])
    halves = {name: torch.zeros(4096, 2048, dtype=torch.bfloat16) for name in layers[:8]}
    torch.save(halves, inputs["bfloat16"])
    with inputs["file"].open("wb") as file:
        file.truncate(600 * MIB)
    save_file({f"{name}.weight": torch.zeros(2048, 2048) for name in layers}, inputs["safetensors"])
    np.lib.format.open_memmap(inputs["array"], "w+", np.float32, (160 * MIB // 4,))
    row = {"id": 1, "text": "a row of the table", "scores": [0.25, 0.5, 0.75], "kept": True}
    with inputs["json"].open("w") as rows:
        rows.write(
            "[" + ", ".join(json.dumps(row | {"id": number}) for number in range(500_000)) + "]"
        )
    return inputs


def empty(inputs: Mapping[str, Path]) -> None:
    """Remove what a script wrote to shared memory."""
    for path in inputs["shm"].iterdir():
        path.unlink()
