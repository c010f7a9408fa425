"""Models and suites from YAML: what is wrong is named with its file, its key and the way out."""

from pathlib import Path
from typing import Any

import pytest

from weighin.cell import ModelSpec
from weighin.errors import ConfigError
from weighin.settings.definition import (
    COMMANDS,
    DEFAULT_SAVING,
    DEFAULT_STRATEGIES,
    MODELS,
    Settings,
    check_suite,
    read_model,
    read_suite,
)
from weighin.suite.registry import data_folder, model
from weighin.units import GIB, MIB

CONFIGS = data_folder("configs")
SUITE_KEYS = f"known keys: {', '.join(Settings.keys(MODELS))}"
MODEL_KEYS = "known keys: name, builder, kwargs, description"
SIZE_HINT = "write a size such as 8GiB, 8g, 6500m or 4096"


def written(folder: Path, text: str) -> Path:
    path = folder / "x.yaml"
    path.write_text(text)
    return path


def complaint(read: Any, path: Path) -> str:
    """What a user is told of this file, with the file's name as FILE."""
    with pytest.raises(ConfigError) as caught:
        read(path)
    return str(caught.value).replace(str(path), "FILE")


@pytest.mark.parametrize("path", sorted((CONFIGS / "models").glob("*.yaml")), ids=lambda p: p.stem)
def test_each_model_of_ours_loads_and_is_called_like_its_file(path: Path) -> None:
    assert read_model(path).name == path.stem
    assert model(path.stem) == read_model(path)


def test_each_suite_of_ours_loads() -> None:
    for path in (CONFIGS / "suites").glob("*.yaml"):
        if path.stem in ("commands", "converting-files"):
            assert read_suite(path, COMMANDS).commands
            continue
        suite = read_suite(path)
        for name in [each.source for each in suite.models]:
            if not name.startswith("results/folders/"):  # which a benchmark makes
                model(name)


def test_a_model(tmp_path: Path) -> None:
    path = written(tmp_path, "{name: n, builder: 'a.b:c', kwargs: {x: 1}, description: d}")
    assert read_model(path) == ModelSpec("n", "a.b:c", {"x": 1})


def test_a_model_without_arguments(tmp_path: Path) -> None:
    assert read_model(written(tmp_path, "name: n\nbuilder: a:b")).kwargs == {}


MODEL = "name: n\nbuilder: a:b\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MODEL + "kwarg: {}", f"FILE: kwarg: unknown key\ndid you mean 'kwargs'? {MODEL_KEYS}"),
        (MODEL + "zzz: 1", f"FILE: zzz: unknown key\n{MODEL_KEYS}"),
        ("name: n", f"FILE: builder: missing\n{MODEL_KEYS}"),
        (
            "name: n\nbulder: a:b",
            f"FILE: bulder: unknown key\ndid you mean 'builder'? {MODEL_KEYS}",
        ),
        ("name: 3\nbuilder: a:b", "FILE: name: input should be a valid string, got 3"),
        (
            "name: n\nbuilder: a.b",
            "FILE: builder: 'a.b' is not a builder\nwrite package.module:function",
        ),
        (
            MODEL + "kwargs: [1]",
            "FILE: kwargs: input should be a valid dictionary, got [1]",
        ),
        ("", "FILE: not a mapping of keys to values"),
        ("[1, 2]", "FILE: not a mapping of keys to values"),
        (MODEL + "1: x", f"FILE: 1: unknown key\n{MODEL_KEYS}"),
    ],
)
def test_a_wrong_model(tmp_path: Path, text: str, expected: str) -> None:
    assert complaint(read_model, written(tmp_path, text)) == expected


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert complaint(read_model, tmp_path / "x.yaml") == (
        "cannot read FILE: No such file or directory"
    )


def test_a_file_that_is_no_yaml(tmp_path: Path) -> None:
    assert complaint(read_suite, written(tmp_path, "models: [a\nram: 8g")) == (
        "FILE, line 2: not YAML: expected ',' or ']', but got ':'"
    )


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xff\xfe\x00x")
    assert complaint(read_suite, path) == "FILE: not UTF-8: invalid start byte at byte 0"


def test_a_suite_needs_only_models() -> None:
    suite = check_suite({"models": "gpt2-xl"})
    assert [model.source for model in suite.models] == ["gpt2-xl"]
    assert [one.name for one in suite.strategies] == list(DEFAULT_STRATEGIES)
    assert suite.ram == [None]
    assert (suite.device, suite.isolation, suite.cache) == ("cpu", "auto", "cold")
    assert (suite.repeats, suite.timeout_s) == (1, 600)


def test_the_default_strategies_are_all_of_ours() -> None:
    from weighin.suite.registry import strategies

    assert set(DEFAULT_STRATEGIES) <= set(strategies())


