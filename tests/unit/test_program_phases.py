"""``weighin.phase`` in real programs, and the listener that measures the phases, without a cgroup."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from leftovers import wait_until

from weighin.cell import Cell
from weighin.phase_reporter import Connection, Reporter
from weighin.probes.cgroup import Cgroup, Counters
from weighin.program_phases import VARIABLE
from weighin.result import OURS, Phase, Track
from weighin.run.listener import Listener
from weighin.run.measure import Spec, Watch
from weighin.units import MIB

HARNESS = Path(__file__).resolve().parents[2] / "harness"
TAKE = "def take(mib):\n    return bytearray(b'1') * (mib << 20)\n"


class PhaseListener:
    """The listener and the watch of a command that a test runs itself."""

    def __init__(self, folder: Path) -> None:
        self.inner = Listener(folder)
        self.watching = Watch(Spec(Cell.of_command("x", ("x",), "process")), self.inner)
        self.environment = {VARIABLE: str(self.inner.path)}

    def watch(self, cgroup: Cgroup | None) -> None:
        self.watching.cgroup = cgroup
        self.inner.watch(self.watching._take, self.watching._at_mark)

    def close(self) -> tuple[tuple[Phase, ...], tuple[Track, ...]]:
        self.inner.close()
        tracks = [Track(each.pid, each.phases) for each in self.inner.by_process.values()]
        return (tracks[0].phases if tracks else ()), tuple(tracks[1:])

    @property
    def pid(self) -> int:
        return next(iter(self.inner.by_process.values())).pid

    @property
    def peak_bytes(self) -> int | None:
        return self.watching.peak_bytes

    @property
    def last_phase(self) -> str | None:
        return next(iter(self.inner.by_process.values())).died_in

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(text for each in self.inner.by_process.values() for text in each.told.notes)

    @property
    def highest_rss_bytes(self) -> dict[int, int]:
        return {each.pid: each.highest_rss_bytes for each in self.inner.by_process.values()}


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[PhaseListener]:
    listener = PhaseListener(tmp_path)
    listener.watch(None)
    yield listener
    listener.close()


def run(program: str, variables: dict[str, str], timeout_s: float = 60.0) -> tuple[int, str]:
    """Run a Python program with these variables; return its exit code and all that it printed."""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", TAKE + program],
        env=os.environ | {"PYTHONPATH": str(HARNESS)} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout_s,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def phases_of(listener: PhaseListener, program: str) -> tuple[tuple[Phase, ...], tuple[Track, ...]]:
    """Return the phases of a program that must end well and print nothing."""
    assert run(program, listener.environment) == (0, "")
    return listener.close()


def names(phases: tuple[Phase, ...]) -> list[str]:
    return [phase.name for phase in phases]


def test_a_phase_has_its_own_peak_faults_and_memory_at_its_end(listener: PhaseListener) -> None:
    phases, others = phases_of(
        listener,
        """
import weighin
with weighin.phase("spike"):
    take(200)
with weighin.phase("nothing"):
    pass
with weighin.phase("kept"):
    kept = take(100)
""",
    )
    assert (names(phases), others) == (["spike", "nothing", "kept"], ())
    spike, nothing, kept = phases
    assert spike.peak_rss_bytes - nothing.peak_rss_bytes == pytest.approx(200 * MIB, abs=2 * MIB)
    assert kept.peak_rss_bytes - nothing.peak_rss_bytes == pytest.approx(100 * MIB, abs=2 * MIB)
    assert kept.end.rss_bytes == pytest.approx(kept.peak_rss_bytes, abs=MIB)
    assert spike.minor_faults > 0
    assert spike.start_ns < spike.end_ns <= nothing.start_ns < nothing.end_ns <= kept.start_ns
    assert kept.peak_cgroup_bytes is kept.end.cgroup_bytes is kept.workingset_refault_file is None
    highest = max(listener.highest_rss_bytes.values())
    assert highest == pytest.approx(spike.peak_rss_bytes, abs=MIB)
    assert (listener.peak_bytes, listener.last_phase, listener.warnings) == (None, None, ())


def test_a_mark_that_the_kernel_cannot_reset_leaves_no_peak_and_says_so(tmp_path: Path) -> None:
    """cgroup v2 before Linux 6.12: the mark is that since the group was made."""
    (group := tmp_path / "group").mkdir()
    (group / "memory.current").write_text("4096")
    listener = PhaseListener(tmp_path)
    listener.watch(Cgroup(group))
    (phase,), _ = phases_of(listener, 'import weighin\nwith weighin.phase("one"):\n    pass\n')
    assert phase.peak_cgroup_bytes is None
    assert listener.warnings == (
        "phases have no cgroup peak, because the cgroup's peak could not be reset (cgroup v2 needs Linux"
        " 6.12 for it)",
    )


def test_an_outer_phase_has_the_peak_of_an_inner_one(listener: PhaseListener) -> None:
    phases, _ = phases_of(
        listener,
        """
