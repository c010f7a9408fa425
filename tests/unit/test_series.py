"""Cells and series of cells: their names, rows, figures, and what a report says of ranks, uses and limits."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import (
    IMPORT,
    MODEL_BYTES,
    make_cell,
    make_result,
    make_samples,
    make_skipped,
    write_samples,
)
from snapshots import Compare
from sweeps import swept

from weighin.cell import ModelSpec
from weighin.records import metrics
from weighin.records.floor import floors, next_cell
from weighin.records.metrics import COLUMNS, largest, latest, middle, outcome_of
from weighin.records.run_folder import Records, read_samples
from weighin.records.series import (
    Figure,
    Measured,
    RankSeries,
    Row,
    Series,
    labels_among,
    name_of,
    row_of,
    selects,
    summarise,
)
from weighin.records.verdict import used_ns
from weighin.result import Cost, Faults, Memory, Outcome, Peaks, Phase, Rank, Result, Use
from weighin.show.findings import findings, floor_label, unreclaimable
from weighin.show.table import markdown
from weighin.suite import registry
from weighin.units import GIB, MIB

SECOND = 1_000_000_000


# Names --------------------------------------------------------------------------------------------


TITLES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-xl": ("gpt2-xl", {}),
    "mynets:build": ("mynets:build", {}),
    "mynets:build(width=64)": ("mynets:build", {"width": 64}),
    'my.nets:build(a="x y",b=[1,2])': ("my.nets:build", {"b": [1, 2], "a": "x y"}),
    "m:Net.small(deep=true)": ("m:Net.small", {"deep": True}),
}


def test_a_model_is_called_by_its_name_or_by_its_builder_with_its_arguments() -> None:
    specs = [registry.model(name, kwargs) for name, kwargs in TITLES.values()]
    assert [one.title for one in specs] == [*TITLES]
    firsts = [name_of(make_cell(model=one)).partition(" mmap_assign pt ")[0] for one in specs]
    assert firsts == [title.replace(" ", "_") for title in TITLES]


def test_long_arguments_are_cut_and_still_told_apart() -> None:
    kwargs: list[dict[str, object]] = [{"layers": [*range(100), last]} for last in (1, 2, 1)]
    first, other, same = (registry.model("mynets:build", each).title for each in kwargs)
    assert first == same != other
    assert first.startswith("mynets:build(layers=[0,1,2,") and len(first) < 80


NAMES: dict[str, dict[str, Any]] = {
    "cold docker ram=none": {"ram_limit_bytes": None},
    "warm cgroup ram=8GiB": {"cache": "warm", "isolation": "cgroup"},
    "cold docker ram=8GiB vram=1GiB": {"vram_limit_bytes": 2**30},
    "cold docker ram=8GiB ram_high=1GiB": {"ram_high_bytes": 2**30},
    "cold docker ram=8GiB operation=save": {"operation": "save"},
    "cold docker ram=8GiB passes=0": {"passes": 0},
    "cold docker ram=8GiB passes=2": {"passes": 2},
    "cold docker ram=8GiB use=fork": {"passes": 0, "use": "fork"},
    "cold docker ram=8GiB ranks=2": {"ranks": 2},
    "cold docker ram=8GiB disk=50MB/s": {"disk_bytes_per_s": 50_000_000},
    "cold docker ram=8GiB a=x_y b=1": {"options": {"b": 1, "a": "x y"}},
    "cold docker ram=8GiB A=1": {"environment": {"A": "1"}},
}


def test_what_distinguishes_a_cell_is_in_its_name() -> None:
    of_model = "gpt2-xl mmap_assign pt float32 cpu"
    names = [name_of(make_cell(**changes)) for changes in NAMES.values()]
    assert names == [f"{of_model} {words}" for words in NAMES]


def test_a_selector_matches_words_of_a_name() -> None:
    name = name_of(make_cell())
    for selector in ("mmap_assign", "mmap*", "ram=8GiB mmap_assign", "*", "", name):
        assert selects(selector, name), selector
    for selector in ("mmap", "mmap_assign ram=4GiB", "MMAP*"):
        assert not selects(selector, name), selector
    assert selects("a [x", "a [x")  # a whole name matches itself


def test_a_label_has_only_what_differs_among_the_cells_of_its_strategy() -> None:
    cell = make_cell(options={"x": 1}, environment={"A": "1"})
    for other, label in (
        (make_cell("streaming", format="dcp"), "mmap_assign"),
        (replace(cell, format="dcp"), "mmap_assign pt"),
        (replace(cell, options={}), "mmap_assign x=1"),
        (replace(cell, environment={}), "mmap_assign A=1"),
        (replace(cell, ram_limit_bytes=5), "mmap_assign"),
    ):
        assert labels_among([cell, other])(cell) == label


# Figures ------------------------------------------------------------------------------------------


def test_the_median_is_a_figure_of_one_repeat_and_values_may_be_missing() -> None:
    """Of an even number it is the lower of the middle two."""
    assert [middle(each) for each in ([20, None, 5, 10, 25], [9, 1, 4], [2, 1], [3])] == [10, 4, 1, 3]  # fmt: skip
    assert [largest(each) for each in ([None, 3, 7, None, 5], [0, None])] == [7, 0]
    assert Figure.of([5, None, 1, 9, 7]) == Figure(1, 5, 9)
    for none in ([None], []):
        assert [middle(none), largest(none), Figure.of(none)] == [None] * 3


def test_the_last_record_of_a_cell_counts_at_the_place_of_the_first() -> None:
    first, other = make_result(make_cell()), make_result(make_cell(repeat=1))
    again = replace(first, message="again")
    assert latest([first, other, again]) == [again, other]


@pytest.mark.parametrize(
    ("outcomes", "text", "failures"),
    [
        ("ok ok", "ok", set()),
        ("timeout", "timeout", {"timeout"}),
        ("ok timeout ok", "ok 2, timeout 1", {"timeout"}),
        ("ok timeout oom_killed", "ok 1, timeout 1, oom_killed 1", {"timeout", "oom_killed"}),
    ],
)
def test_the_outcomes_of_repeats_are_one_or_are_counted(
    outcomes: str, text: str, failures: set[str]
) -> None:
    assert outcome_of([Outcome(one) for one in outcomes.split()]) == text
    assert Series(text, 1).failures == failures
    assert Series(text, 1).is_ok == (text == "ok")


def test_a_series_has_the_figures_of_its_good_repeats_and_the_message_of_a_bad_one() -> None:
    ends = [(30, ""), (99, "late"), (10, ""), (98, "later"), (20, "")]
    results = [
        make_result(
            make_cell(repeat=number),
            load_ns=ns,
            outcome=Outcome.TIMEOUT if message else Outcome.OK,
            message=message,
        )
        for number, (ns, message) in enumerate(ends)
    ]
    results[0] = replace(results[0], model_bytes=None)
    (found,) = summarise([Records(results[:3]), Records(results[3:])]).values()
    assert found.figures["load"] == Figure(10, 20, 30)
    assert (found.outcome, found.repeats, found.message) == ("ok 3, timeout 2", 5, "late")
    assert (found.model_bytes, found.limit_bytes) == (results[1].model_bytes, 8 * 2**30)
    (bad,) = summarise([Records([results[1]])]).values()
    assert (bad.figures, bad.phases) == ({}, {})
    again = replace(results[0], load_ns=5)
    (last,) = summarise([Records([results[0], again])]).values()
    assert (last.figures["load"], last.repeats) == (Figure(5, 5, 5), 1)


def test_two_models_whose_builders_share_a_function_name_are_two_series() -> None:
    builders = [("mynets:build", {}), ("othernets:build", {}), ("mynets:build", {"width": 64})]
    results = [make_result(make_cell(model=ModelSpec("build", *one))) for one in builders]
    assert len(summarise([Records(results)])) == len(series(results)) == 3


# Rows ---------------------------------------------------------------------------------------------


def series(results: Sequence[Result]) -> list[Row]:
    return Measured.of(Path(), Records(tuple(results))).rows


def test_what_was_not_measured_is_none() -> None:
    row = row_of(make_skipped())
    assert all(row[name] is None for name in COLUMNS)


def test_the_figures_of_a_mixed_series_are_those_of_its_ok_repeats() -> None:
    good = make_result(make_cell("streaming"))
    late: dict[str, Any] = {
        "outcome": Outcome.TIMEOUT,
        "peaks": Peaks(rss_bytes=1),
        "message": "slow",
    }
    (row,) = series([make_result(make_cell("streaming", repeat=1), **late), good])
    assert (row["outcome"], row["message"]) == ("timeout 1, ok 1", "slow")
    assert row["peak_rss_bytes_min"] == good.peaks.rss_bytes


def test_samples_are_read_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    result = make_result()
    with write_samples(tmp_path, result).open("a") as file:
        file.write("400000")
    assert read_samples(tmp_path, result.samples_path) == make_samples(result)
    assert read_samples(tmp_path, None) == read_samples(tmp_path, "none.csv") == []


HEAD = "t_ns,rss_bytes,anon_bytes,file_bytes,shmem_bytes,swap_bytes,minor_faults,major_faults\n9,1,2,3,4,5,6,7\n"
FILES = {
    f"{HEAD}8,1,2,3,4,5,6,7\n": [8, 9], f"{HEAD}5,1,2,3\n": [9], f"{HEAD}5,1,2,3,4,5,6,-7\n": [9],
    f"{HEAD}5,1,2,3,4,5,6,x\n": [9], f"{HEAD}5,1,2,3,4,5,6,{2**63}\n": [9],
    "": [], "t_ns\n": [], "t_ns,rss_bytes\n1,2\n": [], "\x00": [],
}  # fmt: skip
"""Samples as text, and the times of those that are read."""


@pytest.mark.parametrize("text", FILES)
def test_a_row_with_missing_or_impossible_figures_is_left_out(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.csv").write_text(text)
    assert [sample.t_ns for sample in read_samples(tmp_path, "x.csv")] == FILES[text]
    assert read_samples(tmp_path / "y", "../x.csv") == []


# Ranks --------------------------------------------------------------------------------------------

BEFORE = 300 * MIB


def ranked(ranks: int, copies: float, strategy: str = "baseline", **changes: Any) -> Result:
    """A cell whose cgroup peaks this many models above the imports of all ranks."""
    before = BEFORE * ranks
    cell = make_cell(strategy, **{"ranks": ranks, "ram_limit_bytes": None, **changes})
    return replace(
        make_result(cell),
        model_bytes=MODEL_BYTES,
        baseline=Memory(BEFORE, BEFORE, 0, 0, cgroup_bytes=before),
        peaks=Peaks(
            rss_bytes=BEFORE + MODEL_BYTES,
            cgroup_bytes=before + round(copies * MODEL_BYTES),
            anon_sampled_bytes=before + round(copies * MODEL_BYTES),
            pss_bytes=before + MODEL_BYTES if ranks > 1 else None,
        ),
        ranks=(Rank(peak_rss_bytes=BEFORE + MODEL_BYTES),) * ranks if ranks > 1 else (),
    )


def test_the_growth_is_the_slope_over_the_ranks() -> None:
    for charges, growth in (
        ({1: 200, 2: 400, 4: 800}, "linear (2.00x a rank)"),
        ({1: 100, 4: 110}, "flat (0.03x a rank)"),
        ({2: 100, 4: 200}, "between (0.50x a rank)"),
        ({1: 100, 5: 196}, "flat (0.24x a rank)"),
        ({1: 100, 5: 200}, "between (0.25x a rank)"),
        ({1: 100, 5: 396}, "between (0.74x a rank)"),
        ({1: 100, 5: 400}, "linear (0.75x a rank)"),
        ({4: 100}, "-"),
    ):
        assert RankSeries(make_cell(), {}, charges, 100).growth == growth
        assert RankSeries(make_cell(), {}, charges, None).growth == "-"


def test_memory_that_cannot_be_given_back_is_above_the_imports_of_all_ranks() -> None:
    one = ranked(2, 1.0)
    shared = replace(one.peaks, unreclaimable_sampled_bytes=3 * BEFORE)
    small = replace(one.peaks, anon_sampled_bytes=BEFORE)
    before = Memory(BEFORE, BEFORE - 10, 0, 10, cgroup_bytes=5)
    found = [
        (one, MODEL_BYTES),
        (replace(one, peaks=shared), BEFORE),
        (replace(one, peaks=small), 0),
        (replace(one, peaks=Peaks()), None),
        (replace(one, baseline=None), None),
        (replace(one, baseline=before), MODEL_BYTES),
    ]
    assert [unreclaimable(each) for each, _ in found] == [size for _, size in found]


def test_a_sum_of_peaks_needs_the_peak_of_every_rank() -> None:
    one = ranked(2, 1.0)
    assert metrics.sum_of_peaks(one) == 2 * (BEFORE + MODEL_BYTES)
    for ranks in ((), (*one.ranks, Rank())):
        assert metrics.sum_of_peaks(replace(one, ranks=ranks)) is None


# Uses ---------------------------------------------------------------------------------------------

USE_COLUMNS = ("use_s", "use_peak_rss_bytes", "use_peak_cgroup_bytes", "use_anon_bytes", "use_child_bytes", "use_anon_sampled_bytes")  # fmt: skip
PASSES = [(10, 300, 700, 50), (5, 200, 900, 60), (7, 100, None, 40)]
"""Forward passes: their time, peak RSS, peak of the cgroup, and anonymous memory after them."""


def passed(use: Use | None, *passes: tuple[int, int, int | None, int]) -> Result:
    result = make_result(make_cell("baseline"), [("import", 1, 0.1, 0.1), ("read", 1, 1, 0)])
    phases = tuple(
        Phase("forward", 100, 100 + ns, rss, Memory(rss, anon, 0, 0), 0, 0, peak_cgroup_bytes=group)
        for ns, rss, group, anon in passes
    )
    return replace(result, phases=(*result.phases, *phases), use=use)


@pytest.mark.parametrize(
    ("result", "figures", "needed_bytes"),
    [
        (passed(None, *PASSES), [22, 300, 900, 40, None, None], 0),
        (passed(None), [None] * 6, 0),
        (passed(Use(1000, "", (30, 50, 20)), *PASSES), [22, 300, 900, 40, 50, 1000], 1100),
        (passed(Use(None, "backward", ()), *PASSES), [22, 300, 900, 40, None, None], 0),
    ],
    ids=["passes", "no use", "forked processes", "nothing sampled"],
)
def test_the_figures_of_a_use_are_of_all_passes_and_the_memory_is_that_after_the_last(
    result: Result, figures: list[int | None], needed_bytes: int
) -> None:
    assert [COLUMNS[name].read(result) for name in USE_COLUMNS] == figures
    assert metrics.use_needed_bytes(result) == needed_bytes


def test_memory_as_a_multiple_of_the_model_counts_from_the_imports() -> None:
    result = replace(make_result(), model_bytes=200, baseline=Memory(90, 50, 0, 0))
    assert metrics.per_model(result, 450) == pytest.approx(2.0)
    assert metrics.per_model(result, None) is None
    for unknown in ({"baseline": None}, {"model_bytes": None}, {"model_bytes": 0}):
        assert metrics.per_model(replace(result, **unknown), 450) is None


def used(use: str, loaded: float = 1.0, after: float = 4.0, **options: Any) -> Result:
    """A load of 1 GiB whose use takes 2 s; its anonymous memory is given in GiB above the import."""
    is_forward = use == "forward"
    changes: dict[str, Any] = {"use": "" if is_forward else use, "passes": int(is_forward)}
    script = (
        IMPORT,
        ("load", 1, 0.19 + loaded, 0.11),
        ("touch", 1, 0.19 + loaded, 0.11),
        (use if is_forward else f"use: {use}", 2, 0.19 + after, 0.11),
    )
    return make_result(
        make_cell(ram_limit_bytes=None, options=options, **changes),
        script,
        model_bytes=GIB,
        load_ns=SECOND,
        cost=Cost(wall_ns=9 * SECOND, first_use_ns=2 * SECOND),
        use=Use(round((0.19 + after) * GIB)),
    )


def test_the_gate_compares_the_figures_of_uses_and_names_their_phase() -> None:
    (found,) = summarise([Records([used("adamw")])]).values()
    assert found.figures["use_anon"].median == round(4.19 * GIB)
    assert found.figures["use_peak_rss"].median == round(4.19 * GIB) + round(0.11 * GIB) + MIB
    assert found.figures["use"].median == 2 * SECOND
    assert "use: adamw" in found.phases
    (found,) = summarise([Records([used("forward")])]).values()
    assert not {"use", "use_anon", "use_peak_rss"} & found.figures.keys()
    assert "forward" not in found.phases


def test_the_time_and_the_floor_of_a_cell_include_its_use() -> None:
    result = used("adamw")
    assert used_ns(result) == 4 * SECOND
    searched = floors([result, used("write")])
    assert [floor_label(searched)(one) for one in searched] == ["mmap_assign adamw", "mmap_assign write"]  # fmt: skip
    first = next_cell(result.cell, [result], 0.01, 64 * GIB)
    assert first and first.ram_limit_bytes
    needed = round(4.19 * GIB)
    assert 0 <= first.ram_limit_bytes - needed < 0.1 * needed


# Limits -------------------------------------------------------------------------------------------


def under_two_limits(**changes: Any) -> list[Result]:
    """A cell that lives under 8 GiB, and is killed under 4."""
    return [swept("a", 8, (5, 0), **changes), swept("a", 4, None, **changes)]


def repeats(*lives: tuple[float, float] | None) -> list[Result]:
    """A matrix of a cell that lives well without a limit and under 8 GiB, and so under 4."""
    ends = [swept("a", None, (5, 0)), swept("a", 8, (5, 0))]
    return [*ends, *(swept("a", 4, lived, repeat=number) for number, lived in enumerate(lives))]


def ended(outcome: Outcome, pages: int = 0) -> list[Result]:
    late = replace(swept("a", 4, (5, 0)), outcome=outcome, ready_ns=None, phases=())
    if outcome is Outcome.TIMEOUT:
        late = replace(late, message="still running after 300 s")
    return [swept("a", 8, (5, 0)), replace(late, faults=Faults(1, 1, pages))]


THREE = [ranked(2, many, repeat=number) for number, many in enumerate((3.0, 1.0, 2.0))]
FINDINGS: dict[str, list[Result]] = {
    "ranks: the median above the imports of all": [*THREE, ranked(4, 2.5)],
    "ranks: one and more": [ranked(1, 1.0), ranked(4, 1.1)],
    "ranks: a peak that is not known": [replace(THREE[0], peaks=Peaks())],
    "ranks: a charge before the load that is not known": [replace(THREE[0], baseline=None)],
    "no ranks: one, limited, saved, and late": [
        ranked(1, 2.0), ranked(2, 2.0, "streaming", ram_limit_bytes=8 * GIB), ranked(2, 1.0, operation="save"),
        replace(ranked(2, 1.0), outcome=Outcome.TIMEOUT)],
    "uses: options with one text have a row each": [
        used(use, size, x=x) for size, x in ((1.0, "1"), (2.0, 1)) for use in ("forward", "adamw")],
    "limits: models have matrices of their own, and layouts rows": [
        *under_two_limits(), *under_two_limits(format="dcp"), *under_two_limits(options={"x": 1}),
        *under_two_limits(model=replace(make_cell().model, name="gpt2"))],
    "no limits: there is but one": [swept("a", None, (5, 0)), swept("a", 8, (5, 0))],
    "limits: a byte more is another one": [
        *under_two_limits(), replace(swept("a", 8, (5, 0)), cell=make_cell("a", ram_limit_bytes=8 * GIB + 1))],
    "limits: the median of repeats that live": repeats((6, 0), (9, 0), (7, 0)),
    "limits: a killed repeat": repeats((6, 0), None, (30, 2)),
    "limits: repeats that thrash": repeats((6, 0), (40, 2), (30, 2)),
    "limits: late, and it thrashed": ended(Outcome.TIMEOUT, MODEL_BYTES // 4096),
    "limits: late": ended(Outcome.TIMEOUT),
    "limits: failed": ended(Outcome.STRATEGY_FAILED),
    "limits: skipped": ended(Outcome.SKIPPED),
    "limits: options with one text": [
        *under_two_limits(options={"map_location": "1"}), *under_two_limits(options={"map_location": 1})],
    "limits: commands with one name": [
        *under_two_limits(command=("a", "1")), *under_two_limits(command=("a", "2"))],
    "disks: options and rates with one text": [
        swept("a", None, (seconds, 0), disk_bytes_per_s=rate, options={"x": x})
        for x, rate, seconds in (("1", 10**8, 5), (1, 10**8, 6), ("1", 10**8 + 1, 7))],
}  # fmt: skip


def test_what_a_report_finds(same: Compare) -> None:
    texts = []
    for what, results in FINDINGS.items():
        tables = [replace(one, notes=[]) for one in findings(Measured(results))]
        texts.append(f"# {what}\n\n{markdown(tables)}")
    same("findings.md", "\n\n".join(texts) + "\n")
