"""How a server that is waited for is named."""

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from leftovers import wait_until

from weighin.errors import ConfigError
from weighin.plan.commands import check
from weighin.run import readiness
from weighin.run.readiness import Readiness, answers, stop
from weighin.settings.definition import Settings


@pytest.mark.parametrize(
    "how", [{}, {"ready": "started"}, {"ready_url": "http://127.0.0.1:8000/health"}]
)
def test_a_server_that_can_be_waited_for(how: dict[str, str]) -> None:
    check(Settings().model_copy(update=how))


@pytest.mark.parametrize("url", ["https://localhost/", "http:///health", "localhost:8000", "x"])
def test_an_address_that_is_not_of_http_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not an HTTP address"):
        check(Settings(ready_url=url))


def test_two_ways_to_tell_that_a_server_is_ready_are_one_too_many() -> None:
    with pytest.raises(ConfigError, match="each decides when the server is ready"):
        check(Settings(ready="started", ready_url="http://localhost/"))


class Server:
    """A server that answers each path with the status that it names: /503 with 503."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        paths = self.paths

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                paths.append(self.path)
                self.send_response(int("".join(filter(str.isdigit, self.path)) or 200))
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self._http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


@pytest.mark.parametrize(
    ("path", "is_ready"),
    [("", True), ("/404", True), ("/499", True), ("/500", False), ("/503?a=", False)],
)
def test_a_server_answers_unless_it_says_that_it_cannot(
    server: Server, path: str, is_ready: bool
) -> None:
    assert answers(f"{server.url}{path}") == is_ready
    assert server.paths == [path or "/"]


def test_where_nobody_listens_there_is_no_answer(server: Server) -> None:
    server.close()
    assert not answers(server.url)


class Command:
    """A command that ends after so many waits; ``ends`` is None for one that never does."""

    def __init__(self, ends: int | None = None) -> None:
        self.left = ends
        self.waits: list[float] = []
        self.signals: list[int] = []
        self.kills = 0

    def wait(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        if self.left is None:
            time.sleep(min(timeout_s, 0.002))
            return False
        self.left -= 1
        return self.left < 0

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def kill(self) -> None:
        self.kills += 1


def waited(
    command: Command,
    timeout_s: float = 60.0,
    *,
    ready: str = "up",
    kills: Callable[[], int | None] = lambda: None,
    is_over: Callable[[], bool] | None = None,
    after: Callable[[Readiness], None] = lambda _: None,
) -> tuple[bool, int | None]:
    """Wait for a command; return whether it was in time, and when it was ready."""
    one = Readiness(Settings(ready=ready), lambda: None)
    one.begin()
    after(one)
    running: Any = command
    in_time = one.wait(running, timeout_s, kills, is_over)
    one.end()
    return in_time, one.ready_ns


def test_a_command_without_readiness_is_waited_for_at_once() -> None:
    ended, runs = Command(0), Command()
    assert waited(ended, 7.0, ready="") == (True, None)
    assert waited(runs, 7.0, ready="") == (False, None)
    assert (ended.waits, runs.waits) == ([7.0], [7.0])


def test_a_wait_ends_when_the_server_is_ready_or_the_command_ends() -> None:
    in_time, ready_ns = waited(Command(), after=Readiness.now)
    assert in_time and ready_ns
    assert waited(Command(3)) == (True, None)
    assert waited(Command(), 0.02) == (False, None)


def test_a_wait_ends_when_it_is_proven_to_be_over() -> None:
    looks = iter([False, False, True])
    assert waited(Command(), is_over=lambda: next(looks)) == (False, None)
    looks = iter([True])
    command = Command()
    assert waited(command, ready="", is_over=lambda: next(looks)) == (False, None)
    assert command.waits[0] > 0.05  # looks at a command that may thrash are not so near


def test_a_server_of_which_a_process_was_killed_gets_no_long_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(readiness, "_AFTER_KILL_S", 0.05)
    start_s = time.monotonic()
    assert waited(Command(), 60.0, kills=lambda: 1) == (False, None)
    assert time.monotonic() - start_s < 50
    monkeypatch.setattr(readiness, "_AFTER_KILL_S", 1000.0)
    assert waited(Command(), 0.05, kills=lambda: 1) == (False, None)  # it gets no more than it had


def test_the_figures_are_read_once_when_the_server_is_ready() -> None:
    reads: list[int] = []
    one = Readiness(Settings(ready="up"), lambda: reads.append(1))
    one.now()
    first = one.ready_ns
    one.now()
    assert (one.ready_ns, reads) == (first, [1])


def test_an_address_is_asked_until_it_answers(server: Server) -> None:
    url = f"{server.url}/200"
    server.close()
    one = Readiness(Settings(ready_url=url), lambda: None)
    assert one.is_expected
    one.begin()
    assert one.ready_ns is None
    one.end()


def test_an_address_that_answers_is_ready(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    given = iter([False, False, True])
    monkeypatch.setattr(readiness, "answers", lambda _: next(given))
    one = Readiness(Settings(ready_url=server.url), lambda: None)
    one.begin()
    wait_until(lambda: one.ready_ns, "it is not ready")
    one.end()
    assert next(given, None) is None


def test_an_address_that_answers_before_the_start_is_refused(server: Server) -> None:
    with pytest.raises(ConfigError) as caught:
        Readiness(Settings(ready_url=server.url), lambda: None)
    assert str(caught.value) == (
        f"a server answers at {server.url} before the command starts\n"
        "stop that server, or start the command on another port and write that port into --ready-url"
    )


def test_a_server_is_asked_to_end_and_then_killed() -> None:
    ends, stays = Command(0), Command()
    for command in (ends, stays):
        running: Any = command
        stop(running, 3.0)
    assert (ends.signals, ends.kills, ends.waits) == ([15], 0, [3.0])
    assert (stays.signals, stays.kills, stays.waits) == ([15], 1, [3.0, 10.0])
