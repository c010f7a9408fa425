"""A Docker engine that plays recorded answers over a socket, and keeps what it was asked.

The client, the Docker SDK, is the real one. A test changes an answer, or gives several that follow
each other, and reads the requests as the engine gets them.
"""

import json
import queue
import re
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

RECORDED = Path(__file__).parent / "fixtures" / "engine" / "20.10.json"
CONTAINER = "0123456789abcdef" * 4


@dataclass(frozen=True)
class Answer:
    """A status, and a body as JSON; the status 101 gives the connection to a stream."""

    status: int
    body: Any = None


@dataclass(frozen=True)
class Request:
    """What an engine was asked; ``call`` names it, with ID in place of an ID or name."""

    call: str
    path: str
    query: dict[str, str]
    body: Any


class RecordedEngine(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """An engine at the socket ``path``."""

    daemon_threads = True

    def __init__(self, path: Path) -> None:
        recorded = json.loads(RECORDED.read_text())
        # The last answer to each call is given again and again.
        self.answers = {call: [Answer(*each)] for call, each in recorded.items()}
        self.requests: list[Request] = []
        self.streams: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self.address = f"unix://{path}"
        self._connections: list[socket.socket] = []
        super().__init__(str(path), _Handler)

    def says(self, call: str, *answers: Answer) -> None:
        self.answers[call] = list(answers)

    def has(self, call: str, **fields: Any) -> None:
        """Change fields of the recorded answer to a call."""
        [answer] = self.answers[call]
        self.says(call, Answer(answer.status, answer.body | fields))

    def state(self, **fields: Any) -> None:
        """Change the recorded state of the container."""
        [answer] = self.answers["GET /containers/ID/json"]
        self.has("GET /containers/ID/json", State=answer.body["State"] | fields)

    def asked(self, call: str) -> list[Request]:
        return [request for request in self.requests if request.call == call]

    def calls(self) -> list[str]:
        """Return the calls that were made of containers, without the question for the version."""
        return [each.call for each in self.requests if "/containers/" in each.call]

    def attached(self) -> socket.socket:
        """Return the engine's end of the next stream that was asked for."""
        return self.streams.get(timeout=60)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self._connections.append(connection.dup())
        return connection, address

    def server_close(self) -> None:
        """Close all connections too: a client keeps them open, and a thread waits at each."""
        super().server_close()
        for connection in self._connections:
            with suppress(OSError):  # it is closed
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def shutdown_request(self, request: Any) -> None:
        """Close the server's descriptor only, because a stream belongs to the test now."""
        self.close_request(request)

    def answer(self, request: Request) -> Answer:
        self.requests.append(request)
        answers = self.answers[request.call]
        return answers.pop(0) if len(answers) > 1 else answers[0]


def _named(path: str) -> str:
    """Return a path without the version of the API, and with ID in place of an ID or name."""
    path = re.sub(r"^/v\d\.\d+", "", path)
    path = re.sub(r"^/(containers|exec)/(?!(create|json)$)[^/]+", r"/\1/ID", path)
    return re.sub(r"^/images/.+/json$", "/images/ID/json", path)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: RecordedEngine

    def _handle(self) -> None:
        url = urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        content = self.rfile.read(length)
        is_json = "json" in self.headers.get("Content-Type", "")
        body = json.loads(content) if length and is_json else content
        call = f"{self.command} {_named(url.path)}"
        answer = self.server.answer(Request(call, url.path, dict(parse_qsl(url.query)), body))
        if answer.status == 101:  # the server must not close the connection: the test gets it
            self.send_response(101, "UPGRADED")
            self.send_header("Connection", "Upgrade")
            self.send_header("Upgrade", "tcp")
            self.end_headers()
            self.close_connection = True
            self.server.streams.put(self.connection.dup())
            return
        content = b"" if answer.body is None else json.dumps(answer.body).encode()
        self.send_response(answer.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_DELETE = _handle  # noqa: N815 (the names that http.server calls)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def playing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordedEngine]:
    """Play the recorded engine, to which DOCKER_HOST leads, until the block ends."""
    with RecordedEngine(folder / "engine") as engine:
        thread = threading.Thread(target=engine.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("DOCKER_HOST", engine.address)
        try:
            yield engine
        finally:
            engine.shutdown()
            thread.join()
            while not engine.streams.empty():
                engine.streams.get().close()
