"""How a server that is waited for is named."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from factories import refused

from weighin.run.output import answers
from weighin.settings.definition import check_suite


@pytest.mark.parametrize("url", ["https://localhost/", "http:///health", "localhost:8000", "x"])
def test_an_address_that_is_not_of_http_is_refused(url: str) -> None:
    assert "is not an HTTP address" in refused(check_suite, {"ready_url": url})


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
