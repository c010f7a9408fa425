"""Predictions of what a use of the loaded model takes, through the process that runs strategies."""

from pathlib import Path
from textwrap import dedent

import pytest
from test_predict import BIAS_BYTES, SPEC, WEIGHT_BYTES

from weighin.cell import Cell, ModelSpec
from weighin.predict.client import predict
from weighin.predict.prediction import Prediction
from weighin.suite import registry
from weighin.suite.matrix import Planned
from weighin.units import KIB, MIB


def planned(strategy: str, use: str, spec: ModelSpec = SPEC, dtype: str = "float32") -> Planned:
    info = registry.strategy(strategy)
    cell = Cell(spec, strategy, "process", dtype=dtype, format=info.formats[0], use=use, passes=0)
    return Planned.of(cell, info)


def copies(one: Prediction) -> float:
    """Return the anonymous peak of the use above the import of torch, as copies of the weight."""
    assert one.cannot == ""
    assert one.use and one.baseline_anon_bytes
    return (one.use.all_peak_bytes - one.baseline_anon_bytes) / WEIGHT_BYTES


def test_uses_of_a_mapped_and_a_copied_model_are_counted() -> None:
    """AdamW keeps a gradient and two states, and needs two temporary tensors as large as a weight."""
    expected = {
        "write": (1, 1), "sgd": (2, 2), "adamw": (6, 6), "deepcopy": (1, 2), "save": (0, 1),
        "fork": (2, 3),
    }  # fmt: skip
    uses = [(strategy, use) for use in expected for strategy in ("mmap_assign", "load_assign")]
    found = [round(copies(one)) for one in predict([planned(*pair) for pair in uses])]
    assert dict(zip(expected, zip(found[::2], found[1::2], strict=True), strict=True)) == expected


def test_a_conversion_to_float32_keeps_one_weight_of_the_old_dtype() -> None:
    mapped, copied = predict(
        [planned(name, "to-float32", dtype="bfloat16") for name in ("mmap_assign", "load_assign")],
        checkpoint_dtype="bfloat16",
    )
    assert (round(copies(mapped), 1), round(2 * copies(copied))) == (1.0, 3)


def test_a_floor_holds_the_load_and_the_use() -> None:
    load, trained, forked = predict([planned("load_assign", use) for use in ("", "adamw", "fork")])
    assert load.use is None
    assert load.floor_bytes and trained.floor_bytes and forked.floor_bytes
    assert trained.use and forked.use
    for one in (trained, forked):
        assert one.use
        most = one.use.all_most_bytes
        assert one.floor_bytes == most + most // 512 + 16 * MIB
        assert (one.host_anon_peak_bytes or 0) < most  # that of the load alone
    each = WEIGHT_BYTES + BIAS_BYTES + 4 * MIB
    assert forked.use.children_private_bytes == pytest.approx((each, each), abs=8 * KIB)
    assert [phase.name for phase in trained.phases][-2:] == ["touch", "use: adamw"]


def test_the_work_of_a_load_does_not_include_the_use() -> None:
    load, trained = predict([planned("load_assign", use) for use in ("", "adamw")])
    assert load.work.written_bytes == trained.work.written_bytes
    assert load.disk_read_bytes == trained.disk_read_bytes


def test_a_forward_pass_is_predicted_if_asked_for() -> None:
    info = registry.strategy("mmap_assign")
    cell = Planned.of(Cell(registry.model("gpt2-tiny"), "mmap_assign", "process"), info)
    ((without,), (one,)) = (predict([cell], forward=asked) for asked in (False, True))
    assert without.use is None
    assert one.use and one.cannot == ""
    assert one.use.name == "forward"
    assert one.host_anon_peak_bytes
    assert one.use.host_anon_peak_bytes >= one.host_anon_peak_bytes - 16 * MIB
    (none,) = predict([planned("mmap_assign", "")], forward=True)
    assert none.use is None


def test_a_forward_pass_without_inputs_is_not_predicted() -> None:
    info = registry.strategy("load_assign")
    (one,) = predict([Planned.of(Cell(SPEC, "load_assign", "process"), info)], forward=True)
    assert one.cannot == (
        "CannotFollow: the model's module has no example_inputs for a forward pass"
    )


def test_a_use_of_your_own_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "twice.py"
    path.write_text(
        dedent(
            """
            def use(model):
                return [parameter.detach() * 2 for parameter in model.parameters()]
            """
        )
    )
    (one,) = predict([planned("mmap_assign", "twice")], use_paths={"twice": str(path)})
    assert round(copies(one)) == 1