from weighin import phase
with phase("outer"):
    with phase("inner"):
        take(100)
    with phase("second"):
        pass
""",
    )
    assert names(phases) == ["outer", "inner", "second"]
    outer, inner, second = phases
    assert outer.peak_rss_bytes == inner.peak_rss_bytes > second.peak_rss_bytes + 98 * MIB


def test_functions_and_coroutines_are_decorated_and_threads_overlap(
    listener: PhaseListener,
) -> None:
    phases, _ = phases_of(
        listener,
        """
import asyncio, threading, weighin

@weighin.phase("function")
def function(depth):
    return depth if depth == 0 else function(depth - 1)

@weighin.phase("coroutine")
async def coroutine():
    await asyncio.sleep(0.05)
    return "slept"

assert function(2) == 0
assert asyncio.run(coroutine(), debug=False) == "slept"

def work(number):
    with weighin.phase(f"thread {number}"):
        barrier.wait()
barrier = threading.Barrier(4)
threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
try:
    with weighin.phase("raises"):
        raise KeyError
except KeyError:
    pass
""",
    )
    threads = [f"thread {number}" for number in range(4)]
    assert sorted(names(phases)) == ["coroutine", *["function"] * 3, "raises", *threads]
    (coroutine,) = (phase for phase in phases if phase.name == "coroutine")
    assert coroutine.end_ns - coroutine.start_ns >= 50_000_000


def test_forked_children_have_tracks_of_their_own(listener: PhaseListener) -> None:
    phases, others = phases_of(
        listener,
        """
import os, weighin
with weighin.phase("parent"):
    if (child := os.fork()) == 0:
        with weighin.phase("child"):
            take(50)
        # The child also leaves the phase of its parent.
    else:
        os.waitpid(child, 0)
if child:
    with weighin.phase("after"):
        pass
""",
    )
    assert names(phases) == ["parent", "after"]
    (other,) = others
    assert names(other.phases) == ["child"]
    assert other.phases[0].peak_rss_bytes > 48 * MIB


def test_children_whose_descriptors_are_closed_find_the_socket(listener: PhaseListener) -> None:
    phases, others = phases_of(
        listener,
        """
import os, subprocess, sys, weighin
with weighin.phase("launcher"):
    code = "import weighin\\nwith weighin.phase('rank'): pass"
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code], close_fds=True, check=True)
""",
    )
    assert names(phases) == ["launcher"]
    assert [names(each.phases) for each in others] == [["rank"], ["rank"]]


def test_a_program_that_closes_and_reuses_the_descriptor_is_left_alone(
    listener: PhaseListener, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    phases, _ = phases_of(
        listener,
        f"""
import os, weighin
with weighin.phase("first"):
    os.closerange(3, 100)
    files = [os.open({str(theirs)!r}, os.O_RDWR | os.O_CREAT) for _ in range(20)]
with weighin.phase("second"):
    pass
for file in files: os.close(file)
""",
    )
    assert names(phases) == ["first", "second"]
    assert theirs.read_bytes() == b""


def test_a_program_that_dies_in_a_phase_leaves_the_phase(listener: PhaseListener) -> None:
    program = """
import os, signal, time, weighin
with weighin.phase("outer"):
    with weighin.phase("inner"):
        held = take(100)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
"""
    start_ns = time.monotonic_ns()
    assert run(program, listener.environment) == (-9, "")
    died_ns = time.monotonic_ns()
    time.sleep(0.2)
    phases, _ = listener.close()
    assert names(phases) == ["outer", "inner"]
    assert listener.last_phase == "inner"
    assert all(start_ns < phase.start_ns < phase.end_ns < died_ns for phase in phases)
    assert all(phase.peak_rss_bytes > 100 * MIB for phase in phases)
    assert all(phase.end.rss_bytes > 100 * MIB for phase in phases)
    (warning,) = listener.warnings
    assert warning.endswith("ended inside its phase 'inner', whose peak RSS is therefore sampled")


def test_a_program_that_another_one_replaces_ends_its_phase(listener: PhaseListener) -> None:
    phases, _ = phases_of(
        listener,
        """
