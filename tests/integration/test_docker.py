"""A real engine: limits that hold, marks that outlive the worker, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import leftovers
import pytest
from docker.errors import NotFound

from weighin import child_process
from weighin.cell import Cell, Job, ModelSpec
from weighin.errors import IsolationUnavailable
from weighin.isolation.base import Exit, Running, Streams
from weighin.isolation.docker import DockerIsolation, DockerStarted, _close_stream
from weighin.probes import cgroup
from weighin.probes.cgroup import Cgroup, this_process
from weighin.run.loads import LoadSpec
from weighin.units import MIB

pytestmark = pytest.mark.docker

Start = Callable[..., DockerStarted]


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


def test_an_engine_that_starts_a_command_outside_the_containers_group_is_refused(
    isolation: DockerIsolation, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a rootless engine in the scope of a login; the fixture looks for a container that is left.
    monkeypatch.setattr(cgroup, "outside", lambda pid, group: Path("/session"))
    with pytest.raises(IsolationUnavailable, match=r"outside its container's cgroup") as caught:
        start("pass")
    assert "systemctl --user start docker" in caught.value.repair


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("page not found", r"\(Podman 4.3 cannot\): page not found"),
        ("No such container: 1", "could not start a container: No such container: 1"),
    ],
)
def test_an_engine_that_cannot_limit_a_container_that_runs_is_refused(
    words: str,
    told: str,
    isolation: DockerIsolation,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def update(*_: object, **__: object) -> None:
        raise NotFound(words)

    monkeypatch.setattr(isolation._client, "update_container", update)
    with pytest.raises(IsolationUnavailable, match=told):
        start("pass", limit_bytes=64 * MIB)


def ended(running: Running) -> Exit:
    assert running.wait(60)
    return running.reap()


def lines(running: Running) -> list[str]:
    ended(running)
    return piped[running].rest().splitlines()


def test_a_limit_kills_and_its_counters_outlive_the_worker(start: Start) -> None:
    running = start("input(); b = bytearray(400 << 20)", limit_bytes=256 * MIB)
    assert running.cgroup
    cgroup = Cgroup(running.cgroup)
    assert running.unseen == ""
    cmdline = Path(f"/proc/{running.pid}/cmdline")  # empty while it becomes another program
    leftovers.wait_until(lambda: b"bytearray" in cmdline.read_bytes(), "not the worker's pid")
    assert cgroup.numbers("oom")["oom_kill"] == 0
    piped[running].send(b"\n")
    assert ended(running) == Exit(code=None, signal=signal.SIGKILL)
    assert cgroup.numbers("oom")["oom_kill"] == 1
    peak = int(cgroup.file("peak").read_text())
    assert 0.95 * 256 * MIB < peak <= 256 * MIB
    running.close()
    assert not running.cgroup.exists()


def test_what_fits_lives(start: Start) -> None:
    running = start("b = bytearray(200 << 20); print(len(b))", limit_bytes=256 * MIB)
    assert lines(running) == [str(200 * MIB)]
    assert ended(running) == Exit(0)


def test_swap_is_off(start: Start) -> None:
    running = start("input()", limit_bytes=256 * MIB)
    assert running.cgroup
    cgroup = Cgroup(running.cgroup)
    if cgroup.version == 2:
        assert (running.cgroup / "memory.swap.max").read_text().strip() == "0"
    else:
        assert (running.cgroup / "memory.swappiness").read_text().strip() == "0"
        assert int((running.cgroup / "memory.memsw.limit_in_bytes").read_text()) == 256 * MIB


def test_a_limit_too_small_for_python_is_an_exit(start: Start) -> None:
    running = start("import torch", limit_bytes=6 * MIB)
    assert ended(running).signal == signal.SIGKILL
    assert running.cgroup and Cgroup(running.cgroup).numbers("oom")["oom_kill"]


def test_a_limit_below_the_engines_own_minimum_is_explained(start: Start) -> None:
    with pytest.raises(IsolationUnavailable, match="Minimum memory limit allowed is 6MB"):
        start("pass", limit_bytes=MIB)


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
    received = "".join(lines(running))
    printed = [f"{stream} {n}" for stream in ("out", "err") for n in range(2000)]
    assert Counter(received) == Counter("".join([*printed, "the last word"]))
    assert ended(running) == Exit(code=None, signal=signal.SIGKILL)


def test_the_end_of_stdin_reaches_the_worker(start: Start) -> None:
    running = start("import sys; sys.stdin.read(); sys.exit(5)")
    assert not running.wait(0.3)
    piped[running].end_input()
    assert ended(running) == Exit(5)


def test_the_container_ends_with_the_standard_input_of_its_first_process(start: Start) -> None:
    running = start("import time; time.sleep(600)")
    first = running._first_pid
    _close_stream(running._first_stdin)
    leftovers.wait_until(lambda: not Path(f"/proc/{first}").exists(), "the container goes on")
    assert ended(running) == Exit(code=None, signal=signal.SIGKILL)
    assert "was killed with its command" in running.unseen


def test_an_acknowledgement_that_nobody_read_does_not_release_the_container(start: Start) -> None:
    running = start("import os; os.kill(os.getpid(), 9)")
    ended(running)
    for _ in range(3):
        piped[running].send(b"\n")
    time.sleep(0.2)
    assert running.cgroup
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
    assert ended(running) == Exit(code=None, signal=signal.SIGKILL)
    assert running.cgroup
    assert Cgroup(running.cgroup).numbers("oom")["oom_kill"] == 0


def test_a_process_that_the_worker_leaves_does_not_hold_its_end_up(start: Start) -> None:
    code = """
        import subprocess
        subprocess.Popen(["sleep", "60"], start_new_session=True)
        print("last", flush=True)
    """
    running = start(code)
    start_s = time.monotonic()
    assert lines(running) == ["last"]
    assert ended(running) == Exit(0)
    assert time.monotonic() - start_s < 30


def test_the_container_sees_little_and_changes_nothing(start: Start, tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"w")
    code = f"PATH = {str(tmp_path / 'weights.bin')!r}\n" + textwrap.dedent(
        """
        import json, os, socket
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
        }))
        """
    )
    running = start(code, seen=[tmp_path])
    seen = json.loads(lines(running)[-1])
    assert seen == {
        "uid": [os.getuid(), os.getgid()],
        "mount": "Read-only file system",
        "root": "Read-only file system",
        "tmp": None,
        "links": ["lo"],
        "network": "Network is unreachable",
        "capabilities": 0,
        "no_new_privileges": 1,
    }


def test_a_worker_has_the_torch_of_this_environment(start: Start) -> None:
    import importlib.metadata

    running = start("import torch; print(torch.__version__)")
    assert lines(running)[-1] == importlib.metadata.version("torch")


def test_settings_of_allocators_reach_the_worker(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    monkeypatch.setenv("LD_PRELOAD_NOT", "x")
    running = start("import os; print(os.environ['MALLOC_ARENA_MAX'], os.environ['PYTHONPATH'])")
    assert lines(running) == [f"1 {os.pathsep.join(child_process.CODE_PATH)}"]


def test_start_gives_the_worker_the_paths_that_it_can_read(
    isolation: DockerIsolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("w.pt", "w.json", "mine.py"):
        (tmp_path / name).write_text(name)
    code = "import json, sys; j = json.load(open(sys.argv[1] + '/job')); print(*[open(j[k]).read()"
    code += " for k in j if k in ('checkpoint', 'manifest', 'strategy_path')])"
    monkeypatch.setattr(
        child_process, "module", lambda *words: (sys.executable, "-c", code, words[1])
    )
    checkpoint, manifest, strategy = (str(tmp_path / n) for n in ("w.pt", "w.json", "mine.py"))
    load = LoadSpec(Job(cell(256 * MIB), checkpoint, manifest, strategy))
    (folder := tmp_path / "cell").mkdir()
    with ExitStack() as opened:
        load.enter(opened)
        running = load.start(isolation, folder)
        try:
            ended(running)
            assert load.printed.text == b"w.pt w.json mine.py\n"
        finally:
            running.close()
            running.close()


def test_an_interrupt_during_the_start_leaves_nothing(
    isolation: DockerIsolation, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    steps = (
        "attach_socket",
        "start",
        "inspect_container",
        "exec_create",
        "exec_start",
        "exec_inspect",
    )
    for step in steps:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(isolation._client, step, interrupt)
            start("pass")
        assert containers(isolation) == []


STARTING = """
    import os, signal, sys
    from weighin.cell import Cell, ModelSpec
    from weighin.isolation.base import Streams
    from weighin.isolation.docker import DockerIsolation
    cell = Cell(ModelSpec("m", "x:y"), "mine", "docker")
    DockerIsolation().start(cell, ["sleep", "600"], streams=Streams(*[os.open(os.devnull, 2)] * 3))
