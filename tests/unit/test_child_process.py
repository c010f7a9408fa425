"""Lines through real pipes, and real children: whole lines come, and last words are kept."""

import fcntl
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from weighin import child_process
from weighin.child_process import STDERR_KEPT_BYTES, Child, PipeChannel
from weighin.pipes import LineBuffer, LineReader, ready, write

TEXT = b"one\n\ntwo\ntorn"


def popped(buffer: LineBuffer) -> list[bytes]:
    return list(iter(buffer.pop, None))


@pytest.mark.parametrize("cut", range(len(TEXT) + 1))
def test_lines_survive_a_cut_at_every_byte(cut: int) -> None:
    buffer = LineBuffer()
    buffer.feed(TEXT[:cut])
    early = popped(buffer)
    buffer.feed(TEXT[cut:])
    assert early + popped(buffer) == [b"one", b"", b"two"]


def test_lines_survive_single_bytes() -> None:
    buffer = LineBuffer()
    for index in range(len(TEXT)):
        buffer.feed(TEXT[index : index + 1])
    assert popped(buffer) == [b"one", b"", b"two"]


@dataclass
class Worker:
    """The worker's ends of the pipes."""

    stdin: int
    stdout: int
    stderr: int

    def say(self, text: bytes) -> None:
        os.write(self.stdout, text)

    def stderr_tail(self, text: bytes) -> None:
        os.write(self.stderr, text)

    def end(self) -> None:
        os.close(self.stdout)
        os.close(self.stderr)


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker(-1, -1, -1)
    yield worker
    for descriptor in (worker.stdin, worker.stdout, worker.stderr):
        try:
            os.close(descriptor)
        except OSError:  # the test has closed it
            continue


@pytest.fixture
def channel(worker: Worker) -> Iterator[PipeChannel]:
    worker.stdin, theirs = os.pipe()
    ours, worker.stdout = os.pipe()
    noise, worker.stderr = os.pipe()
    channel = PipeChannel(theirs, ours, noise)
    yield channel
    channel.close()


def test_lines_come_in_their_order(channel: PipeChannel, worker: Worker) -> None:
    worker.say(b"one\ntw")
    assert channel.receive(60) == b"one"
    worker.say(b"o\nthree\n")
    assert channel.receive(60) == b"two"
    assert channel.receive(0) == b"three"


def test_a_torn_last_line_is_dropped(channel: PipeChannel, worker: Worker) -> None:
    worker.say(b"one\nto")
    worker.end()
    assert channel.receive(60) == b"one"
    assert channel.receive(60) is None
    assert channel.receive(60) is None


def test_an_event_longer_than_a_pipe(channel: PipeChannel, worker: Worker) -> None:
    line = b"x" * 1_000_000
    writer = threading.Thread(target=worker.say, args=(line + b"\n",))
    writer.start()
    assert channel.receive(60) == line
    writer.join()


def test_silence_times_out(channel: PipeChannel) -> None:
    with pytest.raises(TimeoutError):
        channel.receive(0.01)


def test_half_a_line_times_out_and_is_kept(channel: PipeChannel, worker: Worker) -> None:
    worker.say(b"on")
    with pytest.raises(TimeoutError):
        channel.receive(0.01)
    worker.say(b"e\n")
    assert channel.receive(60) == b"one"


def test_a_line_that_waits_is_found_without_waiting(channel: PipeChannel, worker: Worker) -> None:
    worker.say(b"one\n")
    assert channel.receive(0) == b"one"


def test_a_worker_that_prints_without_end_times_out_too() -> None:
    ours, theirs = os.pipe()
    stdin, other = os.pipe()
    channel = PipeChannel(other, ours, os.open("/dev/zero", os.O_RDONLY))
    # Only where the time-out is missed: the test fails then, and does not hang.
    rescue = threading.Timer(5, os.write, [theirs, b"rescued\n"])
    rescue.start()
    try:
        with pytest.raises(TimeoutError):
            channel.receive(0.05)
        os.write(theirs, b"one\n")
        assert channel.receive(0) == b"one"
    finally:
        rescue.cancel()
        channel.close()
        os.close(theirs)
        os.close(stdin)


