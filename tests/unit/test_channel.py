"""Lines through real pipes: whole ones come, however they are cut; stderr_tail never hides them."""

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from weighin.isolation.channel import STDERR_KEPT_BYTES, LineBuffer, PipeChannel

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
    assert channel.receive(1) == b"one"
    worker.say(b"o\nthree\n")
    assert channel.receive(1) == b"two"
    assert channel.receive(0) == b"three"


def test_a_torn_last_line_is_dropped(channel: PipeChannel, worker: Worker) -> None:
    worker.say(b"one\nto")
    worker.end()
    assert channel.receive(1) == b"one"
    assert channel.receive(1) is None
    assert channel.receive(1) is None


def test_an_event_longer_than_a_pipe(channel: PipeChannel, worker: Worker) -> None:
    line = b"x" * 1_000_000
    writer = threading.Thread(target=worker.say, args=(line + b"\n",))
    writer.start()
    assert channel.receive(10) == line
    writer.join()


def test_silence_times_out(channel: PipeChannel) -> None:
    with pytest.raises(TimeoutError):
        channel.receive(0.01)


def test_half_a_line_times_out_and_is_kept(channel: PipeChannel, worker: Worker) -> None:
    worker.say(b"on")
    with pytest.raises(TimeoutError):
        channel.receive(0.01)
    worker.say(b"e\n")
    assert channel.receive(1) == b"one"


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
    assert channel.receive(1) == b"one"


def test_stderr_is_kept_apart_and_the_last_of_it_read_at_the_end(
    channel: PipeChannel, worker: Worker
) -> None:
    worker.say(b"one\n")
    worker.stderr_tail(b"a traceback\n")
    worker.end()
    assert channel.receive(1) == b"one"
    assert channel.receive(1) is None
    assert channel.stderr_tail == b"a traceback\n"


def test_only_the_last_64_kib_of_stderr_are_kept(channel: PipeChannel, worker: Worker) -> None:
    def print_much() -> None:
        for number in range(3 * STDERR_KEPT_BYTES // 8):
            worker.stderr_tail(b"%07d\n" % number)
        worker.end()

    printer = threading.Thread(target=print_much)
    printer.start()
    assert channel.receive(10) is None
    printer.join()
    assert len(channel.stderr_tail) == 64 * 1024
    assert channel.stderr_tail.endswith(b"%07d\n" % (3 * STDERR_KEPT_BYTES // 8 - 1))


def test_a_closed_error_stream_is_no_end_of_events(channel: PipeChannel, worker: Worker) -> None:
    os.close(worker.stderr)
    worker.say(b"one\n")
    assert channel.receive(1) == b"one"
    with pytest.raises(TimeoutError):
        channel.receive(0.01)


def test_a_child_that_keeps_the_error_stream_open_holds_nobody_up(
    channel: PipeChannel, worker: Worker
) -> None:
    worker.stderr_tail(b"said\n")
    os.close(worker.stdout)
    assert channel.receive(1) is None
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
    assert [channel.receive(1) for _ in range(4)] == [b"one", b"two", None, None]
    assert channel.stderr_tail == b"said\n"
    channel.close()
