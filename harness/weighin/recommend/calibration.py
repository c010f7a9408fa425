"""Measure how fast this machine reads files, writes and copies memory, and initialises tensors.

``weighin recommend`` predicts the times of loads from the measured speeds (the calibration). Each
speed is the best of three rounds, because other programs can slow a round down, but not speed it
up. Before each read, the pages of the file are evicted from the page cache, and the eviction is
verified.
"""

import ctypes
import json
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from weighin import child_process
from weighin.atomic import write_text
from weighin.checkpoint import cache
from weighin.errors import ConfigError, HarnessError
from weighin.loader.direct_io import DISK_THREADS, PIECE_BYTES, PieceReader
from weighin.probes import environment, page_cache
from weighin.run import page_preconditioning
from weighin.text import one_line
from weighin.units import GIB, MIB

SCHEMA: Final = 2
FILE: Final = "calibration.json"

_FILE_BYTES: Final = 512 * MIB
_MEMORY_BYTES: Final = 512 * MIB
_ROUNDS: Final = 3
_TORCH_TIMEOUT_S: Final = 300


@dataclass(frozen=True, slots=True)
class Calibration:
    """A machine's speeds in bytes per second and costs in seconds; ``_MEANINGS`` explains them."""

    read_bytes_per_s: float
    read_direct_bytes_per_s: float
    map_bytes_per_s: float
    fault_bytes_per_s: float
    copy_bytes_per_s: float
    init_bytes_per_s: float
    archive_s: float
    module_s: float

    def slowed(self, times: float) -> "Calibration":
        """Return the calibration of a machine on which all work takes ``times`` times as long."""
        return Calibration(**{
            name: value / times if name.endswith("_per_s") else value * times
            for name, value in asdict(self).items()
        })  # fmt: skip


def stored() -> Calibration | None:
    """Return the stored calibration; None if it cannot be read, or if it is of another machine."""
    try:
        content = json.loads((cache.folder() / FILE).read_text())
        figures = {one.name: float(content["figures"][one.name]) for one in fields(Calibration)}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if content.get("schema") != SCHEMA or content.get("machine") != _machine():
        return None
    return Calibration(**figures)


def calibrate(say: Callable[[str], None]) -> Calibration:
    """Measure this machine, which takes about 10 s, and store its calibration in the cache folder.

    Raises:
        ConfigError: the cache folder cannot be written, or reads from a disk cannot be measured in it.
        HarnessError: torch does not run, or takes too long.
    """
    folder = cache.folder()
    say(f"measuring the speed of this machine: reading and writing 512 MiB in {folder}")
    with _file(folder) as path:
        page_preconditioning.touch_and_free(2 * _MEMORY_BYTES)
        measured = [_round(path) for _ in range(_ROUNDS)]
    measured += _ask_torch()
    names = [each.name for each in fields(Calibration)]
    rounds = {name: [once[name] for once in measured if name in once] for name in names}
    best = {
        name: max(values) if name.endswith("_per_s") else min(values)
        for name, values in rounds.items()
    }
    content = {"schema": SCHEMA, "machine": _machine(), "figures": best, "rounds": rounds}
    write_text(folder / FILE, json.dumps(content, indent=1))
    return Calibration(**best)


def _round(path: Path) -> dict[str, float]:
    """Measure, one time each, the speeds that need no torch."""
    return {
        "read_bytes_per_s": _cold(path, _read_buffered),
        "read_direct_bytes_per_s": _cold(path, _read_direct),
        "map_bytes_per_s": _cold(path, _read_mapped),
        "fault_bytes_per_s": _fault(),
        "copy_bytes_per_s": _copy(),
    }


def table(calibration: Calibration) -> Table:
    """Return a calibration as the table that ``weighin doctor --calibrate`` prints."""
    drawn = Table("figure", "this machine", "meaning", box=SIMPLE_HEAD, pad_edge=False)
    drawn.title = f"calibration, stored in {cache.folder() / FILE}"
    for name, meaning in _MEANINGS.items():
        value = getattr(calibration, name)
        size = f"{value / GIB:.2f} GiB/s" if name.endswith("_per_s") else f"{value * 1e3:.2f} ms"
        drawn.add_row(name, size, meaning)
    return drawn


_MEANINGS: Final = {
    "read_bytes_per_s": "reading a file that is not in the page cache: one thread, buffered",
    "read_direct_bytes_per_s": "reading a file that is not in the page cache: eight threads, O_DIRECT",
    "map_bytes_per_s": "reading a file that is not in the page cache: through a mapping",
    "fault_bytes_per_s": "writing to memory for the first time, without a request for huge pages",
    "copy_bytes_per_s": "copying memory that was written before",
    "init_bytes_per_s": "initialising a tensor with random numbers, as constructors do",
    "archive_s": "opening a file with torch.load",
    "module_s": "importing one Python module",
}


