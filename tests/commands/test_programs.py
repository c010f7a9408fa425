"""The programs take the amounts that ``known_commands`` says, as the kernel counts them without weighin."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

import known_commands
import pytest
from again import EVICTED, tried_again
from cells import MIB, Group, new_group, page_cache
from known_commands import KNOWN, Known

pytestmark = [pytest.mark.cgroup, pytest.mark.compiler]


@dataclass(frozen=True, slots=True)
class Counted:
    """What the kernel counted: its mark of the group's charge, and the largest samples of its parts."""

    code: int
    peak_bytes: int
    anon_bytes: int
    shmem_bytes: int
    file_bytes: int
    kernel_bytes: int


def _parts(group: Group) -> tuple[int, int, int, int]:
    """Return the anonymous, shared and file memory of a group, and that of the kernel for it."""
    stat = group.stat()
    if group.version == 2:
        anon, shmem, file, kernel = (
            stat.get(name, 0) for name in ("anon", "shmem", "file", "kernel")
        )
    else:
        anon, shmem, file = (stat.get(name, 0) for name in ("rss", "shmem", "cache"))
        kernel = int((group.path / "memory.kmem.usage_in_bytes").read_text())
    return anon, shmem, file - shmem, kernel


def count(command: tuple[str, ...]) -> Counted:
    """Run a command in a group of its own, and look at the group every 2 ms."""
    with ExitStack() as stack:
        group = stack.enter_context(new_group())
        script = 'echo $$ > "$1" && shift && exec "$@"'
        process = subprocess.Popen(
            ("/bin/sh", "-c", script, "sh", str(group.path / "cgroup.procs"), *command),
            stdin=subprocess.DEVNULL,
        )
        seen = [(0, 0, 0, 0)]
        while process.poll() is None:
            seen.append(_parts(group))
            sleep(0.002)
        largest = (max(column) for column in zip(*seen, strict=True))
        return Counted(process.returncode, group.peak_bytes(), *largest)


@pytest.fixture(scope="module")
def file(disk: Path) -> Path:
    path = disk / "known-file"
    path.write_bytes(os.urandom(known_commands.FILE_BYTES))
    return path


def within(figure: int, known_bytes: int) -> bool:
    """Tell whether a figure is right within 1 % and 1 MiB."""
    return abs(figure - known_bytes) <= 0.01 * known_bytes + MIB


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.id)
def test_a_program_takes_what_is_known_of_it(known: Known, programs: Path, file: Path) -> None:
    page_cache.drop([file])
    counted = count(known.command(programs, file))
    print(known.id, counted)
    assert counted.code == 0
    assert within(counted.shmem_bytes, known.shmem_bytes)
    assert within(counted.file_bytes, known.file_bytes)
    if known.peak_ms >= known_commands.VISIBLE_MS:
        assert within(counted.anon_bytes, known.anon_bytes)
    total = known.needed_bytes + known.file_bytes
    assert within(counted.peak_bytes, total)


@tried_again(EVICTED)
def test_the_page_cache_of_a_file_is_charged_to_its_first_reader(
    programs: Path, file: Path
) -> None:
    known = next(known for known in KNOWN if known.name == "maps")
    file.read_bytes()
    warm = count(known.command(programs, file))
    page_cache.drop([file])
    cold = count(known.command(programs, file))
    assert within(warm.peak_bytes, known.needed_bytes)
    assert within(cold.peak_bytes, known.needed_bytes + known.file_bytes)


def test_the_daemon_goes_on_without_its_parent(programs: Path) -> None:
    started = monotonic()
    ended = subprocess.run((programs / "daemon", "16", "30"), capture_output=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")  # its streams are closed
    assert monotonic() - started < 20
    (pid,) = _named(str(programs / "daemon"))
    assert os.getsid(pid) not in (os.getsid(0), pid)
    os.kill(pid, signal.SIGKILL)


def _named(program: str) -> list[int]:
    """Return the pids of the running processes of a program."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes().startswith(os.fsencode(program) + b"\0"):
                found.append(int(folder.name))
        except OSError:  # it ended meanwhile
            continue
    return found
