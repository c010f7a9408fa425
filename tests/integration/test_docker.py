"""A real engine: limits that hold, marks that outlive the worker, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import leftovers
import pytest
from commands import CommandLine

from weighin.cell import Cell, Job, ModelSpec
from weighin.errors import IsolationUnavailable
from weighin.isolation.base import Exit
from weighin.isolation.docker.container import DockerRunning
from weighin.isolation.docker.image import PYTHON
from weighin.isolation.docker.isolation import DockerIsolation
from weighin.isolation.docker.mounts import Bind
from weighin.probes.cgroup import MemoryCgroup
from weighin.units import MIB

pytestmark = pytest.mark.docker

Start = Callable[..., DockerRunning]


def cell(limit_bytes: int | None = None) -> Cell:
    return Cell(ModelSpec("m", "x:y"), "mine", "docker", ram_limit_bytes=limit_bytes)


@pytest.fixture(scope="module")
def isolation() -> DockerIsolation:
    isolation = DockerIsolation()
    isolation.prepare()
    return isolation


@pytest.fixture
def start(isolation: DockerIsolation) -> Iterator[Start]:
    """Start a Python program as a worker; closes it after the test."""
    started: list[DockerRunning] = []

    def start(
        code: str, limit_bytes: int | None = None, binds: Sequence[Bind] = ()
    ) -> DockerRunning:
        command = (PYTHON, "-c", textwrap.dedent(code))
        started.append(isolation._start(command, cell(limit_bytes), binds))
        return started[-1]

    yield start
    for running in started:
        running.close()
    assert containers(isolation) == []


@pytest.mark.cgroup
def test_auto_takes_a_cgroup_where_the_engine_has_no_base_image(command: CommandLine) -> None:
    ended = command.run(
        *("bench", "gpt2-tiny", "--ram", "1g", "-s", "baseline"),
        WEIGHIN_BASE_IMAGE="weighin-missing:never",
    )
    assert ended.code == 0, ended.err
    assert ended.err.startswith(
        "note: isolation cgroup: the base image weighin-missing:never does not exist here and cannot be pulled from a registry: "
    )
    assert "isolation cgroup" in ended.out


def containers(isolation: DockerIsolation) -> list[str]:
    """Return the names of all containers that are this process's own."""
    found = isolation._client.containers(all=True, filters={"label": "weighin.owner"})
    mine = f"weighin-{os.getpid()}-"
    return [name for c in found for name in c["Names"] if name.startswith(f"/{mine}")]


def lines(running: DockerRunning) -> list[str]:
    received = []
    while (line := running.channel.receive(60)) is not None:
        received.append(line.decode())
    return received


def test_a_limit_kills_and_its_counters_outlive_the_worker(start: Start) -> None:
    running = start("input(); b = bytearray(400 << 20)", limit_bytes=256 * MIB)
    assert running.cgroup
    cgroup = MemoryCgroup(running.cgroup)
    assert running.unseen == ""
    cmdline = Path(f"/proc/{running.pid}/cmdline")  # empty while it becomes another program
    leftovers.wait_until(lambda: b"bytearray" in cmdline.read_bytes(), "not the worker's pid")
    assert cgroup.read_oom_kills() == 0
    running.channel.send(b"\n")
    assert running.wait(60) == Exit(code=None, signal=signal.SIGKILL, oom_killed=True)
    assert cgroup.read_oom_kills() == 1
    peak = int(cgroup.peak_path.read_text())
    assert 0.95 * 256 * MIB < peak <= 256 * MIB
    running.close()
    assert not running.cgroup.exists()


def test_what_fits_lives(start: Start) -> None:
    running = start("b = bytearray(200 << 20); print(len(b))", limit_bytes=256 * MIB)
    assert lines(running) == [str(200 * MIB)]
    assert running.wait(60) == Exit(0)


