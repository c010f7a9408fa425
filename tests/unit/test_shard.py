"""A plan that is divided into shards: every cell is in one of them."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighin.errors import ConfigError
from weighin.plan.start import resume, start
from weighin.plan.task import Run
from weighin.records.run_folder import in_shard
from weighin.settings.definition import check_suite


@given(cells=st.integers(0, 60), count=st.integers(1, 12))
def test_every_cell_is_in_one_shard(cells: int, count: int) -> None:
    plan = list(range(cells))
    shards = [in_shard(plan, f"{index}/{count}") for index in range(1, count + 1)]
    assert sorted(cell for shard in shards for cell in shard) == plan
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "1/0", "a/b", "-1/4", "1/4/2"])
def test_a_text_that_is_no_shard(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        in_shard([], text)
    assert str(caught.value) == (
        f"cannot read {text!r} as a shard\n"
        "write the shard's number, from 1, and the number of shards: 2/8"
    )


def started(shard: str) -> Run:
    suite = {"models": "gpt2-tiny", "strategies": ["baseline", "streaming", "sequential"]}
    settings = check_suite(suite | {"isolation": "process", "shard": shard})
    return start(settings, Path("run"))[0]


def test_a_run_of_a_shard_has_the_whole_plan_and_its_own_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = started("2/2")
    assert [each.cell.strategy for each in run.planned] == ["streaming"]
    plan = json.loads(Path("run/plan.json").read_text())
    assert [cell["strategy"] for cell in plan["cells"]] == ["baseline", "streaming", "sequential"]
    assert plan["settings"]["shard"] == "2/2"
    assert [each.cell for each in resume(Path("run")).planned] == [
        each.cell for each in run.planned
    ]


def test_more_shards_than_cells_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        started("4/4")
    assert str(caught.value) == (
        "shard 4/4: the plan has only 3 cells\ndivide the plan into 3 shards at most"
    )
    assert not Path("run").exists()
