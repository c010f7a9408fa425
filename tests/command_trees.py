"""Start small commands of known sizes that go on step by step, in a cgroup or as plain processes."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from leftovers import wait_until

from weighin.probes.command_sampler import CommandSampler
from weighin.result import Sample
from weighin.units import MIB

HOLDING = """
import mmap, os, sys, time
def hold(mib, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
    held = mmap.mmap(-1, mib << 20, flags)
    held.madvise(mmap.MADV_NOHUGEPAGE)
    write(held, mib)
    return held
def write(held, mib):
    for offset in range(0, mib << 20, 4096):
        held[offset] = 1
def step(name):
    print(name, flush=True)
    if not sys.stdin.readline():
        sys.exit()
SHARED = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
"""
"""Functions for a command: hold and write so many MiB, and wait for its test after each step."""

FAMILY = """
step("started")
private, shared = hold(128), hold(32, SHARED)
to_child, from_child = os.pipe(), os.pipe()
children = []
for _ in range(3):
    if (pid := os.fork()) == 0:
        write(shared, 32)
        write(private, 32)
        os.write(from_child[1], b"1")
        os.read(to_child[0], 1)
        os._exit(0)
    children.append(pid)
for _ in range(3):
    os.read(from_child[0], 1)
step("forked")
os.write(to_child[1], b"111")
for pid in children:
    os.waitpid(pid, 0)
step("alone")
"""
"""A parent with 128 MiB, and three children that share it and write 32 MiB each: 224 MiB of private
memory, and 32 MiB of shared memory that all four map."""
FAMILY_ANON_MIB, FAMILY_SHMEM_MIB = 128 + 3 * 32, 32


class Command:
    """A running command that waits for ``go`` after each of its steps."""

    def __init__(self, code: str, group: Path | None = None) -> None:
        def enter() -> None:
            if group:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", HOLDING + code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            preexec_fn=enter,  # noqa: PLW1509 (the tests have no other thread when they start one)
        )
        self.pid = self.process.pid

    def reach(self, name: str) -> None:
        """Wait until the command says that it has reached the step."""
        assert self.process.stdout
        assert self.process.stdout.readline() == f"{name}\n"

    def go(self, name: str = "") -> None:
        """Let the command go on, and wait until it reaches the step."""
        assert self.process.stdin
        self.process.stdin.write("\n")
        if name:
            self.reach(name)


@contextlib.contextmanager
def command(code: str, group: Path | None = None) -> Iterator[Command]:
    """Start a command, and end it if the test has not ended it."""
    started = Command(code, group)
    with started.process:
        try:
            yield started
        finally:
            started.process.kill()


def last(sampler: CommandSampler) -> Sample:
    """Return the newest sample of a running sampler."""
    return sampler._samples[-1]


def settle(sampler: CommandSampler) -> None:
    """Wait until a command that does not grow was sampled, and its table of processes kept."""
    count = len(sampler._samples)

    def is_settled() -> bool:
        kept, now = sampler._kept, last(sampler)
        return (
            len(sampler._samples) > count + 2
            and kept is not None
            and _size(now) < _size(kept) + 4 * MIB
        )

    wait_until(is_settled, "the table of processes was not kept")


def _size(sample: Sample) -> int:
    return sample.rss_bytes if sample.cgroup_bytes is None else sample.cgroup_bytes
