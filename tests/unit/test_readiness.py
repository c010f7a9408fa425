"""When a server that is waited for is ready. An address that is none: see test_config."""

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from weighin.run.output import answers


class Server(HTTPServer):
    """A server that answers each path with the status that it names: /503 with 503."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.paths: list[str] = []


class Answer(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        self.send_response(int("".join(filter(str.isdigit, self.path)) or 200))
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("path", "is_ready"),
    [("", True), ("/404", True), ("/499", True), ("/500", False), ("/503?a=", False)],
)
def test_a_server_answers_unless_it_says_that_it_cannot(
    server: Server, path: str, is_ready: bool
) -> None:
    assert answers(f"http://127.0.0.1:{server.server_port}{path}") == is_ready
    assert server.paths == [path or "/"]


def test_where_nobody_listens_there_is_no_answer() -> None:
    with socket.socket() as bound:  # so that no other program listens there
        bound.bind(("127.0.0.1", 0))
        assert not answers(f"http://127.0.0.1:{bound.getsockname()[1]}")