def test_a_whole_suite(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
models: [a, b]
strategies: [x, {name: y, options: {threads: 4}}]
ram: [none, 8g, 6500m, 536870912, None]
device: cuda:1
isolation: docker
cache: warm
repeats: 3
timeout_s: 12.5
description: everything
""",
    )
    suite = read_suite(path)
    assert [(one.name, one.options) for one in suite.strategies] == [
        ("x", {}),
        ("y", {"threads": 4}),
    ]
    assert suite.ram == [None, 8 * GIB, 6500 * MIB, 512 * MIB, None]
    assert (suite.device, suite.isolation, suite.cache) == ("cuda:1", "docker", "warm")
    assert (suite.repeats, suite.timeout_s) == (3, 12.5)


def test_one_value_stands_for_a_list_of_one() -> None:
    suite = check_suite({"models": "a", "strategies": "x", "ram": "8g"})
    assert [model.source for model in suite.models] == ["a"]
    assert [one.name for one in suite.strategies] == ["x"]
    assert suite.ram == [8 * GIB]
    assert [one.name for one in check_suite({"models": "a", "strategies": {"name": "y"}}).strategies] == ["y"]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("modles: a", f"modles: unknown key\ndid you mean 'models'? {SUITE_KEYS}"),
        ("models: a\nzzz: 1", f"zzz: unknown key\n{SUITE_KEYS}"),
        ("ram: 8g", f"models: missing\n{SUITE_KEYS}"),
        ("models: 3", "models.name: input should be a valid string, got 3"),
        ("models: []", "models: empty\nwrite at least one value, or leave the key out"),
        (
            "strategies: []\nmodels: a",
            "strategies: empty\nwrite at least one value, or leave the key out",
        ),
        (
            "models: a\nstrategies: [{nme: x}]",
            "strategies.nme: unknown key\ndid you mean 'name'? known keys: name, options",
        ),
        (
            "models: a\nstrategies: [{options: {}}]",
            "strategies.name: missing\nknown keys: name, options",
        ),
        (
            "models: a\nstrategies: [{name: x, options: 3}]",
            "strategies.options: input should be a valid dictionary, got 3",
        ),
        (
            "models: a\nstrategies: [3]",
            "strategies.name: input should be a valid string, got 3",
        ),
        ("models: a\nram: [8g, lots]", f"ram: cannot read 'lots' as a size\n{SIZE_HINT}"),
        (
            "models: a\nram: 8GB",
            "ram: '8GB' is ambiguous: GB is 1000-based for some tools and 1024-based for others\n"
            "write 8GiB (1024-based), or the number of bytes",
        ),
        (
            "models: a\nram: 0",
            "ram: '0' is less than one byte\nwrite a size such as 8GiB or 6500m",
        ),
        ("models: a\nram: -5", f"ram: cannot read '-5' as a size\n{SIZE_HINT}"),
        (
            "models: a\nram: true",
            "ram: input should be a valid integer, got True",
        ),
        (
            "models: a\nram: 8.5",
            "ram: input should be a valid integer, got 8.5",
        ),
        (
            "models: a\nram: []",
            "ram: empty\nwrite at least one value, or leave the key out",
        ),
        ("models: a\ndevice: gpu", "device: 'gpu' is not a device\nwrite cpu, cuda or cuda:1"),
        (
            "models: a\nisolation: vm",
            "isolation: input should be 'auto', 'docker', 'cgroup' or 'process', got 'vm'",
        ),
        ("models: a\ncache: hot", "cache: input should be 'cold' or 'warm', got 'hot'"),
        (
            "models: a\nrepeats: 0",
            "repeats: input should be greater than or equal to 1, got 0",
        ),
        (
            "models: a\nrepeats: many",
            "repeats: input should be a valid integer, unable to parse string as an integer,"
            " got 'many'",
        ),
        ("models: a\ntimeout_s: -1", "timeout_s: input should be greater than 0, got -1"),
        ("models: a\ntimeout_s: .inf", "timeout_s: input should be a finite number, got inf"),
        (
            "models: a\ntimeout: 5",
            f"timeout: unknown key\ndid you mean 'timeout_s'? {SUITE_KEYS}",
        ),
    ],
)
def test_a_wrong_suite(tmp_path: Path, text: str, expected: str) -> None:
    assert complaint(read_suite, written(tmp_path, text)) == f"FILE: {expected}"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"ram": ["lots"]}, f"--ram: cannot read 'lots' as a size\n{SIZE_HINT}"),
        ({"timeout_s": 0.0}, "--timeout: input should be greater than 0, got 0.0"),
        ({"repeats": 0}, "--repeats: input should be greater than or equal to 1, got 0"),
        ({"device": "gpu"}, "--device: 'gpu' is not a device\nwrite cpu, cuda or cuda:1"),
        ({"cache": "hot"}, "--cache: input should be 'cold' or 'warm', got 'hot'"),
    ],
)
def test_a_wrong_option_is_named_as_it_was_typed(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_suite({"models": ["a"]} | options)
    assert str(caught.value) == expected


def test_a_suite_of_saves_has_every_way_of_saving() -> None:
    suite = check_suite({"models": "gpt2-xl", "operation": "save"})
    assert [one.name for one in suite.strategies] == list(DEFAULT_SAVING)


@pytest.mark.parametrize(
    ("name", "value", "other"),
    [("disk", None, "50MB/s"), ("ranks", 1, 2), ("uses", "forward", "none")],
)
def test_a_save_takes_the_usual_value_however_often(name: str, value: Any, other: Any) -> None:
    save = {"models": "gpt2-xl", "operation": "save"}
    assert getattr(check_suite(save | {name: [value, value]}), name) == [value, value]
    with pytest.raises(ConfigError, match="save"):
        check_suite(save | {name: [value, other]})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "models: a\noperation: save\ncache: warm",
            "FILE: cache: warm does not apply to a save, because a save reads no checkpoint\nleave cache out",
        ),
        (
            "models: a\noperation: safe",
            "FILE: operation: input should be 'load' or 'save', got 'safe'",
        ),
    ],
)
def test_a_wrong_suite_of_saves(tmp_path: Path, text: str, expected: str) -> None:
    assert complaint(read_suite, written(tmp_path, text)) == expected
