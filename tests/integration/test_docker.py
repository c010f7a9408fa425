"""A real engine: limits that hold, marks that outlive the worker, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import leftovers
import pytest
from docker.errors import NotFound

from weighin import child_process
from weighin.cell import Cell, ModelSpec
from weighin.errors import IsolationUnavailable
from weighin.isolation.base import Exit, Running, Streams
from weighin.isolation.docker import DockerIsolation, DockerStarted, _close_stream
from weighin.probes import cgroup
from weighin.probes.cgroup import Cgroup, this_process
from weighin.units import MIB

pytestmark = pytest.mark.docker

Start = Callable[..., DockerStarted]
KILLED = Exit(code=None, signal=signal.SIGKILL)


def cell(limit_bytes: int | None = None) -> Cell:
    return Cell(ModelSpec("m", "x:y"), "mine", "docker", ram_limit_bytes=limit_bytes)


@pytest.fixture(scope="module")
def isolation() -> DockerIsolation:
    return DockerIsolation()


piped: dict[Running, leftovers.Piped] = {}
"""The pipes of each worker of a test."""


@pytest.fixture
def start(isolation: DockerIsolation) -> Iterator[Start]:
    """Start a Python program as a worker; closes it after the test."""

    def start(
        code: str, limit_bytes: int | None = None, seen: Sequence[Path] = ()
    ) -> DockerStarted:
        command = (sys.executable, "-c", textwrap.dedent(code))
        paths, pipes = map(str, seen), leftovers.Piped()
        try:
            streams = Streams(*pipes.streams)
            running = isolation.start(cell(limit_bytes), command, "", streams, paths)
        finally:
            pipes.started()
        assert isinstance(running, DockerStarted)
        piped[running] = pipes
        return running

    yield start
    while piped:
        running, pipes = piped.popitem()
        running.close()
        pipes.close()
    assert containers(isolation) == []


def containers(isolation: DockerIsolation) -> list[str]:
    """Return the names of all containers that are this process's own."""
    found = isolation._client.containers(all=True, filters={"label": "weighin.owner"})
    mine = f"weighin-{os.getpid()}-"
    return [name for c in found for name in c["Names"] if name.startswith(f"/{mine}")]


def ended(running: Running) -> Exit:
    assert running.wait(60)
    return running.reap()


def oom_kills(running: DockerStarted) -> int:
    assert running.cgroup
    return Cgroup(running.cgroup).numbers("oom")["oom_kill"]


def raising(error: BaseException) -> Callable[..., None]:
    def act(*_: object, **__: object) -> None:
        raise error

    return act


def test_an_engine_that_cannot_do_what_a_cell_needs_is_refused(
    isolation: DockerIsolation, start: Start
) -> None:
    """The fixture looks for a container that is left."""

    def refused(what: object, name: str, value: object, limit_bytes: int | None = 64 * MIB) -> str:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(IsolationUnavailable) as caught:
            patch.setattr(what, name, value)
            start("pass", limit_bytes)
        return str(caught.value)

    # A rootless engine in the scope of a login.
    told = refused(cgroup, "outside", lambda pid, group: Path("/session"), None)
    assert "outside of their container's cgroup" in told
    assert "systemctl --user start docker" in told
    for words, said in (
        ("page not found", "(Podman 4.3 cannot): page not found"),
        ("No such container: 1", "could not start a container: No such container: 1"),
    ):
        assert said in refused(isolation._client, "update_container", raising(NotFound(words)))
    with pytest.raises(IsolationUnavailable, match="Minimum memory limit allowed is 6MB"):
        start("pass", limit_bytes=MIB)


def test_a_limit_kills_and_its_counters_outlive_the_worker(start: Start) -> None:
    running = start("input(); b = bytearray(400 << 20)", limit_bytes=256 * MIB)
    assert running.cgroup
    assert running.unseen == ""
    cmdline = Path(f"/proc/{running.pid}/cmdline")  # empty while it becomes another program
    leftovers.wait_until(lambda: b"bytearray" in cmdline.read_bytes(), "not the worker's pid")
    assert oom_kills(running) == 0
    piped[running].send(b"\n")
    assert ended(running) == KILLED
    assert oom_kills(running) == 1
    peak = int(Cgroup(running.cgroup).file("peak").read_text())
    assert 0.95 * 256 * MIB < peak <= 256 * MIB
    running.close()
    assert not running.cgroup.exists()


def test_what_a_worker_prints_is_complete(start: Start) -> None:
    running = start(
        """
        import os
        for n in range(2000):
            os.write(1, b"out %d\\n" % n)
            os.write(2, b"err %d\\n" % n)
        os.write(2, b"the last word")
        os.kill(os.getpid(), 9)
        """
    )
    # The engine cuts both streams into parts, and may put one's part into a line of the other.
    assert ended(running) == KILLED
    received = piped[running].rest().replace("\n", "")
    printed = [f"{stream} {n}" for stream in ("out", "err") for n in range(2000)]
    assert Counter(received) == Counter("".join([*printed, "the last word"]))


