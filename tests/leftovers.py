"""Find processes, cgroups and containers that a run left behind; there should be none."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

_PATIENCE_S = 60.0


def processes(mark: str, *, also_named: bool = False) -> list[str]:
    """Return the other processes whose environment contains ``mark``, each as "pid command".

    ``also_named`` adds those whose command line contains it.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        if folder.name == str(os.getpid()):
            continue
        with suppress(OSError):  # it ended meanwhile, or belongs to another user
            # Both files are empty for zombies, which have ended and only wait for their parent.
            command, environment = ((folder / name).read_bytes() for name in ("cmdline", "environ"))
            if mark.encode() in environment or (also_named and mark.encode() in command):
                text = command.replace(b"\0", b" ").decode(errors="replace")
                found.append(f"{folder.name} {text}")
    return found


def lives(pid: int) -> bool:
    """Return whether a process has not ended; one that only waits for its parent has."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def end(found: list[str]) -> None:
    """Kill the ``processes`` that were found."""
    for process in found:
        with suppress(ProcessLookupError):
            os.kill(int(process.split()[0]), signal.SIGKILL)


def all_groups() -> list[Path]:
    """Return the cgroups of all runs on this machine, and those below them, the lowest first."""
    roots = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place, (kind, _, options) = line.split()[4], line.rpartition(" - ")[2].split()
        if kind == "cgroup2" or (kind == "cgroup" and {"memory", "blkio"} & {*options.split(",")}):
            roots.append(place)
    below = [Path(folder) for root in roots for folder, *_ in os.walk(root, topdown=False)]
    return [group for group in below if "/weighin." in str(group)]


def groups(owner: int) -> list[Path]:
    """Return the cgroups in which process ``owner`` ran its cells."""
    return [group for group in all_groups() if group.name.startswith(f"weighin.{owner}-")]


def containers(owner: int) -> list[str]:
    """Return the names of the containers that process ``owner`` started; empty without an engine."""
    if not has_docker():
        return []
    form = '{{.Label "weighin.owner"}} {{.Names}}'
    command = ["docker", "ps", "--all", "--filter=label=weighin.owner", f"--format={form}"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    mine = f"{owner}-"
    return [line.split()[1] for line in found.splitlines() if line.startswith(mine)]


@cache
def has_docker() -> bool:
    """Tell whether an engine answers."""
    if not shutil.which("docker"):
        assert "DOCKER_HOST" not in os.environ and not Path("/var/run/docker.sock").exists(), (
            "an engine without the command docker: what a test leaves there cannot be seen"
        )
        return False
    return subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0


def mounts(owner: int) -> list[str]:
    """Return the slow disks that process ``owner`` mounted."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if f" fuse.weighin {owner}-" in line]


def all_of(owner: int, mark: str) -> list[str]:
    """Return all leftovers of process ``owner``, whose children have ``mark`` in their environment."""
    leftovers = [*groups(owner), *containers(owner), *processes(mark), *mounts(owner)]
    return [str(leftover) for leftover in leftovers]


def wait_until(happened: Callable[[], object], what: str, patience_s: float = _PATIENCE_S) -> None:
    """Poll until ``happened`` returns a true value; fail with ``what`` after ``patience_s``."""
    deadline = time.monotonic() + patience_s
    while not happened():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


class Piped:
    """The pipes of a process that a test starts as a worker: what it gets, and what it prints."""

    def __init__(self) -> None:
        (stdin, self._to), (self._from, out) = os.pipe(), os.pipe()
        self.streams = (stdin, out, out)
        self._text = b""

    def send(self, data: bytes) -> None:
        with suppress(BrokenPipeError):
            os.write(self._to, data)

    def started(self) -> None:
        """Close the process's own ends, which it has now."""
        for end in {*self.streams}:
            os.close(end)

    def printed(self, number: int = 1) -> list[bytes]:
        """Return the lines that were printed, when they are at least ``number``."""
        while self._text.count(b"\n") < number and (data := os.read(self._from, 65536)):
            self._text += data
        return self._text.split(b"\n")[:-1]

    def rest(self) -> str:
        """Return all that was printed, at the end of all that print."""
        while data := os.read(self._from, 65536):
            self._text += data
        return self._text.decode()

    def close(self) -> None:
        for end in (self._to, self._from):
            if end >= 0:
                os.close(end)
