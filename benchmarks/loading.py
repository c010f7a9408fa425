"""Compare the load times of strategies with raw reads of the same file.

Each strategy runs once per round in a fresh process, in random order, with a warm and with a cold
page cache. Memory is freed just before the clock starts, because in a virtual machine the first
access to a page is slow if the page was free for some seconds. For a warm cache, the file's pages
are dropped and the file is read again, as weighin does, because pages that were just written take
longer to map. The clock starts after ``import torch``. A strategy's time includes its own imports
(from bytecode, as after a pip install), unless ``--imports before`` is given.

"Loaded" is the time until the strategy returned. "Ready" also includes reading every byte once. The
values are verified after the clock stopped. A raw read fills fresh memory, and then reads this
memory once too; it is the limit for "loaded" and for "ready". The column "x limit" is the median,
over the rounds, of a strategy's time divided by the time of the raw read of the same file in the
same round, since files of equal content may lie differently on a disk. Use --beside to compare two
strategies: it computes ratios within a round, which cancels the drift of a machine's speed.
"""

import argparse
import json
import mmap
import operator
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from weighin.cell import ModelSpec
from weighin.checkpoint import cache
from weighin.probes import page_cache
from weighin.probes.page_cache import ask_for_huge_pages
from weighin.run import loads
from weighin.suite import registry

RAW = {"warm": "pread, 2 threads", "cold": "O_DIRECT, 4 threads"}
WAYS = {
    "streaming": ("streaming", "pt"),
    "streaming safetensors": ("streaming", "safetensors"),
    "load_assign": ("load_assign", "pt"),
    "mmap_assign": ("mmap_assign", "pt"),
    "safetensors_copy": ("safetensors_copy", "safetensors"),
    "safetensors_mmap": ("safetensors_mmap", "safetensors"),
}
PEERS = ("runai", "fastsafetensors", "tensorizer", "eager", "prefetch_mmap", "safetensors_pread")
_PIECE_BYTES = 4 * 1024**2
_THREADS = {"warm": 2, "cold": 4}
_WARM_ATTEMPTS = 5
_MEMORY = {
    "warm": 5,
    "cold": 9,
}  # in quarters of the checkpoint's size: the memory of a load, page cache included


