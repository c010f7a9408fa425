"""Measure how well this machine holds slow disks: rates and latencies, through FUSE and the throttle.

    .venv/bin/python benchmarks/slow_disks.py [--isolation cgroup,docker] [--repeats 3]

Each line is one direct read of 256 MiB, or of 2 s, as before a run with ``--disk``. A rate must be within
5 %, a latency within 10 %. Run it on an idle machine: the exit code is 1 if a median is outside.
"""

import argparse
import sys
from collections.abc import Iterator
from statistics import median
from typing import Final

from weighin.disk.pace import Pace
from weighin.errors import HarnessError
from weighin.isolation import select
from weighin.isolation.base import Isolation
from weighin.run import disk_proof
from weighin.suite.registry import model
from weighin.units import format_latency, format_rate

RATES: Final = (50_000_000, 100_000_000, 200_000_000)
LATENCIES_NS: Final = (1_000_000, 5_000_000, 20_000_000)
MODEL: Final = "gpt2-small"


def main() -> None:
    arguments = _arguments()
    is_good = True
    for name in arguments.isolation.split(","):
        isolation = select.named(name)
        isolation.check()
        isolation.prepare()
        for pace in paces():
            is_good &= _measure(isolation, pace, arguments.repeats)
    sys.exit(0 if is_good else 1)


def paces() -> Iterator[Pace]:
    """Yield each rate alone, each latency alone, and each rate with each latency."""
    yield from (Pace(rate) for rate in RATES)
    yield from (Pace(None, latency_ns) for latency_ns in LATENCIES_NS)
    yield from (Pace(rate, latency_ns) for rate in RATES for latency_ns in LATENCIES_NS)


def _measure(isolation: Isolation, pace: Pace, repeats: int) -> bool:
    job = disk_proof.job_of(isolation, model(MODEL), pace)
    try:
        proofs = [disk_proof.prove(isolation, job) for _ in range(repeats)]
    except HarnessError as error:
        print(f"{isolation.name:8} {pace!s:16} {error.message}")
        return False
    words, good = [], True
    rates = [proof.bytes_per_s for proof in proofs if proof.bytes_per_s]
    if rates and pace.bytes_per_s:
        off = median(rates) / pace.bytes_per_s - 1
        good &= abs(off) <= disk_proof.RATE_TOLERANCE
        shown = " ".join(f"{rate / 1e6:.1f}" for rate in rates)
        words.append(f"{format_rate(pace.bytes_per_s)}: {shown} MB/s ({off:+.1%})")
    latencies = [proof.latency_ns for proof in proofs if proof.latency_ns]
    if latencies and pace.latency_ns:
        off = median(latencies) / pace.latency_ns - 1
        good &= abs(off) <= disk_proof.LATENCY_TOLERANCE
        shown = " ".join(f"{latency / 1e6:.2f}" for latency in latencies)
        words.append(f"{format_latency(pace.latency_ns)}: {shown} ms ({off:+.1%})")
    verdict = "ok" if good else "OUTSIDE"
    print(f"{isolation.name:8} {proofs[0].through:22} {verdict:8} {'; '.join(words)}", flush=True)
    return good


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--isolation", default="cgroup", help="comma-separated: cgroup, docker, process"
    )
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