def test_swap_is_off(start: Start) -> None:
    running = start("input()", limit_bytes=256 * MIB)
    assert running.cgroup
    cgroup = MemoryCgroup(running.cgroup)
    if cgroup.version == 2:
        assert (running.cgroup / "memory.swap.max").read_text().strip() == "0"
    else:
        assert (running.cgroup / "memory.swappiness").read_text().strip() == "0"
        assert int((running.cgroup / "memory.memsw.limit_in_bytes").read_text()) == 256 * MIB


def test_a_limit_too_small_for_python_is_an_exit(start: Start) -> None:
    running = start("import torch", limit_bytes=6 * MIB)
    exit_ = running.wait(60)
    assert (exit_.signal, exit_.oom_killed) == (signal.SIGKILL, True)
    assert running.channel.receive(60) is None


def test_a_limit_below_the_engines_own_minimum_is_explained(start: Start) -> None:
    with pytest.raises(IsolationUnavailable, match="Minimum memory limit allowed is 6MB"):
        start("pass", limit_bytes=MIB)


def test_stderr_is_apart_from_events_and_complete(start: Start) -> None:
    running = start(
        """
        import os
        for n in range(2000):
            os.write(1, b'{"event":%d}\\n' % n)
            os.write(2, b"noise %d without an end" % n)
        os.write(1, b'{"torn')
        os.write(2, b"the last word")
        os.kill(os.getpid(), 9)
        """
    )
    received = lines(running)
    assert [json.loads(line)["event"] for line in received] == list(range(2000))
    assert running.wait(60) == Exit(code=None, signal=signal.SIGKILL)
    assert running.channel.stderr_tail.startswith(b"noise 0 without an endnoise 1")
    assert b"the last word" in running.channel.stderr_tail


def test_the_end_of_stdin_reaches_the_worker(start: Start) -> None:
    running = start("import sys; sys.stdin.read(); open('/proc/1/fd/1', 'w').write('ended\\n')")
    with pytest.raises(TimeoutError):
        running.wait(0.3)
    init = running._keeper
    running.channel.close()
    leftovers.wait_until(
        lambda: not Path(f"/proc/{init}").exists(), "the container outlived its stdin"
    )


def test_an_acknowledgement_that_nobody_read_does_not_release_the_container(start: Start) -> None:
    running = start("import os; os.kill(os.getpid(), 9)")
    running.wait(60)
    for _ in range(3):
        running.channel.send(b"\n")
    time.sleep(0.2)
    assert running.cgroup
    assert (running.cgroup / "cgroup.procs").read_text().split() == [str(running._keeper)]


def test_kill_ends_the_worker_and_its_children_only(start: Start) -> None:
    running = start(
        """
        import subprocess, time
        subprocess.Popen(["sleep", "60"], start_new_session=True)
        print("up", flush=True)
        time.sleep(60)
        """
    )
    assert running.channel.receive(60) == b"up"
    running.kill()
    assert running.wait(60) == Exit(code=None, signal=signal.SIGKILL)
    assert running.cgroup
    assert MemoryCgroup(running.cgroup).read_oom_kills() == 0


def test_a_worker_that_cannot_be_seen_can_be_killed_and_waited_for(start: Start) -> None:
    running = start("import time; time.sleep(60)")
    running.cgroup = running.pid = None
    running.kill()
    assert running.wait(60) == Exit(code=None, signal=signal.SIGKILL)


