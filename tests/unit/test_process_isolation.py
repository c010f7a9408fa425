"""Commands and workers as plain processes: their streams, their ends, and that none of them is left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
from fakes import JOB
from leftovers import Piped, lives, wait_until

from weighin import child_process
from weighin.cell import Cell
from weighin.child_process import adopt_orphans
from weighin.errors import ConfigError, IsolationUnavailable, StillRunning
from weighin.isolation import cgroup, process
from weighin.isolation.base import Exit, Running, Streams
from weighin.isolation.process import WORKER_VARIABLE, ProcessIsolation, ProcessTree, Started
from weighin.probes.cgroup import Cgroup, parent_of, this_process
from weighin.probes.sampler import Sampler
from weighin.program_phases import VARIABLE as PHASES_VARIABLE
from weighin.run.measure import end_rest
from weighin.units import MIB

Start = Callable[..., Running]
KILLED = Exit(None, signal=signal.SIGKILL)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a command with the lines of ``script`` in a shell; it ends with the test."""
    with ExitStack() as started:

        def start_command(script: str, **fields: object) -> object:
            cell = Cell.of_command("mine", ("sh", "-c", script), "process", **fields)
            running = ProcessIsolation().start(cell, cell.command, str(tmp_path), Streams())
            started.callback(running.close)
            return running

        yield start_command  # type: ignore[misc]


@pytest.fixture
def is_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be weighin itself, which adopts orphans."""
    monkeypatch.setattr(child_process, "is_program", True)


@pytest.fixture
def pipes() -> Iterator[Piped]:
    with closing(Piped()) as pipes:
        yield pipes


@pytest.fixture
def ends() -> Iterator[set[int]]:
    """Pids of processes that end with the test."""
    pids = set[int]()
    yield pids
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


# -- commands


@pytest.fixture(params=["a pidfd", "before Linux 5.3"])
def _pidfd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "a pidfd":
        monkeypatch.setattr(child_process, "open_process", lambda _: None)


@pytest.mark.usefixtures("_pidfd")
@pytest.mark.parametrize(
    ("script", "ended", "code", "name"),
    [
        ("exit 0", Exit(0), 0, ""),
        ("exit 3", Exit(3), 3, ""),
        ("exit 137", Exit(137), 137, ""),
        ("kill -9 $$", KILLED, 137, "SIGKILL"),
        ("kill -TERM $$", Exit(None, signal=15), 143, "SIGTERM"),
        ("kill -40 $$", Exit(None, signal=40), 168, "signal 40"),  # a real-time signal has no name
    ],
)
def test_how_a_command_ended_and_how_a_shell_tells_it(
    start: Start, script: str, ended: Exit, code: int, name: str
) -> None:
    running = start(script)
    assert running.wait(60)
    assert running.wait(0)
    assert running.reap() == ended
    assert (ended.shell_code, ended.signal_name) == (code, name)


def test_a_command_has_its_folder_and_its_variables(start: Start, tmp_path: Path) -> None:
    running = start('pwd > out; echo "$MODE" >> out', environment={"MODE": "m"})
    assert running.wait(60)
    assert (tmp_path / "out").read_text() == f"{tmp_path}\nm\n"
    unseen = "a plain process has no cgroup of its own, so these are not seen"
    assert running.unseen.startswith(unseen)
    assert (running.cgroup, running.shares_terminal) == (None, True)


@pytest.mark.usefixtures("_pidfd")
def test_a_command_that_runs_is_waited_for_and_gets_signals(start: Start) -> None:
    running = start("exec sleep 600")
    assert not running.wait(0)
    assert not running.wait(0.05)
    running.send_signal(signal.SIGTERM)
    assert running.wait(60)
    assert running.reap() == Exit(None, signal=signal.SIGTERM)
    running.send_signal(signal.SIGTERM)  # it has ended: nothing happens


@pytest.mark.usefixtures("no_garbage")
def test_a_program_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")  # without folders that this user may not read
    before = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(ConfigError) as caught:
        Started(("no-such-program",), folder=str(tmp_path), streams=Streams())
    assert str(caught.value) == (
        f"cannot start 'no-such-program' in {tmp_path}: No such file or directory\n"
        "give a command as in a shell: weighin run -- python train.py"
    )
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    assert not adopt_orphans(adopt=False)


def test_a_close_ends_a_command_that_runs_and_the_adoption_of_orphans(start: Start) -> None:
    running = start("trap '' TERM; sleep 600 & wait")
    assert not running.wait(0)
    assert adopt_orphans()
    running.close()
    assert not lives(running.pid)
    assert not adopt_orphans(adopt=False)


# -- daemons and orphans

DAEMON = "env -i setsid sleep 600 & echo $! > pid; "


def written_pid(folder: Path) -> int:
    file = folder / "pid"
    wait_until(lambda: file.exists() and file.read_text().endswith("\n"), "no pid was written")
    return int(file.read_text())


def daemon(folder: Path) -> int:
    """Return the pid of DAEMON once it is ``sleep``, in a session of its own."""
    pid = written_pid(folder)
    wait_until(lambda: psutil.Process(pid).name() == "sleep", "it did not become a daemon")
    return pid


def test_a_daemon_without_variables_is_of_its_command(start: Start, tmp_path: Path) -> None:
    running = start(DAEMON + "exec sleep 601")
    pid = daemon(tmp_path)
    wait_until(lambda: set(running.members()) == {running.pid, pid}, "they are not both members")
    running.kill()
    wait_until(lambda: not lives(pid), "the daemon lives on")
    assert running.wait(60)
    assert running.reap() == KILLED


def test_a_daemon_that_is_left_ends_with_its_command(start: Start, tmp_path: Path) -> None:
    running = start(DAEMON + "exit 0")
    pid = daemon(tmp_path)
    assert running.wait(60)
    assert running.reap() == Exit(0)
    assert running.members() == [pid]
    running.close()
    assert not lives(pid)
    running.close()


def test_an_orphan_that_has_ended_is_reaped(start: Start, tmp_path: Path) -> None:
    running = start("( env -i sh -c 'echo $$ > pid' & ); exec sleep 600")
    pid = written_pid(tmp_path)
    wait_until(lambda: running.members() == [running.pid], "the orphan stays a member")
    assert not lives(pid)


def worker_with_daemon(folder: Path, pipes: Piped, then: str) -> tuple[Started, int]:
    """Return a worker that starts DAEMON, and the daemon's pid."""
    command = ("sh", "-c", f"read go; cd {folder}; {DAEMON} {then}")
    running = Started(command, streams=Streams(*pipes.streams), is_worker=True)
    pipes.started()
    pipes.send(b"\n")  # the mark is given to a process that has started
    return running, daemon(folder)