def test_an_event_is_found_behind_stderr(channel: PipeChannel, worker: Worker) -> None:
    worker.stderr_tail(b"noise\n")
    worker.say(b"one\n")
    assert channel.receive(60) == b"one"


def test_stderr_is_kept_apart_and_the_last_of_it_read_at_the_end(
    channel: PipeChannel, worker: Worker
) -> None:
    worker.say(b"one\n")
    worker.stderr_tail(b"a traceback\n")
    worker.end()
    assert channel.receive(60) == b"one"
    assert channel.receive(60) is None
    assert channel.stderr_tail == b"a traceback\n"


def test_only_the_last_64_kib_of_stderr_are_kept(channel: PipeChannel, worker: Worker) -> None:
    def print_much() -> None:
        for number in range(3 * STDERR_KEPT_BYTES // 8):
            worker.stderr_tail(b"%07d\n" % number)
        worker.end()

    printer = threading.Thread(target=print_much)
    printer.start()
    assert channel.receive(60) is None
    printer.join()
    assert len(channel.stderr_tail) == 64 * 1024
    assert channel.stderr_tail.endswith(b"%07d\n" % (3 * STDERR_KEPT_BYTES // 8 - 1))


def test_a_closed_error_stream_is_no_end_of_events(channel: PipeChannel, worker: Worker) -> None:
    os.close(worker.stderr)
    worker.say(b"one\n")
    assert channel.receive(60) == b"one"
    with pytest.raises(TimeoutError):
        channel.receive(0.01)


def test_a_child_that_keeps_the_error_stream_open_holds_nobody_up(
    channel: PipeChannel, worker: Worker
) -> None:
    worker.stderr_tail(b"said\n")
    os.close(worker.stdout)
    assert channel.receive(60) is None
    assert channel.stderr_tail == b"said\n"


def test_what_is_sent_arrives(channel: PipeChannel, worker: Worker) -> None:
    channel.send(b"{}\n")
    assert os.read(worker.stdin, 100) == b"{}\n"


def test_sending_to_a_worker_that_is_gone_is_no_error(channel: PipeChannel, worker: Worker) -> None:
    os.close(worker.stdin)
    channel.send(b"\n")


def test_the_end_of_the_worker_is_the_end_even_where_a_child_holds_its_pipes(
    worker: Worker,
) -> None:
    worker.stdin, theirs = os.pipe()
    ours, worker.stdout = os.pipe()
    noise, worker.stderr = os.pipe()
    process, ended = os.pipe()  # stands for a pidfd: readable when the worker has ended
    channel = PipeChannel(theirs, ours, noise, process)
    worker.say(b"one\ntwo\nto")
    worker.stderr_tail(b"said\n")
    os.write(ended, b"!")
    os.close(ended)
    assert [channel.receive(60) for _ in range(4)] == [b"one", b"two", None, None]
    assert channel.stderr_tail == b"said\n"
    channel.close()


def python(code: str) -> Child:
    return Child((sys.executable, "-P", "-c", code), child_process.environment())


def test_a_line_above_the_size_of_a_pipe_is_whole_though_signals_interrupt_the_write() -> None:
    reading, writing = os.pipe()
    line = b"x" * 1_000_000
    got: list[bytes | None] = []
    reader = threading.Thread(target=lambda: got.append(LineReader(reading).receive(60)))

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
    os.close(reading)
    assert got == [line]


def test_descriptors_above_1023_are_waited_for() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    ours, theirs = os.pipe()
    try:
        high = fcntl.fcntl(ours, fcntl.F_DUPFD, 2000)
        os.write(theirs, b"one\n")
        assert ready([high], 1) == [high]
        assert LineReader(high).receive(60) == b"one"
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
    answer = child_process.ask(child_process.module("calendar"), child_process.environment())
    assert (answer.code, answer.stderr_tail) == (0, b"")
