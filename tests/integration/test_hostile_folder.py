"""No verb runs a Python file of the current folder that nobody named, whatever its name is."""

from pathlib import Path

import pytest
import torch
from typed import CommandLine

NAMES = (
    *("torch", "numpy", "random", "json", "tempfile", "pickle", "struct", "subprocess", "ctypes"),
    *("typing", "logging", "weighin", "safetensors", "transformers", "pip", "sitecustomize"),
)


@pytest.fixture
def hostile(command: CommandLine) -> Path:
    """A folder with a checkpoint and Python files that note that they were executed."""
    torch.save({"weight": torch.ones(8, 8), "bias": torch.zeros(8)}, command.folder / "model.pt")
    for name in NAMES:
        note = (
            f"open({str(command.folder / 'executed')!r}, 'a').write('{name} ')\nraise ImportError"
        )
        (command.folder / f"{name}.py").write_text(note)
    return command.folder


def run(command: CommandLine, *arguments: str) -> None:
    """Run a verb in the folder."""
    ended = command.run(*arguments)
    executed = command.folder / "executed"
    assert not executed.exists(), f"{arguments[0]}: {executed.read_text()}"
    assert (ended.code, ended.left) == (0, []), ended.err


def test_convert_and_predict_run_no_file_of_the_current_folder(
    command: CommandLine, hostile: Path
) -> None:
    run(command, "convert", "model.pt", "model.safetensors", "--verify")
    run(command, "predict", "model.pt", "-s", "streaming")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "model.pt"),
        ("recommend", "model.pt", "--ram", "1g"),
        ("bench", "model.pt", "-s", "streaming", "--isolation", "process", "--out", "run"),
        ("bench", "gpt2-tiny", "-s", "streaming", "--isolation", "process", "--out", "run"),
        ("list", "models"),
        ("doctor",),
        pytest.param(
            ("floor", "model.pt", "-s", "streaming", "--isolation", "cgroup", "--out", "run"),
            marks=pytest.mark.cgroup,
        ),
    ],
    ids=" ".join,
)
def test_no_verb_runs_a_file_of_the_current_folder(
    command: CommandLine, hostile: Path, arguments: tuple[str, ...]
) -> None:
    run(command, *arguments)


@pytest.mark.nightly
def test_reading_a_run_executes_no_file_of_the_current_folder(
    command: CommandLine, hostile: Path
) -> None:
    run(command, "bench", "model.pt", "-s", "streaming", "--isolation", "process", "--out", "run")
    for verb in ("report", "history"):
        run(command, *verb.split(), "run")
