"""What weighin sends to the nodes of a Ray cluster, and how it asks them."""

import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("ray")

from ray import cloudpickle

from weighin.errors import ConfigError, Interrupted
from weighin.fleet import ray_cluster
from weighin.fleet.ray_cluster import Cluster
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
print(run.__globals__["run_here"]({"kind": "describe"}, {}))
"""


def test_a_node_without_weighin_can_say_so() -> None:
    answer = subprocess.run(
        [sys.executable, "-I", "-c", WITHOUT_WEIGHIN],
        input=cloudpickle.dumps(ray_cluster.run),
        capture_output=True,
        check=False,
    )
    assert answer.stdout == b"{'ended': {'why': 'exit code 1'}}\n", answer.stderr.decode()


class Silent(Cluster):
    """A cluster whose nodes never answer; ``living`` are those that Ray names."""

    def __init__(self, *living: str) -> None:
        self.living = living

    def names(self) -> dict[str, str]:
        self.gpus = dict.fromkeys(self.living, 2.0)
        living, self.living = self.living, self.living[1:]
        return {each: each for each in living}

    def submit(self, *asked: Any, **__: Any) -> Future[Any]:
        assert asked[2] == 0, "a description reserves no GPU"
        return Future()

    def stop(self, assignments: Iterable[Future[Any]]) -> None:
        self.stopped = len([*assignments])


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "_WAIT_S", 0.01)


def test_a_node_that_did_not_answer_gets_no_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "_ANSWER_S", 0.05)
    silent = Silent(*"ab" * 1000)
    with pytest.raises(ConfigError, match="no node has answered what it can measure: a"):
        silent.find()
    silent._labels, silent._code = {}, ""
    task = Mock()
    monkeypatch.setattr(silent, "_task", task, raising=False)
    Cluster.submit(silent, {}, {"c"}, 1)
    asked = task.options.call_args.kwargs
    task.options.return_value.remote.assert_called_once_with({"weighin": ""})
    task.options.return_value.remote.return_value.future.assert_called_once_with()
    where = asked["label_selector"]["ray.io/node-id"]
    assert where.startswith("!in(") and asked["num_gpus"] == 1
    assert set(where[4:-1].split(",")) == set("abc")


def test_a_node_that_is_lost_before_it_answers_does_not_measure() -> None:
    with pytest.raises(ConfigError, match="no node has answered what it can measure: a"):
        Silent("a").find()


def test_an_exception_on_a_node_names_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    here = SimpleNamespace(get_node_id=lambda: "a")
    monkeypatch.setattr("ray.get_runtime_context", lambda: here)
    monkeypatch.setattr("psutil.Process", Mock(side_effect=PermissionError("environ")))
    place, told = ray_cluster.run({"kind": "measure"})
    assert (place, told["error"]["exit_code"]) == ("a", 2)
    why = "weighin does not start on this node: PermissionError('environ')"
    assert told["error"]["message"] == why


def test_a_signal_ends_the_wait_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "check", Mock(side_effect=Interrupted("stopped")))
    silent = Silent("a", "a")
    with pytest.raises(Interrupted):
        silent.find()
    assert silent.stopped == 1
