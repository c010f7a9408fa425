"""``weighin.phase`` in real programs, and the listener that measures the phases, without a cgroup."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from select import select
from unittest.mock import Mock

import pytest
from leftovers import wait_until

from weighin.cell import Cell
from weighin.phase_reporter import Connection, Reporter, address
from weighin.probes.cgroup import Cgroup, Counters
from weighin.program_phases import VARIABLE
from weighin.result import OURS
from weighin.run.listener import Listener, Reported
from weighin.run.measure import Spec, Watch
from weighin.units import MIB

HARNESS = Path(__file__).resolve().parents[2] / "harness"
BEGIN = """
import os, subprocess, sys, weighin
from weighin import phase

def take(mib):
    return bytearray(b'1') * (mib << 20)

"""


class Heard:
    """The listener and the watch of a command that a test runs itself."""

    def __init__(self, folder: Path) -> None:
        self.listener = Listener(folder)
        self.watch = Watch(Spec(Cell.of_command("x", ("x",), "process")), self.listener)
        self.variables = {VARIABLE: str(self.listener.path)}

    def begin(self, cgroup: Cgroup | None = None) -> None:
        self.watch.cgroup = cgroup
        self.listener.watch(self.watch._take, self.watch._at_mark)

    def end(self) -> list[Reported]:
        self.listener.close()
        return [*self.listener.by_process.values()]


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[Heard]:
    """A listener at a path that is longer than an address."""
    (folder := tmp_path / ("long" * 50)).mkdir()
    heard = Heard(folder)
    heard.begin()
    yield heard
    heard.end()
    assert list(folder.iterdir()) == []


def start(program: str, variables: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-X", "dev", "-W", "error", "-c", BEGIN + program],
        env=os.environ | {"PYTHONPATH": str(HARNESS)} | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(program: str, variables: dict[str, str]) -> tuple[int, str]:
    """Run a Python program; return its exit code and all that it printed."""
    child = start(program, variables)
    printed, _ = child.communicate(timeout=60)
    return child.returncode, printed


def processes_of(heard: Heard, program: str) -> list[Reported]:
    """Return what the processes of a program reported, which must end well and print nothing."""
    assert run(program, heard.variables) == (0, "")
    return heard.end()


def names(process: Reported) -> list[str]:
    return [phase.name for phase in process.phases]


def test_a_phase_has_its_own_peak_faults_and_memory_at_its_end(heard: Heard) -> None:
    (main,) = processes_of(
        heard,
        """
with phase("spike"):
    take(200)
with phase("nothing"):
    pass
with phase("outer"):
    with phase("inner"):
        take(100)
    with phase("second"):
        pass
""",
    )
    assert names(main) == ["spike", "nothing", "outer", "inner", "second"]
    spike, nothing, outer, inner, second = main.phases
    assert spike.peak_rss_bytes - nothing.peak_rss_bytes == pytest.approx(200 * MIB, abs=2 * MIB)
    assert spike.minor_faults > 0
    assert spike.start_ns < spike.end_ns <= nothing.start_ns < nothing.end_ns <= outer.start_ns
    assert (
        outer.peak_cgroup_bytes is outer.end.cgroup_bytes is outer.workingset_refault_file is None
    )
    assert outer.peak_rss_bytes == inner.peak_rss_bytes > second.peak_rss_bytes + 98 * MIB
    assert main.highest_rss_bytes == pytest.approx(spike.peak_rss_bytes, abs=MIB)
    assert (heard.watch.peak_bytes, main.died_in, main.told.notes) == (None, None, [])


def test_a_mark_that_the_kernel_cannot_reset_leaves_no_peak_and_says_so(tmp_path: Path) -> None:
    """cgroup v2 before Linux 6.12: the mark is that since the group was made."""
    (group := tmp_path / "group").mkdir()
    (group / "memory.current").write_text("4096")
    heard = Heard(tmp_path)
    heard.begin(Cgroup(group))
    (main,) = processes_of(heard, 'with phase("one"):\n    pass\n')
    assert [one.peak_cgroup_bytes for one in main.phases] == [None]
    assert main.told.notes == [
        "phases have no cgroup peak, because the cgroup's peak could not be reset (cgroup v2 needs Linux"
        " 6.12 for it)"
    ]


DECORATED = """
import asyncio, threading

@phase("function")
def function(depth):
    return depth if depth == 0 else function(depth - 1)

@phase("coroutine")
async def coroutine():
    await asyncio.sleep(0.05)
    return "slept"

