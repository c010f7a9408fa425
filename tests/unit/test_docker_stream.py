"""The multiplexed stream of a container, taken apart however it is split."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from weighin.child_process import STDERR_KEPT_BYTES
from weighin.isolation.docker.stream import STDERR, STDOUT, FrameBuffer, StreamChannel


def frame(stream: int, payload: bytes) -> bytes:
    return bytes([stream, 0, 0, 0]) + len(payload).to_bytes(4, "big") + payload


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def engine(sockets: tuple[socket.socket, socket.socket]) -> socket.socket:
    """The engine's end of a stream; ``channel`` has the other."""
    return sockets[0]


@pytest.fixture
def channel(sockets: tuple[socket.socket, socket.socket]) -> Iterator[StreamChannel]:
    channel = StreamChannel(sockets[1])
    yield channel
    channel.close()
    channel.close()


FRAMES = [(STDOUT, b"one\ntw"), (STDERR, b"noise"), (STDOUT, b""), (STDOUT, b"o\n"), (STDERR, b"!")]
STREAM = b"".join(frame(*each) for each in FRAMES)


@pytest.mark.parametrize("cut", range(len(STREAM) + 1))
def test_frames_survive_a_cut_at_every_byte(cut: int) -> None:
    buffer = FrameBuffer()
    assert buffer.feed(STREAM[:cut]) + buffer.feed(STREAM[cut:]) == FRAMES


def test_frames_survive_single_bytes() -> None:
    buffer = FrameBuffer()
    fed = [buffer.feed(STREAM[i : i + 1]) for i in range(len(STREAM))]
    assert [each for some in fed for each in some] == FRAMES


def test_a_frame_longer_than_one_read() -> None:
    buffer, payload = FrameBuffer(), bytes(300_000)
    data = frame(STDERR, payload)
    assert buffer.feed(data[:65536]) == []
    assert buffer.feed(data[65536:]) == [(STDERR, payload)]


def test_events_and_stderr_are_kept_apart(engine: socket.socket, channel: StreamChannel) -> None:
    engine.sendall(STREAM + frame(STDOUT, b"\x180\n") + frame(STDERR, b"\x18"))
    assert [channel.receive(60), channel.receive(60), channel.receive(60)] == [b"one", b"two", None]
    assert (channel.worker_code, channel.stderr_tail) == (0, b"noise!")


def test_a_line_torn_by_a_kill_is_void(engine: socket.socket, channel: StreamChannel) -> None:
    engine.sendall(frame(STDOUT, b'{"whole":1}\n{"tor') + frame(STDOUT, b"\x18137\n"))
    engine.sendall(frame(STDERR, b"\x18"))
    assert channel.wait(1) == 137
    assert channel.receive(60) == b'{"whole":1}'
    assert channel.receive(60) is None


def test_a_worker_that_prints_the_keepers_byte_does_not_end(
    engine: socket.socket, channel: StreamChannel
) -> None:
    engine.sendall(frame(STDOUT, b"odd\x18bytes\nnext\n"))
    assert channel.receive(60) == b"next"
    assert channel.worker_code is None


def test_late_stderr_is_waited_for(engine: socket.socket, channel: StreamChannel) -> None:
    engine.sendall(frame(STDOUT, b"\x181\n"))
    late = frame(STDERR, b"Traceback") + frame(STDERR, b"\x18")
    timer = threading.Timer(0.05, engine.sendall, [late])
    timer.start()
    assert channel.receive(60) is None
    timer.join()
    assert channel.stderr_tail == b"Traceback"


def test_a_stream_that_just_ends(engine: socket.socket, channel: StreamChannel) -> None:
    engine.sendall(frame(STDOUT, b"last\ntorn"))
    engine.close()
    assert channel.wait(1) is None
    assert channel.receive(60) == b"last"
    assert channel.receive(60) is None
    channel.send(b"to nobody\n")


def test_silence_is_a_timeout(engine: socket.socket, channel: StreamChannel) -> None:
    for call in (channel.receive, channel.wait):
        with pytest.raises(TimeoutError):
            call(0)
    engine.sendall(frame(STDOUT, b"still here\n"))
    assert channel.receive(60) == b"still here"


def test_what_is_sent_arrives(engine: socket.socket, channel: StreamChannel) -> None:
    channel.send(b"\n")
    assert engine.recv(10) == b"\n"


def test_stderr_keeps_its_end(engine: socket.socket, channel: StreamChannel) -> None:
    noise = b"x" * STDERR_KEPT_BYTES + b"the end"
    sender = threading.Thread(target=engine.sendall, args=[frame(STDERR, noise)])
    sender.start()
    sender.join(0.1)
    with pytest.raises(TimeoutError):
        channel.receive(0.2)
    sender.join()
    assert len(channel.stderr_tail) == STDERR_KEPT_BYTES
    assert channel.stderr_tail.endswith(b"the end")


def test_a_worker_that_prints_without_end_times_out_too(
    engine: socket.socket, channel: StreamChannel
) -> None:
    ended = threading.Event()

    def print_without_end() -> None:
        with contextlib.suppress(OSError):  # the other end is closed when it is enough
            while not ended.is_set():
                engine.sendall(frame(STDERR, b"noise"))

    printer = threading.Thread(target=print_without_end)
    printer.start()
    try:
        with pytest.raises(TimeoutError):
            channel.receive(0.05)
    finally:
        ended.set()
        channel.close()
        printer.join()


class Reset:
    """A socket whose other end has reset the connection."""

    def settimeout(self, _: float) -> None: ...

    def recv(self, _: int) -> bytes:
        raise ConnectionResetError

    def sendall(self, _: bytes) -> None:
        raise BrokenPipeError

    def shutdown(self, _: int) -> None:
        raise OSError

    def close(self) -> None: ...


def test_a_stream_that_the_engine_resets_has_ended() -> None:
    channel = StreamChannel(Reset())
    channel.send(b"to nobody\n")
    assert channel.wait(60) is None
    assert channel.receive(60) is None
    channel.close()


def test_a_channel_of_a_container_that_never_ran_has_ended(
    engine: socket.socket, channel: StreamChannel
) -> None:
    channel.end()
    assert (channel.receive(60), channel.wait(60)) == (None, None)


def test_frames_of_other_streams_are_left_out(
    engine: socket.socket, channel: StreamChannel
) -> None:
    engine.sendall(frame(0, b"stdin\n") + frame(3, b"odd\n") + frame(STDOUT, b"line\n"))
    assert channel.receive(60) == b"line"
    assert channel.stderr_tail == b""


def test_events_that_came_before_the_exit_code_are_kept(
    engine: socket.socket, channel: StreamChannel
) -> None:
    engine.sendall(frame(STDOUT, b"one\n\x187\n") + frame(STDERR, b"words\x18"))
    assert channel.wait(60) == 7
    assert channel.stderr_tail == b"words"
    assert [channel.receive(60), channel.receive(60)] == [b"one", None]


def test_an_ended_worker_whose_stderr_stays_open_is_not_waited_for_for_ever(
    engine: socket.socket, channel: StreamChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weighin.isolation.docker.stream._STDERR_TIMEOUT_S", 0.05)
    engine.sendall(frame(STDERR, b"words") + frame(STDOUT, b"\x180\n"))
    assert channel.wait(60) == 0
    assert channel.stderr_tail == b"words"
    engine.sendall(frame(STDERR, b"too late"))
    assert channel.receive(60) is None
    assert channel.stderr_tail == b"words"  # it was not waited for a second time