@dataclass(frozen=True, slots=True)
class Way:
    """A strategy's file and the checkpoint that it reads; without a strategy, a raw read."""

    name: str
    strategy: Path | None
    checkpoint: Path
    manifest: Path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="gpt2-large")
    parser.add_argument(
        "--dtype", default="float32", help="of the model; the checkpoint is float32"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--states", nargs="+", choices=RAW, default=list(RAW))
    parser.add_argument(
        "--ways", nargs="+", help="run only these strategies, named as in the table"
    )
    parser.add_argument(
        "--peers", action="store_true", help="compare with the loaders of other projects too"
    )
    parser.add_argument(
        "--beside",
        metavar="WAY",
        help="add the ratio of each ready time to this strategy's in the same round",
    )
    parser.add_argument(
        "--imports",
        choices=("paid", "before"),
        default="paid",
        help="before: strategies' imports and the first use of the meta device precede the clock",
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(_run_one(json.loads(options.one))))
        return
    loads.compile_code()
    ways = _ways(options.model, peers=options.peers)
    ways = [way for way in ways if not options.ways or way.name in options.ways]
    if options.beside and options.beside not in [way.name for way in ways]:
        parser.error(
            f"--beside {options.beside!r}: choose of {', '.join(way.name for way in ways)}"
        )
    for state in options.states:
        _print(state, _compare(options, ways, state), options.beside)


def _ways(model: str, *, peers: bool) -> list[Way]:
    """Return the strategies to compare; generates missing checkpoints."""
    spec = registry.model(model)
    ways = []
    for name, (strategy, fmt) in WAYS.items():
        made = cache.ensure(spec, fmt)
        ways.append(Way(name, registry.strategy(strategy).path, made.path, made.manifest_path))
    return ways + (_peers(spec) if peers else [])


def _peers(spec: ModelSpec) -> list[Way]:
    """Return the loaders of other projects that are installed here."""
    ways = []
    for name in PEERS:
        info = registry.strategy(name)
        if info.missing:
            print(f"{name} is left out: it {info.missing}", file=sys.stderr)
        else:
            made = cache.ensure(spec, info.formats[0])
            ways.append(Way(name, info.path, made.path, made.manifest_path))
    return ways


def _compare(
    options: argparse.Namespace, ways: list[Way], state: str
) -> list[tuple[Way, list[tuple[float, float]]]]:
    """Return the seconds of each strategy and of a raw read of each file, by round."""
    read_raw = {
        way.checkpoint: Way(
            f"{RAW[state]}, {way.checkpoint.suffix}", None, way.checkpoint, way.manifest
        )
        for way in ways
    }
    timings: list[tuple[Way, list[tuple[float, float]]]] = [
        (way, []) for way in (*read_raw.values(), *ways)
    ]
    for file in read_raw:
        assert page_cache.drop([file]) == 0  # pages must come from a read, not from a write
    shuffle = random.Random(0)  # noqa: S311 (varies which strategy runs before which)
    for number in range(options.rounds):
        for way, seconds in shuffle.sample(timings, len(timings)):
            print(f"{state}, round {number + 1}: {way.name}", file=sys.stderr)
            job = {
                "raw": state if way.strategy is None else "",
                "strategy": str(way.strategy),
                "path": str(way.checkpoint),
                "manifest": str(way.manifest),
                "imports": options.imports,
                "model": options.model,
                "dtype": options.dtype,
            }
            seconds.append(in_fresh_process(job, way.checkpoint, state))
    return timings


def in_fresh_process(job: dict[str, Any], read: Path, state: str) -> tuple[float, float]:
    """Time one strategy, or a raw read, whose memory is freed just before its clock starts."""
    memory_bytes = _MEMORY[state] * read.stat().st_size // 4
    command = [sys.executable, __file__, "--one", json.dumps(job)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout
        with loads.held(memory_bytes):
            process.stdout.readline()
            _prepare_cache(read, state)
            time.sleep(loads.SETTLED_S)
            _prepare_cache(read, state)  # some machines evict pages that were not used recently
        output, _ = process.communicate("go\n")
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    loaded, ready = json.loads(output.splitlines()[-1])
    return loaded, ready


def _print(
    state: str, timings: list[tuple[Way, list[tuple[float, float]]]], beside: str | None
) -> None:
    limits = {
        way.checkpoint: list(zip(*seconds, strict=True))
        for way, seconds in timings
        if way.strategy is None
    }
    other = [ready for way, seconds in timings if way.name == beside for _, ready in seconds]
    print(
        f"\n{state:<34}"
        + "".join(f"{what + ' s':>9}{'range':>14}{'x limit':>9}" for what in ("loaded", "ready"))
        + (f"{'x ' + beside:>20}{'range':>14}" if beside else "")
    )
    for way, seconds in timings:
        line = f"{way.name:<34}"
        columns = list(zip(*seconds, strict=True))
        for column, limit in zip(columns, limits[way.checkpoint], strict=True):
            ratio = statistics.median(map(operator.truediv, column, limit))
            line += with_range(column, 9) + f"{ratio:>9.2f}"
        if beside:
            line += with_range(list(map(operator.truediv, columns[1], other)), 20)
        print(line, flush=True)


def with_range(values: Sequence[float], width: int) -> str:
    spread = f"{min(values):.2f}..{max(values):.2f}"
    return f"{statistics.median(values):>{width}.2f}{spread:>14}"


def _run_one(job: dict[str, Any]) -> tuple[float, float]:
    """Return the seconds until one strategy returned and until ready, in this fresh process."""
    import torch

    from weighin.checkpoint.manifest import read_manifest
    from weighin.stream.construct import resolve_builder
    from weighin.worker.loading import WorkerLoad, import_strategy
    from weighin.worker.verify import check_values, named_tensors, touch

    path = Path(job["path"])
    if job["raw"]:
        start = _start_clock()
        threads, piece_bytes = job.get("threads", _THREADS[job["raw"]]), job.get("piece_bytes")
        area = _read_raw(path, threads, piece_bytes or _PIECE_BYTES, direct=job["raw"] == "cold")
        loaded = time.monotonic() - start
        words = torch.frombuffer(area, dtype=torch.int64, count=len(area) // 8)
        touch(
            {str(at): chunk for at, chunk in enumerate(words.chunk(512))}
        )  # about as many as a model has tensors
        return loaded, time.monotonic() - start
    spec = registry.model(job["model"])
    load = WorkerLoad(
        checkpoint=path,
        device=torch.device("cpu"),
        dtype=getattr(torch, job["dtype"]),
        options={},
        model=spec,
        builder=resolve_builder(spec.builder),
        marks=cast(Any, _NoMarks()),
    )
    if job["imports"] == "before":
        import_strategy(Path(job["strategy"]))
        with torch.device("meta"):
            torch.triu(torch.nn.Embedding(1, 1).weight)
    start = _start_clock()
    model = import_strategy(Path(job["strategy"]))(load)
    loaded = time.monotonic() - start
    checksums = touch(named_tensors(model))
    ready = time.monotonic() - start
    check_values(checksums, read_manifest(Path(job["manifest"])), load.dtype)
    return loaded, ready


def _start_clock() -> float:
    """Announce the load, wait until memory was freed for it, and return the time."""
    print("at the load", flush=True)
    sys.stdin.readline()
    return time.monotonic()


class _NoMarks:
    """Phases that measure nothing, because this benchmark needs total times only."""

    def phase(self, _name: str) -> AbstractContextManager[None]:
        return nullcontext()


def _read_raw(path: Path, count: int, piece_bytes: int, *, direct: bool) -> mmap.mmap:
    """Read the file into fresh huge pages: from the page cache, or with ``direct`` from the disk."""
    file = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    size = os.fstat(file).st_size
    starts, lock = iter(range(0, size, piece_bytes)), threading.Lock()
    area = mmap.mmap(-1, size + piece_bytes, flags=mmap.MAP_PRIVATE)
    ask_for_huge_pages(area, 0, len(area))

    def work() -> None:
        while True:
            with lock:
                start = next(starts, None)
            if start is None:
                return
            os.preadv(file, [memoryview(area)[start : start + piece_bytes]], start)

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return area


def _prepare_cache(file: Path, state: str) -> None:
    """Load the whole file into the page cache, or drop it from there."""
    if state == "cold":
        assert page_cache.drop([file]) == 0
        return
    piece = bytearray(1024**2)
    for _ in range(_WARM_ATTEMPTS):
        if (page_cache.cached([file]) or 0) >= file.stat().st_size:
            return
        with file.open("rb", buffering=0) as source:
            while source.readinto(piece):
                pass
    raise SystemExit(f"the page cache does not keep {file}: free some memory, or --states cold")


if __name__ == "__main__":
    main()
