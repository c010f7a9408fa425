"""Compare the load times of strategies with raw reads of the same file, cached and from disks.

    .venv/bin/python benchmarks/loading.py --model gpt2-large
    .venv/bin/python benchmarks/loading.py --model gpt2-medium --states 200MB/s,1ms 200MB/s,20ms

In each round, ``weighin bench`` loads with each strategy once, in random order. Then each file is read raw,
in processes of their own, which begin as weighin's do: with a page cache that is warm or cold, and with
memory that was just freed. A state RATE,LATENCY is a cold page cache before a disk that FUSE slows down (the
extra ``disk``).

"Loaded" is the time until the strategy returned, with its imports; "ready" also includes reading every byte
once. A raw read fills fresh huge pages, and then reads them once too: it is the limit for both. The columns
"x raw" are medians, over the rounds, of a time divided by that of the fastest raw read of the same file in
the same round, since files of equal content may lie differently on a disk.
"""

import argparse
import json
import mmap
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Final

from rounds import ratios, spread

from weighin.checkpoint import cache
from weighin.probes import page_cache
from weighin.records import run_folder
from weighin.run import loads
from weighin.show.table import Table
from weighin.slow_disk import Mount, Pace
from weighin.suite import registry
from weighin.units import KIB, MIB, parse_rate, parse_seconds

STRATEGIES: Final = "streaming,load_assign,mmap_assign,safetensors_copy,safetensors_mmap"
RAW: Final = {"warm": {"pread, 2 threads": (2, 4 * MIB)}, "cold": {"O_DIRECT, 4 threads": (4, 4 * MIB)}}  # fmt: skip
RAW_LATE: Final = {f"O_DIRECT, {threads} threads": (threads, 256 * KIB) for threads in (16, 64)}
HEADS: Final = ("loaded s", "x raw", "ready s", "x raw", "MB/s")
_WARM_ATTEMPTS: Final = 5

