"""Encode and decode the messages between parent and worker: one JSON object per line.

The parent is weighin's own process, and the worker is the measured process. The parent first sends
the job, which says what to measure. After an event that needs acknowledgement, the worker waits
until the parent has read the cgroup's counters and has sent an empty line. The worker sends each
event in one ``write()``, so that a kill loses at most one event.

=============  ==============================================================  ===========
event          fields                                                          acknowledged
=============  ==============================================================  ===========
baseline       t_ns, memory, import_ns, environment                            yes
begin          name, t_ns                                                      no
cuda           points: [[t_ns, allocated bytes, driver-used bytes], ...]       no
note           text: a warning about a measured value, for the record          no
trace          requested_bytes, reserved_bytes at its start,
               events: [[t_ns, action, bytes], ...]; several of these          no
phase          all fields of ``Phase`` but peak_cgroup_bytes                   yes
loaded         load_ns, without the time spent between phases                  no
ready          t_ns, touch_ns; for a save also written: all fields of Written  no
failed         outcome, message, summary (of the allocator, if out of memory)  no
used           gradients, children_private_bytes: fields of ``Use``            no
done           first_use_ns, marks_ns                                          no
=============  ==============================================================  ===========

If several processes (ranks) are to load the model together, the worker starts them and passes the
messages on. Each event of a rank also has the field ``rank``. All ranks wait for each other at the
events in ``MET``. Two more events exist:

=============  ==============================================================  ===========
event          fields                                                          acknowledged
=============  ==============================================================  ===========
shared         pss_bytes, when all ranks are ready                             yes
ended          code, signal: how a rank ended that failed; stderr_tail         no
=============  ==============================================================  ===========
"""

import json
from dataclasses import asdict
from typing import Any

from weighin.cell import Body, Cell, Job, ModelSpec
from weighin.foreign import parse_json

ACKNOWLEDGEMENT = b"\n"

MET = ("baseline", "ready", "shared", "done")
"""After each of these events, a rank of a cell waits until all ranks have sent the same event."""

ACKNOWLEDGED = (*MET, "phase")
"""The events after which a rank waits for the parent. Without ranks, a worker waits only after
``baseline`` and ``phase``.
"""

BODY_PLUGIN = "weighin-body"
"""The name of the pytest plugin that records phases when a measured process runs a test."""


def encode_job(job: Job) -> bytes:
    """Return the job as a line of JSON, the first line that a worker reads."""
    return json.dumps(asdict(job)).encode() + b"\n"


def decode_job(line: bytes) -> Job:
    fields: dict[str, Any] = json.loads(line)
    cell = fields.pop("cell")
    cell["command"] = tuple(cell["command"])
    model = ModelSpec(**cell.pop("model"))
    for name in ("python_path", "mounts"):
        fields[name] = tuple(fields[name])
    if body := fields.pop("body"):
        body = Body(body["path"], tuple(body["pytest_arguments"]))
    return Job(cell=Cell(model=model, **cell), body=body, **fields)


def encode_event(event: dict[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode() + b"\n"


def decode_event(line: bytes) -> dict[str, Any] | None:
    """Return the event in a line; None for a line that is no event but a strategy's output."""
    try:
        event = parse_json(line)
    except ValueError:
        return None
    is_event = isinstance(event, dict) and isinstance(event.get("event"), str)
    return event if is_event else None
