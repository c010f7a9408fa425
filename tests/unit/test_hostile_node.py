"""A node of a fleet cannot make the driver write outside of the run's folder."""

import base64
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from weighin.engines.driver import Driver
from weighin.engines.transport import Task
from weighin.errors import RecordError
from weighin.plan.nodes import Node
from weighin.plan.start import start
from weighin.plan.task import Progress
from weighin.settings.reading import check_suite

NODE = Node("n", "node", 2**33, 2**33, {"process": ""})


class Answers:
    """The events of one assignment."""

    def __init__(self, *events: dict[str, Any]) -> None:
        self.events = [json.dumps(each).encode() for each in events]

    def next_event(self) -> bytes | None:
        return self.events.pop(0) if self.events else None

    def cancel(self) -> None:
        self.events.clear()


class Fleet:
    """A node that is prepared at once, and answers a cell with a file at a path of its choice."""

    def __init__(self, path: str) -> None:
        self.path = path

    def submit(self, node: Node, assignment: Mapping[str, Any]) -> Task:
        if assignment["kind"] == "prepare":
            return Answers({"event": "ended", "code": 0, "stderr": ""})
        content = base64.b64encode(b"owned").decode()
        return Answers({"event": "file", "path": self.path, "is_first": True, "content": content})

    def wait(self, tasks: Sequence[Task], timeout_s: float) -> Sequence[Task]:
        return tasks

    def is_alive(self, node: Node) -> bool:
        return True

    def ask_again(self, nodes: Sequence[Node]) -> Sequence[Node]:
        return [NODE]

    def joined(self, known: Collection[str]) -> tuple[Sequence[Node], Sequence[str]]:
        return [], []


@pytest.mark.parametrize("path", ["../owned", "/tmp/owned", "plan.json", "samples/../../owned"])
def test_a_node_can_write_no_file_that_no_record_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "cache"))
    command = {"name": "true", "command": ["true"]}
    settings = check_suite({"commands": command, "cwd": str(tmp_path), "isolation": "process"})
    task, _ = start(settings, tmp_path / "run")
    before = {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()}
    with pytest.raises(RecordError, match="which no record names"):
        Driver(Fleet(path), [NODE], task, Progress(), lambda result, _: result).run()
    assert {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()} == before