"""


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(3)"])
def test_a_parent_that_ends_without_closing_leaves_nothing(end: str) -> None:
    command = (sys.executable, "-c", f"{textwrap.dedent(STARTING)}{end}")
    with subprocess.Popen(command) as parent:
        assert parent.wait(60) in (-signal.SIGKILL, 3)
        owner = parent.pid
    leftovers.wait_until(lambda: leftovers.containers(owner) == [], "the container is there")


def test_a_container_that_a_killed_parent_did_not_start_is_removed(
    isolation: DockerIsolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = "-".join(["1", "1", *this_process().split("-")[2:]])
    with monkeypatch.context() as patch:
        patch.setattr("weighin.probes.cgroup.this_process", lambda: ended)
        patch.setattr("weighin.isolation.docker.DockerStarted", lambda *_: None)
        isolation.start(cell(), [":"])
    (name,) = containers(isolation)
    assert isolation.remove_stale() == [f"container {name.lstrip('/')} of process 1"]
    assert containers(isolation) == isolation.remove_stale() == []


def test_a_container_sees_neither_the_home_nor_the_current_folder(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    absent = [f"{tmp_path}/mine", "/var/run/docker.sock", "/etc/shadow"]
    # Of a home, only the folders that lead to this Python are there, if it is in that home.
    python = {sys.prefix, sys.base_prefix, str(Path(child_process.__file__))}
    leads = {str(above) for path in python for above in (Path(path), *Path(path).parents)}
    homes = [home for home in ("/root", "/home") if Path(home).is_dir()]
    absent += [
        str(path) for home in homes for path in Path(home).iterdir() if str(path) not in leads
    ]
    assert homes
    running = start(f"import os; print([p for p in {absent!r} if os.path.exists(p)])")
    assert lines(running) == ["[]"]


def test_describe_says_what_changes_figures(isolation: DockerIsolation) -> None:
    described = isolation.describe()
    assert set(described) == {"engine", "cgroup_driver", "cgroup_version", "storage_driver"}
