"""What a series is called: a model's own name, or its whole builder with its arguments."""

from dataclasses import replace
from pathlib import Path

import pytest
from factories import make_cell, make_result
from test_check import run_of, typed
from test_evaluate import STREAMING

from weighin.cell import ModelSpec
from weighin.formats.pretrained_folder import is_folder
from weighin.gate import baseline
from weighin.records import run_folder
from weighin.records.series import SeriesRun, name_of, summarise
from weighin.report import history
from weighin.report.rows import cells, values
from weighin.result import Result
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
    assert len(summarise([SeriesRun([ours, other])])) == 2
    assert set(values(cells([ours, other]), "model")) == {
        ours.cell.model.title,
        other.cell.model.title,
    }
    run_of(tmp_path / "a", ours, other)
    run_of(tmp_path / "b", ours)
    found = history.read(tmp_path, "peak_rss").lines
    assert sorted(len(line.points) for line in found) == [1, 2]
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
    named = {one.cell.model.name for one in results if not is_folder(one.cell.model)}
    assert named <= set(registry.models())
    for cell in (one.cell for one in results if one.cell.model.name in named):
        assert name_of(cell).split(" ")[:2] == [cell.model.name, cell.strategy]
    assert set(values(cells(results), "model")) == {one.cell.model.name for one in results}


def test_a_baseline_of_before_covers_the_series_of_its_own_models_still() -> None:
    path = ROOT / ".ci" / "baseline.yaml"
    for name in baseline.read(path).series:
        model, strategy, fmt, *_ = name.split(" ")
        spec = registry.model(model)
        cell = make_cell(strategy, model=spec, format=fmt, ram_limit_bytes=None)
        assert name_of(cell) == name
