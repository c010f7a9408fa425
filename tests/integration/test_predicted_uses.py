"""Predictions of the memory in a use of the loaded model, against measurements of the same cells."""

from __future__ import annotations

import json
from typing import Any

import predicted_runs
import pytest
from nightly import nightly
from typed import CommandLine

from weighin.units import MIB

CELLS = ("--use", "write,adamw", "--strategies", "mmap_assign,streaming")


def compared(command: CommandLine, run: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = predicted_runs.as_json(
        predicted_runs.check(command.folder / run)
    )["checked"]
    return found


@pytest.mark.parametrize("model", ["gpt2-tiny", *nightly("gpt2-small")])
def test_the_memory_of_a_use_is_predicted_within_1_percent_and_16_mib(
    command: CommandLine, model: str
) -> None:
    bench = ("bench", model, *CELLS, "--isolation", "process", "--out", "run")
    ended = command.run(*bench, patience_s=600)
    assert ended.code == 0, ended.err
    cells = compared(command, "run")
    assert len(cells) == 4
    wrong = {}
    for cell in cells:
        assert cell["cannot"] == ""
        figures = {name: sizes for name, sizes in cell["figures"].items() if "file" not in name}
        assert {name.partition("_")[0] for name in figures} == {"host", "use"}
        for name, sizes in figures.items():
            predicted, measured = sizes["predicted"], sizes["measured"]
            if abs(predicted - measured) > measured * 0.01 + 16 * MIB:
                wrong[cell["strategy"], cell["use"], name] = (predicted, measured)
    assert wrong == {}


@pytest.mark.cgroup
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("use", ["adamw", "write", "deepcopy"])
def test_a_load_and_its_use_live_under_their_predicted_floor(
    command: CommandLine, use: str
) -> None:
    for strategy in ("mmap_assign", "streaming"):
        cells = ("gpt2-small", "--use", use, "--strategies", strategy)
        predicted = command.run("predict", *cells, "--json", "-", patience_s=300)
        (one,) = json.loads(predicted.out)["predictions"]
        limit = ("--ram", f"{one['floor_bytes']}", "--isolation", "cgroup", "--out", strategy)
        ended = command.run("bench", *cells, *limit, patience_s=600)
        assert ended.code == 0, ended.err
        (record,) = command.records(strategy)
        assert (record["outcome"], record["oom_kills"]) == ("ok", 0), record["message"]
