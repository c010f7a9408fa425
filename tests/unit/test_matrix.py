"""A matrix becomes each of its combinations once, in an order that is fair to all."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from factories import planned
from hypothesis import given
from hypothesis import strategies as st

from weighin.cell import Cell, ModelSpec
from weighin.plan.loads import plan_cell
from weighin.plan.task import Planned
from weighin.stream.hugging_face_folder import BUILDER
from weighin.suite import registry
from weighin.suite.registry import StrategyInfo
from weighin.units import GIB

NONE: dict[str, Any] = {}  # options


def info(
    name: str, devices: tuple[str, ...] = ("cpu",), formats: tuple[str, ...] = ("pt",)
) -> StrategyInfo:
    return StrategyInfo(name, Path(f"/{name}.py"), "", formats, devices)


def model(name: str) -> ModelSpec:
    return ModelSpec(name, "a.b:c")


def cells_of(**changes: Any) -> list[Planned]:
    fields: dict[str, Any] = {
        "models": (model("m"),),
        "strategies": ((info("a"), {}), (info("b"), {}), (info("c"), {})),
    }
    return planned(**fields | changes)


def test_repeats_are_interleaved() -> None:
    order = [(one.cell.strategy, one.cell.repeat) for one in cells_of(repeats=2)]
    assert order == [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1), ("c", 1)]


def test_strategies_follow_each_other_under_one_limit_then_comes_the_next() -> None:
    models, two = (model("m"), model("n")), ((info("a"), NONE), (info("b"), NONE))
    found = cells_of(models=models, strategies=two, ram=[GIB, None])
    order = [(p.cell.model.name, p.cell.ram_limit_bytes, p.cell.strategy) for p in found]
    assert order == [(name, ram, each) for name in "mn" for ram in (GIB, None) for each in "ab"]


def test_each_rate_comes_with_each_latency() -> None:
    found = cells_of(strategies=((info("a"), {}),), disk=["50MB/s", "none"], disk_latency=["1ms", "none"])  # fmt: skip
    rate, latency = "disk=50MB/s", "disk_latency=1ms"
    assert [one.cell.disk for one in found] == [(rate, latency), (rate,), (latency,), ()]


def test_each_environment_comes_with_each_strategy() -> None:
    arenas = {"MALLOC_ARENA_MAX": "2"}
    two = ((info("a"), NONE), (info("b"), NONE))
    order = [
        (one.cell.strategy, one.cell.environment)
        for one in cells_of(strategies=two, environment=[{}, arenas])
    ]
    assert order == [("a", {}), ("b", {}), ("a", arenas), ("b", arenas)]


def test_a_cell_has_all_that_the_suite_says() -> None:
    (found,) = cells_of(
        strategies=((info("a", ("cuda",), ("per_param", "pt")), {"threads": 2}),),
        ram=[GIB],
        device="cuda:1",
        cache="warm",
    )
    cell = found.cell
    assert (cell.model, cell.strategy, cell.isolation) == (model("m"), "a", "process")
    assert (cell.ram_limit_bytes, cell.device, cell.cache) == (GIB, "cuda:1", "warm")
    assert (cell.format, cell.options, cell.dtype) == ("per_param", {"threads": 2}, "float32")
    assert found.skip == ""


BERT = {"architecture": "BertModel"}
BUILT_IN = ModelSpec("minilm", BUILDER, BERT | {"config": {}})
FOLDER = ModelSpec("mine", BUILDER, BERT | {"config": {"architectures": ["BertModel"]}})
FOLDERS = replace(info("a"), pretrained="transformers")
NO_FOLDER = "a loads Hugging Face folders only"
SHARES = replace(info("s"), shares_load=True)
SEVERAL = info("a", formats=("pt", "dcp", "per_param"))
ABSENT = replace(registry.strategy("instanttensor"), packages=("not-on-any-index",))


@pytest.mark.parametrize(
    ("strategies", "options", "cells"),
    [
        ([info("a"), info("b", ("cpu", "cuda"))], {"device": "cuda:1"}, ["a pt x1: a does not load to cuda", "b pt x1: "]),
        ([FOLDERS], {"models": (BUILT_IN, FOLDER, model("m"))}, [f"a pt x1: {NO_FOLDER}", "a pt x1: ", f"a pt x1: {NO_FOLDER}"]),
        ([SHARES], {}, ["s pt x1: s divides a load: it needs --ranks 2 or more"]),
        ([info("a"), SHARES], {"ranks": [1, 2]}, ["a pt x1: ", "a pt x2: ", "s pt x2: "]),
        ([SEVERAL, info("b")], {"format": ["per_param", "dcp"]}, ["a per_param x1: ", "a dcp x1: ", "b per_param x1: b does not read per_param, only pt"]),
        ([info("a")], {"operation": "save", "device": "cuda"}, ["a pt x1: a does not save from cuda"]),
        ([info("a")], {"operation": "save", "format": ["dcp"]}, ["a dcp x1: a does not write dcp, only pt"]),
        ([ABSENT], {}, ["instanttensor safetensors x1: instanttensor does not load to cpu"]),
    ],
    ids=["device", "folders", "alone", "ranks", "formats", "a save's device", "a save's format", "device before package"],
)  # fmt: skip
def test_what_a_strategy_cannot_do_is_skipped_with_the_reason(
    strategies: list[StrategyInfo], options: dict[str, Any], cells: list[str]
) -> None:
    found = cells_of(strategies=tuple((one, {}) for one in strategies), **options)
    assert [
        f"{one.cell.strategy} {one.cell.format} x{one.cell.ranks}: {one.skip}" for one in found
    ] == cells


@pytest.mark.parametrize(
    ("name", "skips_adapted", "skips_plain"),
    [("streaming", False, False), ("peft_merge", False, True), ("safetensors_mmap", True, False)],
)
def test_a_model_with_an_adapter_is_loaded_by_those_who_merge_it_and_others_are_skipped(
    name: str, skips_adapted: bool, skips_plain: bool
) -> None:
    info = replace(registry.strategy(name), packages=())
    base: dict[str, Any] = {"config": {"architectures": None}}
    adapted, plain = (
        plan_cell(
            Cell(ModelSpec("m", BUILDER, kwargs), name, "process", format="safetensors"), info
        )
        for kwargs in (base | {"adapter": "/somewhere/adapter"}, base)
    )
    assert ("merge it" in adapted.skip) == skips_adapted
    assert ("--adapter ADAPTER" in plain.skip) == skips_plain


def test_what_is_asked_for_twice_is_measured_once() -> None:
    found = cells_of(strategies=((info("a"), {}), (info("a"), {})), ram=[GIB, None, GIB])
    assert [one.cell.ram_limit_bytes for one in found] == [GIB, None]


def test_one_strategy_with_two_options_is_two_cells() -> None:
    found = cells_of(strategies=((info("a"), {"threads": 1}), (info("a"), {"threads": 2})))
    assert [one.cell.options for one in found] == [{"threads": 1}, {"threads": 2}]


NAMES = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True)


@given(
    models=NAMES,
    strategies=NAMES,
    limits=st.lists(st.sampled_from([None, GIB, 2 * GIB, 3 * GIB]), min_size=1, unique=True),
    repeats=st.integers(1, 4),
)
def test_each_combination_comes_exactly_once(
    models: list[str], strategies: list[str], limits: list[int | None], repeats: int
) -> None:
    found = cells_of(
        models=tuple(map(model, models)),
        strategies=tuple((info(name), {}) for name in strategies),
        ram=limits,
        repeats=repeats,
    )
    cells = [one.cell for one in found]
    combinations = [(c.repeat, c.model.name, c.ram_limit_bytes, c.strategy) for c in cells]
    assert len(set(combinations)) == len(combinations)
    assert set(combinations) == set(product(range(repeats), models, limits, strategies))
    assert len({cell.id for cell in cells}) == len(cells)
    assert len({cell.series for cell in cells}) * repeats == len(cells)
    # Interleaved: all of one repeat before any of the next.
    assert [cell.repeat for cell in cells] == sorted(cell.repeat for cell in cells)
