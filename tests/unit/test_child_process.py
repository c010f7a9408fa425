"""Real children: whole events come, and last words are kept."""

import fcntl
import os
import resource
import signal
import sys
import threading
from pathlib import Path

import pytest
from leftovers import lives, wait_until

from weighin import child_process
from weighin.child_process import STDERR_KEPT_BYTES, Child, ready, write

PARENT = """
import os, sys, time
from weighin.child_process import Parent
parent = Parent()
"""


def python(code: str) -> Child:
    return Child((sys.executable, "-P", "-c", PARENT + code), child_process.environment())


def test_events_come_in_their_order_and_what_is_sent_arrives() -> None:
    code = """
parent.send("one")
told = parent.receive()
parent.send("two", told=told)
parent.send("three", text="x" * 1_000_000)
"""
    with python(code) as child:
        assert child.receive(60) == {"event": "one"}
        child.send("answer", odd={"é\n": [1, None]})
        told = {"event": "answer", "odd": {"é\n": [1, None]}}
        assert child.receive(60) == {"event": "two", "told": told}
        assert child.receive(60) == {"event": "three", "text": "x" * 1_000_000}
        assert child.receive(60) is None


CUT = "os.write(parent._socket.fileno(), b'to')\n"


AFTER: dict[str, tuple[str, bytes | None]] = {
    "killed inside an event": (CUT, b""),
    "a fork holds the socket inside an event": (CUT + "os.fork() or time.sleep(600)", b""),
    "its own child holds all open": ("print('said'); os.fork() or time.sleep(600)", b"said\n"),
    "its output is closed": ("os.close(1); os.close(2); time.sleep(600)", None),
    "silence": ("time.sleep(600)", None),
}


@pytest.mark.parametrize("name", AFTER)
def test_what_comes_after_an_event(name: str) -> None:
    """Nothing, once the child has ended; nothing in time, if it has not (``printed`` is None)."""
    code, printed = AFTER[name]
    with python("parent.send('one')\n" + code) as child:
        assert child.receive(60) == {"event": "one"}
        if printed is None:
            with pytest.raises(TimeoutError):
                child.receive(0.01)
        else:
            assert [child.receive(60), child.receive(60)] == [None, None]
            assert child.printed.startswith(printed)


def test_what_is_printed_is_no_event_and_the_last_64_kib_are_kept() -> None:
    lines = 3 * STDERR_KEPT_BYTES // 8
    code = f"parent.send('one')\nfor n in range({lines}): print(f'{{n:07}}', flush=True)\nos.write(2, b'end')"
    with python(code) as child:
        assert child.receive(60) == {"event": "one"}
        assert child.receive(60) is None
        assert len(child.printed) == 64 * 1024
        assert child.printed.endswith(b"%07d\nend" % (lines - 1))


def test_sending_to_a_child_that_is_gone_is_no_error() -> None:
    with python("") as child:
        assert child.wait(60) == 0
        child.send("more")
        child.send("more")


def test_a_line_above_the_size_of_a_pipe_is_whole_though_signals_interrupt_the_write() -> None:
    reading, writing = os.pipe()
    line = b"x" * 1_000_000
    got: list[bytes] = []

    def read() -> None:
        with os.fdopen(reading, "rb") as file:
            got.append(file.readline())

    reader = threading.Thread(target=read)

    def start_reading(*_: object) -> None:
        if reader.ident is None:
            reader.start()

    before = signal.signal(signal.SIGALRM, start_reading)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)  # the first write fills the pipe, and is cut
    try:
        write(writing, line + b"\n")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        os.close(writing)
    reader.join()
    assert got == [line + b"\n"]


def test_descriptors_above_1023_are_waited_for() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    ours, theirs = os.pipe()
    try:
        high = fcntl.fcntl(ours, fcntl.F_DUPFD, 2000)
        os.write(theirs, b"one\n")
        assert ready([high], 1) == [high]
        os.close(high)
    finally:
        os.close(ours)
        os.close(theirs)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_child_that_is_late_is_killed_with_its_own_children() -> None:
    with python("parent.send('forked', pid=os.fork()); time.sleep(600)") as child:
        forked = max((child.receive(60) or {})["pid"] for _ in range(2))
        with pytest.raises(TimeoutError):
            child.wait(0.01)
    assert child.wait() == -signal.SIGKILL
    wait_until(lambda: not lives(forked), "its own child lives on")


def test_an_answer_that_does_not_come_in_time_is_an_error() -> None:
    with pytest.raises(TimeoutError):
        child_process.ask((sys.executable, "-c", "import time; time.sleep(600)"), {}, timeout_s=0.1)


def test_a_child_runs_no_file_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json.py", "calendar.py"):
        (tmp_path / name).write_text("raise SystemExit('hostile')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f":{os.environ.get('PYTHONPATH', '')}:")
    command = child_process.module("calendar")
    answer, printed = child_process.ask(command, child_process.environment())
    assert answer is None and "hostile" not in printed


def test_the_last_words_are_not_awaited_of_a_child_that_holds_the_error_stream() -> None:
    with Child(("sh", "-c", "sleep 600 & echo $! said >&2"), os.environ) as child:
        assert child.wait(60) == 0
        sleeper, said = child.printed.split()
        assert said == b"said"
        assert lives(int(sleeper))  # it was not waited for
    os.kill(int(sleeper), signal.SIGKILL)


def test_the_last_words_are_read_at_the_close() -> None:
    child = python("import os; os.write(2, b'x' * 60_000 + b'last')")
    child.wait(60)
    child.close()
    assert child.printed.endswith(b"xlast")


def test_a_process_whose_parent_has_ended_before_it_asked_for_its_end_ends(tmp_path: Path) -> None:
    """Here, 1 stands for a parent that is not there any more."""
    code = f"child_process.end_with_parent(os.getppid()); open({str(tmp_path / 'lives')!r}, 'w')"
    with python(
        f"from weighin import child_process; {code}; child_process.end_with_parent(1)"
    ) as child:
        assert child.wait(60) == 125
    assert (tmp_path / "lives").exists()