assert function(2) == 0
assert asyncio.run(coroutine(), debug=False) == "slept"
barrier = threading.Barrier(2)
threads = [threading.Thread(target=phase("thread")(barrier.wait)) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
try:
    with phase("raises"):
        raise KeyError
except KeyError:
    pass
"""


def test_functions_and_coroutines_are_decorated_and_threads_overlap(heard: Heard) -> None:
    (main,) = processes_of(heard, DECORATED)
    found = ["function"] * 3 + ["coroutine"] + ["thread"] * 2 + ["raises"]
    assert names(main) == found
    assert main.phases[3].end_ns - main.phases[3].start_ns >= 50_000_000
    assert main.phases[5].start_ns < main.phases[4].end_ns


PROGRAMS = {
    "a forked child leaves its parent's phase alone": (
        """
with phase("parent"):
    if (child := os.fork()) == 0:
        with phase("child"):
            pass
    else:
        os.waitpid(child, 0)
if child:
    with phase("after"):
        pass
""",
        [["parent", "after"], ["child"]],
    ),
    "children whose descriptors are closed find the socket": (
        """
with phase("launcher"):
    code = "import weighin\\nwith weighin.phase('rank'): pass"
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code], close_fds=True, check=True)
""",
        [["launcher"], ["rank"], ["rank"]],
    ),
    "a program that replaces another ends its phase": (
        """
with phase("before"):
    code = "import weighin\\nwith weighin.phase('after'): pass"
    os.execv(sys.executable, [sys.executable, "-c", code])
""",
        [["before", "after"]],
    ),
    "a descriptor that the program closes and reuses is left alone": (
        """
with phase("first"):
    os.closerange(3, 100)
    files = [os.memfd_create("theirs") for _ in range(20)]
with phase("second"):
    pass
assert [os.fstat(one).st_size for one in files] == [0] * 20
""",
        [["first", "second"]],
    ),
}


@pytest.mark.parametrize(("program", "found"), PROGRAMS.values(), ids=PROGRAMS)
def test_each_process_has_a_track_of_its_own(
    heard: Heard, program: str, found: list[list[str]]
) -> None:
    assert [names(each) for each in processes_of(heard, program)] == found


def test_names_are_made_safe(heard: Heard) -> None:
    recorded: dict[object, str] = {
        "read (1/2)": "read (1/2)",
        "zwei\nZeilen\x1b[2J": "phase zwei Zeilen__2J",
        "é": "phase _",
        "file \udc80": "phase file _",
        "": "phase",
        "x" * 500: "phase " + "x" * 58,
        OURS[0]: f"phase {OURS[0]}",
        17: "17",
    }
    (main,) = processes_of(heard, f"for name in {[*recorded]}:\n    with phase(name): pass")
    assert names(main) == [*recorded.values()]
    (said,) = main.told.notes
    assert said.startswith("names of phases were changed: ")


def test_a_loop_of_phases_keeps_the_first_thousand(heard: Heard) -> None:
    (main,) = processes_of(
        heard,
        """
for number in range(1500):
    with phase("step" if number < 1000 else "later"):
        if number == 1400: take(100)
""",
    )
    assert names(main) == ["step"] * 1000
    assert main.highest_rss_bytes > main.phases[0].end.rss_bytes + 98 * MIB
    assert main.told.notes == ["a process had more than 1000 phases: later ones are not recorded"]


def test_processes_wait_until_the_listener_watches(tmp_path: Path) -> None:
    heard = Heard(tmp_path)
    child = start("with phase('early'): pass", heard.variables)
    assert select([heard.listener._server], [], [], 60)[0]
    assert child.poll() is None
    heard.begin()
    assert child.communicate(timeout=60)[0] == ""
    assert [names(each) for each in heard.end()] == [["early"]]


def test_the_messages_of_a_process_that_has_ended_are_taken(tmp_path: Path) -> None:
    listener = Listener(tmp_path)
    code = (
        "from weighin.phase_reporter import Connection\n"
        "message = {'event': 'told', 'phase': 'quick'}\n"
        f"Connection({str(listener.path)!r}).send(message, wait=False)"
    )
    assert run(code, {}) == (0, "")
    taken = []
    listener.watch(lambda _, message: taken.append(message), lambda _: Counters())
    listener.close()
    assert [type(each).__name__ for each in taken] == ["Told"]


MANY = (
    "for _ in range(1000):\n    with phase('x'): pass\nprint('done')"  # 2 s each would be 2,000 s
)


@pytest.mark.parametrize("path", ["", "no/such/socket", "a file", "closed", "x" * 5000])
def test_without_a_listener_a_program_goes_on_at_once(tmp_path: Path, path: str) -> None:
    (tmp_path / "a file").touch()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as closed:
        closed.bind(str(tmp_path / "closed"))
    assert run(MANY, {VARIABLE: str(tmp_path / path) if path else ""}) == (0, "done\n")


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
        assert time.monotonic() - start_s >= waits_s


def test_a_socket_that_is_removed_and_closed_meanwhile_raises_nothing(heard: Heard) -> None:
    reporter = Reporter(heard.variables[VARIABLE])
    begun = reporter.begin("read")
    heard.listener.path.unlink()
    heard.end()
    reporter.end(begun)
    reporter.end(reporter.begin("again"))


ODD_MESSAGES = [
    b"", b"\xff\n", b"[" * 9000, b'{"event": "begin"}\n', b'{"event": "begin", "id": true, "name": "x"}\n',
    b'{"event": "begin", "id": 1, "name": ["x"]}\n', b'{"event": "end", "id": 1, "t_ns": 1.5}\n',
    b'{"event": "told", "id": 1}\n',
]  # fmt: skip


def test_a_message_of_another_shape_ends_its_connection_alone(heard: Heard) -> None:
    for message in ODD_MESSAGES:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as theirs:
            theirs.settimeout(60)
            with address(heard.variables[VARIABLE]) as place:
                theirs.connect(place)
            theirs.send(message)
            assert theirs.recv(1) == b"" if message else True, message
    ours, good = processes_of(heard, "with phase('good'): pass")
    assert (names(ours), names(good)) == ([], ["good"])


def test_an_interrupted_phase_raises_the_interrupt_alone(heard: Heard) -> None:
    (main,) = processes_of(
        heard,
        """
