"""Names to files: strategies, suites and a user's models are found and read, never run, and never imported."""

import os
import re
import sys
from collections.abc import Callable
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import pytest
from factories import read_suite, refused
from typed_here import typed

from weighin.cell import Cell, ModelSpec, Operation
from weighin.plan.loads import plan_cell
from weighin.settings.definition import DEFAULT_SAVING, DEFAULT_STRATEGIES
from weighin.settings.yaml_file import read_mapping
from weighin.suite import registry, user_code

WHOLE = '''"""Do nothing at all.

Twice."""
raise RuntimeError("imported")

FORMATS = ("safetensors", "pt")
DEVICES = ("cpu", "cuda")


def load(job):
    return None
'''


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def of_file(folder: Path, constants: str) -> registry.StrategyInfo:
    """Return what is read of a file with these constants and a function load."""
    return registry.read_strategy(write(folder / "mine.py", f"{constants}\ndef load(job): ...\n"))


READ: dict[str, tuple[bytes, dict[str, Any]]] = {
    "whole": (WHOLE.encode(), {"summary": "Do nothing at all.", "formats": ("safetensors", "pt"), "devices": ("cpu", "cuda")}),
    "bare": (b"def load(job): ...", {}),
    "annotated constant": (b'FORMATS: Final = ("per_param",)\ndef load(job): ...', {"formats": ("per_param",)}),
    "another encoding": ('# coding: latin-1\n"""Größe."""\ndef load(job): ...'.encode("latin-1"), {"summary": "Größe."}),
    "options": (b'raise SystemExit\nOPTIONS = ("threads",)\ndef load(job): ...\n', {"options": ("threads",)}),
}  # fmt: skip
"""Files of strategies, and what is read in each beside the defaults."""


@pytest.mark.parametrize("name", READ)
def test_a_strategy_is_read_without_running_it(name: str, tmp_path: Path) -> None:
    text, wanted = READ[name]
    (path := tmp_path / "mine.py").write_bytes(text)
    defaults: dict[str, Any] = {"summary": "", "formats": ("pt",), "devices": ("cpu",)}
    assert registry.read_strategy(path) == registry.StrategyInfo("mine", path, **defaults | wanted)


def test_a_path_is_a_strategy_of_its_own(here: Path) -> None:
    path = write(here / "mine.py", WHOLE)
    assert registry.strategy("./mine.py").path == path
    assert registry.strategy("mine.py").name == "mine"


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for this project's strategies."""
    folder = tmp_path / "strategies"
    folder.mkdir()
    monkeypatch.setattr(registry, "data_folder", lambda name: tmp_path / name)
    return folder


