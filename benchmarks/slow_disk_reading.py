"""Compare loads from disks that answer late with a raw parallel read of the same file.

    .venv/bin/python benchmarks/slow_disk_reading.py --model gpt2-medium

The checkpoint is shown again through FUSE (the extra ``disk``), at a rate and with a latency for each
request. Each way runs once per round at each latency, in random order, in a fresh process and with a
cold page cache. The clock starts after ``import torch`` and the strategy's imports. "Loaded" is the
time until the strategy returned, "ready" also includes reading every byte once. MB/s is the file's size
divided by the ready time. "x raw" is the median, over the rounds, of the fastest raw read's ready time
in the round divided by that of the way.
"""

import argparse
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from loading import in_fresh_process, with_range

from weighin.checkpoint import cache
from weighin.run.loads import compile_code
from weighin.slow_disk import Mount, Pace
from weighin.suite import registry
from weighin.units import KIB, format_latency, parse_rate, parse_seconds

RAW = {f"raw, {threads} threads": threads for threads in (16, 64)}
WAYS = {
    "streaming": ("streaming", "safetensors"),
    "streaming .pt": ("streaming", "pt"),
    "baseline .pt": ("baseline", "pt"),
    "mmap_assign .pt": ("mmap_assign", "pt"),
    "safetensors_mmap": ("safetensors_mmap", "safetensors"),
}
_RAW_PIECE_BYTES = 256 * KIB

Seconds = dict[str, list[tuple[float, float]]]
"""The times of each way until loaded and until ready, by round."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt2-medium")
    parser.add_argument("--rate", type=parse_rate, default=parse_rate("200MB/s"))
    parser.add_argument("--latencies", default="1ms,5ms,20ms")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    latencies_ns = [parse_seconds(text) for text in options.latencies.split(",")]
    compile_code()
    spec = registry.model(options.model)
    made = {fmt: cache.ensure(spec, fmt) for fmt in ("safetensors", "pt")}
    jobs = {
        name: _job(options.model, made["safetensors"], raw="cold", threads=threads, strategy="")
        for name, threads in RAW.items()
    } | {
        name: _job(options.model, made[fmt], raw="", strategy=str(registry.strategy(strategy).path))
        for name, (strategy, fmt) in WAYS.items()
        if name in options.ways
    }
    times: dict[int, Seconds] = {ns: defaultdict(list) for ns in latencies_ns}
    shuffle = random.Random(0)  # noqa: S311 (varies which way runs before which)
    for number in range(options.rounds):
        for latency_ns in shuffle.sample(latencies_ns, len(latencies_ns)):
            for name in shuffle.sample(list(jobs), len(jobs)):
                print(f"round {number + 1}, {format_latency(latency_ns)}: {name}", file=sys.stderr)
                pace = Pace(options.rate, latency_ns)
                times[latency_ns][name].append(_timed(jobs[name], pace))
    sizes = {name: Path(job["path"]).stat().st_size for name, job in jobs.items()}
    for latency_ns in latencies_ns:
        _print(str(Pace(options.rate, latency_ns)), list(jobs), times[latency_ns], sizes)


def _job(model: str, made: cache.Prepared, **more: Any) -> dict[str, Any]:
    return {
        "path": str(made.path), "manifest": str(made.manifest_path), "model": model,
        "dtype": "float32", "imports": "before", "piece_bytes": _RAW_PIECE_BYTES, **more,
    }  # fmt: skip


def _timed(job: dict[str, Any], pace: Pace) -> tuple[float, float]:
    """Run one way on a disk of this pace; return its seconds until loaded and until ready."""
    path = Path(job["path"])
    with tempfile.TemporaryDirectory() as root:
        disk = Mount(path.parent, pace, Path(root))
        try:
            seen = disk.folder / path.name
            return in_fresh_process(job | {"path": str(seen)}, seen, "cold")
        finally:
            disk.close()


def _print(pace: str, names: list[str], times: Seconds, sizes: dict[str, int]) -> None:
    print(
        f"\n{pace:<22}{'loaded s':>9}{'range':>14}{'ready s':>9}{'range':>14}{'MB/s':>7}{'x raw':>7}"
    )
    fastest = [
        min(ready for _, ready in row) for row in zip(*(times[raw] for raw in RAW), strict=True)
    ]
    for name in names:
        loaded, ready = zip(*times[name], strict=True)
        rate = sizes[name] / statistics.median(ready) / 1e6
        size = sizes[name] / sizes[names[0]]  # a .pt file may be larger than the safetensors file
        share = statistics.median(raw * size / own for raw, own in zip(fastest, ready, strict=True))
        print(f"{name:<22}{with_range(loaded, 9)}{with_range(ready, 9)}{rate:>7.0f}{share:>7.2f}")


if __name__ == "__main__":
    main()