import os, sys, weighin
with weighin.phase("before"):
    code = "import weighin\\nwith weighin.phase('after'): pass"
    os.execv(sys.executable, [sys.executable, "-c", code])
""",
    )
    assert names(phases) == ["before", "after"]


@pytest.mark.parametrize(
    ("name", "recorded"),
    [
        ("read (1/2)", "read (1/2)"),
        ("zwei\nZeilen\x1b[2J", "phase zwei Zeilen__2J"),
        ("é", "phase _"),
        ("file \udc80", "phase file _"),
        ("", "phase"),
        ("x" * 500, "phase " + "x" * 58),
        (OURS[0], f"phase {OURS[0]}"),
        (17, "17"),
    ],
)
def test_names_are_made_safe(listener: PhaseListener, name: object, recorded: str) -> None:
    phases, _ = phases_of(listener, f"import weighin\nwith weighin.phase({name!r}): pass")
    assert names(phases) == [recorded]
    said = [text for text in listener.warnings if text.startswith("names of phases were changed: ")]
    assert len(said) == (recorded != str(name))


def test_a_loop_of_phases_keeps_the_first_thousand(listener: PhaseListener) -> None:
    phases, _ = phases_of(
        listener,
        """
import weighin
for number in range(1500):
    with weighin.phase("step" if number < 1000 else "later"):
        if number == 1400: take(100)
""",
    )
    assert names(phases) == ["step"] * 1000
    assert max(listener.highest_rss_bytes.values()) > phases[0].end.rss_bytes + 98 * MIB
    (warning,) = listener.warnings
    assert warning == "a process had more than 1000 phases: later ones are not recorded"


def test_a_path_longer_than_an_address_works(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 50)
    folder.mkdir()
    listener = PhaseListener(folder)
    listener.watch(None)
    phases, _ = phases_of(listener, "import weighin\nwith weighin.phase('far'): pass")
    assert names(phases) == ["far"]
    assert list(folder.iterdir()) == []


def test_processes_wait_until_the_listener_watches(tmp_path: Path) -> None:
    listener = PhaseListener(tmp_path)
    program = "import weighin\nwith weighin.phase('early'): pass"
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(HARNESS)} | listener.environment,
    )
    time.sleep(0.5)
    assert child.poll() is None
    listener.watch(None)
    assert child.wait(60) == 0
    assert names(listener.close()[0]) == ["early"]


MANY = """
import weighin
for _ in range(1000):
    with weighin.phase("x"): pass
print("done")
"""


def test_the_messages_of_a_process_that_has_ended_are_taken(tmp_path: Path) -> None:
    listener = PhaseListener(tmp_path)
    code = (
        "from weighin.phase_reporter import Connection\n"
        "message = {'event': 'told', 'phase': 'quick'}\n"
        f"Connection({str(listener.inner.path)!r}).send(message, wait=False)"
    )
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(HARNESS)}, check=True)
    taken = []
    listener.inner.watch(lambda _, message: taken.append(message), lambda _: Counters())
    listener.inner.close()
    assert [type(each).__name__ for each in taken] == ["Told"]


@pytest.mark.parametrize("path", ["", "no/such/socket", "a file", "closed", "x" * 5000])
def test_without_a_listener_a_program_goes_on_at_once(tmp_path: Path, path: str) -> None:
    (tmp_path / "a file").touch()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as closed:
        closed.bind(str(tmp_path / "closed"))
    variables = {VARIABLE: str(tmp_path / path) if path else ""}
    start_s = time.monotonic()
    assert run(MANY, variables) == (0, "done\n")
    assert time.monotonic() - start_s < 15


@pytest.mark.parametrize(("backlog", "waits_s"), [(10, 2), (0, 0)])
def test_a_listener_that_does_not_answer_costs_two_seconds_once(
    tmp_path: Path, backlog: int, waits_s: int
) -> None:
    path = str(tmp_path / "deaf")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as first,
    ):
        deaf.bind(path)
        deaf.listen(backlog)
        first.connect(path)  # with a backlog of 0, the queue is full now
        start_s = time.monotonic()
        assert run(MANY, {VARIABLE: path}) == (0, "done\n")
        assert waits_s <= time.monotonic() - start_s < waits_s + 15


def test_a_socket_that_is_removed_and_closed_meanwhile_raises_nothing(tmp_path: Path) -> None:
    listener = PhaseListener(tmp_path)
    listener.watch(None)
    reporter = Reporter(listener.environment[VARIABLE])
    begun = reporter.begin("read")
    listener.inner.path.unlink()
    listener.close()
    reporter.end(begun)
    reporter.end(reporter.begin("again"))


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xff\n",
        b"[" * 9000,
        b'{"event": "begin"}\n',
        b'{"event": "begin", "id": true, "name": "x"}\n',
        b'{"event": "begin", "id": 1, "name": ["x"]}\n',
        b'{"event": "end", "id": 1, "t_ns": 1.5}\n',
        b'{"event": "told", "id": 1}\n',
    ],
)
def test_a_message_of_another_shape_ends_its_connection_alone(
    listener: PhaseListener, message: bytes
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as theirs:
        theirs.settimeout(5)
        theirs.connect(listener.environment[VARIABLE])
        theirs.send(message)
        assert theirs.recv(1) == b"" if message else True
    assert run("import weighin\nwith weighin.phase('good'): pass", listener.environment)[0] == 0
    _, others = listener.close()
    assert [names(each.phases) for each in others] == [["good"]]


def test_an_interrupted_phase_raises_the_interrupt_alone(listener: PhaseListener) -> None:
    phases, _ = phases_of(
        listener,
        """
