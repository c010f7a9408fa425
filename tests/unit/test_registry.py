"""Names to files: strategies are read, never run, and never imported."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from factories import refused

from weighin.cell import ModelSpec, Operation
from weighin.settings.definition import DEFAULT_SAVING, DEFAULT_STRATEGIES, read_suite
from weighin.settings.yaml_file import read_mapping
from weighin.suite import registry

WHOLE = '''"""Do nothing at all.

Twice."""
raise RuntimeError("imported")

FORMATS = ("safetensors", "pt")
DEVICES = ("cpu", "cuda")


def load(job):
    return None
'''


def write(text: str, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


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


def test_a_path_is_a_strategy_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(WHOLE, tmp_path / "mine.py")
    monkeypatch.chdir(path.parent)
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
    (ours / "_shared.py").write_text("")
    (ours / "b.py").write_text(WHOLE)
    (ours / "a.py").write_text(WHOLE)
    assert list(registry.strategies()) == ["a", "b"]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Install a distribution "fastload" that offers a module as a strategy; returns its folder."""

    def install(module: str) -> Path:
        site = tmp_path / "site"
        info = site / "fastload-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fastload\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[weighin.strategies]\nfast = {module}\n")
        monkeypatch.syspath_prepend(str(site))
        return site

    return install


def test_an_installed_package_offers_a_strategy(ours: Path, install: Callable[[str], Path]) -> None:
    site = install("fast_one")
    path = write(WHOLE, site / "fast_one.py")
    assert registry.strategies()["fast_one"].path == path
    assert registry.strategy("fast_one").formats == ("safetensors", "pt")
    assert "fast_one" not in sys.modules


def test_not_even_the_package_around_a_strategy_is_imported(
    ours: Path, install: Callable[[str], Path]
) -> None:
    site = install("fastload.ways.fast_two")
    write('raise RuntimeError("imported")', site / "fastload/__init__.py")
    write(WHOLE, site / "fastload/ways/fast_two.py")  # a namespace package in between
    assert list(registry.strategies()) == ["fast_two"]
    assert "fastload" not in sys.modules


@pytest.mark.parametrize("module", ["gone_module", "gone_package.inside", "json.gone"])
def test_an_entry_point_into_nothing(
    ours: Path, install: Callable[[str], Path], module: str
) -> None:
    install(module)
    assert refused(registry.strategies) == (
        f"the entry point of strategy 'fast' names {module!r}, which cannot be found\nreinstall fastload"
    )


def test_two_strategies_of_one_name(ours: Path, install: Callable[[str], Path]) -> None:
    site = install("baseline")
    (ours / "baseline.py").write_text(WHOLE)
    write(WHOLE, site / "baseline.py")
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


@pytest.mark.parametrize(
    ("text", "known"),
    [('OPTIONS = ("threads",)', "threads"), ("OPTIONS = ()", ""), ("", "")],
    ids=["one", "none", "undeclared"],
)
def test_a_strategy_takes_the_options_that_its_file_declares(
    text: str, known: str, tmp_path: Path
) -> None:
    info = registry.read_strategy(write(f"{text}\ndef load(job): ...\n", tmp_path / "mine.py"))
    info.check_options(known.split())
    said = refused(info.check_options, ["thraeds"])
    assert said.startswith("no option of mine is called 'thraeds'\n")
    assert ("did you mean 'threads'? known: threads; " in said) == bool(known)
    assert said.endswith('a strategy declares its options in its file: OPTIONS = ("thraeds",)')


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


def test_a_suite_by_its_name_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ci").touch()  # a file of the same name is ./ci
    (model,) = read_suite(registry.suite_file("ci")).models
    assert model.source == "gpt2-small"
    assert registry.suite_file("./ci") == Path("./ci")
    assert registry.suite_file("mine.yaml") == Path("mine.yaml")


def test_each_suite_says_what_it_measures_and_is_found_nearest_to_what_was_typed() -> None:
    assert all(read_mapping(path)["description"] for path in registry.suites().values())
    assert refused(registry.suite_file, "saveing").startswith(
        "no suite is called 'saveing'\ndid you mean 'saving'? known: after-the-load, "
    )


def test_a_name_that_would_move_the_cursor_is_cleaned_or_refused(tmp_path: Path) -> None:
    strategy = tmp_path / "a\x1bcb.py"
    strategy.write_text("def load(job):\n    pass\n")
    said = refused(registry.read_strategy, strategy)
    assert said.endswith("a?cb.py: its name cannot be shown\nrename the file")
    assert ModelSpec("a\x1b[2Jb\0", "m:f").title == "a?[2Jb?"