@pytest.mark.parametrize("is_weighin", [True, False])
def test_a_daemon_of_a_worker_ends_with_it_and_the_hosts_children_live_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipes: Piped, is_weighin: bool
) -> None:
    """In another program than weighin, which may start children meanwhile, the daemon stays."""
    monkeypatch.setattr(child_process, "is_program", is_weighin)
    bare = partial(subprocess.Popen, ["sleep", "600"], env={}, start_new_session=True)
    hosts = [bare()]
    running, pid = worker_with_daemon(tmp_path, pipes, "exit 4")
    if not is_weighin:
        hosts.append(bare())
    try:
        assert running.reap() == Exit(4)
        assert lives(pid)
        running.close()
        assert lives(pid) is not is_weighin
        assert [one.poll() for one in hosts] == [None] * len(hosts)
        assert not adopt_orphans(adopt=False)
    finally:
        running.close()
        for one in hosts:
            one.kill()
            one.wait()
        if not is_weighin:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.usefixtures("is_program")
def test_a_worker_that_does_not_end_is_an_error_and_its_children_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pipes: Piped
) -> None:
    running, pid = worker_with_daemon(tmp_path, pipes, "read go")
    with monkeypatch.context() as patch:
        patch.setattr(Started, "reap", lambda _: Exit(None, still_runs=True))
        with pytest.raises(StillRunning, match=f"process {running.pid} does not end"):
            running.close()
    wait_until(lambda: not lives(pid), "the daemon lives on")
    assert running.reap() == KILLED


SERVICES = """
mkfifo go end; sleep 600 & echo $!
(read line < go; sleep 600 & echo $!; read line < end) &
read line
"""


