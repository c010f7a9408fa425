"""A disk that the kernel's throttle slows down, and the proof of its speed before each run."""

from __future__ import annotations

import pytest
from again import BUSY, tried_again
from cells import Pace, Watched

from weighin.run import disk_proof
from weighin.suite.registry import model


def proof(isolation: Watched, pace: Pace) -> disk_proof.Proof:
    return disk_proof.prove(isolation, disk_proof.job_of(isolation, model("tied-tiny"), pace))


@tried_again(BUSY)
@pytest.mark.fuse
def test_the_proof_tells_the_rate_and_the_latency_of_fuse(isolation: Watched) -> None:
    found = proof(isolation, Pace(50_000_000, 5_000_000))
    print(found)
    assert found.through == "FUSE"
    assert found.bytes_per_s == pytest.approx(50e6, rel=0.1)  # 5 % on an idle machine
    assert found.latency_ns == pytest.approx(5e6, rel=0.2)


@tried_again(BUSY)
def test_a_rate_alone_is_held_by_the_kernel(limiting: Watched) -> None:
    found = proof(limiting, Pace(50_000_000))
    print(found)
    assert found.through == "the kernel's throttle"
    assert found.bytes_per_s == pytest.approx(50e6, rel=0.1)
