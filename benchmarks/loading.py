"""How near the loaders come to what the machine can do: ratios to raw reads of the same file.

Each way runs in a fresh process, A B C A B C, warm and cold; memory is touched and freed before
each, because a virtual machine's pages are slower the longer they were free. The clock starts
behind ``import torch``: what a way imports itself is its own cost. Ready = every byte read once.
"""

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

from harness import page_cache, registry, steady
from harness.checkpoint import cache
from harness.checkpoint.layouts import files

RAW = {"warm": "pread, 2 threads", "cold": "O_DIRECT, 4 threads"}
WAYS = ("streaming", "load_assign", "mmap_assign", "safetensors_copy", "safetensors_mmap")
_PIECE_BYTES = 4 * 1024**2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="gpt2-large")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(_run_one(json.loads(options.one))))
        return
    for state in RAW:
        found = _compare(options.model, options.dtype, state, options.rounds)
        _print(state, found)


def _compare(model: str, dtype: str, state: str, rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        for way in (RAW[state], *WAYS):
            fmt = registry.strategy(way).formats[0] if way in WAYS else "pt"
            checkpoint = cache.ensure(registry.model(model), fmt)
            job = {"way": way, "model": model, "dtype": dtype, "path": str(checkpoint.path)}
            if state == "cold":
                assert page_cache.drop(files(checkpoint.path)) == 0
            else:
                _read_through(checkpoint.path)
            steady.touch_and_free(2 * checkpoint.files_bytes)
            command = [sys.executable, __file__, "--one", json.dumps(job)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            seconds.setdefault(way, []).append(json.loads(output))
    return seconds


def _print(state: str, found: dict[str, list[float]]) -> None:
    limit = statistics.median(found[RAW[state]])
    print(f"\n{state:<22}{'median s':>9}{'range s':>16}{'x limit':>9}")
    for way, seconds in found.items():
        median = statistics.median(seconds)
        spread = f"{min(seconds):.2f}..{max(seconds):.2f}"
        print(f"{way:<22}{median:>9.2f}{spread:>16}{median / limit:>9.2f}")


def _run_one(job: dict[str, Any]) -> float:
    """Return the seconds until ready of one way, in this fresh process."""
    import torch

    from harness.models.building import resolve_builder
    from harness.worker.loading import WorkerLoad, import_strategy
    from harness.worker.touch import named_tensors, touch

    path = Path(job["path"])
    if job["way"] not in WAYS:
        start = time.monotonic()
        _read_raw(path, direct=job["way"] == RAW["cold"])
        return time.monotonic() - start
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
    start = time.monotonic()
    touch(named_tensors(import_strategy(registry.strategy(job["way"]).path)(load)))
    return time.monotonic() - start


class _NoMarks:
    """Phases that measure nothing: this benchmark only asks for the time until ready."""

    def phase(self, _name: str) -> AbstractContextManager[None]:
        return nullcontext()


def _read_raw(path: Path, *, direct: bool) -> None:
    """Read the file into fresh huge pages (cached), or through small buffers (from the disk)."""
    file = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    size = os.fstat(file).st_size
    starts, lock = iter(range(0, size, _PIECE_BYTES)), threading.Lock()
    area = None
    if not direct:
        area = mmap.mmap(-1, size + _PIECE_BYTES, flags=mmap.MAP_PRIVATE)
        area.madvise(mmap.MADV_HUGEPAGE)

    def work() -> None:
        own = mmap.mmap(-1, _PIECE_BYTES, flags=mmap.MAP_PRIVATE)
        while True:
            with lock:
                start = next(starts, None)
            if start is None:
                return
            target = memoryview(area)[start : start + _PIECE_BYTES] if area else own
            os.preadv(file, [target], start)

    threads = [threading.Thread(target=work) for _ in range(4 if direct else 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _read_through(path: Path) -> None:
    piece = bytearray(1024**2)
    for file in files(path):
        with file.open("rb", buffering=0) as source:
            while source.readinto(piece):
                pass


if __name__ == "__main__":
    main()
