"""What records say of a way of loading: which of them count, and what they tell."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import make_cell, make_result
from pytest import MonkeyPatch
from ran_commands import make_command, make_ran

from weighin.errors import RecordError
from weighin.probes import environment
from weighin.recommend.prior_runs import Evidence, find
from weighin.records import run_folder
from weighin.result import Outcome, Result, Use
from weighin.units import GIB

HERE = {"machine": "x86_64", "cpu": "Example CPU", "cpus": 2, "ram_bytes": 24 * GIB}
WANTED = make_cell("streaming", ram_limit_bytes=None)


@pytest.fixture(autouse=True)
def _this_machine(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "machine", lambda: HERE | {"kernel": "7.0"})


def measured(strategy: str = "streaming", **changes: Any) -> Result:
    cell = make_cell(strategy, **{"ram_limit_bytes": None} | changes)
    return replace(make_result(cell, outcome=Outcome.OK), environment=dict(HERE))


def run(folder: Path, *results: Result) -> Path:
    for one in results:
        run_folder.append(folder, one)
    return folder


def test_records_are_sorted_by_strategy_and_layout(tmp_path: Path) -> None:
    run(tmp_path / "a", measured(), measured("baseline"))
    run(tmp_path / "b", measured(format="safetensors"), measured(repeat=1))
    (tmp_path / "no run").mkdir()
    found = find([tmp_path], WANTED)
    assert {key: len(one.ok_limits) for key, one in found.items()} == {
        ("streaming", "pt"): 2,
        ("streaming", "safetensors"): 1,
        ("baseline", "pt"): 1,
    }
    assert find([tmp_path / "a"], WANTED).keys() == {("streaming", "pt"), ("baseline", "pt")}


def test_commands_do_not_count(tmp_path: Path) -> None:
    same = replace(
        make_command(), model=WANTED.model, dtype=WANTED.dtype, format=WANTED.format, cache="cold"
    )
    result = make_ran(same, environment=measured().environment)
    assert find([run(tmp_path, result)], WANTED) == {}
    load = replace(same, operation="load", command=())
    assert len(find([run(tmp_path / "load", replace(result, cell=load))], WANTED)) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "bfloat16"},
        {"device": "cuda"},
        {"cache": "warm"},
        {"options": {"threads": 1}},
        {"model": replace(WANTED.model, kwargs={})},
        {"operation": "save"},
        {"vram_limit_bytes": GIB},
        {"disk_bytes_per_s": 200_000_000},
        {"disk_latency_ns": 5_000_000},
    ],
)
def test_other_loads_do_not_count(tmp_path: Path, other: dict[str, Any]) -> None:
    assert find([run(tmp_path, measured(**other))], WANTED) == {}


def test_of_a_load_with_another_use_only_the_ready_time_counts(tmp_path: Path) -> None:
    use = Use(anon_sampled_bytes=8 * GIB, children_private_bytes=(GIB, GIB))
    trained = replace(measured(use="adamw"), use=use)
    killed = replace(measured(use="adamw", ram_limit_bytes=GIB), outcome=Outcome.OOM_KILLED)
    runs = [run(tmp_path, measured(), trained, killed)]
    load = find(runs, WANTED)["streaming", "pt"]
    assert (len(load.ok_limits), load.killed_limits, len(load.ready_s[None])) == (1, [], 2)
    both = find(runs, replace(WANTED, use="adamw"))["streaming", "pt"]
    assert (len(both.ok_limits), both.killed_limits, len(both.ready_s[None])) == (1, [GIB], 2)
    assert (load.anon_bytes or 0) < 8 * GIB
    assert both.anon_bytes == 10 * GIB


@pytest.mark.parametrize("name", HERE)
def test_other_machines_do_not_count(tmp_path: Path, name: str) -> None:
    one = measured()
    elsewhere = replace(one, environment=one.environment | {name: "another"})
    assert find([run(tmp_path, elsewhere)], WANTED) == {}


def test_a_newer_kernel_is_the_same_machine(tmp_path: Path) -> None:
    one = measured()
    before = replace(one, environment=one.environment | {"kernel": "6.1"})
    assert find([run(tmp_path, before)], WANTED).keys() == {("streaming", "pt")}


def test_a_damaged_run_among_others_is_left_out_and_named(tmp_path: Path) -> None:
    run(tmp_path / "a", measured())
    damaged = run(tmp_path / "b", measured())
    (damaged / run_folder.RECORDS).write_text("{}\n")
    texts: list[str] = []
    assert find([tmp_path], WANTED, texts.append).keys() == {("streaming", "pt")}
    assert [text.startswith(str(damaged / run_folder.RECORDS)) for text in texts] == [True]


def test_a_damaged_run_that_was_named_is_an_error(tmp_path: Path) -> None:
    folder = run(tmp_path, measured())
    (folder / run_folder.RECORDS).write_text("{}\n")
    with pytest.raises(RecordError):
        find([folder], WANTED)


def test_what_lives_under_a_limit_lives_under_a_higher_one() -> None:
    found = Evidence(ok_limits=[None, 4 * GIB], killed_limits=[2 * GIB])
    limits = [1 * GIB, 2 * GIB, 3 * GIB, 4 * GIB, 5 * GIB]
    assert [found.fits(one) for one in limits] == [False, False, None, True, True]
    assert Evidence(ok_limits=[None]).fits(GIB) is None


def test_a_killed_cell_tells_its_limit_and_no_figure() -> None:
    found = Evidence()
    found.take(make_result(make_cell("baseline", ram_limit_bytes=GIB), outcome=Outcome.OOM_KILLED))
    assert found == Evidence(killed_limits=[GIB])


def test_the_largest_anonymous_peak_counts() -> None:
    found = Evidence()
    for anon in (3, 5, 4):
        one = measured()
        peaks = replace(one.peaks, anon_sampled_bytes=anon * GIB)
        found.take(replace(one, peaks=peaks, ready_ns=anon * 10**9))
    assert (found.anon_bytes, found.ready_s) == (5 * GIB, {None: [3.0, 5.0, 4.0]})


def test_times_are_those_under_the_limit_that_is_asked_for() -> None:
    found = Evidence(ready_s={None: [1.0, 2.0, 9.0], 4 * GIB: [3.0], GIB: [60.0]})
    limits = [None, 8 * GIB, 4 * GIB, 2 * GIB, GIB, GIB // 2]
    assert [found.median_ready_s(one) for one in limits] == [2.0, 2.0, 3.0, 3.0, 60.0, 60.0]
    assert Evidence(ready_s={GIB: [60.0]}).median_ready_s(None) == 60.0
    assert Evidence().median_ready_s(None) is None


def test_the_noise_is_how_far_the_middle_repeat_is_from_the_median() -> None:
    found = Evidence(ready_s={None: [1.0, 2.0, 9.0], 4 * GIB: [3.0], GIB: [60.0, 62.0]})
    limits = [None, 8 * GIB, 4 * GIB, GIB]
    assert [found.noise_s(one) for one in limits] == [1.0, 1.0, None, 1.0]
    assert Evidence().noise_s(None) is None