def test_files_that_begin_with_an_underscore_are_no_strategies(ours: Path) -> None:
    for name in ("_shared", "b", "a"):
        write(ours / f"{name}.py", WHOLE)
    assert list(registry.strategies()) == ["a", "b"]


Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a distribution "fastload" that offers a module as a strategy; returns its folder."""

    def install(module: str, group: str = "strategies") -> Path:
        info = (site := tmp_path / "site") / "fastload-1.0.dist-info"
        write(info / "METADATA", "Metadata-Version: 2.1\nName: fastload\nVersion: 1.0\n")
        write(info / "entry_points.txt", f"[weighin.{group}]\nfast = {module}\n")
        monkeypatch.syspath_prepend(str(site))
        return site

    return install


@pytest.mark.parametrize(("operation", "group"), [("load", "strategies"), ("save", "saving")])
def test_an_installed_package_offers_a_strategy(
    ours: Path, install: Install, operation: Operation, group: str
) -> None:
    path = write(install("fast_one", group) / "fast_one.py", WHOLE.replace("load", operation))
    found = registry.strategies(operation)["fast_one"]
    assert (found.path, found.formats) == (path, ("safetensors", "pt"))
    assert registry.strategy("fast_one", operation) == found
    assert "fast_one" in typed("list strategies")[1]
    assert "fast_one" not in sys.modules


def test_not_even_the_package_around_a_strategy_is_imported(ours: Path, install: Install) -> None:
    site = install("fastload.ways.fast_two")
    write(site / "fastload/__init__.py", 'raise RuntimeError("imported")')
    write(site / "fastload/ways/fast_two.py", WHOLE)  # a namespace package in between
    assert list(registry.strategies()) == ["fast_two"]
    assert "fastload" not in sys.modules


@pytest.mark.parametrize("module", ["gone_module", "gone_package.inside", "json.gone"])
def test_an_entry_point_into_nothing(ours: Path, install: Install, module: str) -> None:
    install(module)
    assert refused(registry.strategies) == (
        f"the installed strategy 'fast' names {module!r}, which cannot be found\nreinstall fastload"
    )


def test_two_strategies_of_one_name(ours: Path, install: Install) -> None:
    site = install("baseline")
    write(ours / "baseline.py", WHOLE)
    write(site / "baseline.py", WHOLE)
    assert refused(registry.strategies) == (
        f"two strategies are called 'baseline': {ours}/baseline.py and {site}/baseline.py\n"
        "rename one of the files: a strategy's name is its file's name"
    )


XL = {"emb_dim": 1600, "n_layers": 48, "n_heads": 25}


def test_a_model_is_a_name_or_a_builder_and_arguments_are_laid_over_those_of_its_file() -> None:
    spec = registry.model("gpt2-xl")
    assert (spec.name, spec.builder) == ("gpt2-xl", "weighin.models.gpt2:gpt2")
    assert spec.kwargs == XL
    spec = registry.model("gpt2-xl", {"n_layers": 2, "vocab_size": 100, "n_heads": 25})
    assert spec.title == "gpt2-xl(n_layers=2,vocab_size=100)"  # no series of gpt2-xl
    assert spec.kwargs == XL | {"n_layers": 2, "vocab_size": 100}
    given: list[dict[str, object]] = [{}, {"width": 64}]
    for kwargs in given:
        mine = ModelSpec("build", "my.nets:build", kwargs)
        assert registry.model("my.nets:build", kwargs) == mine


def test_all_of_ours_are_there_and_each_says_what_it_does() -> None:
    load, save = registry.strategies(), registry.strategies("save")
    assert set(load) >= set(DEFAULT_STRATEGIES)
    assert set(save) == set(DEFAULT_SAVING)
    assert all(info.summary.endswith(".") for info in (*load.values(), *save.values()))
    assert registry.strategy("per_param", "save").path != registry.strategy("per_param").path


PASSED_ON = {
    "streaming": {"threads", "granularity", "key", "strip_prefix"},
    "peft_merge": {"disable_mmap", "device_map"},
    "diffusers": {"disable_mmap", "device_map"},
    "transformers": {"disable_mmap", "device_map"},
}
"""The options of strategies that hand all of them to a function."""


@pytest.mark.parametrize("operation", ["load", "save"])
def test_our_strategies_declare_all_options_that_they_read(operation: Operation) -> None:
    for info in registry.strategies(operation).values():
        text = info.path.read_text()
        read = set(re.findall(r'job\.options\.get\("(\w+)"', text))
        if "**job.options" in text:
            read |= PASSED_ON[info.name]
        assert (info.name, set(info.options)) == (info.name, read)
        assert "OPTIONS = (" in text


def test_a_suite_by_its_name_from_any_folder(here: Path) -> None:
    (here / "ci").touch()  # a file of the same name is ./ci
    (model,) = read_suite(registry.suite_file("ci")).models
    assert model.source == "gpt2-small"
    assert registry.suite_file("./ci") == Path("./ci")
    assert registry.suite_file("mine.yaml") == Path("mine.yaml")


def test_each_suite_says_what_it_measures() -> None:
    assert all(read_mapping(path)["description"] for path in registry.files("suites").values())


def test_a_name_that_would_move_the_cursor_is_cleaned_or_refused(tmp_path: Path) -> None:
    said = refused(registry.read_strategy, write(tmp_path / "a\x1bcb.py", WHOLE))
    assert said.endswith("a?cb.py: its name cannot be printed\nrename the file")
    assert ModelSpec("a\x1b[2Jb\0", "m:f").title == "a?[2Jb?"


# -- the packages that a strategy declares


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
    info = of_file(tmp_path, constant)
    cell = Cell(ModelSpec("m", "a.b:c"), info.name, "process", format=info.formats[0])
    assert plan_cell(cell, info).skip == skip
    assert registry.versions(info.packages) == versions


def test_every_package_of_our_strategies_comes_with_us_or_with_an_extra() -> None:
    ours = {registry.name_of(line).lower().replace("_", "-") for line in requires("weighin") or []}
    for info in registry.strategies().values():
        assert {registry.name_of(package) for package in info.packages} <= ours


def test_a_text_that_names_no_package_counts_as_missing() -> None:
    for text, quoted in (
        ("git+https://no.index/x/y", "git+https://no.index/x/y"),
        ("foo bar baz", "'foo bar baz'"),
    ):
        assert registry.missing_packages((text,)) == f"needs {text}: pip install {quoted}"


# -- the module of a user's own model


def test_a_file_is_a_module_of_its_folder_or_of_its_package(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    write(here / "deep/nets.py")
    mine = ModelSpec("build", "nets:build", {"width": 2})
    assert registry.model("deep/nets.py:build", {"width": 2}) == mine
    found = user_code.import_path(["deep/nets.py:build", "gpt2-tiny"])
    assert found == (str(here / "deep"), str(here))
    for name in ("src/mine/__init__.py", "src/mine/nets/__init__.py", "src/mine/nets/large.py"):
        write(here / name)
    large = user_code.of_file("src/mine/nets/large.py:build")
    assert large == ("mine.nets.large:build", here / "src")
    package = user_code.of_file("src/mine/nets/__init__.py:build")
    assert package == ("mine.nets:build", here / "src")


def test_the_folders_of_pythonpath_that_exist_come_last(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "lib").mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(here / "gone"), "", "lib", str(here)]))
    assert user_code.import_path(["a:b"]) == (str(here), str(here / "lib"))


def test_the_file_of_a_builder_is_known_without_importing_it(here: Path) -> None:
    file = write(here / "nets.py", "raise RuntimeError")
    assert user_code.file_of("nets:build", [str(here)]) == file
    assert user_code.file_of("nets:build", [str(here / "gone")]) is None
    (here / "spaced").mkdir()
    assert user_code.file_of("spaced.nets:build", [str(here)]) == here / "spaced"