import signal, warnings, weighin
warnings.simplefilter("ignore", ResourceWarning)  # of what an interrupt leaves half open
class Stop(BaseException): ...
def stop(*_):
    global armed
    if armed:
        armed = False
        raise Stop
signal.signal(signal.SIGALRM, stop)
armed, stopped = False, 0
with weighin.phase("first"): pass
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
for _ in range(1000):
    try:
        armed = True
        with weighin.phase("often"): pass
        armed = False
    except Stop:
        stopped += 1
signal.setitimer(signal.ITIMER_REAL, 0)
assert stopped
with weighin.phase("last"): pass
""",
    )
    assert (names(phases)[0], names(phases)[-1]) == ("first", "last")


def test_outside_of_a_run_a_phase_is_cheap_and_imports_little() -> None:
    program = """
import sys, time
import weighin
times = []
for _ in range(20):
    start = time.perf_counter_ns()
    for _ in range(1000):
        with weighin.phase("x"): pass
    times.append((time.perf_counter_ns() - start) / 1000)
assert min(times) < 2000, min(times)
ours = {name for name in sys.modules if name.startswith("weighin")}
assert ours == {"weighin", "weighin.program_phases"}, ours
assert not {"socket", "json", "threading", "pathlib", "inspect"} & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={"PYTHONPATH": str(HARNESS)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_program_that_plays_a_worker_changes_no_figure(tmp_path: Path) -> None:
    listener = PhaseListener(tmp_path)
    listener.watch(None)
    listener.watching.peak_bytes = 7
    connection = Connection(listener.environment[VARIABLE], 10.0)
    memory = {"rss_bytes": 1, "anon_bytes": 1, "file_bytes": 0, "shmem_bytes": 0}
    baseline = {"event": "baseline", "baseline_ns": 1, "baseline": memory, "import_ns": 1}
    connection.send(baseline, wait=True)
    connection.send({"event": "done", "first_use_ns": None, "marks_ns": 0}, wait=True)
    connection.drop()
    listener.close()
    (main,) = listener.inner.by_process.values()
    assert (listener.peak_bytes, main.told.baseline, main.is_done) == (7, None, False)


def test_a_listener_whose_thread_does_not_start_can_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    listener = Listener(tmp_path)
    with pytest.raises(RuntimeError, match="start new"):
        listener.watch(lambda *_: None, lambda _: Counters())
    listener.close()


def test_ranks_wait_for_each_other(tmp_path: Path) -> None:
    """None gets an answer before all have sent the message; a third process is no rank."""
    listener = Listener(tmp_path, ranks=2)
    taken: list[str] = []
    listener.watch(lambda _, one: taken.append(type(one).__name__), lambda _: Counters())
    connections = [Connection(str(listener.path), 10.0) for _ in range(2)]
    answered: list[int] = []

    def meet(rank: int) -> None:
        connections[rank].send({"event": "shared", "pss_bytes": rank}, wait=True)
        answered.append(rank)

    for rank, connection in enumerate(connections):
        connection.send({"event": "told", "rank": rank}, wait=False)
    first = threading.Thread(target=meet, args=(0,))
    first.start()
    wait_until(lambda: taken, "the message was not taken")
    time.sleep(0.05)
    assert answered == []
    meet(1)
    first.join(10)
    assert sorted(answered) == [0, 1]
    for connection in connections:
        connection.drop()
    listener.close()
    assert listener.error is None
