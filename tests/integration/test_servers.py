"""A server is measured until it is ready, and is stopped then."""

import subprocess
import sys

import pytest
from typed import CommandLine, Ended, free_port

from weighin.units import MIB

SERVER = """
import http.server, signal, sys
held = bytearray(64 << 20)
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
signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in sys.argv else end)
print("listening\\nready to serve", flush=True)
server.serve_forever()
"""


@pytest.fixture
def port(command: CommandLine) -> str:
    (command.folder / "server.py").write_text(SERVER)
    return str(free_port())


def run(command: CommandLine, options: str, *words: str) -> Ended:
    return command.run(f"run --no-stacks --out r {options} --", *words)


SERVE = (sys.executable, "server.py")


@pytest.mark.parametrize("isolation", ["process", pytest.param("cgroup", marks=pytest.mark.cgroup)])
def test_a_server_is_over_when_a_line_says_that_it_is_ready(
    command: CommandLine, port: str, isolation: str
) -> None:
    ended = run(command, f"--isolation {isolation} --ready ^ready", *SERVE, port)
    assert (ended.code, ended.left) == (0, [])
    assert ended.out == "listening\nready to serve\nstopped in order\n"
    found = command.record("r")
    assert found["outcome"] == "ok"
    assert 0 < found["ready_ns"] < found["cost"]["wall_ns"]
    assert [mark["text"] for mark in found["ran"]["marks"]] == ["ready to serve"]
    # Not the 200 MiB that it takes when it is stopped.
    assert 64 * MIB <= found["ran"]["needed_bytes"] < 150 * MIB


@pytest.mark.parametrize(
    ("path", "timeout", "code"), [("/health?all=1", "2", 137), ("/health", "60", 0)]
)
def test_a_server_is_over_when_its_address_answers(
    command: CommandLine, port: str, path: str, timeout: str, code: int
) -> None:
    """It answers 404 at /health, and 503 elsewhere: a server that is not ready."""
    address = f"'http://127.0.0.1:{port}{path}'"
    options = f"--isolation process --timeout {timeout} --ready-url {address}"
    ended = run(command, options, *SERVE, port)
    assert (ended.code, ended.left) == (code, [])
    assert command.record("r")["outcome"] == ("timeout" if code else "ok")


def test_a_server_that_does_not_end_is_killed_after_the_grace(
    command: CommandLine, port: str
) -> None:
    options = "--isolation process --ready ^ready --set grace_s=0.3"
    ended = run(command, options, *SERVE, port, "stubborn")
    assert (ended.code, ended.left) == (0, [])
    found = command.record("r")
    assert (found["outcome"], found["ran"]["signal"]) == ("ok", 9)


NEVER_READY = [
    ("echo almost; exit 3", "60", 3, "exit code 3 before the server was ready"),
    ("true", "60", 1, "exit code 0 before the server was ready"),
    ("sleep 60", "1", 137, "not ready after 1 s"),
]


@pytest.mark.parametrize(("line", "timeout", "code", "message"), NEVER_READY)
def test_a_server_that_is_never_ready_has_failed(
    command: CommandLine, line: str, timeout: str, code: int, message: str
) -> None:
    options = f"--isolation process --ready ^ready --timeout {timeout}"
    ended = run(command, options, "sh", "-c", line)
    assert (ended.code, ended.left) == (code, [])
    assert command.record("r")["message"] == message


@pytest.mark.cgroup
def test_a_server_whose_worker_is_killed_again_and_again_is_given_up(command: CommandLine) -> None:
    (command.folder / "worker.py").write_text("held = bytearray(100 << 20)")
    restarting = f"while true; do {sys.executable} worker.py && echo ready; done"
    ended = run(command, "--ram 40m --ready ^ready --timeout 100", "sh", "-c", restarting)
    assert (ended.code, ended.left) == (137, [])
    found = command.record("r")
    assert found["outcome"] == "oom_killed"
    assert found["cost"]["wall_ns"] < 60_000_000_000


def test_another_server_at_the_address_is_an_error(command: CommandLine, port: str) -> None:
    address = f"http://127.0.0.1:{port}/health"
    with subprocess.Popen(
        [*SERVE, port], cwd=command.folder, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout
        other.stdout.readline()
        ended = run(command, f"--isolation process --ready-url {address}", "true")
        other.terminate()
    assert ended.code == 2
    assert f"a server answers at {address} before the command starts" in ended.err