def test_what_ran_before_a_command_is_no_orphan_of_it_and_lives_on(
    tmp_path: Path, ends: set[int]
) -> None:
    """As in: start-services.sh & exec weighin run ... The second service starts another meanwhile."""
    pipe = subprocess.PIPE
    with ExitStack() as started:
        command = ["sh", "-c", SERVICES]
        services = subprocess.Popen(command, cwd=tmp_path, stdin=pipe, stdout=pipe)
        started.enter_context(services)
        assert services.stdin and services.stdout
        ends.add(int(services.stdout.readline()))
        tree = ProcessTree(adopts=True)
        started.callback(tree.end)
        own = started.enter_context(subprocess.Popen(["sleep", "600"]))
        started.callback(own.kill)
        tree.pid = own.pid
        (tmp_path / "go").write_text("\n")
        ends.add(int(services.stdout.readline()))
        assert tree.members() == [own.pid]
        services.stdin.close()
        services.wait(60)
        (tmp_path / "end").write_text("\n")
        wait_until(lambda: {*map(parent_of, ends)} == {os.getpid()}, "they are not adopted")
        assert tree.members() == [own.pid]
        tree.end()
        assert [lives(pid) for pid in ends] == [True, True]


CHILDREN = """
import os, time
for _ in range(2):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            held = b"1" * (40 << 20)
            os.write(1, b"held\\n")
            time.sleep(600)
        os._exit(0)
    os.wait()
time.sleep(600)
"""


@pytest.mark.usefixtures("is_program")
@pytest.mark.parametrize("name", ["process", pytest.param("cgroup", marks=pytest.mark.cgroup)])
def test_processes_that_left_the_workers_session_are_sampled(name: str, pipes: Piped) -> None:
    groups: list[Path] = cgroup.make() if name == "cgroup" else []
    command, streams = (sys.executable, "-c", CHILDREN), Streams(*pipes.streams)
    with closing(Started(command, groups=groups, streams=streams, is_worker=True)) as running:
        pipes.started()
        own = Cgroup(groups[0]) if groups else None
        memory = Sampler(running.pid, running.members, own, loading=[running.pid])
        assert pipes.printed(2) == [b"held"] * 2

        def sees_both() -> bool:
            memory.read(1, memory.pids())
            return memory.others[0] >= 2 and memory.others[1] > 80 * MIB

        wait_until(sees_both, "not both were seen")
        assert memory.others[0] <= 4  # their parents may be seen before they end
        assert memory.others[1] < 100 * MIB


# -- processes of another user


