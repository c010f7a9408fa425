"""Run a plan on several nodes. Only the driver's process chooses nodes and writes records."""

import base64
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from weighin.engines.scheduler import MOST_LOSSES, Scheduler
from weighin.engines.transport import LostTask, Task, Transport
from weighin.errors import HarnessError, NoNodeLeft, RecordError
from weighin.foreign import no_link
from weighin.plan.nodes import Node
from weighin.plan.task import Planned, Progress, Run, skipped
from weighin.probes import environment
from weighin.protocol import decode_event
from weighin.records import coverage, run_folder
from weighin.records.run_folder import parse
from weighin.result import SCHEMA, Outcome, Result
from weighin.run import interrupts
from weighin.run.run_lock import only_writer
from weighin.suite import registry
from weighin.text import one_line

_WAIT_S: Final = 0.5  # until the driver looks for signals again
_NEW_NODES_S: Final = 10.0
_NODE_LOSS_S: Final = 10.0  # Ray reports a lost node some seconds after the node's last task
_CANCELLING_S: Final = 45.0


@dataclass(slots=True)
class _Work:
    """An assignment that a node runs: to measure a cell, or (``index`` is None) to prepare the node.

    ``files`` are the sample files that the node sent so far; they are removed if no record follows.
    """

    task: Task
    index: int | None = None
    result: Result | None = None
    files: list[Path] = field(default_factory=list)
    error: dict[str, Any] | None = None
    ended: dict[str, Any] | None = None


@dataclass(slots=True)
class _Member:
    node: Node
    is_prepared: bool = False
    work: _Work | None = None
    step: str = ""