def test_an_acknowledgement_that_nobody_read_does_not_release_the_container(start: Start) -> None:
    running = start("import os; os.kill(os.getpid(), 9)")
    ended(running)
    for _ in range(3):
        piped[running].send(b"\n")
    assert running.cgroup
    for _ in range(20):  # the first process stays
        running.wait(0.01)
        assert (running.cgroup / "cgroup.procs").read_text().split() == [str(running._first_pid)]


def test_kill_ends_the_worker_and_its_children_only(start: Start) -> None:
    running = start(
        """
        import subprocess, time
        subprocess.Popen(["sleep", "60"], start_new_session=True)
        print("up", flush=True)
        time.sleep(60)
        """
    )
    assert piped[running].printed() == [b"up"]
    running.kill()
    assert ended(running) == KILLED
    assert oom_kills(running) == 0


SEEN = """
import json, os, socket, sys
def attempt(action):
    try:
        return action() and None
    except OSError as error:
        return error.strerror
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({
    "uid": [os.getuid(), os.getgid()],
    "mount": attempt(lambda: open(PATH, "r+b")),
    "root": attempt(lambda: open("/new", "w")),
    "tmp": attempt(lambda: open("/tmp/new", "w")),
    "links": sorted(os.listdir("/sys/class/net")),
    "network": attempt(lambda: socket.create_connection(("192.0.2.1", 80), 2)),
    "capabilities": int(status["CapEff"], 16),
    "no_new_privileges": int(status["NoNewPrivs"]),
    "absent": [path for path in ABSENT if os.path.exists(path)],
    "settings": [os.environ.get(name) for name in ("MALLOC_ARENA_MAX", "PYTHONPATH")],
}))
"""


def test_the_container_sees_little_and_changes_nothing(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the home nor the current folder is there; settings of allocators are."""
    for folder in ("seen", "mine"):
        (tmp_path / folder).mkdir()
    (path := tmp_path / "seen" / "weights.bin").write_bytes(b"w")
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.syspath_prepend(tmp_path / "mine")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    absent = [f"{tmp_path}/mine", "/var/run/docker.sock", "/etc/shadow"]
    # Of a home, only the folders that lead to this Python are there, if it is in that home.
    python = {sys.prefix, sys.base_prefix, str(Path(child_process.__file__))}
    leads = {str(above) for path in python for above in (Path(path), *Path(path).parents)}
    homes = [home for home in (Path("/root"), Path("/home")) if home.is_dir()]
    assert homes
    absent += [str(one) for home in homes for one in home.iterdir() if str(one) not in leads]
    running = start(f"PATH, ABSENT = {str(path)!r}, {absent!r}\n{SEEN}", seen=[path.parent])
    ended(running)
    assert json.loads(piped[running].rest().splitlines()[-1]) == {
        "uid": [os.getuid(), os.getgid()],
        "mount": "Read-only file system",
        "root": "Read-only file system",
        "tmp": None,
        "links": ["lo"],
        "network": "Network is unreachable",
        "capabilities": 0,
        "no_new_privileges": 1,
        "absent": [],
        "settings": ["1", os.pathsep.join(child_process.CODE_PATH)],
    }


def test_the_container_ends_with_the_standard_input_of_its_first_process(start: Start) -> None:
    running = start("import time; time.sleep(600)")
    _close_stream(running._first_stdin)
    assert ended(running) == KILLED
    assert "was killed with its command" in running.unseen


STARTING = """
import os, sys
from weighin.cell import Cell, ModelSpec
from weighin.isolation.base import Streams
from weighin.isolation.docker import DockerIsolation
streams = Streams(*[os.open(os.devnull, 2)] * 3)
DockerIsolation().start(Cell(ModelSpec("m", "x:y"), "mine", "docker"), ["sleep", "600"], "", streams)
sys.exit(3)
"""


def test_a_parent_that_ends_without_closing_leaves_nothing() -> None:
    with subprocess.Popen((sys.executable, "-c", STARTING)) as parent:
        assert parent.wait(60) == 3
    leftovers.wait_until(lambda: leftovers.containers(parent.pid) == [], "it is there")


def test_an_interrupt_during_the_start_leaves_nothing(
    isolation: DockerIsolation, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = "attach_socket start inspect_container exec_create exec_start exec_inspect"
    for step in steps.split():
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(isolation._client, step, raising(KeyboardInterrupt()))
            start("pass")
        assert containers(isolation) == []


def test_a_container_that_a_killed_parent_did_not_start_is_removed(
    isolation: DockerIsolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = "-".join(["1", "1", *this_process().split("-")[2:]])
    with monkeypatch.context() as patch:
        patch.setattr("weighin.probes.cgroup.this_process", lambda: gone)
        patch.setattr("weighin.isolation.docker.DockerStarted", lambda *_: None)
        isolation.start(cell(), [":"])
    (name,) = containers(isolation)
    assert isolation.remove_stale() == [f"container {name.lstrip('/')} of process 1"]
    assert containers(isolation) == isolation.remove_stale() == []
