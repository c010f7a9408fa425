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


SERVES = f"exec {sys.executable} server.py PORT"
ENDS = {
    # It answers 404 at /health, and 503 elsewhere: a server that is not ready.
    "its address answers": ("--ready-url http://127.0.0.1:PORT/health", SERVES, 0, "ok", ""),
    "another address does not": ("--timeout 2 --ready-url http://127.0.0.1:PORT/health?all=1", SERVES, 137, "timeout", "not ready after 2 s"),
    "killed after the grace": ("--ready ^ready --set grace_s=0.3", f"{SERVES} stubborn", 0, "ok", ""),
    "failed": ("--ready ^ready", "echo almost; exit 3", 3, "command_failed", "exit code 3 before the server was ready"),
    "ended": ("--ready ^ready", "true", 1, "command_failed", "exit code 0 before the server was ready"),
    "late": ("--ready ^ready --timeout 1", "sleep 60", 137, "timeout", "not ready after 1 s"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_a_server_is_over_when_it_is_ready_or_has_failed(
    command: CommandLine, port: str, name: str
) -> None:
    options, line, code, outcome, message = ENDS[name]
    options, line = (text.replace("PORT", port) for text in (options, line))
    ended = run(command, f"--isolation process {options}", "sh", "-c", line)
    assert (ended.code, ended.left) == (code, [])
    found = command.record("r")
    assert (found["outcome"], found["message"]) == (outcome, message)
    assert found["ran"]["signal"] == 9 or "stubborn" not in line


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
    assert f"--ready-url {address}: a server answers there before the command starts" in ended.err