import signal, warnings
warnings.simplefilter("ignore", ResourceWarning)  # of what an interrupt leaves half open
class Stop(BaseException): ...
def stop(*_):
    global armed
    if armed:
        armed = False
        raise Stop
signal.signal(signal.SIGALRM, stop)
armed, stopped = False, 0
with phase("first"): pass
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
for _ in range(1000):
    try:
        armed = True
        with phase("often"): pass
        armed = False
    except Stop:
        stopped += 1
signal.setitimer(signal.ITIMER_REAL, 0)
assert stopped
with phase("last"): pass
""",
    )
    assert (names(main)[0], names(main)[-1]) == ("first", "last")


def test_outside_of_a_run_a_phase_does_nothing_and_imports_little() -> None:
    program = """
import sys
import weighin
weighin.phase, called = weighin.phase, []
sys.setprofile(lambda frame, event, _: called.append((event, frame.f_code.co_name)))
with weighin.phase("x"): pass
sys.setprofile(None)
calls = [name for event, name in called if event == "call"]
assert calls == ["__init__", "__enter__", "__exit__"], called
@weighin.phase("add")
def add(one, other=1):
    "Add."
    return one / other
assert (add(2), add(2, other=4), add.__name__, add.__doc__) == (2, 0.5, "add", "Add.")
try: add(1, 0)
except ZeroDivisionError: add = None
assert add is None
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


def test_a_program_that_plays_a_worker_changes_no_figure(heard: Heard) -> None:
    heard.watch.peak_bytes = 7
    connection = Connection(heard.variables[VARIABLE], 10.0)
    memory = {"rss_bytes": 1, "anon_bytes": 1, "file_bytes": 0, "shmem_bytes": 0}
    baseline = {"event": "baseline", "baseline_ns": 1, "baseline": memory, "import_ns": 1}
    connection.send(baseline, wait=True)
    connection.send({"event": "done", "first_use_ns": None, "marks_ns": 0}, wait=True)
    connection.drop()
    (main,) = heard.end()
    assert (heard.watch.peak_bytes, main.told.baseline, main.is_done) == (7, None, False)


def test_a_listener_whose_thread_does_not_start_can_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail = Mock(side_effect=RuntimeError("can't start new thread"))
    monkeypatch.setattr(threading.Thread, "start", fail)
    listener = Listener(tmp_path)
    with pytest.raises(RuntimeError, match="start new"):
        listener.watch(lambda *_: None, lambda _: Counters())
    listener.close()


def test_ranks_wait_for_each_other(tmp_path: Path) -> None:
    """None gets an answer before all have sent the message; a third process is no rank."""
    listener = Listener(tmp_path, ranks=2)
    listener.watch(lambda *_: None, lambda _: Counters())
    connections = [Connection(str(listener.path), 10.0) for _ in range(2)]
    answered: list[int] = []

    def meet(rank: int) -> None:
        connections[rank].send({"event": "shared", "pss_bytes": rank}, wait=True)
        answered.append(rank)

    for rank, connection in enumerate(connections):
        connection.send({"event": "told", "rank": rank}, wait=False)
    first = threading.Thread(target=meet, args=(0,))
    first.start()
    wait_until(lambda: listener._waiting, "the message was not taken")
    assert answered == []
    meet(1)
    first.join(60)
    assert sorted(answered) == [0, 1]
    for connection in connections:
        connection.drop()
    listener.close()
    assert listener.error is None
