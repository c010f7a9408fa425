"""Test how an isolation can slow a disk down: the rate alone, and a rate with a latency."""

from collections.abc import Callable, Iterator
from typing import Final

from weighin.disk.pace import Pace
from weighin.doctor.capabilities import Capability
from weighin.errors import HarnessError
from weighin.isolation.base import Isolation
from weighin.run import disk_proof
from weighin.suite.registry import model

_TESTED: Final = (
    ("rate of a disk (--disk)", Pace(100_000_000)),
    ("latency of a disk (--disk-latency)", Pace(100_000_000, 5_000_000)),
)


def examine(isolation: Isolation, say: Callable[[str], None]) -> Iterator[Capability]:
    """Yield whether the cells of an isolation can have a slow disk, proven by a direct read."""
    spec = model("gpt2-tiny")
    for name, pace in _TESTED:
        subject = f"isolation {isolation.name}: {name}"
        say(f"reading directly from a disk of {pace} with {isolation.name}")
        job = disk_proof.job_of(isolation, spec, pace)
        try:
            proof = disk_proof.prove(isolation, job)
        except HarnessError as error:
            yield Capability(subject, "poor", f"{error.message}. {error.repair}")
            continue
        detail = f"asked for {pace}: a direct read got {proof}"
        yield Capability(subject, "good" if proof.holds else "poor", detail)
