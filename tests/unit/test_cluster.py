"""What weighin sends to the nodes of a Ray cluster, and how it asks them."""

import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray import cloudpickle

from weighin.errors import HarnessError, Interrupted
from weighin.fleet import cluster
from weighin.fleet.cluster import Cluster
from weighin.run import interrupts

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
print(run.__globals__["run_here"]({"kind": "describe"}, {}, lambda *_: None)[-1].decode())
"""


def test_a_node_without_weighin_can_say_so() -> None:
    answer = subprocess.run(
        [sys.executable, "-I", "-c", WITHOUT_WEIGHIN],
        input=cloudpickle.dumps(cluster.run),
        capture_output=True,
        check=False,
    )
    assert answer.stdout == b'{"event": "ended", "code": 1, "stderr": ""}\n', answer.stderr.decode()


class Silent(Cluster):
    """A cluster whose nodes never answer; ``living`` are those that Ray names."""

    def __init__(self, *living: str) -> None:
        self.living = living
        self._gpus = {"a": 0.0, "b": 0.0}

    def names(self) -> dict[str, str]:
        return {each: each for each in self.living}

    def measure(self, _: Any, __: Any, ___: Any, is_stopped: Callable[[], bool], tries: int = 3) -> Any:  # fmt: skip
        while not is_stopped():
            time.sleep(0.01)
        raise HarnessError("the node was lost: cancelled")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_WAIT_S", 0.01)


def test_a_node_that_is_gone_is_not_awaited() -> None:
    assert str(Silent().ask(["a"], "examine")["a"]) == "the node did not answer"


def test_a_node_has_a_limited_time_to_say_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_ANSWER_S", 0.05)
    answers = Silent("a", "b").probe(["a", "b"])
    assert [str(each) for each in answers.values()] == ["the node did not answer"] * 2


def test_a_signal_ends_the_wait_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        raise Interrupted("stopped")

    monkeypatch.setattr(interrupts, "check", check)
    with pytest.raises(Interrupted):
        Silent("a").ask(["a"], "describe")


def test_a_question_takes_no_steps_of_the_cells_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: Any = iter([([], ["t"])] * 3 + [(["t"], [])])
    ray = SimpleNamespace(wait=lambda *_, **__: next(ended), get=lambda *_, **__: ("a", []))
    monkeypatch.setattr(cluster, "ray", ray)
    asking: Any = object.__new__(Cluster)
    asking._gpus, asking._taken_s = {"a": 0.0}, -1e9
    asking._task = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: "t"))
    asking._said = SimpleNamespace()  # to take from it would fail
    assert asking.measure({}, ["a"], None, lambda: False) == ("a", {})
