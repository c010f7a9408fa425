"""What records say of a way of loading: which of them count, and what they tell."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import make_cell, make_result, run_of
from pytest import MonkeyPatch
from ran_commands import make_command

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


def elsewhere(**changes: Any) -> Result:
    one = measured()
    return replace(one, environment=one.environment | changes)


def test_records_are_sorted_by_strategy_and_layout(tmp_path: Path) -> None:
    run_of(tmp_path / "a", measured(), measured("baseline"))
    run_of(tmp_path / "b", measured(format="safetensors"), measured(repeat=1))
    (tmp_path / "no run").mkdir()
    found = find(tmp_path, WANTED)
    assert {key: len(one.ok_limits) for key, one in found.items()} == {
        ("streaming", "pt"): 2, ("streaming", "safetensors"): 1, ("baseline", "pt"): 1,
    }  # fmt: skip
    assert find(tmp_path / "a", WANTED).keys() == {("streaming", "pt"), ("baseline", "pt")}


OTHERS: dict[str, Result] = {
    "dtype": measured(dtype="bfloat16"),
    "device": measured(device="cuda"),
    "cache": measured(cache="warm"),
    "options": measured(options={"threads": 1}),
    "model": measured(model=replace(WANTED.model, kwargs={})),
    "operation": measured(operation="save"),
    "vram": measured(vram_limit_bytes=GIB),
    "disk": measured(disk_bytes_per_s=200_000_000),
    "latency": measured(disk_latency_ns=5_000_000),
    **{name: elsewhere(**{name: "another"}) for name in HERE},
    "command": measured(operation="command", command=make_command().command),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_loads_and_other_machines_do_not_count(tmp_path: Path, other: str) -> None:
    assert find(run_of(tmp_path / "other", OTHERS[other]), WANTED) == {}
    assert len(find(run_of(tmp_path / "same", elsewhere(kernel="6.1")), WANTED)) == 1


def test_of_a_load_with_another_use_only_the_ready_time_counts(tmp_path: Path) -> None:
    use = Use(anon_sampled_bytes=8 * GIB, children_private_bytes=(GIB, GIB))
    trained = replace(measured(use="adamw"), use=use)
    killed = replace(measured(use="adamw", ram_limit_bytes=GIB), outcome=Outcome.OOM_KILLED)
    run = run_of(tmp_path, measured(), trained, killed)
    load = find(run, WANTED)["streaming", "pt"]
    assert (len(load.ok_limits), load.killed_limits, len(load.ready_s[None])) == (1, [], 2)
    both = find(run, replace(WANTED, use="adamw"))["streaming", "pt"]
    assert (len(both.ok_limits), both.killed_limits, len(both.ready_s[None])) == (1, [GIB], 2)
    assert (load.anon_bytes or 0) < 8 * GIB
    assert both.anon_bytes == 10 * GIB


def test_a_damaged_run_is_left_out_and_named_and_an_error_if_it_was_named(tmp_path: Path) -> None:
    run_of(tmp_path / "a", measured())
    damaged = run_of(tmp_path / "b", measured())
    (damaged / run_folder.RECORDS).write_text("{}\n")
    texts: list[str] = []
    assert find(tmp_path, WANTED, texts.append).keys() == {("streaming", "pt")}
    assert [text.startswith(str(damaged / run_folder.RECORDS)) for text in texts] == [True]
    with pytest.raises(RecordError):
        find(damaged, WANTED)


def test_what_lives_under_a_limit_lives_under_a_higher_one() -> None:
    found = Evidence(ok_limits=[None, 4 * GIB], killed_limits=[2 * GIB])
    limits = [1 * GIB, 2 * GIB, 3 * GIB, 4 * GIB, 5 * GIB]
    assert [found.fits(one) for one in limits] == [False, False, None, True, True]
    assert Evidence(ok_limits=[None]).fits(GIB) is None


def test_the_largest_anonymous_peak_counts_and_a_killed_cell_tells_its_limit_alone() -> None:
    found = Evidence()
    for anon in (3, 5, 4):
        one = measured()
        peaks = replace(one.peaks, anon_sampled_bytes=anon * GIB)
        found.take(replace(one, peaks=peaks, ready_ns=anon * 10**9))
    assert (found.anon_bytes, found.ready_s) == (5 * GIB, {None: [3.0, 5.0, 4.0]})
    killed = Evidence()
    killed.take(make_result(make_cell("baseline", ram_limit_bytes=GIB), outcome=Outcome.OOM_KILLED))
    assert killed == Evidence(killed_limits=[GIB])


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