def _machine() -> dict[str, Any]:
    here = environment.machine()
    return {name: here[name] for name in ("machine", "cpu", "cpus", "ram_bytes", "kernel")}


@contextmanager
def _file(folder: Path) -> Iterator[Path]:
    """Yield the path of a file of random bytes on the disk, and remove the file afterwards."""
    block = os.urandom(MIB)  # written 512 times, because no disk compresses repetitions 1 MiB apart
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:  # it has no name, so a kill leaves no file
            for _ in range(_FILE_BYTES // MIB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            yield Path(f"/proc/self/fd/{file.fileno()}")
    except OSError as error:
        raise ConfigError(
            f"cannot calibrate in {folder}: {error.strerror}",
            "choose another folder: WEIGHIN_CACHE=/path weighin ...",
        ) from None


def _cold(path: Path, read: Callable[[Path], None]) -> float:
    cached_bytes = page_cache.drop([path])
    if cached_bytes is None:
        raise ConfigError(
            f"cannot calibrate in {cache.folder()}: this kernel does not report which file pages"
            " are cached",
            "run weighin doctor --calibrate on the Linux host, outside of this sandbox",
        )
    if cached_bytes:
        raise ConfigError(
            f"cannot calibrate in {cache.folder()}: the files of this folder stay in memory"
            " (tmpfs), so that no disk can be measured",
            "choose a cache folder on a disk: WEIGHIN_CACHE=/path weighin ...",
        )
    start = time.perf_counter()
    read(path)
    return _FILE_BYTES / (time.perf_counter() - start)


def _read_buffered(path: Path) -> None:
    piece = bytearray(MIB)
    with path.open("rb", buffering=0) as file:
        while file.readinto(piece):
            pass


def _read_direct(path: Path) -> None:
    def read(first: int) -> None:
        reader, target = PieceReader(), memoryview(bytearray(PIECE_BYTES))
        try:
            for offset in range(first * PIECE_BYTES, _FILE_BYTES, DISK_THREADS * PIECE_BYTES):
                reader.read(path, target, offset)
        finally:
            reader.close()

    with ThreadPoolExecutor(DISK_THREADS) as pool:
        list(pool.map(read, range(DISK_THREADS)))


def _read_mapped(path: Path) -> None:
    """Copy a mapped file into memory with one thread per processor, as weighin does after a load."""
    threads = os.cpu_count() or 1
    with (
        path.open("rb") as file,
        mmap.mmap(
            file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        ) as area,
    ):
        view = ctypes.c_char.from_buffer(area)
        base, share = ctypes.addressof(view), _FILE_BYTES // threads

        def read(thread: int) -> None:
            piece = ctypes.create_string_buffer(MIB)
            for offset in range(thread * share, (thread + 1) * share - MIB + 1, MIB):
                ctypes.memmove(piece, base + offset, MIB)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read, range(threads)))
        del view  # a mapping with a pointer into it cannot be closed


def _fault() -> float:
    with mmap.mmap(-1, _MEMORY_BYTES, flags=mmap.MAP_PRIVATE) as area:
        start = time.perf_counter()
        _fill(area)
        return _MEMORY_BYTES / (time.perf_counter() - start)


def _copy() -> float:
    half = _MEMORY_BYTES // 2
    with mmap.mmap(-1, _MEMORY_BYTES, flags=mmap.MAP_PRIVATE) as area:
        _fill(area)
        view = ctypes.c_char.from_buffer(area)
        address = ctypes.addressof(view)
        start = time.perf_counter()
        ctypes.memmove(address + half, address, half)
        elapsed_s = time.perf_counter() - start
        del view  # a mapping with a pointer into it cannot be closed
        return half / elapsed_s


def _fill(area: mmap.mmap) -> None:
    view = ctypes.c_char.from_buffer(area)
    ctypes.memset(ctypes.addressof(view), 1, len(area))
    del view


def _ask_torch() -> list[dict[str, float]]:
    """Let another process measure what needs torch; return a dict of results for each round."""
    command = child_process.module("weighin.recommend.torch_costs")
    try:
        asked = child_process.ask(command, child_process.environment(), timeout_s=_TORCH_TIMEOUT_S)
    except TimeoutError:
        raise HarnessError(
            f"cannot calibrate: torch takes longer than {_TORCH_TIMEOUT_S} s",
            "end other programs, and calibrate again: weighin doctor --calibrate",
        ) from None
    if asked.code:
        raise HarnessError(f"cannot calibrate: torch does not run: {one_line(asked.why)}")
    return [
        {name: figure for name, figure in event.items() if name != "event"}
        for event in asked.events
    ]
