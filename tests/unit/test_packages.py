"""The packages that strategies declare: read from the file, looked up, and named where they are missing."""

from importlib.metadata import requires, version
from pathlib import Path

import pytest
from factories import refused

from weighin.cell import Cell, ModelSpec
from weighin.plan.loads import plan_cell
from weighin.suite import registry


def written(folder: Path, constant: str) -> registry.StrategyInfo:
    (path := folder / "mine.py").write_text(f"{constant}\ndef load(job): ...\n")
    return registry.read_strategy(path)


@pytest.mark.parametrize(
    ("constant", "skip", "versions"),
    [
        ("", "", {}),
        ('PACKAGES = ("safetensors>=0.6", "PyYAML")', "", {"safetensors": version("safetensors"), "PyYAML": version("pyyaml")}),
        ('PACKAGES = ("not-on-any-index", "torch>=99.1")', "mine needs not-on-any-index, torch>=99.1: pip install not-on-any-index 'torch>=99.1'", {"torch": version("torch")}),
    ],
    ids=["none", "installed", "missing"],
)  # fmt: skip
def test_a_missing_package_is_a_reason_to_skip_that_says_what_to_install(
    tmp_path: Path, constant: str, skip: str, versions: dict[str, str]
) -> None:
    info = written(tmp_path, constant)
    cell = Cell(ModelSpec("m", "a.b:c"), info.name, "process", format=info.formats[0])
    assert plan_cell(cell, info).skip == skip
    assert registry.versions(info.packages) == versions


def test_every_package_of_our_strategies_comes_with_us_or_with_an_extra() -> None:
    ours = {registry.name_of(line).lower().replace("_", "-") for line in requires("weighin") or []}
    for info in registry.strategies().values():
        assert {registry.name_of(package) for package in info.packages} <= ours


def test_packages_must_be_written_out(tmp_path: Path) -> None:
    for text in ('PACKAGES = "torch"', "PACKAGES = (1,)", "PACKAGES = names()"):
        told = refused(written, tmp_path, text)
        assert "PACKAGES is not a tuple of strings" in told, text


def test_a_text_that_names_no_package_counts_as_missing() -> None:
    for text, quoted in (
        ("git+https://no.index/x/y", "git+https://no.index/x/y"),
        ("foo bar baz", "'foo bar baz'"),
    ):
        assert registry.missing_packages((text,)) == f"needs {text}: pip install {quoted}"
