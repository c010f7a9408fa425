"""What a hand or a stranger types, and what weighin answers in two lines: no traceback and no hang."""

import os
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from weighin.cli import _console, app
from weighin.errors import ConfigError, HarnessError
from weighin.run.output import Relay
from weighin.settings.yaml_file import read_mapping

TYPED = {
    ("run", "--ready-url", "http://[::1", "--", "true"): "is not an HTTP address",
    ("run", "--ready-url", "http://a:b", "--", "true"): "is not an HTTP address",
    ("run", "--timeout", "nan", "--", "true"): "input should be a finite number, got 'nan'",
    (
        "run",
        "--timeout",
        "-1",
        "--",
        "true",
    ): "input should be greater than or equal to 0, got '-1'",
    ("run", "--set", "grace_s=-1", "--", "true"): "input should be greater than or equal to 0",
    ("bench", "gpt2-tiny", "--timeout", "inf"): "input should be a finite number, got 'inf'",
    ("bench", "gpt2-tiny", "-s", "./deep.py"): "deep.py is not Python: ",
    (
        "bench",
        "gpt2-tiny",
        "-s",
        "./fifo.py",
    ): "cannot read the strategy fifo.py: not a regular file",
    ("bench", "gpt2"): "did you mean 'gpt2-small'?",
    (
        "inspect",
        "https://hub/gpt2",
    ): "https://hub/gpt2 is an address, and weighin fetches nothing",
    ("inspect", "empty.pt"): "empty.pt: no tensors in it",
    ("convert", "model.pt", f"{244 * 'a'}.safetensors"): "the target's name is too long",
    (
        "recommend",
        "--set",
        "models=gpt2-tiny,llama-8b",
    ): "weighin recommend answers for one value of models",
    ("convert", "model.pt", "out.xyz"): "no format of checkpoints has the suffix .xyz",
}


@pytest.fixture
def _inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "cache"))
    Path("deep.py").write_text(f"def load(job): pass\nx = {'-' * 200_000}1\n")
    os.mkfifo("fifo.py")
    torch.save({}, "empty.pt")
    torch.save({"w": torch.zeros(3)}, "model.pt")


@pytest.mark.usefixtures("_inputs")
@pytest.mark.parametrize(("arguments", "text"), TYPED.items(), ids=lambda each: " ".join(each)[:40])
def test_a_rough_input_is_refused_with_its_reason(arguments: tuple[str, ...], text: str) -> None:
    result = CliRunner().invoke(app.app, [*arguments])
    assert isinstance(result.exception, SystemExit | HarnessError)
    said = result.output + str(result.exception)
    assert text in " ".join(said.split())


@pytest.mark.parametrize(
    "line", ["def load(job)", "def load(job, x=1)", "def load(*jobs)", "def load(job, *, x=1)"]
)
def test_what_can_be_called_with_a_job_is_a_strategy(tmp_path: Path, line: str) -> None:
    from weighin.suite.registry import read_strategy

    (path := tmp_path / "mine.py").write_text(f"{line}: pass\n")
    assert read_strategy(path).name == "mine"


def test_a_pattern_that_would_take_forever_is_given_up() -> None:
    relay = Relay((1, 2), [r"(?:a|aa|aaa|aaaa)+$|^(\w+\s?)*\$"])
    relay._note("\n".join(["a" * 5_000 + "!", "word " * 5_000 + "!", "aaaa"]), 1, 1)
    relay.close()
    assert [mark.text for mark in relay.marks] == ["aaaa"]


def test_a_key_twice_in_yaml_is_an_error_with_its_line(tmp_path: Path) -> None:
    (path := tmp_path / "baseline.yaml").write_text("a: 1\nb:\n  c: 1\n  c: 2\n")
    with pytest.raises(
        ConfigError, match=r"baseline.yaml, line 4: not YAML: the key c is there twice"
    ):
        read_mapping(path)
    path.write_text("base: &base {x: 1}\nb:\n  <<: *base\n  c: 2\n")
    assert read_mapping(path)["b"] == {"x": 1, "c": 2}


def test_no_color_means_no_bold(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    _console.show("[bold]text[/bold]")
    _console.error("text")
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert "text" in captured.out


@pytest.mark.parametrize(
    "config", ["{%s}", '{"text_config": {"inner": {%s}}}'], ids=["top", "inner"]
)
def test_a_config_of_a_billion_layers_is_refused(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config % '"model_type": "gpt2", "n_layer": 1000000000')
    torch.save({"w": torch.zeros(3)}, tmp_path / "pytorch_model.bin")
    result = CliRunner().invoke(app.app, ["bench", str(tmp_path)])
    assert "n_layer is 1,000,000,000, more layers than any model has" in str(result.exception)
