"""Names to files: strategies are read, never run, and never imported."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from weighin.cell import ModelSpec, Operation
from weighin.errors import ConfigError, UnknownName
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


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(text: str, name: str = "mine.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def complaint(act: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        act()
    return str(caught.value)


def test_a_strategy_is_read_without_running_it(write: Callable[..., Path]) -> None:
    path = write(WHOLE)
    info = registry.read_strategy(path)
    assert info == registry.StrategyInfo(
        "mine", path, "Do nothing at all.", ("safetensors", "pt"), ("cpu", "cuda")
    )


def test_a_bare_strategy_reads_pt_and_loads_to_the_cpu(write: Callable[..., Path]) -> None:
    info = registry.read_strategy(write("def load(job): ..."))
    assert (info.summary, info.formats, info.devices) == ("", ("pt",), ("cpu",))


def test_an_annotated_constant_counts(write: Callable[..., Path]) -> None:
    text = 'from typing import Final\nFORMATS: Final = ("per_param",)\ndef load(job): ...'
    assert registry.read_strategy(write(text)).formats == ("per_param",)


def test_a_file_in_another_encoding_is_read_as_python_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "latin.py"
    path.write_bytes('# coding: latin-1\n"""Größe."""\ndef load(job): ...'.encode("latin-1"))
    assert registry.read_strategy(path).summary == "Größe."


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "gone.py"
    assert complaint(lambda: registry.strategy(str(path))) == (
        f"the strategy {path}: no such file or folder\ncheck the path"
    )


def test_a_folder_is_no_strategy(tmp_path: Path) -> None:
    assert complaint(lambda: registry.strategy(f"{tmp_path}/")) == (
        f"cannot read the strategy {tmp_path}: Is a directory"
    )


def test_a_path_is_a_strategy_of_its_own(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(WHOLE)
    monkeypatch.chdir(path.parent)
    assert registry.strategy("./mine.py").path == path
    assert registry.strategy("mine.py").name == "mine"


def test_all_of_ours_are_there_and_each_says_what_it_does() -> None:
    found = registry.strategies()
    assert set(found) >= set(DEFAULT_STRATEGIES)
    assert all(info.summary.endswith(".") for info in found.values())


def test_an_unknown_strategy_gets_the_nearest() -> None:
    with pytest.raises(UnknownName) as caught:
        registry.strategy("mmap_asign")
    known = ", ".join(sorted(registry.strategies()))
    assert str(caught.value) == (
        "no strategy is called 'mmap_asign'\n"
        f"did you mean 'mmap_assign'? known: {known}; for a file of your own: --strategies ./mine.py"
    )


def test_listing_imports_neither_torch_nor_a_strategy() -> None:
    code = (
        "import sys; from weighin.suite import registry; registry.strategies(); registry.models();"
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'strategies')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


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


def test_an_installed_package_offers_a_strategy(
    ours: Path, install: Callable[[str], Path], write: Callable[..., Path]
) -> None:
    site = install("fast_one")
    path = write(WHOLE, f"{site}/fast_one.py")
    assert registry.strategies()["fast_one"].path == path
    assert registry.strategy("fast_one").formats == ("safetensors", "pt")
    assert "fast_one" not in sys.modules


def test_not_even_the_package_around_a_strategy_is_imported(
    ours: Path, install: Callable[[str], Path], write: Callable[..., Path]
) -> None:
    site = install("fastload.ways.fast_two")
    write('raise RuntimeError("imported")', f"{site}/fastload/__init__.py")
    write(WHOLE, f"{site}/fastload/ways/fast_two.py")  # a namespace package in between
    assert list(registry.strategies()) == ["fast_two"]
    assert "fastload" not in sys.modules


@pytest.mark.parametrize("module", ["gone_module", "gone_package.inside", "json.gone"])
def test_an_entry_point_into_nothing(
    ours: Path, install: Callable[[str], Path], module: str
) -> None:
    install(module)
    assert complaint(registry.strategies) == (
        f"the entry point of strategy 'fast' names {module!r}, which cannot be found\nreinstall fastload"
    )


def test_two_strategies_of_one_name(
    ours: Path, install: Callable[[str], Path], write: Callable[..., Path]
) -> None:
    site = install("baseline")
    (ours / "baseline.py").write_text(WHOLE)
    write(WHOLE, f"{site}/baseline.py")
    assert complaint(registry.strategies) == (
        f"two strategies are called 'baseline': {ours}/baseline.py and {site}/baseline.py\n"
        "rename one of the files: a strategy's name is its file's name"
    )


def test_a_model_by_its_name() -> None:
    spec = registry.model("gpt2-xl")
    assert (spec.name, spec.builder) == ("gpt2-xl", "weighin.models.gpt2:gpt2")
    assert spec.kwargs == {"emb_dim": 1600, "n_layers": 48, "n_heads": 25}


def test_arguments_are_laid_over_those_of_the_file() -> None:
    spec = registry.model("gpt2-xl", {"n_layers": 2, "vocab_size": 100, "n_heads": 25})
    assert spec.title == "gpt2-xl(n_layers=2,vocab_size=100)"  # no series of gpt2-xl
    assert spec.kwargs == {"emb_dim": 1600, "n_layers": 2, "n_heads": 25, "vocab_size": 100}


def test_any_builder_is_a_model() -> None:
    assert registry.model("my.nets:build", {"width": 64}) == ModelSpec(
        "build", "my.nets:build", {"width": 64}
    )
    assert registry.model("my.nets:build").kwargs == {}


def test_an_unknown_model_gets_the_nearest() -> None:
    with pytest.raises(UnknownName) as caught:
        registry.model("gpt2-xxl")
    known = ", ".join(sorted(registry.models()))
    assert str(caught.value) == (
        "no model is called 'gpt2-xxl'\n"
        f"did you mean 'gpt2-xl'? known: {known}; for any other model: ./FILE, ./FOLDER, or --model package.module:callable"
    )


def test_ways_of_saving_are_listed_apart() -> None:
    found = registry.strategies("save")
    assert set(found) == set(DEFAULT_SAVING)
    assert all(info.summary.endswith(".") for info in found.values())
    assert registry.strategy("per_param", "save").path != registry.strategy("per_param").path


def test_an_unknown_way_of_saving_gets_the_nearest() -> None:
    with pytest.raises(UnknownName) as caught:
        registry.strategy("torch_safe", "save")
    assert str(caught.value) == (
        "no strategy for saves is called 'torch_safe'\n"
        "did you mean 'torch_save'? known: dcp, per_module, per_param, safetensors, sharded,"
        " torch_save; for a file of your own: --strategies ./mine.py"
    )


def test_options_are_read_from_the_file_without_importing_it(tmp_path: Path) -> None:
    (path := tmp_path / "mine.py").write_text(
        'raise SystemExit\nOPTIONS = ("threads",)\ndef load(job): ...\n'
    )
    info = registry.read_strategy(path)
    assert info.options == ("threads",)
    info.check_options(["threads"])
    with pytest.raises(UnknownName) as caught:
        info.check_options(["thraeds"])
    assert str(caught.value) == (
        "no option of mine is called 'thraeds'\n"
        "did you mean 'threads'? known: threads;"
        ' a strategy declares its options in its file: OPTIONS = ("thraeds",)'
    )


@pytest.mark.parametrize("text", ["", "OPTIONS = ()\n"])
def test_a_strategy_without_options_takes_none(text: str, tmp_path: Path) -> None:
    (path := tmp_path / "mine.py").write_text(f"{text}def load(job): ...\n")
    with pytest.raises(UnknownName, match="no option of mine is called 'threads'"):
        registry.read_strategy(path).check_options(["threads"])


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


def test_the_options_of_our_suites_are_known() -> None:
    for path in sorted((registry.data_folder("configs") / "suites").glob("*.yaml")):
        if "models" in read_mapping(path):
            assert registry.chosen(read_suite(path))


def test_a_suite_by_its_name_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ci").touch()  # a file of the same name is ./ci
    (model,) = read_suite(registry.suite_file("ci")).models
    assert model.source == "gpt2-small"
    assert registry.suite_file("./ci") == Path("./ci")
    assert registry.suite_file("mine.yaml") == Path("mine.yaml")
    with pytest.raises(UnknownName) as caught:
        registry.suite_file("saveing")
    assert str(caught.value) == (
        "no suite is called 'saveing'\n"
        "did you mean 'saving'? known: after-the-load, allocators, ci, commands, converting, converting-files, cuda-transfers, half-precision,"
        " layouts, many-tensors, notebook, ram-sweep, saving, slow-disk, training-checkpoint; for a file of your own: --suite ./mine.yaml"
    )


def test_each_suite_says_what_it_measures() -> None:
    assert all(read_mapping(path)["description"] for path in registry.suites().values())


def test_a_name_that_would_move_the_cursor_is_cleaned_or_refused(tmp_path: Path) -> None:
    strategy = tmp_path / "a\x1bcb.py"
    strategy.write_text("def load(job):\n    pass\n")
    with pytest.raises(ConfigError) as caught:
        registry.read_strategy(strategy)
    assert caught.value.message.endswith("a?cb.py: its name cannot be shown")
    assert caught.value.repair == "rename the file"
    assert ModelSpec("a\x1b[2Jb\0", "m:f").title == "a?[2Jb?"