class Driver:
    """Runs the cells (measurements) of one plan on several nodes.

    Each node prepares itself once, and then runs one cell after the other. ``placed`` is a function
    that adds facts about the node to a result.
    """

    def __init__(
        self,
        transport: Transport,
        nodes: Sequence[Node],
        task: Run,
        progress: Progress,
        placed: Callable[[Result, Node], Result],
    ) -> None:
        self._transport = transport
        self._placed_on = placed
        self._task = task
        self._progress = progress
        self._members = {node.id: _Member(node) for node in nodes if self._can_isolate(node)}
        self._known = {node.id for node in nodes}  # includes nodes that were lost or left out
        self._troubles: list[HarnessError] = []
        self._settings = _settings(task)
        self._code = {
            name: value for name, value in environment.code().items() if name.startswith("git_")
        }

    def run(self) -> None:
        """Run every cell that has no record yet.

        Raises:
            NoNodeLeft: no node can run the remaining cells.
            HarnessError: another process runs this plan.
            RecordError: the run's folder cannot be read or written, or a node sent a file that
                no record names.
        """
        with only_writer(self._task.folder), interrupts.stoppable(), interrupts.put_off():
            cells = self._todo()
            self._cells = [each.cell for each in cells]
            self._scheduler = Scheduler(self._cells)
            try:
                self._run()
            finally:
                self._cancel()

    def _todo(self) -> list[Planned]:
        """Return the planned cells without a record; record as skipped those that the plan skips."""
        results = self._task.begin()
        todo = {c.id for c in coverage.pending([p.cell for p in self._task.planned], results)}
        waiting = [each for each in self._task.planned if each.cell.id in todo]
        for each in waiting:
            if each.skip:
                self._record(skipped(each, {}))
        return [each for each in waiting if not each.skip]

    def _run(self) -> None:
        looked_s = time.monotonic()
        while len(self._scheduler) or self._busy():
            interrupts.check()
            if time.monotonic() - looked_s > _NEW_NODES_S:
                self._take_new_nodes()
                looked_s = time.monotonic()
            for member in self._members.values():
                if member.work is None:
                    self._assign(member)
            if not (busy := self._busy()):
                self._look_again()
                continue
            by_task = {member.work.task: member for member in busy if member.work}
            for task in self._transport.wait([*by_task], _WAIT_S):
                self._take_event(by_task[task])

    def _look_again(self) -> None:
        """Ask all nodes for their free RAM, and leave out nodes that were lost.

        Raise NoNodeLeft if no remaining node can run any waiting cell.
        """
        nodes = [member.node for member in self._members.values()]
        answers = {node.id: node for node in self._transport.ask_again(nodes)}
        for member in list(self._members.values()):
            if node := answers.get(member.node.id):
                member.node = node
            else:
                self._leave_out(member, HarnessError("the node was lost"))
        if not any(self._scheduler.can_take(each.node) for each in self._members.values()):
            raise self._stuck()

    def _busy(self) -> list[_Member]:
        return [member for member in self._members.values() if member.work]

    def _assign(self, member: _Member) -> None:
        if not member.is_prepared:
            if wanted := self._scheduler.wants(member.node):
                series = {self._cells[each].series: self._cells[each] for each in wanted}
                cells = [asdict(cell) for cell in series.values()]
                member.work = _Work(self._submit(member, "prepare", cells))
                self._show(member, "preparing")
            return
        index = self._scheduler.take(member.node)
        if index is not None:
            cell = self._cells[index]
            member.work = _Work(self._submit(member, "measure", [asdict(cell)]), index)
            self._show(member, cell.strategy)

    def _submit(self, member: _Member, kind: str, cells: list[dict[str, Any]]) -> Task:
        return self._transport.submit(
            member.node,
            {
                "kind": kind,
                "operation": cells[0]["operation"],
                "cells": cells,
                "settings": self._settings,
                "patience_s": min(self._task.patience_s, 1e9),  # JSON has no infinity
            },
        )

    def _take_event(self, member: _Member) -> None:
        work = member.work
        assert work
        try:
            line = work.task.next_event()
        except LostTask as lost:
            self._lose(member, work, lost)
            return
        if line is None:
            member.work = None
            self._show(member, "")
            self._finish(member, work)
        elif event := decode_event(line):
            self._take(member, work, event)

    def _take(self, member: _Member, work: _Work, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "phase":
            assert work.index is not None
            self._show(member, f"{self._cells[work.index].strategy}: {event['name']}")
        elif kind == "preparing":
            if work.index is None and event["share"] is None:
                self._progress.preparing(f"{member.node.name}: {event['text']}", None)
            self._show(member, event["text"])
        elif kind == "record":
            member.node = replace(member.node, free_ram_bytes=event["free_ram_bytes"])
            place = f"a record from the node {member.node.name}"
            work.result = self._placed(parse(Result, event["record"].encode(), place), member)
            self._record(work.result)
        elif kind == "file":
            self._write_part(work, event)
        elif kind in ("error", "ended"):
            setattr(work, kind, event)

    def _finish(self, member: _Member, work: _Work) -> None:
        if not work.result:
            _remove(work.files)
        if work.error:
            told = {name: work.error[name] for name in ("message", "repair", "exit_code")}
            self._leave_out(member, HarnessError(**told))
            if work.index is not None and not work.result:
                self._scheduler.give_back(work.index)
        elif work.index is not None and not work.result:
            self._record(self._failed(work.index, member, _last_words(work)))
        elif work.index is None:
            if work.ended and work.ended["code"] == 0:
                member.is_prepared = True
            else:
                self._leave_out(member, HarnessError(f"its preparation ended: {_last_words(work)}"))

    def _lose(self, member: _Member, work: _Work, lost: LostTask) -> None:
        member.work = None
        self._show(member, "")
        if not work.result:
            _remove(work.files)
        is_gone = lost.with_node or self._is_gone(member)
        if is_gone:
            self._leave_out(member, HarnessError(f"the node was lost: {lost.message}"))
        if work.index is None or work.result:
            if not is_gone:
                self._leave_out(member, HarnessError(lost.message))
        elif not is_gone:
            self._record(self._failed(work.index, member, lost.message))
        elif not self._scheduler.lost(work.index):
            message = f"{MOST_LOSSES} nodes were lost while they ran this cell, the last of them"
            self._record(self._failed(work.index, member, message))

    def _is_gone(self, member: _Member) -> bool:
        deadline_s = time.monotonic() + _NODE_LOSS_S
        while time.monotonic() < deadline_s:
            if not self._transport.is_alive(member.node):
                return True
            time.sleep(_WAIT_S)
        return False

    def _leave_out(self, member: _Member, error: HarnessError) -> None:
        self._members.pop(member.node.id, None)
        message = f"{member.node.name}: {error.message}"
        self._troubles.append(HarnessError(message, error.repair, exit_code=error.exit_code))
        self._progress.preparing(f"no further cell for {member.node.name}: {error.message}", None)

    def _take_new_nodes(self) -> None:
        joined, refused = self._transport.joined(self._known)
        for line in refused:
            self._progress.preparing(line, None)
        self._known |= {node.id for node in joined}
        self._members |= {node.id: _Member(node) for node in filter(self._can_isolate, joined)}

    def _can_isolate(self, node: Node) -> bool:
        return not node.isolations[self._task.isolation.name]

    def _stuck(self) -> HarnessError:
        left = len(self._scheduler)
        waiting = f"{left} cell{'s' * (left > 1)} cannot run"
        if self._members:
            reasons = self._scheduler.stuck(member.node for member in self._members.values())
            return NoNodeLeft(f"{waiting}: {reasons}", "free memory on a node, or add a node")
        if not self._troubles:
            return NoNodeLeft(f"{waiting}: no node can use {self._task.isolation.name}")
        last = self._troubles[-1]
        message = f"{waiting}, no node is left: {last.message}"
        return NoNodeLeft(message, last.repair, exit_code=last.exit_code)

    def _record(self, result: Result) -> None:
        self._task.results.append(run_folder.append(self._task.folder, result))
        self._progress.finished(self._task.results[-1])

    def _placed(self, result: Result, member: _Member) -> Result:
        result = replace(result, environment=result.environment | self._code)
        return self._placed_on(result, member.node)

    def _failed(self, index: int, member: _Member, why: str) -> Result:
        result = Result(
            schema=SCHEMA,
            cell=self._cells[index],
            outcome=Outcome.MEASUREMENT_FAILED,
            message=f"on {member.node.name}: {why}",
            started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        )
        return self._placed(result, member)

    def _write_part(self, work: _Work, event: dict[str, Any]) -> None:
        assert work.index is not None
        cell = self._cells[work.index]
        if event["path"] not in run_folder.paths_of(cell):
            raise RecordError(f"a node sent the file {event['path']!r}, which no record names")
        path = self._task.folder / event["path"]
        work.files.append(path)
        with run_folder.writing(path, f"; the measurement of {cell.id} is lost"):
            no_link(path, self._task.folder)
            path.parent.mkdir(exist_ok=True)
            with path.open("wb" if event["is_first"] else "ab") as file:
                file.write(base64.b64decode(event["content"]))

    def _show(self, member: _Member, step: str) -> None:
        member.step = step
        self._progress.nodes({m.node.name: m.step for m in self._members.values() if m.work})

    def _cancel(self) -> None:
        """Stop the assignments that still run, and wait at most 45 s for their ends."""
        busy = self._busy()
        for member in busy:
            assert member.work
            member.work.task.cancel()
        deadline_s = time.monotonic() + _CANCELLING_S
        while busy and time.monotonic() < deadline_s:
            by_task = {member.work.task: member for member in busy if member.work}
            for task in self._transport.wait([*by_task], _WAIT_S):
                try:
                    has_ended = task.next_event() is None
                except LostTask:
                    has_ended = True
                if has_ended:
                    busy.remove(by_task[task])


def _settings(task: Run) -> dict[str, Any]:
    """Return the plan's settings to send to the nodes, without shard and engine.

    A strategy that is part of weighin gets an empty path: a node finds it in its own installation.
    """
    paths = task.settings.strategy_paths
    if paths:  # a command has no strategies
        operation = task.planned[0].cell.operation if task.planned else "load"
        own = {str(info.path) for info in registry.strategies(operation).values()}
        paths = {name: "" if path in own else path for name, path in paths.items()}
    ours = {"strategy_paths": paths, "shard": None, "engine": {}}
    return task.settings.model_copy(update=ours).as_json()


def _remove(files: Sequence[Path]) -> None:
    for path in files:
        path.unlink(missing_ok=True)


def _last_words(work: _Work) -> str:
    ended = work.ended or {"code": "unknown", "stderr": ""}
    words = f"exit code {ended['code']}"
    return f"{words}, {one_line(ended['stderr'])}" if ended["stderr"] else words
