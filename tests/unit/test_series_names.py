"""What a series is called: a model's own name, or its whole builder with its arguments."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import make_cell, make_result, run_of
from test_check import typed
from test_evaluate import STREAMING

from weighin.cell import ModelSpec
from weighin.gate import baseline
from weighin.gate.compare import history
from weighin.records import run_folder
from weighin.records.run_folder import Records
from weighin.records.series import (
    DIMENSIONS,
    Figure,
    Series,
    labels_among,
    name_of,
    selects,
    summarise,
)
from weighin.result import Outcome, Result
from weighin.stream.pretrained_folder import folder_library
from weighin.suite import registry

ROOT = Path(__file__).parents[2]
RECORDS = [
    *sorted((ROOT / "results" / "published").glob("*/records.jsonl")),
    Path(__file__).parent / "fixtures" / "records-schema1.jsonl",
]


def of_builder(builder: str, **kwargs: object) -> Result:
    spec = ModelSpec(builder.rpartition(":")[2], builder, kwargs)
    return make_result(replace(STREAMING, model=spec))


@pytest.mark.parametrize(
    ("spec", "title"),
    [
        (registry.model("gpt2-xl"), "gpt2-xl"),
        (registry.model("mynets:build"), "mynets:build"),
        (registry.model("mynets:build", {"width": 64}), "mynets:build(width=64)"),
        (registry.model("my.nets:build", {"b": [1, 2], "a": "x y"}), 'my.nets:build(a="x y",b=[1,2])'),
        (registry.model("m:Net.small", {"deep": True}), "m:Net.small(deep=true)"),
    ],
)  # fmt: skip
def test_a_model_is_called_by_its_name_or_by_its_builder_with_its_arguments(
    spec: ModelSpec, title: str
) -> None:
    assert spec.title == title
    assert name_of(make_cell(model=spec)).startswith(f"{title.replace(' ', '_')} mmap_assign pt ")


def test_long_arguments_are_cut_and_still_told_apart() -> None:
    lasts = (1, 2, 1)
    kwargs: list[dict[str, object]] = [{"layers": [*range(100), last]} for last in lasts]
    titles = [registry.model("mynets:build", each).title for each in kwargs]
    assert titles[0] == titles[2] != titles[1]
    assert titles[0].startswith("mynets:build(layers=[0,1,2,")
    assert len(titles[0]) < 80


@pytest.mark.parametrize(
    "other", [of_builder("othernets:build"), of_builder("mynets:build", width=64)]
)
def test_two_models_whose_builders_share_a_function_name_are_two_series(
    tmp_path: Path, other: Result
) -> None:
    ours = of_builder("mynets:build")
    assert len(summarise([Records([ours, other])])) == 2
    run_of(tmp_path / "a", ours, other)
    run_of(tmp_path / "b", ours)
    found = history(tmp_path, "peak_rss")
    assert sorted(len(one["points"]) for one in found.json["series"]) == [1, 2]
    code, text = typed("compare", tmp_path / "a", tmp_path / "b", "--metrics", "peak_rss", COLUMNS="160")  # fmt: skip
    assert code == 0
    assert "mynets:build" in text
    assert other.cell.model.title in text
    assert "1 figures compared with A" in text


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.parent.name)
def test_a_model_known_by_its_name_keeps_it_in_every_record_that_we_have(
    tmp_path: Path, path: Path
) -> None:
    (tmp_path / run_folder.RECORDS).write_bytes(path.read_bytes())
    every = run_folder.read(tmp_path).results
    results = [one for one in every if one.cell.operation != "command"]
    named = {one.cell.model.name for one in results if not folder_library(one.cell.model)}
    assert named <= set(registry.models())
    for cell in (one.cell for one in results if one.cell.model.name in named):
        assert name_of(cell).split(" ")[:2] == [cell.model.name, cell.strategy]
    assert {DIMENSIONS["model"](one) for one in results} == {one.cell.model.name for one in results}


def test_a_baseline_of_before_covers_the_series_of_its_own_models_still() -> None:
    path = ROOT / ".ci" / "baseline.yaml"
    for name in baseline.read(path).series:
        model, strategy, fmt, *_ = name.split(" ")
        spec = registry.model(model)
        cell = make_cell(strategy, model=spec, format=fmt, ram_limit_bytes=None)
        assert name_of(cell) == name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ram_limit_bytes": None}, "cold docker ram=none"),
        ({"cache": "warm", "isolation": "cgroup"}, "warm cgroup ram=8GiB"),
        ({"vram_limit_bytes": 2**30}, "cold docker ram=8GiB vram=1GiB"),
        ({"ram_high_bytes": 2**30}, "cold docker ram=8GiB ram_high=1GiB"),
        ({"operation": "save"}, "cold docker ram=8GiB operation=save"),
        ({"passes": 0}, "cold docker ram=8GiB passes=0"),
        ({"passes": 2}, "cold docker ram=8GiB passes=2"),
        ({"passes": 0, "use": "fork"}, "cold docker ram=8GiB use=fork"),
        ({"ranks": 2}, "cold docker ram=8GiB ranks=2"),
        ({"disk_bytes_per_s": 50_000_000}, "cold docker ram=8GiB disk=50MB/s"),
        ({"options": {"b": 1, "a": "x y"}}, "cold docker ram=8GiB a=x_y b=1"),
        ({"environment": {"A": "1"}}, "cold docker ram=8GiB A=1"),
    ],
)
def test_what_distinguishes_a_cell_is_in_its_name(changes: dict[str, Any], words: str) -> None:
    assert name_of(make_cell(**changes)) == f"gpt2-xl mmap_assign pt float32 cpu {words}"


@pytest.mark.parametrize(
    ("selector", "is_selected"),
    [
        ("mmap_assign", True), ("mmap*", True), ("ram=8GiB mmap_assign", True), ("*", True),
        ("mmap", False), ("mmap_assign ram=4GiB", False), ("MMAP*", False), ("", True),
        ("gpt2-xl mmap_assign pt float32 cpu cold docker ram=8GiB", True),
    ],
)  # fmt: skip
def test_a_selector_matches_words_of_a_name(selector: str, is_selected: bool) -> None:
    assert selects(selector, name_of(make_cell())) == is_selected
    assert selects("a [x", "a [x")  # a whole name matches itself


def test_a_label_has_only_what_differs_among_the_cells_of_its_strategy() -> None:
    cell = make_cell(options={"x": 1}, environment={"A": "1"})
    other = make_cell("streaming", format="dcp")
    assert labels_among([cell, other])(cell) == "mmap_assign"
    assert labels_among([cell, replace(cell, format="dcp")])(cell) == "mmap_assign pt"
    assert labels_among([cell, replace(cell, options={})])(cell) == "mmap_assign x=1"
    assert labels_among([cell, replace(cell, environment={})])(cell) == "mmap_assign A=1"
    assert labels_among([cell, replace(cell, ram_limit_bytes=5)])(cell) == "mmap_assign"


def test_a_figure_has_the_range_and_the_median_of_the_known_values() -> None:
    assert Figure.of([5, None, 1, 9, 7]) == Figure(1, 5, 9)
    assert Figure.of([None]) is Figure.of([]) is None


def test_the_outcomes_of_a_series_are_told_apart() -> None:
    assert (Series("ok", 1).is_ok, Series("ok 2, timeout 1", 3).is_ok) == (True, False)
    assert Series("ok 2, timeout 1, oom_killed 1", 4).failures == {"timeout", "oom_killed"}
    assert Series("ok", 3).failures == frozenset()
    assert Series("timeout", 1).failures == {"timeout"}


def test_a_series_has_the_figures_of_its_good_repeats_and_the_message_of_a_bad_one() -> None:
    results = [
        make_result(make_cell(repeat=number), load_ns=ns, outcome=outcome, message=message)
        for number, (ns, outcome, message) in enumerate(
            [(30, Outcome.OK, ""), (99, Outcome.TIMEOUT, "late"), (10, Outcome.OK, ""),
             (98, Outcome.TIMEOUT, "later"), (20, Outcome.OK, "")]
        )
    ]  # fmt: skip
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