@pytest.fixture
def anothers(ends: set[int], monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Pids of processes that this user may not signal, as those of sudo; they end with the test."""
    kill = os.kill

    def denied(pid: int, number: int) -> None:
        if pid in ends:
            raise PermissionError
        kill(pid, number)

    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", denied)
        yield ends


def test_a_process_of_another_user_is_spared_and_not_waited_for(
    start: Start, tmp_path: Path, anothers: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start(DAEMON + "sleep 601 & exit 0")
    anothers.add(pid := daemon(tmp_path))
    assert running.wait(60)
    monkeypatch.setattr(child_process, "PATIENCE_S", 120)
    began_s = time.monotonic()
    assert end_rest(running, grace_s=120) == ("sleep 601",)
    assert running.reap() == Exit(0)
    running.close()
    running.close()
    assert time.monotonic() - began_s < 60
    assert lives(pid)
    assert not adopt_orphans(adopt=False)


@pytest.mark.usefixtures("is_program")
def test_a_daemon_of_a_worker_that_is_another_users_is_spared(
    tmp_path: Path, pipes: Piped, anothers: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, pid = worker_with_daemon(tmp_path, pipes, "exit 4")
    anothers.add(pid)
    monkeypatch.setattr(child_process, "PATIENCE_S", 0.1)
    assert running.reap() == Exit(4)
    running.close()
    assert lives(pid)
    assert not adopt_orphans(adopt=False)


def test_a_command_of_another_user_loses_no_measurement(
    start: Start, anothers: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "PATIENCE_S", 0.1)
    running = start("exec sleep 600")
    anothers.add(running.pid)
    running.kill()
    running.send_signal(signal.SIGTERM)
    ended = running.reap()
    assert (ended, ended.shell_code, ended.signal_name) == (Exit(None, still_runs=True), None, "")
    with pytest.raises(StillRunning):
        running.close()
    assert not adopt_orphans(adopt=False)


# -- workers


@pytest.mark.usefixtures("is_program")
def test_a_worker_that_cannot_start_leaves_no_adoption(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Started((str(tmp_path / "no-such-program"),), is_worker=True)
    assert not adopt_orphans(adopt=False)


WORKER = ("sh", "-c", f'echo "$MODE,${{{PHASES_VARIABLE}-none}},$PYTHONPATH"; exec cat')


def test_a_worker_gets_its_variables_then_what_is_sent_and_ends_when_it_is_killed(
    monkeypatch: pytest.MonkeyPatch, pipes: Piped
) -> None:
    monkeypatch.setenv(PHASES_VARIABLE, "/of/another/program")
    cell = replace(JOB.cell, environment={"MODE": "fast"})
    with closing(ProcessIsolation().start(cell, WORKER, "", Streams(*pipes.streams))) as worker:
        pipes.started()
        pipes.send(b"a job\n")
        variables, job = pipes.printed(2)
        mode, phases, path = variables.split(b",")
        assert (mode, phases) == (b"fast", b"none")
        assert path.split(b":")[0] == os.fsencode(Path(process.__file__).parents[2])
        assert job == b"a job"
        assert (worker.cgroup, worker.unseen) == (None, "a plain process has no cgroup of its own")
        assert not worker.wait(0)
        worker.kill()
        assert worker.reap() == KILLED
    assert worker.pid and not lives(worker.pid)


def test_what_a_plain_process_is_and_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    isolation = ProcessIsolation()
    isolation.check()
    assert (isolation.name, isolation.limits) == ("process", False)
    assert isolation.describe() == {}
    monkeypatch.setattr(Path, "exists", lambda path: path.name != "clear_refs")
    with pytest.raises(IsolationUnavailable, match="cannot measure peaks"):
        isolation.check()


# -- what dead runs left


@contextmanager
def marked(mark: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with this mark."""
    with subprocess.Popen(["sleep", "600"], env=os.environ | {WORKER_VARIABLE: mark}) as process:
        try:
            yield process
        finally:
            process.kill()


def dead_mark() -> str:
    """Return the mark of a run whose process has ended."""
    ended = "-".join(["1", "1", *this_process().split("-")[2:]])
    return ProcessTree(adopts=False).mark.replace(this_process(), ended, 1)


def test_marks_are_unique_and_are_inherited() -> None:
    first, second = ProcessTree(adopts=False), ProcessTree(adopts=False)
    assert first.mark != second.mark
    with marked(second.mark) as process:
        assert (first.members(), second.members()) == ([], [process.pid])
        assert first.kill() == []
        second.end()
        assert process.wait(60) == -signal.SIGKILL
        assert second.members() == []


def test_processes_of_a_dead_run_are_ended_and_named() -> None:
    with marked(dead_mark()) as orphan, marked(ProcessTree(adopts=False).mark) as other:
        assert ProcessIsolation().remove_stale() == [f"process {orphan.pid} of process 1"]
        assert orphan.wait(60) == -signal.SIGKILL
        assert other.poll() is None


OTHER_NAMESPACE = f"""
import subprocess
from weighin.isolation.process import ProcessIsolation, ProcessTree
marked = {{{WORKER_VARIABLE!r}: ProcessTree(adopts=False).mark}}
assert ProcessIsolation().remove_stale() == []
sleeper = subprocess.Popen(["sleep", "600"], env=marked)
print("up", flush=True)
input()
assert sleeper.poll() is None
"""


@pytest.mark.root
def test_runs_in_two_pid_namespaces_leave_each_other_alone() -> None:
    inside = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-P")
    there = subprocess.Popen((*inside, "-c", OTHER_NAMESPACE), stdin=-1, stdout=-1, text=True)
    with marked(ProcessTree(adopts=False).mark) as here, there:
        try:
            assert there.stdout and there.stdout.readline() == "up\n"
            assert ProcessIsolation().remove_stale() == []
            assert here.poll() is None
            there.communicate("\n", timeout=60)
            assert there.returncode == 0
        finally:
            there.kill()  # and so its sleeper


CLEANS = """
import subprocess
from weighin.isolation.process import ProcessIsolation
with subprocess.Popen(["sleep", "600"]) as relative:
    assert ProcessIsolation().remove_stale() == []
    assert relative.poll() is None
    relative.kill()
"""


def test_a_process_of_a_killed_run_that_cleans_ends_neither_itself_nor_its_relatives() -> None:
    """Nor what is above it and has the mark of a third run, as when weighin measures weighin."""
    inner = f'{WORKER_VARIABLE}={dead_mark()} "$@"; exit $?'
    command = ("sh", "-c", inner, "sh", sys.executable, "-P", "-c", CLEANS)
    above = os.environ | {WORKER_VARIABLE: dead_mark()}
    done = subprocess.run(command, env=above, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
