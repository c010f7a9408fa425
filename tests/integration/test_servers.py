"""A server is measured until it is ready, and is stopped then."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typed import CommandLine, free_port

from weighin.units import MIB

SERVER = """
import http.server, signal, sys, threading
held = bytearray(int(sys.argv[2]) << 20)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(404 if self.path == "/health" else 503)
        self.end_headers()
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
def end(*_):
    later = bytearray(200 << 20)
    print("stopped in order", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end if sys.argv[3] == "polite" else signal.SIG_IGN)
print("listening\\nready to serve", flush=True)
server.serve_forever()
"""


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def weighin(tmp_path: Path) -> CommandLine:
    (tmp_path / "server.py").write_text(SERVER)
    return CommandLine(tmp_path, tmp_path / "cache")


def server(port: int, mib: int = 64, end: str = "polite") -> tuple[str, ...]:
    return (sys.executable, "server.py", str(port), str(mib), end)


def record(run: Path) -> dict[str, Any]:
    line: dict[str, Any] = json.loads((run / "records.jsonl").read_text())
    return line


ISOLATIONS = ["process", pytest.param("cgroup", marks=pytest.mark.cgroup)]


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_server_is_over_when_a_line_says_that_it_is_ready(
    weighin: CommandLine, port: int, isolation: str
) -> None:
    ended = weighin.run(
        "run", "--no-stacks", "--isolation", isolation, "--out", "r", "--ready", "^ready",
        "--", *server(port),
    )  # fmt: skip
    assert (ended.code, ended.left) == (0, [])
    assert ended.out == "listening\nready to serve\nstopped in order\n"
    found = record(weighin.folder / "r")
    assert found["outcome"] == "ok"
    assert 0 < found["ready_ns"] < found["cost"]["wall_ns"]
    assert [mark["text"] for mark in found["ran"]["marks"]] == ["ready to serve"]
    # Not the 200 MiB that it takes when it is stopped.
    assert 64 * MIB <= found["ran"]["needed_bytes"] < 150 * MIB


@pytest.mark.parametrize(
    ("path", "timeout", "code"), [("/health?all=1", "2", 137), ("/health", "60", 0)]
)
def test_a_server_is_over_when_its_address_answers(
    weighin: CommandLine, port: int, path: str, timeout: str, code: int
) -> None:
    """It answers 404 at /health, and 503 elsewhere: a server that is not ready."""
    ended = weighin.run(
        "run", "--no-stacks", "--isolation", "process", "--out", "r", "--timeout", timeout,
        "--ready-url", f"http://127.0.0.1:{port}{path}", "--", *server(port),
    )  # fmt: skip
    assert (ended.code, ended.left) == (code, [])
    assert record(weighin.folder / "r")["outcome"] == ("timeout" if code else "ok")


def test_a_server_that_does_not_end_is_killed_after_the_grace(
    weighin: CommandLine, port: int
) -> None:
    ended = weighin.run(
        "run", "--no-stacks", "--isolation", "process", "--out", "r", "--ready", "^ready",
        "--set", "grace_s=0.3", "--", *server(port, end="stubborn"),
    )  # fmt: skip
    assert (ended.code, ended.left) == (0, [])
    found = record(weighin.folder / "r")
    assert (found["outcome"], found["ran"]["signal"]) == ("ok", 9)


@pytest.mark.parametrize(
    ("command", "timeout", "code", "message"),
    [
        (["sh", "-c", "echo almost; exit 3"], "60", 3, "exit code 3 before the server was ready"),
        (["true"], "60", 1, "exit code 0 before the server was ready"),
        (["sleep", "60"], "1", 137, "not ready after 1 s"),
    ],
)
def test_a_server_that_is_never_ready_has_failed(
    weighin: CommandLine, command: list[str], timeout: str, code: int, message: str
) -> None:
    ended = weighin.run(
        "run", "--no-stacks", "--isolation", "process", "--out", "r", "--ready", "^ready",
        "--timeout", timeout, "--", *command,
    )  # fmt: skip
    assert (ended.code, ended.left) == (code, [])
    assert record(weighin.folder / "r")["message"] == message


@pytest.mark.cgroup
def test_a_server_whose_worker_is_killed_again_and_again_is_given_up(weighin: CommandLine) -> None:
    (weighin.folder / "worker.py").write_text("held = bytearray(100 << 20)")
    restarting = f"while true; do {sys.executable} worker.py && echo ready; done"
    ended = weighin.run(
        "run", "--no-stacks", "--ram", "40m", "--out", "r", "--ready", "^ready", "--timeout", "100",
        "--", "sh", "-c", restarting,
    )  # fmt: skip
    assert (ended.code, ended.left) == (137, [])
    found = record(weighin.folder / "r")
    assert found["outcome"] == "oom_killed"
    assert found["cost"]["wall_ns"] < 60_000_000_000


def test_another_server_at_the_address_is_an_error(weighin: CommandLine, port: int) -> None:
    other = subprocess.Popen(
        [*server(port, mib=0)], cwd=weighin.folder, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout
    other.stdout.readline()
    address = f"http://127.0.0.1:{port}/health"
    ended = weighin.run(
        "run", "--no-stacks", "--isolation", "process", "--out", "r", "--ready-url", address,
        "--", "true",
    )  # fmt: skip
    other.terminate()
    other.communicate()
    assert ended.code == 2
    assert f"a server answers at {address} before the command starts" in ended.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ready", "a("], "--ready: 'a(' is not a regular expression"),
        (["--ready-url", "https://x/"], "--ready-url: 'https://x/' is not an HTTP address"),
    ],
)
def test_a_wrong_request_is_refused_before_the_command_starts(
    weighin: CommandLine, options: list[str], message: str
) -> None:
    ended = weighin.run("run", *options, "--", "touch", "started")
    assert ended.code == 2
    assert message in ended.err
    assert not (weighin.folder / "started").exists()
