"""A matrix becomes each of its combinations once, in an order that is fair to all."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from factories import planned
from hypothesis import given
from hypothesis import strategies as st
from snapshots import Compare

from weighin.cell import Cell, ModelSpec
from weighin.plan.loads import plan_cell
from weighin.plan.task import Planned
from weighin.records.series import name_of
from weighin.stream.hugging_face_folder import BUILDER
from weighin.suite import registry
from weighin.suite.registry import StrategyInfo
from weighin.units import GIB


def info(
    name: str, devices: tuple[str, ...] = ("cpu",), formats: tuple[str, ...] = ("pt",), **more: Any
) -> StrategyInfo:
    return StrategyInfo(name, Path(f"/{name}.py"), "", formats, devices, **more)


def model(name: str) -> ModelSpec:
    return ModelSpec(name, "a.b:c")


def cells_of(*strategies: StrategyInfo | tuple[StrategyInfo, Any], **changes: Any) -> list[Planned]:
    fields: dict[str, Any] = {
        "models": (model("m"),),
        "strategies": [one if isinstance(one, tuple) else (one, {}) for one in strategies],
    }
    return planned(**fields | changes)


A, B = info("a"), info("b")
BERT = {"architecture": "BertModel"}
BUILT_IN = ModelSpec("built-in", BUILDER, BERT | {"config": {}})
FOLDER = ModelSpec("folder", BUILDER, BERT | {"config": {"architectures": ["BertModel"]}})
FOLDERS = info("a", pretrained="transformers")
SHARES = info("s", shares_load=True)
SEVERAL = info("a", formats=("pt", "dcp", "per_param"))
ABSENT = replace(registry.strategy("instanttensor"), packages=("not-on-any-index",))
ASKED: dict[str, list[Planned]] = {
    "repeats are interleaved": cells_of(A, B, info("c"), repeats=2),
    "strategies follow each other under one limit, then comes the next":
        cells_of(A, B, models=(model("m"), model("n")), ram=[GIB, None]),
    "each rate comes with each latency": cells_of(A, disk=["50MB/s", "none"], disk_latency=["1ms", "none"]),
    "each environment comes with each strategy": cells_of(A, B, environment=[{}, {"MALLOC_ARENA_MAX": "2"}]),
    "a cell has all that the suite says": cells_of(
        (info("a", ("cuda",), ("per_param", "pt")), {"threads": 2}), ram=[GIB], device="cuda:1", cache="warm"),
    "what is asked for twice is measured once": cells_of(A, A, ram=[GIB, None, GIB]),
    "one strategy with two options is two cells": cells_of((A, {"threads": 1}), (A, {"threads": 2})),
    "a device that a strategy does not load to": cells_of(A, info("b", ("cpu", "cuda")), device="cuda:1"),
    "models that are no folder of transformers": cells_of(FOLDERS, models=(BUILT_IN, FOLDER, model("m"))),
    "a strategy that divides a load is not alone": cells_of(SHARES),
    "of one and two ranks, it gets two": cells_of(A, SHARES, ranks=[1, 2]),
    "formats that a strategy does not read": cells_of(SEVERAL, B, format=["per_param", "dcp"]),
    "a device that a strategy does not save from": cells_of(A, operation="save", device="cuda"),
    "a format that a strategy does not write": cells_of(A, operation="save", format=["dcp"]),
    "the device comes before a package that is missing": cells_of(ABSENT),
}  # fmt: skip


def test_the_cells_of_a_suite_and_why_some_are_skipped(same: Compare) -> None:
    texts = []
    for what, found in ASKED.items():
        lines = [
            f"{name_of(one.cell)} #{one.cell.repeat}{one.skip and f': {one.skip}'}" for one in found
        ]
        texts.append("\n  ".join([what, *lines]))
    same("matrix.txt", "\n".join(texts) + "\n")


@pytest.mark.parametrize(
    ("name", "skips_adapted", "skips_plain"),
    [("streaming", False, False), ("peft_merge", False, True), ("safetensors_mmap", True, False)],
)
def test_a_model_with_an_adapter_is_loaded_by_those_who_merge_it_and_others_are_skipped(
    name: str, skips_adapted: bool, skips_plain: bool
) -> None:
    info = replace(registry.strategy(name), packages=())
    base: dict[str, Any] = {"config": {"architectures": None}}
    specs = [ModelSpec("m", BUILDER, base | more) for more in ({"adapter": "/somewhere"}, {})]
    cells = [Cell(spec, name, "process", format="safetensors") for spec in specs]
    adapted, plain = (plan_cell(cell, info) for cell in cells)
    assert ("merge it" in adapted.skip) == skips_adapted
    assert ("--adapter ADAPTER" in plain.skip) == skips_plain


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
    asked = {"models": [model(name) for name in models], "ram": limits, "repeats": repeats}
    found = cells_of(*map(info, strategies), **asked)
    cells = [one.cell for one in found]
    combinations = [(c.repeat, c.model.name, c.ram_limit_bytes, c.strategy) for c in cells]
    assert len(set(combinations)) == len(combinations)
    assert set(combinations) == set(product(range(repeats), models, limits, strategies))
    assert len({cell.id for cell in cells}) == len(cells)
    assert len({cell.series for cell in cells}) * repeats == len(cells)
    # Interleaved: all of one repeat before any of the next.
    assert [cell.repeat for cell in cells] == sorted(cell.repeat for cell in cells)
