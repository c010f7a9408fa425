"""The packages that strategies declare: read from the file, looked up, and named where they are missing."""

from importlib.metadata import requires, version
from pathlib import Path

import pytest

from weighin.cell import Cell, ModelSpec
from weighin.errors import ConfigError
from weighin.plan.loads import plan_cell
from weighin.plan.task import Planned
from weighin.predict.client import predict
from weighin.suite import registry


def written(folder: Path, constant: str) -> registry.StrategyInfo:
    (path := folder / "mine.py").write_text(f"{constant}\ndef load(job): ...\n")
    return registry.read_strategy(path)


def planned(info: registry.StrategyInfo, device: str = "cpu") -> Planned:
    fmt = info.formats[0]
    spec = ModelSpec("m", "a.b:c")
    return plan_cell(Cell(spec, info.name, "process", device=device, format=fmt), info)


def test_a_strategy_without_packages_needs_none(tmp_path: Path) -> None:
    info = written(tmp_path, "")
    assert (info.packages, info.missing, planned(info).skip) == ((), "", "")


def test_installed_packages_are_no_reason_to_skip(tmp_path: Path) -> None:
    info = written(tmp_path, 'PACKAGES = ("safetensors>=0.6", "PyYAML")')
    assert (info.missing, planned(info).skip) == ("", "")
    assert registry.versions(info.packages) == {
        "safetensors": version("safetensors"),
        "PyYAML": version("pyyaml"),
    }


def test_a_missing_package_is_a_reason_that_says_what_to_install(tmp_path: Path) -> None:
    info = written(tmp_path, 'PACKAGES = ("not-on-any-index", "torch>=99.1")')
    assert planned(info).skip == (
        "mine needs not-on-any-index, torch>=99.1: pip install not-on-any-index 'torch>=99.1'"
    )
    assert registry.versions(info.packages) == {"torch": version("torch")}


def test_every_package_of_our_strategies_comes_with_us_or_with_an_extra() -> None:
    ours = {registry.name_of(line).lower().replace("_", "-") for line in requires("weighin") or []}
    for info in registry.strategies().values():
        assert {registry.name_of(package) for package in info.packages} <= ours


def test_a_device_that_does_not_suit_is_named_before_a_missing_package() -> None:
    info = registry.strategy("instanttensor")
    assert planned(info).skip == "instanttensor does not load to cpu"


@pytest.mark.parametrize("text", ['PACKAGES = "torch"', "PACKAGES = (1,)", "PACKAGES = names()"])
def test_packages_must_be_written_out(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="PACKAGES is not a tuple of strings"):
        written(tmp_path, text)


def test_a_prediction_says_which_package_it_cannot_follow(tmp_path: Path) -> None:
    [prediction] = predict(
        [planned(written(tmp_path, 'PACKAGES = ("safetensors", "numpy", "rich")'))]
    )
    assert prediction.cannot == "weighin cannot predict how rich reads files"


@pytest.mark.parametrize(
    ("text", "quoted"),
    [("git+https://no.index/x/y", "git+https://no.index/x/y"), ("foo bar baz", "'foo bar baz'")],
)
def test_a_text_that_names_no_package_counts_as_missing(text: str, quoted: str) -> None:
    assert registry.missing_packages((text,)) == f"needs {text}: pip install {quoted}"
