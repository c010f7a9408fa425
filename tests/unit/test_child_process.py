"""Lines through real pipes, and real children: whole lines come, and last words are kept."""

import fcntl
import os
import resource
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from weighin import child_process
from weighin.child_process import STDERR_KEPT_BYTES, Child, Lines, ready, write

TEXT = b"one\n\ntwo\ntorn"


def received(*parts: bytes) -> list[bytes | None]:
    """Return the lines of a pipe to which the parts are written one after the other."""
    ours, theirs = os.pipe()
    lines, found = Lines(ours), list[bytes | None]()
    for part in parts:
        os.write(theirs, part)
        with suppress(TimeoutError):
            while True:
                found.append(lines.receive(0))
    os.close(theirs)
    assert lines.receive(0) is None
    os.close(ours)
    return found


@pytest.mark.parametrize("cut", range(len(TEXT) + 1))
def test_lines_survive_a_cut_at_every_byte(cut: int) -> None:
    assert received(TEXT[:cut], TEXT[cut:]) == [b"one", b"", b"two"]


def test_lines_survive_single_bytes() -> None:
    parts = (TEXT[index : index + 1] for index in range(len(TEXT)))
    assert received(*parts) == [b"one", b"", b"two"]


def shell(script: str) -> Child:
    return Child(("sh", "-c", script), os.environ)


def python(code: str) -> Child:
    return Child((sys.executable, "-P", "-c", code), child_process.environment())


def test_lines_come_in_their_order() -> None:
    with shell(r"printf 'one\ntw'; read -r _; printf 'o\nthree\n'; read -r _") as child:
        assert child.receive(60) == b"one"
        child.send(b"\n")
        assert child.receive(60) == b"two"
        assert child.receive(0) == b"three"


def test_a_torn_last_line_is_dropped() -> None:
    with shell(r"printf 'one\nto'") as child:
        assert [child.receive(60) for _ in range(3)] == [b"one", None, None]


def test_an_event_longer_than_a_pipe() -> None:
    with shell("head -c 1000000 /dev/zero | tr '\\0' x; echo") as child:
        assert child.receive(60) == b"x" * 1_000_000


def test_silence_times_out() -> None:
    with shell("exec sleep 60") as child, pytest.raises(TimeoutError):
        child.receive(0.01)


def test_half_a_line_times_out_and_is_kept() -> None:
    with shell("printf on; read -r _; echo e") as child:
        assert ready([child._lines._file], 60)
        with pytest.raises(TimeoutError):
            child.receive(0.01)
        child.send(b"\n")
        assert child.receive(60) == b"one"


def test_a_line_that_waits_is_found_without_waiting() -> None:
    with shell("echo one; read -r _") as child:
        assert ready([child._lines._file], 60)
        assert child.receive(0) == b"one"


def test_a_worker_that_prints_without_end_times_out_too() -> None:
    with shell("cat /dev/zero >&2 & read -r _; echo one; wait") as child:
        with pytest.raises(TimeoutError):
            child.receive(0.05)
        child.send(b"\n")
        assert ready([child._lines._file], 60)
        assert child.receive(0) == b"one"


def test_stderr_is_kept_apart_and_the_last_of_it_read_at_the_end() -> None:
    with shell("echo noise >&2; echo one; echo a traceback >&2") as child:
        assert child.receive(60) == b"one"
        assert child.receive(60) is None
        assert child.stderr_tail == b"noise\na traceback\n"


def test_only_the_last_64_kib_of_stderr_are_kept() -> None:
    lines = 3 * STDERR_KEPT_BYTES // 8
    with shell(f"seq -f %07g 1 {lines} >&2") as child:
        assert child.receive(60) is None
        assert len(child.stderr_tail) == 64 * 1024
        assert child.stderr_tail.endswith(b"%07d\n" % lines)


def test_a_closed_error_stream_is_no_end_of_events() -> None:
    with shell("exec 2>&-; echo one; exec sleep 60") as child:
        assert child.receive(60) == b"one"
        with pytest.raises(TimeoutError):
            child.receive(0.01)


def test_an_open_error_stream_holds_nobody_up() -> None:
    with shell("echo said >&2; exec >&-; exec sleep 60") as child:
        assert child.receive(60) is None
        assert child.stderr_tail == b"said\n"


def test_what_is_sent_arrives() -> None:
    with shell('read -r line; echo "$line"') as child:
        child.send(b"{}\n")
        assert child.receive(60) == b"{}"


def test_sending_to_a_worker_that_is_gone_is_no_error() -> None:
    with shell("exec <&-; echo closed; exec sleep 60") as child:
        assert child.receive(60) == b"closed"
        child.send(b"\n")


def test_the_end_of_the_worker_is_the_end_even_where_a_child_holds_its_pipes() -> None:
    with shell(r"sleep 60 & printf 'one\ntwo\nto'; echo said >&2") as child:
        assert [child.receive(60) for _ in range(4)] == [b"one", b"two", None, None]
        assert child.stderr_tail == b"said\n"


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


def test_the_last_words_are_kept_after_the_event_pipe_has_closed() -> None:
    words = "import os, time; os.close(1); time.sleep(0.3); os.write(2, b'x' * 200_000 + b'last')"
    with python(words) as child:
        assert child.receive(60) is None
        assert child.wait(60) == 0
        assert child.stderr_tail.endswith(b"xlast")


def test_a_child_that_is_late_is_killed_with_its_own_children() -> None:
    with python("import os, time; print(os.fork(), flush=True); time.sleep(60)") as child:
        forked = int(child.receive(60) or b"")
        with pytest.raises(TimeoutError):
            child.wait(0.01)
    assert child.wait() == -signal.SIGKILL
    for _ in range(200):  # SIGKILL was sent: on a busy machine the process ends a little later
        if _has_ended(forked):
            break
        time.sleep(0.05)
    assert _has_ended(forked)


def _has_ended(pid: int) -> bool:
    """Tell whether a process has ended; it may be a zombie, if nobody has waited for it yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def test_an_answer_that_does_not_come_in_time_is_an_error() -> None:
    with pytest.raises(TimeoutError):
        child_process.ask((sys.executable, "-c", "import time; time.sleep(60)"), {}, timeout_s=0.1)


def test_a_child_runs_no_file_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('hostile')")
    (tmp_path / "calendar.py").write_text("raise SystemExit('hostile')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f":{os.environ.get('PYTHONPATH', '')}:")
    command = child_process.module("calendar")
    assert child_process.ask(command, child_process.environment()) == (None, "exit code 0")


def test_the_last_words_are_not_awaited_of_a_child_that_holds_the_error_stream() -> None:
    with shell("sleep 20 & echo said >&2") as child:
        assert child.wait(60) == 0
        began_s = time.monotonic()
        assert child.stderr_tail == b"said\n"
        assert time.monotonic() - began_s < 10


def test_the_last_words_are_read_at_the_close() -> None:
    child = python("import os; os.write(2, b'x' * 60_000 + b'last')")
    child.wait(60)
    child.close()
    assert child.stderr_tail.endswith(b"xlast")


def test_a_child_that_sends_nothing_has_one_output_which_holds_nobody_up() -> None:
    code = "import os; os.write(1, b'x' * 200_000); os.write(2, b'y'); os.write(1, b'z')"
    with Child((sys.executable, "-c", code), os.environ, sends=False) as child:
        assert child.wait(60) == 0
        assert child.stderr_tail.endswith(b"xyz")


def test_of_a_line_without_end_only_the_last_part_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "_LONGEST_BYTES", 8)
    assert received(b"1234", b"5678", b"9\n") == [b"9"]
