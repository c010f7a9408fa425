"""Measure one cell on this machine, or describe the machine: ``python -m weighin.fleet.node``.

``run`` starts this process, writes the assignment as the first line of its standard input, and keeps the
input open for as long as it wants the answer. When the input ends, this process stops the measurement
and cleans up. Each line of standard output is an event (``weighin.protocol.encode_event``).

step    text; is_line: whether it is worth a line of its own
record  record: a line of records.jsonl; files: the run's others, by path; free_ram_bytes after it
short   free_ram_bytes: less than the cell's limit, so that the cell was not begun
node    what the machine has
error   message, repair, exit_code
ended   code, stderr: how this process ended, and its last line; added by ``run``

A command that this process measures has no input, because ``Parent`` has replaced standard input by
/dev/null. The command has no terminal: its output goes to this process's standard error, a pipe.
"""

import base64
import contextlib
import json
import os
import signal
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, Final

from weighin import __version__, child_process
from weighin.checkpoint import cache, staging
from weighin.child_process import Child, Parent, last_line, module
from weighin.errors import HarnessError, Interrupted, explain
from weighin.isolation import delegation, select
from weighin.plan import start
from weighin.plan.task import Progress, Run
from weighin.probes import environment, gpu_check
from weighin.protocol import decode_event
from weighin.records import run_folder
from weighin.result import SCHEMA
from weighin.run import interrupts, runner
from weighin.suite import registry

Answer = tuple[str, dict[str, dict[str, Any]]]
"""The id of a node, and its events by their kind; it sends one of a kind."""
Say = Callable[[tuple[str, str, bool, str]], object]
"""Takes who says something, what (nothing at the end), whether it is worth a line, and the cell's id."""

_PAUSE_S = 0.5  # Ray can cancel a task only between two lines of Python
_PATIENCE_S = 30.0  # the measured processes of a stopped cell need a moment to end
_LOCK_PATIENCE_S: Final = 60.0  # after a driver is killed, its worker needs a moment to end


def run(
    assignment: Mapping[str, Any],
    variables: Mapping[str, str],
    say: Callable[[str, bool], object],
    is_stopped: Callable[[], bool] = lambda: False,
) -> list[bytes]:
    """Run an assignment in a process of its own, and return its events; the process ends with ``run``.

    Ray copies this function by value to the nodes, with what it uses of ``child_process``: it needs only
    the standard library, so that a node without weighin can report that weighin is missing.
    """
    process = Child(module("weighin.fleet.node"), variables)
    events = []
    try:
        process.send(json.dumps(assignment).encode() + b"\n")
        while not is_stopped():
            try:
                if (line := process.receive(_PAUSE_S)) is None:
                    break
            except TimeoutError:
                continue
            if (event := json.loads(line))["event"] == "step":
                say(event["text"], event["is_line"])
            else:
                events.append(line)
    finally:
        process.end_input()
        with contextlib.suppress(TimeoutError):
            while process.receive(_PATIENCE_S) is not None:
                pass
            process.wait(_PATIENCE_S)
        process.kill()
        code = process.wait()
        process.close()
        say("", False)
    ended = {"event": "ended", "code": code, "stderr": last_line(process.stderr_tail)}
    return [*events, json.dumps(ended).encode()]


def answer(place: str, lines: Iterable[bytes]) -> Answer:
    """Return the events of ``run``, which may come from another machine."""
    return place, {event["event"]: event for event in map(decode_event, lines) if event}


def main() -> int:
    """Read an assignment from standard input, run it, and return the exit code of this process."""
    child_process.is_program = True
    events = Parent()
    if (line := events.receive()) is None:  # the driver has ended
        return 1
    assignment = json.loads(line)
    threading.Thread(target=_stop_at_end_of_input, args=(events,), daemon=True).start()
    try:
        with interrupts.stoppable(interrupts.Stopped):
            (_measure if assignment["kind"] == "measure" else _describe)(assignment, events)
    except (HarnessError, OSError) as found:
        error = found if isinstance(found, HarnessError) else explain(found)
        events.send("error", message=error.message, repair=error.repair, exit_code=error.exit_code)
        return error.exit_code
    except interrupts.Stopped:
        return Interrupted.exit_code
    return 0


