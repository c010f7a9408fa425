"""Encode and decode a job, and the events of weighin's own child processes: one JSON object per line.

A worker gets its job through standard input, and reports to a socket (``weighin.phase_reporter``).
"""

import json
from dataclasses import asdict
from typing import Any

from weighin.cell import Body, Cell, Job, ModelSpec
from weighin.files import parse_json

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
