"""A matrix becomes each of its combinations once, in an order that is fair to all."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from factories import planned
from hypothesis import given
from hypothesis import strategies as st

from weighin.cell import Cell, ModelSpec
from weighin.plan.loads import plan_cell
from weighin.plan.task import Planned
from weighin.stream.pretrained_folder import BUILDER
from weighin.suite import registry
from weighin.suite.registry import StrategyInfo
from weighin.units import GIB


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
    found = cells_of(
        models=(model("m"), model("n")),
        strategies=((info("a"), {}), (info("b"), {})),
        ram=[GIB, None],
    )
    order = [(p.cell.model.name, p.cell.ram_limit_bytes, p.cell.strategy) for p in found]
    assert order == [
        ("m", GIB, "a"), ("m", GIB, "b"), ("m", None, "a"), ("m", None, "b"),
        ("n", GIB, "a"), ("n", GIB, "b"), ("n", None, "a"), ("n", None, "b"),
    ]  # fmt: skip


def test_a_strategy_for_ranks_has_no_cell_of_one_rank_beside_those_of_several() -> None:
    shares = replace(info("s"), shares_load=True)
    found = cells_of(strategies=((info("a"), {}), (shares, {})), ranks=[1, 2])
    cells = [(one.cell.strategy, one.cell.ranks, one.skip) for one in found]
    assert cells == [("a", 1, ""), ("a", 2, ""), ("s", 2, "")]
    (alone,) = cells_of(strategies=((shares, {}),))
    assert alone.skip == "s divides a load: it needs --ranks 2 or more"


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


def test_a_strategy_that_does_not_load_to_the_device_is_skipped_with_the_reason() -> None:
    found = cells_of(
        strategies=((info("a"), {}), (info("b", ("cpu", "cuda")), {})), device="cuda:1"
    )
    assert [one.skip for one in found] == ["a does not load to cuda", ""]


def test_a_strategy_for_folders_skips_a_built_in_model_of_transformers() -> None:
    folders = replace(info("a"), pretrained="transformers")
    built_in = ModelSpec("minilm", BUILDER, {"architecture": "BertModel", "config": {}})
    config = {"architectures": ["BertModel"]}
    folder = ModelSpec("mine", BUILDER, {"architecture": "BertModel", "config": config})
    found = cells_of(strategies=((folders, {}),), models=(built_in, folder, model("m")))
    reason = "a loads Hugging Face folders only"
    assert [one.skip for one in found] == [reason, "", reason]


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


def test_each_strategy_loads_every_format_that_is_asked_for_and_that_it_reads() -> None:
    several = info("a", formats=("pt", "dcp", "per_param"))
    strategies: tuple[tuple[StrategyInfo, dict[str, Any]], ...] = ((several, {}), (info("b"), {}))
    found = cells_of(strategies=strategies, format=["per_param", "dcp"])
    assert [(one.cell.strategy, one.cell.format, one.skip) for one in found] == [
        ("a", "per_param", ""),
        ("a", "dcp", ""),
        ("b", "per_param", "b does not read per_param, only pt"),
    ]


def test_a_save_is_skipped_with_reasons_of_its_own() -> None:
    found = cells_of(operation="save", device="cuda", strategies=((info("a"), {}),))
    assert [(one.cell.operation, one.skip) for one in found] == [
        ("save", "a does not save from cuda")
    ]
    found = cells_of(operation="save", format=["dcp"], strategies=((info("a"), {}),))
    assert [one.skip for one in found] == ["a does not write dcp, only pt"]


def test_a_model_with_an_adapter_is_loaded_by_those_who_merge_it_and_others_are_skipped() -> None:
    merged = ModelSpec(
        "base+adapter",
        BUILDER,
        {"config": {"architectures": None}, "adapter": "/somewhere/adapter"},
    )
    plain = ModelSpec("base", BUILDER, {"config": {"architectures": None}})
    for name, needs in (("streaming", False), ("peft_merge", True), ("safetensors_mmap", None)):
        info = registry.strategy(name)
        info = replace(info, packages=())
        skips = [
            plan_cell(Cell(model, name, "process", format="safetensors"), info).skip
            for model in (merged, plain)
        ]
        assert ("merge it" in skips[0]) == (needs is None)
        assert ("--adapter ADAPTER" in skips[1]) == bool(needs)
