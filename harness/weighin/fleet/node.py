"""Measure one cell on this machine, or describe the machine: ``python -m weighin.fleet.node``.

``run`` starts this process. When ``run`` sends the event ``stop``, or ends, this process stops the measurement
and cleans up. It sends at most one of each of these events:

began   nothing: weighin runs here
record  record: a line of records.jsonl; files: the run's others, by path
short   ram_bytes, free_ram_bytes, gpu_bytes: less than the cell needs; the cell was not begun
node    what the machine has
error   message, repair, exit_code
ended   why: how this process ended, and its last line; added by ``run``

A command that this process measures has no input; its output goes to this process's standard error.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from weighin import __version__, child_process, install
from weighin.checkpoint import temporary_folders
from weighin.child_process import Child, Parent, last_line, module
from weighin.errors import ConfigError, HarnessError, Interrupted, explain
from weighin.isolation import cgroup, select
from weighin.plan import start
from weighin.plan.task import Demand, Node, Progress
from weighin.probes import environment, gpu_memory
from weighin.records import run_folder
from weighin.result import SCHEMA
from weighin.run import interrupts, runner

Told = dict[str, dict[str, Any]]
"""The fields of the events of one assignment, by the names of the events."""
Answer = tuple[str, Told]
"""The id of a node, and what it told."""

_PAUSE_S = 0.5  # Ray can cancel a task only between two lines of Python
_PATIENCE_S = 30.0  # the measured processes of a stopped cell need a moment to end
_LOCK_PATIENCE_S: Final = 60.0  # after a driver is killed, its worker needs a moment to end


def run(
    assignment: Mapping[str, Any],
    variables: Mapping[str, str],
    is_stopped: Callable[[], bool] = lambda: False,
) -> Told:
    """Run an assignment in a process of its own, which ends with ``run``; return its events. This function needs
    only the standard library and ``child_process``, which Ray copies by value to a node that may lack weighin.
    """
    process, told = Child(module("weighin.fleet.node"), variables), Told()
    try:
        process.send("assignment", **assignment)
        while not is_stopped():
            with contextlib.suppress(TimeoutError):
                if (event := process.receive(_PAUSE_S)) is None:
                    break
                told[event.pop("event")] = event
    finally:
        process.send("stop")
        end_s = time.monotonic() + _PATIENCE_S
        with contextlib.suppress(TimeoutError):
            while (left_s := end_s - time.monotonic()) > 0 and process.receive(left_s) is not None:
                pass
            process.wait(end_s - time.monotonic())
        with contextlib.suppress(TimeoutError):
            process.close()
        code = process.wait()
    why = [f"exit code {code}", last_line(process.printed)]
    return {**told, "ended": {"why": ", ".join(filter(None, why))}}


def own_code() -> str:
    return f"weighin {__version__}, files with the digest {environment.code_digest()}"


def main() -> int:
    child_process.is_program = True
    driver = Parent()
    if (assignment := driver.receive()) is None:  # the driver has ended
        return 1

    def stop_when_told() -> None:
        driver.receive()  # nothing after the assignment but the order to stop, or the end
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_when_told, daemon=True).start()
    try:
        with interrupts.stoppable(interrupts.EndedBySignal):
            driver.send("began")
            there, here = assignment.get("weighin"), own_code()
            if there and there != here:
                raise ConfigError(
                    f"this node has {here}, and the driver's machine {there}",
                    "install the same files of weighin on all nodes, because a table must not mix the"
                    f" figures of different code: {install.command('ray', anywhere=True)}",
                )
            (_measure if assignment["kind"] == "measure" else _describe)(assignment, driver)
    except (HarnessError, OSError) as found:
        error = found if isinstance(found, HarnessError) else explain(found)
        driver.send("error", message=error.message, repair=error.repair, exit_code=error.exit_code)
        return error.exit_code
    except interrupts.EndedBySignal:
        return Interrupted.exit_code
    return 0


def _describe(assignment: Mapping[str, Any], driver: Parent) -> None:
    broken = dict.fromkeys(select.NAMES, "")
    for name in broken:
        try:
            select.named(name).check()
        except HarnessError as error:
            broken[name] = f"{error.message} ({error.repair})"
    driver.send("node", **_memory("cgroup", gpu=assignment["gpu"]), isolations=broken)


def _memory(isolation: str, *, gpu: bool) -> dict[str, Any]:
    total, free = cgroup.ram_bytes(isolation)
    gpus = [each.total_bytes for each in gpu_memory.look().gpus] if gpu else []
    return {"ram_bytes": total, "free_ram_bytes": free, "gpu_bytes": gpus}


def _measure(assignment: Mapping[str, Any], driver: Parent) -> None:
    """Measure the assignment's cell, as a run of one cell in a temporary folder."""
    cell, settings = assignment["cell"], assignment["settings"]
    if paths := settings.get("strategy_paths"):
        from weighin.suite import registry  # takes 60 ms

        own = registry.strategies(cell["operation"])
        settings["strategy_paths"] = {n: path or str(own[n].path) for n, path in paths.items()}
    with temporary_folders.own_folder(temporary_folders.folder() / "fleet") as folder:
        plan = {"schema": SCHEMA, "cells": [cell], "settings": settings}
        (folder / run_folder.PLAN).write_text(json.dumps(plan))
        task = replace(
            start.resume(folder, trusted=True),  # the driver has asked for the user's trust
            patience_s=max(assignment["patience_s"], _LOCK_PATIENCE_S),
            is_probed=assignment["is_tested"],
            more_limits=[(limit, ranks) for limit, ranks in assignment["limits"]],
        )
        (planned,) = task.planned
        demand, end_s = Demand.of(planned.cell), time.monotonic() + 30.0  # another cell may end
        while True:
            has = _memory(task.isolation.name, gpu=planned.cell.needs_gpu)
            if not demand.obstacle(node := Node("", "", **has), is_now=True):
                break
            if demand.obstacle(node) or time.monotonic() >= end_s:  # the node may have joined later
                driver.send("short", **has)
                return
            time.sleep(_PAUSE_S)
        try:
            runner.run(task, Progress())
        finally:  # an error after the measurement, such as a full disk, must not lose the record
            if (records := folder / run_folder.RECORDS).exists():
                files = {
                    str(path.relative_to(folder)): path.read_bytes().decode()
                    for path in folder.glob("*/*.csv")
                }
                driver.send("record", record=records.read_text(), files=files)


if __name__ == "__main__":
    sys.exit(main())
