"""The search that ``weighin floor`` performs: what it tries next, what it says, how it is resumed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import PlayedIsolation
from ran_commands import make_command, settings_of
from test_floor import CELL, above, lived, search

from weighin.cli.measure import share
from weighin.errors import ConfigError, RecordError
from weighin.isolation import cgroup
from weighin.plan import start as plans
from weighin.plan.task import Planned, Progress, Run
from weighin.records import run_folder
from weighin.records.floor import Aim
from weighin.result import Outcome, Result
from weighin.run import runner
from weighin.run.runner import said
from weighin.settings.definition import Settings
from weighin.units import GIB, MIB

FIRST = lived(None, Outcome.OK, 1000 * MIB)
OTHER = replace(CELL, strategy="baseline")


def searching(*cells: Any, skip: str = "", **settings: Any) -> Run:
    planned = [Planned(cell) for cell in cells or (CELL,)]
    planned[0] = replace(planned[0], skip=skip)
    usual: dict[str, Any] = {"within": 0.01, "aim": Aim.SURVIVES}
    chosen = Settings().model_copy(update=usual | settings)
    return Run(Path("run"), planned, PlayedIsolation([]), chosen)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[Result]:
    """The results of the cells so far; each search continues after them."""
    results: list[Result] = []
    monkeypatch.setattr(cgroup, "ram_bytes", lambda _: (64 * GIB, 64 * GIB))

    def run(task: Run, _: Progress, following: Any) -> list[Result]:
        while (planned := following(results)) is not None:
            limit = planned.cell.ram_limit_bytes
            works = limit is None or limit >= 1010 * MIB
            outcome = Outcome.OK if works else Outcome.OOM_KILLED
            if planned.skip:
                outcome = Outcome.SKIPPED
            one = lived(limit, outcome, 1000 * MIB, planned.cell.repeat)
            results.append(replace(one, cell=planned.cell))
        return results

    monkeypatch.setattr(runner, "run", run)
    return results


def test_floors_are_found_one_after_the_other_and_each_step_is_told(played: list[Result]) -> None:
    told: list[str] = []
    skipped = replace(CELL, strategy="broken")
    task = searching(skipped, CELL, OTHER, skip="no")
    found = runner.search(task, Progress(narrowed=told.append))
    assert found is played
    assert [one.cell.strategy for one in found] == ["broken"] + ["streaming"] * 6 + ["baseline"] * 6
    limits = [(one.cell.ram_limit_bytes or 0) // MIB for one in found]
    assert limits == [0] + 2 * [0, 1008, 1016, 1016, 1016, 1118]
    assert len(told) == 12  # after each cell of a search
    assert told[:2] == [
        "floor of streaming: not known yet",
        "floor of streaming: above 1008.000 MiB",
    ]
    assert told[5].startswith("floor of streaming: above 1008.000 MiB, at most 1016.000 MiB")
    assert told[-1].startswith("floor of baseline: ")


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ([], "floor of streaming: not known yet"),
        ([FIRST], "floor of streaming: not known yet"),
        (
            [FIRST, lived(GIB, Outcome.OOM_KILLED, GIB)],
            "floor of streaming: above 1.000 GiB",
        ),
        (
            [FIRST, lived(GIB, Outcome.OK, GIB)],
            "floor of streaming: at most 1.000 GiB",
        ),
        (
            search(above(1010 * MIB))[:4],
            "floor of streaming: above 1008.000 MiB, at most 1016.000 MiB",
        ),
        (
            [replace(FIRST, outcome=Outcome.WRONG_WEIGHTS, message="1 tensor differs")],
            "no floor for streaming: wrong_weights without a limit: 1 tensor differs",
        ),
    ],
)  # fmt: skip
def test_the_bounds_of_a_floor_in_words(results: list[Result], words: str) -> None:
    assert said(Planned(CELL), results, Aim.SURVIVES) == words


@pytest.mark.parametrize("within", ["0", "-1%", "10.01%", "abc", "nan%"])
def test_a_step_must_be_a_share_of_the_floor(within: str) -> None:
    with pytest.raises(ConfigError) as caught:
        share(within)
    assert str(caught.value) == (
        f"--within: '{within}' is no share between 0% and 10%\n"
        "write a percentage in this range, such as --within 1%"
    )


def test_only_a_search_is_resumed_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cell = make_command()
    for name, within in (("search", 0.01), ("run", None)):
        run_folder.write_plan(Path(name), [cell], settings_of(cell, within=within).as_json())
    assert plans.resume(Path("search"), trusted=True, search=True).settings.within == 0.01
    with pytest.raises(RecordError) as caught:
        plans.resume(Path("run"), trusted=True, search=True)
    assert str(caught.value) == (
        "run contains a run that is no search for floors\nto resume it: weighin run --resume run"
    )
    with pytest.raises(RecordError) as caught:
        plans.resume(Path("search"), trusted=True)
    assert str(caught.value) == (
        "search contains a search for floors (weighin floor)\nto resume it: weighin floor"
        " --resume search"
    )