def test_the_container_sees_little_and_changes_nothing(start: Start, tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"w")
    running = start(
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
            "mount": attempt(lambda: open("/data/weights.bin", "r+b")),
            "root": attempt(lambda: open("/new", "w")),
            "tmp": attempt(lambda: open("/tmp/new", "w")),
            "links": sorted(os.listdir("/sys/class/net")),
            "network": attempt(lambda: socket.create_connection(("192.0.2.1", 80), 2)),
            "capabilities": int(status["CapEff"], 16),
            "no_new_privileges": int(status["NoNewPrivs"]),
        }))
        """,
        binds=[Bind(tmp_path, "/data")],
    )
    seen = json.loads(lines(running)[0])
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


def test_the_image_has_the_torch_of_this_environment(start: Start) -> None:
    import importlib.metadata

    running = start("import torch; print(torch.__version__)")
    assert lines(running) == [importlib.metadata.version("torch")]


def test_settings_of_allocators_reach_the_worker(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    monkeypatch.setenv("LD_PRELOAD_NOT", "x")
    running = start("import os; print(os.environ['MALLOC_ARENA_MAX'], os.environ['PYTHONPATH'])")
    assert lines(running) == ["1 /weighin/code"]


def test_an_acknowledgement_takes_about_a_millisecond(start: Start) -> None:
    running = start("import sys\nfor line in sys.stdin.buffer: print('event', flush=True)")
    times = []
    for _ in range(50):
        begin = time.perf_counter()
        running.channel.send(b"\n")
        assert running.channel.receive(60) == b"event"
        times.append(time.perf_counter() - begin)
    assert sorted(times)[5] < 0.005  # other work of this machine delays the rest


def test_start_gives_the_worker_the_paths_that_it_can_read(
    isolation: DockerIsolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("w.pt", "w.json", "mine.py"):
        (tmp_path / name).write_text(name)
    code = "import json; j = json.loads(input()); print(*[open(j[k]).read() for k in j if k in "
    code += "('checkpoint', 'manifest', 'strategy_path')])"
    original = isolation._start
    monkeypatch.setattr(isolation, "_start", lambda _, *rest: original((PYTHON, "-c", code), *rest))
    checkpoint, manifest, strategy = (str(tmp_path / n) for n in ("w.pt", "w.json", "mine.py"))
    running = isolation.start(Job(cell(256 * MIB), checkpoint, manifest, strategy))
    try:
        assert lines(running) == ["w.pt w.json mine.py"]
    finally:
        running.close()
        running.close()


def test_a_missing_folder_is_explained_and_leaves_nothing(
    isolation: DockerIsolation, start: Start
) -> None:
    with pytest.raises(IsolationUnavailable) as caught:
        start("pass", binds=[Bind(Path("/not/there"), "/data")])
    assert caught.value.message.startswith(
        "the Docker engine cannot access a folder of this machine:"
    )
    assert containers(isolation) == []


def test_an_interrupt_during_the_start_leaves_nothing(
    isolation: DockerIsolation, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for step in ("attach_socket", "start", "inspect_container"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(isolation._client, step, interrupt)
            start("pass")
        assert containers(isolation) == []


def test_what_a_killed_parent_leaves_is_removed(isolation: DockerIsolation) -> None:
    code = """
        import sys, time
        from weighin.cell import Cell, ModelSpec
        from weighin.isolation.docker.isolation import DockerIsolation
        isolation = DockerIsolation()
        cell = Cell(ModelSpec("m", "x:y"), "mine", "docker")
        isolation._start(("sleep", "600"), cell)
        print(*isolation._containers, flush=True)
        time.sleep(600)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout
        name = parent.stdout.readline().strip()
        assert isolation.remove_stale() == []
        parent.kill()
    assert isolation.remove_stale() == [f"container {name} of process {parent.pid}"]
    assert isolation.remove_stale() == []


def test_a_parent_that_exits_without_closing_leaves_nothing(isolation: DockerIsolation) -> None:
    code = """
        import sys
        from weighin.cell import Cell, ModelSpec
        from weighin.isolation.docker.isolation import DockerIsolation
        isolation = DockerIsolation()
        cell = Cell(ModelSpec("m", "x:y"), "mine", "docker")
        isolation._start(("sleep", "600"), cell)
        sys.exit(3)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    assert subprocess.run(command, check=False).returncode == 3
    assert isolation.remove_stale() == []


def test_describe_says_what_changes_figures(isolation: DockerIsolation) -> None:
    described = isolation.describe()
    assert set(described) == {
        "engine",
        "cgroup_driver",
        "cgroup_version",
        "storage_driver",
        "base_image",
        "image",
    }
    assert described["image"].startswith("weighin:")
