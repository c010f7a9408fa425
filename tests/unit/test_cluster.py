"""What weighin sends to the nodes of a Ray cluster, and how it asks them."""

import subprocess
import sys

import pytest

pytest.importorskip("ray")

from ray import cloudpickle

from weighin.fleet import cluster

WITHOUT_WEIGHIN = """
import sys
class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "weighin":
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Refuses())
from ray import cloudpickle
run = cloudpickle.loads(sys.stdin.buffer.read())
sys.executable = "/bin/false"
print(run.__globals__["run_here"]({"kind": "describe"}, {})[-1])
"""


def test_a_node_without_weighin_can_say_so() -> None:
    answer = subprocess.run(
        [sys.executable, "-I", "-c", WITHOUT_WEIGHIN],
        input=cloudpickle.dumps(cluster.run),
        capture_output=True,
        check=False,
    )
    assert answer.stdout == b"{'event': 'ended', 'code': 1, 'stderr': ''}\n", answer.stderr.decode()


def test_an_exception_on_a_node_names_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    class Context:
        def get_node_id(self) -> str:
            return "a"

    def denied() -> None:
        raise PermissionError("environ")

    monkeypatch.setattr("ray.get_runtime_context", Context)
    monkeypatch.setattr("psutil.Process", denied)
    place, (told,) = cluster.run({"kind": "measure", "monitor": None})
    assert (place, told["event"], told["exit_code"]) == ("a", "error", 2)
    assert told["message"] == "weighin does not start on this node: PermissionError('environ')"
