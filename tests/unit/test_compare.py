"""How many runs are compared, and floors over time; what ``compare`` says is a session of test_check."""

from pathlib import Path

import pytest
from factories import make_result, refused, run_of
from test_evaluate import STREAMING, search

from weighin.gate.compare import compare, history
from weighin.units import MIB


@pytest.mark.parametrize("count", [0, 1, 27])
def test_two_to_26_runs_can_be_compared(count: int, tmp_path: Path) -> None:
    run = run_of(tmp_path, make_result(STREAMING))
    said = refused(compare, [run] * count)
    assert said.startswith(f"cannot compare {count} run{'s' * (count != 1)}\n")
    assert len(compare([run] * 26)[1]["runs"]) == 26
    assert len(compare([run] * 2)[1]["runs"]) == 2


def test_the_floor_of_a_search_over_time(tmp_path: Path) -> None:
    for name, floor_mib in (("a", 6800), ("b", 7100)):
        run_of(tmp_path / name, *search(floor_mib).results, within=0.01)
    (series,) = history(tmp_path, "floor")[1]["series"]
    assert [one["median"] for one in series["points"]] == [6800 * MIB, 7100 * MIB]
    assert [one["before"] for one in series["steps"]] == [6800 * MIB]