Times = tuple[float, float]
"""The seconds until loaded, and until ready."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="gpt2-large")
    parser.add_argument("--dtype", default="float32", help="of the model; the file is float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--states", nargs="+", default=list(RAW), metavar="warm|cold|RATE,LATENCY")
    parser.add_argument("--strategies", default=STRATEGIES)
    parser.add_argument("--raw", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.raw:
        print(json.dumps(_read_raw(*json.loads(options.raw))))
        return
    strategies = options.strategies.split(",")
    formats = ("pt", "safetensors", *(["tensorizer"] if "tensorizer" in strategies else []))
    files = {fmt: cache.ensure(registry.model(options.model), fmt).path for fmt in formats}
    for state in options.states:
        taken = _taken(options, strategies, files, state)
        print(f"\n{_table(state, taken, files).markdown()}", flush=True)


def _raw_ways(state: str) -> dict[str, tuple[int, int]]:
    """Return the raw reads of a state: the number of threads, and the bytes of a piece."""
    return RAW.get(state, RAW_LATE)


def _taken(
    options: argparse.Namespace, strategies: list[str], files: Mapping[str, Path], state: str
) -> dict[str, list[Times]]:
    """Return the times of each raw read and of each strategy, by round."""
    taken: dict[str, list[Times]] = defaultdict(list)
    shuffle = random.Random(0)  # noqa: S311 (varies which strategy runs before which)
    for number in range(options.rounds):
        print(f"{state}, round {number + 1} of {options.rounds}", file=sys.stderr)
        for fmt, path in files.items():
            for name, (threads, piece_bytes) in _raw_ways(state).items():
                taken[f"{name}, {fmt}"].append(_raw(path, state, threads, piece_bytes))
        order = shuffle.sample(strategies, len(strategies))
        kinds = shuffle.sample(list(files), len(files))  # the first cell of a run is often slower
        for name, times in _bench(options, order, kinds, state).items():
            taken[name].append(times)
    return taken


def _bench(
    options: argparse.Namespace, strategies: Sequence[str], formats: Sequence[str], state: str
) -> dict[str, Times]:
    """Load with each strategy once, from each of the formats that it reads."""
    rate, _, latency = state.partition(",")
    slow = ("--disk", rate, "--set", f"disk_latency={latency}") if latency else ("--cache", state)
    with tempfile.TemporaryDirectory() as folder:
        command = (
            *(sys.executable, "-P", "-m", "weighin", "bench", options.model, "--dtype", options.dtype),
            *("--strategies", ",".join(strategies), "--format", ",".join(formats), *slow),
            *("--use", "none", "--isolation", "process", "--set", "steady=true", "--set", "wait=true", "--out", f"{folder}/run"),
        )  # fmt: skip
        ended = subprocess.run(command, check=False, capture_output=True, text=True)
        if ended.returncode:
            sys.exit(ended.stdout + ended.stderr)
        results = run_folder.read(Path(folder, "run")).results
    return {
        f"{one.cell.strategy} {one.cell.format}": (one.load_ns / 1e9, one.ready_ns / 1e9)
        for one in results
        if one.load_ns and one.ready_ns
    }


def _raw(path: Path, state: str, threads: int, piece_bytes: int) -> Times:
    """Read a file raw in a fresh process, for which memory is freed just before its clock starts."""
    rate, _, latency = state.partition(",")
    with ExitStack() as opened:
        if latency:
            root = Path(opened.enter_context(tempfile.TemporaryDirectory()))
            disk = Mount(path.parent, Pace(parse_rate(rate), parse_seconds(latency)), root)
            opened.callback(disk.close)
            path = disk.folder / path.name
        job = json.dumps([str(path), threads, piece_bytes, state != "warm"])
        command = [sys.executable, __file__, "--raw", job]
        pipe = subprocess.PIPE
        process = opened.enter_context(
            subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        )
        assert process.stdout
        with loads.held(9 * path.stat().st_size // 4):
            process.stdout.readline()
            time.sleep(loads.SETTLED_S)
            _prepare_cache(path, state)
        loaded, ready = json.loads(process.communicate("go\n")[0])
        return loaded, ready


def _read_raw(path: str, threads: int, piece_bytes: int, is_direct: bool) -> Times:
    """Wait for a line; read the file into fresh huge pages, and these pages once."""
    import torch

    from weighin.worker.verify import touch

    print("ready to read", flush=True)
    sys.stdin.readline()
    start_s = time.monotonic()
    file = os.open(path, os.O_RDONLY | (os.O_DIRECT if is_direct else 0))
    size = os.fstat(file).st_size
    starts, lock = iter(range(0, size, piece_bytes)), threading.Lock()
    area = mmap.mmap(-1, size + piece_bytes, flags=mmap.MAP_PRIVATE)
    page_cache.ask_for_huge_pages(area, 0, len(area))

    def work() -> None:
        while True:
            with lock:
                start = next(starts, None)
            if start is None:
                return
            os.preadv(file, [memoryview(area)[start : start + piece_bytes]], start)

    readers = [threading.Thread(target=work) for _ in range(threads)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    loaded_s = time.monotonic() - start_s
    words = torch.frombuffer(area, dtype=torch.int64, count=len(area) // 8)
    # As many as a model's tensors.
    touch({str(at): chunk for at, chunk in enumerate(words.chunk(512))})
    return loaded_s, time.monotonic() - start_s


def _prepare_cache(file: Path, state: str) -> None:
    """Load the whole file into the page cache, or drop it from there."""
    assert page_cache.drop([file]) == 0  # pages must come from a read, not from a write
    if state != "warm":
        return
    piece = bytearray(MIB)
    for _ in range(_WARM_ATTEMPTS):
        with file.open("rb", buffering=0) as source:
            while source.readinto(piece):
                pass
        if (page_cache.cached([file]) or 0) >= file.stat().st_size:
            return
    sys.exit(f"the page cache does not keep {file}: free some memory, or --states cold")


def _table(state: str, taken: Mapping[str, list[Times]], files: Mapping[str, Path]) -> Table:
    limits = {}
    for fmt in files:
        reads = (taken[f"{name}, {fmt}"] for name in _raw_ways(state))
        limits[fmt] = [
            tuple(map(min, zip(*each, strict=True))) for each in zip(*reads, strict=True)
        ]
    rows = []
    for name, times in taken.items():
        fmt = name.split()[-1]
        loaded, ready = zip(*times, strict=True)
        row = [name]
        for own, raw in zip((loaded, ready), zip(*limits[fmt], strict=True), strict=True):
            row += [spread(own), f"{median(ratios(own, raw)):.2f}"]
        row.append(f"{files[fmt].stat().st_size / median(ready) / 1e6:.0f}")
        rows.append(row)
    return Table.of((state, *HEADS), rows)


if __name__ == "__main__":
    main()
