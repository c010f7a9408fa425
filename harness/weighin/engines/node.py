"""Run one assignment on this node, such as to measure a cell: ``python -m weighin.engines.node``.

The assignment is the first line of this process's standard input. The process that started this one
keeps standard input open for as long as it wants the result. When standard input ends, this process
stops the measurement and cleans up. Each line of standard output is an event
(``weighin.protocol.encode_event``).

==========  ====================================================================================
event       fields
==========  ====================================================================================
preparing   text, share
phase       name: the worker has entered this phase
node        version, RAM, GPUs and isolations of the node; answers the assignment "probe"
file        path in the run's folder, content: next part of the file (Base64), is_first
record      record: a line of records.jsonl; free_ram_bytes: free RAM after the cell
examined    capabilities, weighin, code; answers the assignment "examine"
error       message, repair, exit_code
==========  ====================================================================================

A command that this process measures has no input, because ``Parent`` has replaced standard input by
/dev/null. The command has no terminal: its output goes to this process's standard error, a pipe.
"""

import base64
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from weighin import __version__, child_process
from weighin.checkpoint import cache, staging
from weighin.child_process import Parent
from weighin.errors import HarnessError, Interrupted, explain
from weighin.isolation import delegation, select
from weighin.plan import start
from weighin.plan.task import Progress, Run
from weighin.probes import environment, gpu_check
from weighin.records import run_folder
from weighin.result import SCHEMA
from weighin.run import interrupts, runner
from weighin.suite import registry
from weighin.units import MIB

_PART_BYTES: Final = 4 * MIB
_LOCK_PATIENCE_S: Final = 60.0  # after a driver is killed, its worker needs a moment to end


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
            _ACTIONS[assignment["kind"]](assignment, events)
    except OSError as error:
        return _fail(events, explain(error))
    except HarnessError as error:
        return _fail(events, error)
    except interrupts.Stopped:
        return Interrupted.exit_code
    return 0


def _fail(events: Parent, error: HarnessError) -> int:
    events.send("error", message=error.message, repair=error.repair, exit_code=error.exit_code)
    return error.exit_code


def _stop_at_end_of_input(driver: Parent) -> None:
    while driver.receive() is not None:
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _probe(assignment: Mapping[str, Any], events: Parent) -> None:
    isolations = dict.fromkeys(select.NAMES, "")
    for name in select.NAMES:
        try:
            select.named(name).check()
        except HarnessError as error:
            isolations[name] = f"{error.message} ({error.repair})"
    gpus = gpu_check.look().gpus if assignment["gpu"] else ()
    total, free = delegation.ram_bytes()
    no_soft_limit = ""
    try:
        select.check_soft_limit(select.named("cgroup"))
    except HarnessError as error:
        no_soft_limit = error.message
    events.send(
        "node",
        weighin=__version__,
        code=environment.code_digest(),
        ram_bytes=total,
        free_ram_bytes=free,
        isolations=isolations,
        no_soft_limit=no_soft_limit,
        gpu_bytes=[gpu.total_bytes for gpu in gpus],
    )


def _prepare(assignment: Mapping[str, Any], events: Parent) -> None:
    with _restored(assignment) as task:
        runner.prepare(task, _progress(events))


def _measure(assignment: Mapping[str, Any], events: Parent) -> None:
    with _restored(assignment) as task:
        try:
            runner.run(replace(task, is_probed=True), _progress(events))
        finally:  # an error after the measurement, such as a full disk, must not lose the record
            _send_results(task.folder, events)


def _send_results(folder: Path, events: Parent) -> None:
    records = folder / run_folder.RECORDS
    if not records.exists():
        return
    for path in sorted(folder.glob("*/*.csv")):
        name, is_first = str(path.relative_to(folder)), True
        with path.open("rb") as file:
            while part := file.read(_PART_BYTES):
                content = base64.b64encode(part).decode()
                events.send("file", path=name, content=content, is_first=is_first)
                is_first = False
    events.send("record", record=records.read_text(), free_ram_bytes=delegation.ram_bytes()[1])


@contextmanager
def _restored(assignment: Mapping[str, Any]) -> Iterator[Run]:
    with staging.own_folder(cache.folder() / "fleet") as folder:
        settings = dict(assignment["settings"])
        if "strategy_paths" in settings:  # a command has no strategies
            known = registry.strategies(assignment["operation"])
            settings["strategy_paths"] = {
                name: path or str(known[name].path)
                for name, path in settings["strategy_paths"].items()
            }
        plan = {"schema": SCHEMA, "cells": assignment["cells"], "settings": settings}
        (folder / run_folder.PLAN).write_text(json.dumps(plan))
        task = start.restore(folder, trusted=True)  # the driver has asked for the user's trust
        yield replace(task, patience_s=max(assignment["patience_s"], _LOCK_PATIENCE_S))


def _progress(events: Parent) -> Progress:
    return Progress(
        preparing=lambda text, share: events.send("preparing", text=text, share=share),
        building=lambda text: events.send("preparing", text=text, share=None),
        phase=lambda name: events.send("phase", name=name),
    )


def _examine(_: Mapping[str, Any], events: Parent) -> None:
    from weighin.doctor import doctor  # imports what measurements do not need

    examination = doctor.examine(lambda text: events.send("preparing", text=text, share=None))
    found = [*examination.capabilities, doctor.nested()]
    code = {"weighin": __version__, "code": environment.code_digest()}
    events.send("examined", capabilities=[asdict(each) for each in found], **code)


_ACTIONS: Final = {
    "probe": _probe,
    "prepare": _prepare,
    "measure": _measure,
    "examine": _examine,
}

if __name__ == "__main__":
    sys.exit(main())
