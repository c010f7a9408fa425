"""Models and suites from YAML: what is wrong is named with its file, its key and the way out."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from snapshots import Compare

from weighin.errors import ConfigError
from weighin.settings.definition import (
    COMMANDS,
    DEFAULT_SAVING,
    DEFAULT_STRATEGIES,
    check_suite,
    read_suite,
)
from weighin.stream.formats import READ_ONLY
from weighin.suite.registry import data_folder, model, read_model, read_strategy
from weighin.units import GIB, MIB

CONFIGS = data_folder("configs")
WRONG = Path(__file__).with_name("snapshots") / "wrong_settings.txt"
"""What is wrong, and what is said of it. Add a line ``$ KIND YAML``, and ``pytest --rewrite`` writes the answer."""
READERS = {
    "suite": read_suite,
    "commands": partial(read_suite, kind=COMMANDS),
    "strategy": read_strategy,
    "saving": partial(read_strategy, operation="save"),
    "options": lambda path: check_suite(yaml.safe_load(path.read_text())),
}


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
        assert not {*suite.format} & {*READ_ONLY}, "weighin cannot make it"
        for name in [each.source for each in suite.models]:
            if not name.startswith("results/folders/"):  # which a benchmark makes
                model(name)


def test_what_is_wrong_is_named_with_its_key_and_the_way_out(tmp_path: Path, same: Compare) -> None:
    cases = [line for line in WRONG.read_text().splitlines() if line.startswith("$ ")]
    assert len(cases) > 50
    answers = []
    for line in cases:
        _, kind, text = line.split(" ", 2)
        said = complaint(READERS[kind], written(tmp_path, text.replace("\\n", "\n")))
        answers.append(f"{line}\n{said}\n")
    same(WRONG.name, "\n".join(answers))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert complaint(read_suite, tmp_path / "x.yaml") == (
        "cannot read FILE: No such file or directory"
    )


def test_a_file_that_is_no_yaml(tmp_path: Path) -> None:
    assert complaint(read_suite, written(tmp_path, "models: [a\nram: 8g")) == (
        "FILE, line 2: not YAML: expected ',' or ']', but got ':'"
    )


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("description: 2026-13-01", "month must be in 1..12"),
        ("[" * 3000, "too many nested values"),
    ],
)
def test_a_value_that_is_no_fault_of_yaml(tmp_path: Path, text: str, what: str) -> None:
    assert complaint(read_suite, written(tmp_path, text)).startswith(f"FILE: {what}")


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xff\x00x")
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


def test_a_text_of_strategies_is_divided_at_its_commas_and_one_of_models_is_not() -> None:
    suite = check_suite({"models": "from:a,b.pt", "strategies": "x,y"})
    assert [model.source for model in suite.models] == ["from:a,b.pt"]
    assert [one.name for one in suite.strategies] == ["x", "y"]


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
