"""Measure one cell on this machine, or describe the machine: ``python -m weighin.fleet.node``.

``run`` starts this process, writes the assignment as the first line of its standard input, and keeps the
input open for as long as it wants the answer. When the input ends, this process stops the measurement
and cleans up. Each line of standard output is an event (``weighin.child_process.encode_event``).

began     nothing: weighin runs here
step      text; is_line: whether it is worth a line of its own
record    record: a line of records.jsonl; files: the run's others, by path
short     fields of ``plan.task.Node``: less than the cell needs; the cell was not begun
node      all fields of ``plan.task.Node``
examined  capabilities: the rows of ``weighin doctor``; can_measure
error     message, repair, exit_code
ended     why: how this process ended, and its last line; added by ``run``

A command that this process measures has no input, because ``Parent`` has replaced standard input by
/dev/null. The command has no terminal: its output goes to this process's standard error, a pipe.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Final, Literal

from weighin import __version__, child_process, install
from weighin.checkpoint import cache, staging
from weighin.child_process import Child, Parent, last_line, module
from weighin.errors import ConfigError, HarnessError, Interrupted, explain
from weighin.isolation import cgroup, select
from weighin.plan import start
from weighin.plan.task import Demand, Node, Progress
from weighin.probes import environment, gpu_check
from weighin.records import run_folder
from weighin.result import SCHEMA
from weighin.run import interrupts, runner
from weighin.suite import registry

Answer = tuple[str, dict[str, dict[str, Any]]]
"""The id of a node (empty if it was lost), and its events by their kind; it sends one of a kind."""
Step = tuple[str, str, bool]
"""Who says something, what (nothing at the end), and whether it is worth a line of its own."""

SLOT: Final = "weighin_slot"
_MONITOR: Final = "RAY_memory_monitor_refresh_ms"
START: Final = f"""{_MONITOR}=0 ray start --resources '{{"{SLOT}": 1}}'"""
"""The command that starts a node; add --head for the first node, and --address for the others."""

_PAUSE_S = 0.5  # Ray can cancel a task only between two lines of Python
_PATIENCE_S = 30.0  # the measured processes of a stopped cell need a moment to end
_LOCK_PATIENCE_S: Final = 60.0  # after a driver is killed, its worker needs a moment to end
_RAM_PATIENCE_S: Final = 30.0  # until the RAM that a cell needs is free


def run(
    assignment: Mapping[str, Any],
    variables: Mapping[str, str],
    say: Callable[[str, bool], object],
    is_stopped: Callable[[], bool] = lambda: False,
) -> dict[str, dict[str, Any]]:
    """Run an assignment in a process of its own, and return its events; the process ends with ``run``.

    Ray copies this function by value to the nodes, with what it uses of ``child_process``: it needs only
    the standard library, so that a node without weighin can report that weighin is missing.
    """
    process = Child(module("weighin.fleet.node"), variables)
    events = {}
    try:
        process.send(json.dumps(assignment).encode() + b"\n")
        while not is_stopped():
            try:
                if (line := process.receive(_PAUSE_S)) is None:
                    break
            except TimeoutError:
                continue
            event = json.loads(line)
            if (kind := event.pop("event")) == "step":
                say(event["text"], event["is_line"])
            else:
                events[kind] = event
    finally:
        process.end_input()
        end_s = time.monotonic() + _PATIENCE_S
        with contextlib.suppress(TimeoutError):
            while (left_s := end_s - time.monotonic()) > 0 and process.receive(left_s) is not None:
                pass
            process.wait(end_s - time.monotonic())
        process.kill()
        code = process.wait()
        process.close()
        say("", False)
    why = f"exit code {code}"
    said = last_line(process.stderr_tail)
    return events | {"ended": {"why": f"{why}, {said}" if said else why}}


def own_code() -> str:
    return f"weighin {__version__}, files with the digest {environment.code_digest()}"


def main() -> int:
    """Read an assignment from standard input, run it, and return the exit code of this process."""
    child_process.is_program = True
    driver = Parent()
    if (line := driver.receive()) is None:  # the driver has ended
        return 1
    assignment = json.loads(line)

    def stop_at_end_of_input() -> None:
        while driver.receive() is not None:
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_at_end_of_input, daemon=True).start()
    try:
        with interrupts.stoppable(interrupts.EndedBySignal):
            driver.send("began")
            if assignment["kind"] != "examine" and (there := assignment.get("weighin")):
                _check_monitor()
                _check_code(there)
            tasks = {"measure": _measure, "describe": _describe, "examine": _examine}
            tasks[assignment["kind"]](assignment, driver)
    except (HarnessError, OSError) as found:
        error = found if isinstance(found, HarnessError) else explain(found)
        driver.send("error", message=error.message, repair=error.repair, exit_code=error.exit_code)
        return error.exit_code
    except interrupts.EndedBySignal:
        return Interrupted.exit_code
    return 0


def _check_monitor() -> tuple[Literal["good"], str]:
    """Raise ConfigError if Ray's memory monitor is on, which kills tasks when the node is short of memory.

    This process has the environment with which the node was started.
    """
    value = os.environ.get(_MONITOR)
    source = f"{_MONITOR} is not set: Ray's default" if value is None else f"{_MONITOR}={value}"
    if value is None or value.strip() != "0":
        raise ConfigError(
            f"Ray's memory monitor is on ({source}), and would kill cells before their limit does",
            "stop Ray on these nodes (ray stop), and start Ray there without its memory monitor:"
            f" {START}",
        )
    return "good", f"off ({source})"


def _check_code(there: str) -> tuple[Literal["good"], str]:
    if there != (here := own_code()):
        raise ConfigError(
            f"this node has {here}, and the driver's machine {there}",
            "install the same files of weighin on all nodes, because a table must not mix the"
            f" figures of different code: {install.command('ray', anywhere=True)}",
        )
    return "good", here


def _examine(assignment: Mapping[str, Any], driver: Parent) -> None:
    from weighin.doctor import doctor  # imports what measurements do not need

    examined = doctor.examine(lambda text: driver.send("step", text=text, is_line=True))
    of_ray = [
        doctor.tried("the same weighin", partial(_check_code, assignment["weighin"])),
        doctor.tried("no memory monitor of Ray", _check_monitor),
    ]
    driver.send(
        "examined",
        capabilities=[asdict(row) for row in (*examined.capabilities, doctor.nested(), *of_ray)],
        can_measure=examined.holds_a_limit and all(row.verdict == "good" for row in of_ray),
    )


def _describe(assignment: Mapping[str, Any], driver: Parent) -> None:
    def obstacle(check: Callable[[], object]) -> str:
        try:
            check()
        except HarnessError as error:
            return f"{error.message} ({error.repair})"
        return ""

    driver.send(
        "node",
        **_memory("cgroup", assignment["has_gpu"]),
        isolations={name: obstacle(select.named(name).check) for name in select.NAMES},
        no_soft_limit=obstacle(lambda: select.check_soft_limit(select.named("cgroup"))),
    )


def _memory(isolation: str, wants_gpu: bool) -> dict[str, Any]:
    total, free = cgroup.ram_bytes(isolation)
    gpu_bytes = [gpu.total_bytes for gpu in gpu_check.look().gpus] if wants_gpu else []
    return {"ram_bytes": total, "free_ram_bytes": free, "gpu_bytes": gpu_bytes}


def _measure(assignment: Mapping[str, Any], driver: Parent) -> None:
    """Measure the assignment's cell, as a run of one cell in a temporary folder of this machine."""
    cell, settings = assignment["cell"], assignment["settings"]
    strategy = cell["strategy"]

    def say(text: str, *, is_line: bool = False) -> None:
        driver.send("step", text=text, is_line=is_line)

    progress = Progress(
        preparing=lambda text, share: say(text, is_line=share is None),
        building=say,
        starting=lambda _: say(strategy),
        phase=lambda name: say(f"{strategy}: {name}"),
    )
    if paths := settings.get("strategy_paths"):
        own = registry.strategies(cell["operation"])
        found = {name: path or str(own[name].path) for name, path in paths.items()}
        settings["strategy_paths"] = found
    with staging.own_folder(cache.folder() / "fleet") as folder:
        plan = {"schema": SCHEMA, "cells": [cell], "settings": settings}
        (folder / run_folder.PLAN).write_text(json.dumps(plan))
        task = replace(
            start.restore(folder, trusted=True),  # the driver has asked for the user's trust
            patience_s=max(assignment["patience_s"], _LOCK_PATIENCE_S),
            is_probed=assignment["is_tested"],
            more_limits=[(limit, ranks) for limit, ranks in assignment["limits"]],
        )
        demand, isolation = Demand.of(task.planned[0].cell), task.isolation.name
        end_s = time.monotonic() + _RAM_PATIENCE_S
        while demand.lacks_now(Node("", "", **(has := _memory(isolation, demand.device != "cpu")))):
            if demand.obstacle(Node("", "", **has)) or time.monotonic() > end_s:
                driver.send("short", **has)
                return
            time.sleep(1)
        try:
            runner.run(task, progress)
        finally:  # an error after the measurement, such as a full disk, must not lose the record
            if (records := folder / run_folder.RECORDS).exists():
                files = {
                    str(path.relative_to(folder)): path.read_bytes().decode()
                    for path in folder.glob("*/*.csv")
                }
                driver.send("record", record=records.read_text(), files=files)


if __name__ == "__main__":
    sys.exit(main())