def _stop_at_end_of_input(driver: Parent) -> None:
    while driver.receive() is not None:
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _describe(assignment: Mapping[str, Any], events: Parent) -> None:
    isolations = dict.fromkeys(select.NAMES, "")
    for name in select.NAMES:
        try:
            select.named(name).check()
        except HarnessError as error:
            isolations[name] = f"{error.message} ({error.repair})"
    no_soft_limit = ""
    try:
        select.check_soft_limit(select.named("cgroup"))
    except HarnessError as error:
        no_soft_limit = error.message
    capabilities = []
    if assignment["kind"] == "examine":
        from weighin.doctor import doctor  # imports what measurements do not need

        found = doctor.examine(lambda text: events.send("step", text=text, is_line=True))
        capabilities = [asdict(each) for each in (*found.capabilities, doctor.nested())]
    total, free = delegation.ram_bytes()
    events.send(
        "node",
        weighin=f"weighin {__version__}, files with the digest {environment.code_digest()}",
        ram_bytes=total,
        free_ram_bytes=free,
        isolations=isolations,
        no_soft_limit=no_soft_limit,
        gpu_bytes=[g.total_bytes for g in gpu_check.look().gpus] if assignment["gpu"] else [],
        capabilities=capabilities,
    )


def _measure(assignment: Mapping[str, Any], events: Parent) -> None:
    limit, strategy = assignment["cell"]["ram_limit_bytes"], assignment["cell"]["strategy"]

    def say(text: str, *, is_line: bool = False) -> None:
        events.send("step", text=text, is_line=is_line)

    progress = Progress(
        preparing=lambda text, share: say(text, is_line=share is None),
        building=say,
        starting=lambda _: say(strategy),
        phase=lambda name: say(f"{strategy}: {name}"),
    )
    with _restored(assignment) as task:
        _, free = delegation.ram_bytes(task.isolation.name)
        if limit is not None and limit > free:
            events.send("short", free_ram_bytes=free)
            return
        try:
            runner.run(task, progress)
        finally:  # an error after the measurement, such as a full disk, must not lose the record
            if (records := task.folder / run_folder.RECORDS).exists():
                files = {}
                for path in task.folder.glob("*/*.csv"):
                    packed = base64.b64encode(zlib.compress(path.read_bytes()))
                    files[str(path.relative_to(task.folder))] = packed.decode()
                _, free = delegation.ram_bytes(task.isolation.name)
                record = records.read_text()
                events.send("record", record=record, files=files, free_ram_bytes=free)


@contextlib.contextmanager
def _restored(assignment: Mapping[str, Any]) -> Iterator[Run]:
    """Yield a run of the assignment's cell alone, in a temporary folder of this machine."""
    cell, settings = assignment["cell"], dict(assignment["settings"])
    if "strategy_paths" in settings:  # a command has no strategies
        known = registry.strategies(cell["operation"])
        settings["strategy_paths"] = {
            name: path or str(known[name].path) for name, path in settings["strategy_paths"].items()
        }
    with staging.own_folder(cache.folder() / "fleet") as folder:
        plan = {"schema": SCHEMA, "cells": [cell], "settings": settings}
        (folder / run_folder.PLAN).write_text(json.dumps(plan))
        task = start.restore(folder, trusted=True)  # the driver has asked for the user's trust
        patience_s = max(assignment["patience_s"], _LOCK_PATIENCE_S)
        limits = [(limit, ranks) for limit, ranks in assignment["limits"]]
        is_probed = assignment["is_tested"]
        yield replace(task, patience_s=patience_s, is_probed=is_probed, more_limits=limits)


if __name__ == "__main__":
    sys.exit(main())
