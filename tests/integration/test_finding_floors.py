"""A real floor: strategies that hold known amounts, found to within a step; stopped and resumed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import leftovers
import pytest
from nightly import nightly
from typed import CommandLine

from weighin.units import MIB

HOLDING = '''"""Hold so many MiB for a moment, then load rightly."""

from mmap import PAGESIZE

import torch


def load_rightly(job):
    model = job.build_model()
    model.load_state_dict(torch.load(job.checkpoint, weights_only=True))
    return model


def load(job):
    with job.phase("hold"):
        held = bytearray({mib} * 1024 * 1024)
        held[::PAGESIZE] = bytes(len(range(0, len(held), PAGESIZE)))
        del held
    return load_rightly(job)
'''
FEW, MORE = 200, 400


def records(command: CommandLine) -> list[dict[str, Any]]:
    return command.records("found")


def strategies(command: CommandLine, held: dict[str, int]) -> str:
    folder: Path = command.folder / "mine"
    folder.mkdir()
    for name, mib in held.items():
        (folder / f"{name}.py").write_text(HOLDING.format(mib=mib))
    return ",".join(f"mine/{name}.py" for name in held)


@pytest.mark.slow
@pytest.mark.cgroup
@pytest.mark.parametrize("held", [{"few": FEW}, *nightly({"few": FEW, "more": MORE})])
def test_floors_are_apart_by_what_the_strategies_hold_and_a_stopped_search_goes_on(
    command: CommandLine, held: dict[str, int]
) -> None:
    names = strategies(command, held)
    started = command.start(
        *(
            "floor",
            "gpt2-tiny",
            "--isolation",
            "cgroup",
            "-s",
            names,
            "--out",
            "found",
            "--json",
            "-",
        )
    )
    leftovers.wait_until(
        lambda: started.process.poll() is not None or len(records(command)) >= 2,
        "no cell was measured",
        patience_s=120,
    )
    stopped = started.end(signal.SIGINT)
    assert (stopped.code, stopped.out, stopped.left) == (130, "", [])
    assert stopped.err.splitlines()[-2:] == [
        f"error: stopped; nothing is left running; 0 of {len(held)} searches for a floor finished",
        "resume it: weighin floor --resume found",
    ]
    refused = command.run("bench", "--resume", "found")
    assert (refused.code, refused.err) == (
        2,
        "error: found contains a search for floors (weighin floor)\nto resume it: weighin"
        " floor --resume found\n",
    )
    ended = command.run("floor", "--resume", "found", "--json", "-", patience_s=400)
    assert (ended.code, ended.left) == (0, [])
    floors = {floor["strategy"]: floor for floor in json.loads(ended.out)["floors"]}
    assert list(floors) == list(held)
    for floor in floors.values():
        assert (floor["message"], floor["step_bytes"], floor["passed"]) == ("", 8 * MIB, 3)
        assert floor["failed"] >= 1
        assert floor["with_room"]["verdict"] in ("survives", "thrashes")
    few, last = floors["few"], floors[[*held][-1]]
    assert few["floor_bytes"] >= FEW * MIB + 100 * MIB  # torch's own anonymous memory is more
    apart = last["floor_bytes"] - few["floor_bytes"]
    assert apart == pytest.approx((held[last["strategy"]] - FEW) * MIB, abs=8 * MIB)
    cells = [json.dumps(one["cell"], sort_keys=True) for one in records(command)]
    assert len(cells) == len(set(cells)) == sum(floor["cells"] for floor in floors.values())
    assert f"floor of {last['strategy']}: above " in ended.err


SPOILING = '''"""Load rightly the first time, then with one value changed."""

import pathlib

import torch


def load_rightly(job):
    model = job.build_model()
    model.load_state_dict(torch.load(job.checkpoint, weights_only=True))
    return model


SEEN = pathlib.Path(__file__).with_suffix(".seen")


def load(job):
    model = load_rightly(job)
    if SEEN.exists():
        next(model.parameters()).data.view(-1)[0] += 1
    SEEN.touch()
    return model
'''


@pytest.mark.cgroup
def test_a_load_that_is_wrong_under_a_limit_ends_the_search_and_is_named(
    command: CommandLine,
) -> None:
    (command.folder / "spoiling.py").write_text(SPOILING)
    ended = command.run(
        *("floor", "gpt2-tiny", "--isolation", "cgroup", "-s", "./spoiling.py", "--json", "-"),
        patience_s=200,
    )
    assert (ended.code, ended.left) == (5, [])
    (floor,) = json.loads(ended.out)["floors"]
    assert (floor["floor_bytes"], floor["below"], floor["cells"]) == (None, "", 2)
    assert floor["message"].startswith("wrong_weights under ")
    assert f"no floor for spoiling: {floor['message']}" in ended.err
    assert ended.err.splitlines()[-1].startswith("error: spoiling under ")
