"""What others wrote, or a hand typed, is refused in one line, and never with a traceback or a hang."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import make_result, refused

from weighin.cli import _console
from weighin.errors import CheckpointError, ConfigError, RecordError
from weighin.files import parse_json, read_bytes
from weighin.records import run_folder
from weighin.result import OURS, Outcome
from weighin.run.output import Relay
from weighin.settings.yaml_file import read_mapping
from weighin.stream.foreign import no_model, read_object
from weighin.stream.hugging_face_folder import read_folder
from weighin.suite.registry import read_strategy
from weighin.worker.phases import named_by_strategy

DEEP = "[" * 100_000 + "]" * 100_000
TOO_DEEP = "[" * 101 + "]" * 101
LONG = "9" * 6000


def test_a_json_text_beyond_the_bounds_is_a_value_error() -> None:
    for text in (DEEP, "[" * 300_000, LONG, TOO_DEEP, "NaN"):
        with pytest.raises(ValueError, match=r"nested|digits|NaN"):
            parse_json(text)


BEYOND = {
    "a deep record": ("records.jsonl", f'{{"schema":1,"cell":{DEEP}}}'),
    "a long record": ("records.jsonl", f'{{"schema":{LONG}}}'),
    "a deep plan": ("plan.json", DEEP),
}


@pytest.mark.parametrize("title", BEYOND)
def test_a_record_or_plan_beyond_the_bounds_is_damaged(tmp_path: Path, title: str) -> None:
    name, text = BEYOND[title]
    (tmp_path / "records.jsonl").touch()
    (tmp_path / name).write_text(text + "\n")
    told = refused(run_folder.read, tmp_path)
    assert "not JSON" in told
    assert len(told.partition("\n")[0]) < 500


@pytest.mark.parametrize(
    "text",
    ["a: &x [*x]", f"a: {DEEP}", f"a: {LONG}", "a: 2026-99-99"],
    ids=["circle", "depth", "digits", "date"],
)
def test_yaml_beyond_the_bounds_is_a_config_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "suite.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_mapping(path)
    assert len(raised.value.message) < 500


def test_a_fifo_is_no_file_of_records_or_suite_or_model_and_does_not_hang(tmp_path: Path) -> None:
    for name in ("records.jsonl", "config.json", "model.safetensors.index.json"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(RecordError, match="not a regular file"):
        run_folder.read(tmp_path)
    with pytest.raises(ConfigError, match="not a regular file"):
        read_mapping(tmp_path / "records.jsonl")
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read: not a regular file"):
        read_folder(tmp_path)
    with pytest.raises(CheckpointError, match=r"index\.json: cannot be read: not a regular file"):
        read_object(tmp_path / "model.safetensors.index.json", "")
    (tmp_path / "pipeline").mkdir()
    os.mkfifo(tmp_path / "pipeline" / "model_index.json")
    assert no_model(tmp_path / "pipeline").message.startswith(f"{tmp_path}/pipeline")
    (tmp_path / "long").write_bytes(b"12345")
    with pytest.raises(OSError, match="longer than 0 MiB"):
        read_bytes(tmp_path / "long", 4)


def test_a_strategy_cannot_use_a_name_of_ours_or_an_unsafe_name() -> None:
    for name in (*OURS, 7, None, "", "a\x1bc", "\0", "x" * 65, "<b>", "-x"):
        with pytest.raises(ValueError, match="phase "):
            named_by_strategy(name)
    assert named_by_strategy("read layer 1.5 (fp8)") == "read layer 1.5 (fp8)"


def test_a_record_that_the_reader_would_refuse_is_a_failed_measurement(tmp_path: Path) -> None:
    impossible: list[tuple[dict[str, Any], str]] = [
        ({"load_ns": -5}, "load_ns: impossible value -5"),
        ({"load_ns": 7, "ready_ns": 6}, "ready_ns: less than load_ns"),
        ({"message": 7}, "Expected `str`, got `int` - at `$.message`"),
    ]
    appended = [run_folder.append(tmp_path, replace(make_result(), **one)) for one, _ in impossible]
    assert [(one.outcome, one.message) for one in appended] == [
        (Outcome.MEASUREMENT_FAILED, f"the measured process reported an impossible figure: {said}")
        for _, said in impossible
    ]
    assert list(run_folder.read(tmp_path).results) == appended


def test_a_models_configuration_may_hold_infinities_but_no_depth(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}')
    assert read_folder(tmp_path).config["time_step_limit"] == [0.0, float("inf")]
    (tmp_path / "config.json").write_text(f'{{"a": {TOO_DEEP}}}')
    with pytest.raises(CheckpointError, match="nested deeper than 100 levels"):
        read_folder(tmp_path)


def test_a_strategy_that_is_no_file_or_too_deep_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.py")
    said = refused(read_strategy, tmp_path / "fifo.py")
    assert said == f"cannot read the strategy {tmp_path}/fifo.py: not a regular file"
    (deep := tmp_path / "deep.py").write_text(f"def load(job): pass\nx = {'-' * 200_000}1\n")
    assert "deep.py is not Python: " in refused(read_strategy, deep)


@pytest.mark.parametrize(
    "line", ["def load(job)", "def load(job, x=1)", "def load(*jobs)", "def load(job, *, x=1)"]
)
def test_what_can_be_called_with_a_job_is_a_strategy(tmp_path: Path, line: str) -> None:
    (path := tmp_path / "mine.py").write_text(f"{line}: pass\n")
    assert read_strategy(path).name == "mine"


def test_a_pattern_that_would_take_forever_is_given_up() -> None:
    relay = Relay((1, 2), [r"(?:a|aa|aaa|aaaa)+$|^(\w+\s?)*\$"])
    relay._note("\n".join(["a" * 5_000 + "!", "word " * 5_000 + "!", "aaaa"]), 1, 1)
    relay.close()
    assert [mark.text for mark in relay.marks] == ["aaaa"]


def test_no_color_means_no_bold(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"NO_COLOR": "1", "FORCE_COLOR": "1", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    _console.show("[bold]text[/bold]")
    _console.error("text")
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert "text" in captured.out
