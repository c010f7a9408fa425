"""Start small commands of known sizes that go on step by step: plain, in a cgroup, or under ``weighin run``."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typed import ROOT, CommandLine, words

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

GROUPS = """
def own_group():
    \"\"\"Return the folder of this process's memory cgroup, and the version.\"\"\"
    mounts = [line.split() for line in open("/proc/self/mounts")]
    v1 = [place for _, place, kind, options, *_ in mounts if kind == "cgroup" and "memory" in options.split(",")]
    v2 = [place for _, place, kind, *_ in mounts if kind == "cgroup2"]
    for line in open("/proc/self/cgroup"):
        number, names, path = line.strip().split(":", 2)
        if "memory" in names.split(",") if v1 else number == "0":
            name = path.rpartition("/")[2]  # a container may show only a part of the tree
            folders = (folder for folder, *_ in os.walk((v1 or v2)[0]))
            return next(each for each in folders if each.endswith("/" + name)), 1 if v1 else 2
def enter(group):
    open(group + "/cgroup.procs", "w").write(str(os.getpid()))
"""
"""Functions for a command in a cgroup of its own."""

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

    def __init__(
        self, code: str, group: Path | None = None, before: tuple[str, ...] = (), **how: Any
    ) -> None:
        def enter() -> None:
            if group:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        self.process = subprocess.Popen(
            [*before, sys.executable, "-S", "-c", HOLDING + code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            preexec_fn=enter,  # noqa: PLW1509 (the tests have no other thread when they start one)
            **how,
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
def command(
    code: str, group: Path | None = None, before: tuple[str, ...] = (), **how: Any
) -> Iterator[Command]:
    """Start a command, and end it if the test has not ended it."""
    started = Command(code, group, before, **how)
    with started.process:
        try:
            yield started
        finally:
            started.process.kill()


_INSIDE = """
set -e
echo $$ > "$1/cgroup.procs"
mount --bind "$1" "$2"
umount -l "$3"
mount --bind "$2" "$3"
shift 3
exec "$@"
"""


def seen_from_inside(group: Path, folder: Path) -> tuple[str, ...]:
    """Return the words before a command that enters a group and sees it as the root, as in a container.

    They need root, for a mount namespace, and a ``folder``.
    """
    (view := folder / "view").mkdir()
    return ("unshare", "--mount", "sh", "-c", _INSIDE, "sh", *map(str, (group, view, group.parent)))


def weighing(out: Path, options: str = "") -> tuple[str, ...]:
    """Return the words before a command that weigh it in a cgroup; the run is in ``out``."""
    return words(f"run --isolation cgroup {options} --out", str(out), "--")


def variables() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT / "harness")}


@contextlib.contextmanager
def weighed(code: str, out: Path, options: str = "") -> Iterator[Command]:
    """Start a command under ``weighin run``, and let it end; the record is then complete."""
    before = weighing(out, f"--no-stacks {options}")
    with command(GROUPS + code, before=before, env=variables(), cwd=out.parent) as started:
        try:
            yield started
            assert started.process.stdin
            started.process.stdin.close()  # it ends at its last step
        except BaseException:
            started.process.terminate()
            raise
        finally:
            started.process.wait(120)


def record(out: Path) -> dict[str, Any]:
    return CommandLine(out.parent, out.parent).record(out.name)


def samples(out: Path) -> list[dict[str, int]]:
    """Return the samples of the one record of a run, the oldest first."""
    return CommandLine(out.parent, out.parent).samples(out.name)
