"""A user's own model: called where its module says how, and said to be uncalled where it does not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from nightly import isolations
from typed import ROOT, CommandLine, Ended

from weighin.units import MIB

NETS = """
import torch

class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.line = torch.nn.Linear(width, width)

    def forward(self, *, x, masks):
        mask, _ = masks
        return {"out": torch.where(mask, self.line(x), 0)}

def build(width):
    return Net(width)
"""
INPUTS = """
def example_inputs(width):
    mask = torch.ones(1, width, dtype=torch.bool)
    return {"x": torch.ones(1, width), "masks": [mask, (mask,)]}
"""


def benched(command: CommandLine, name: str, text: str) -> Ended:
    (command.folder / f"{name}.py").write_text(text)
    torch.save(
        {"line.weight": torch.ones(4, 4), "line.bias": torch.ones(4)}, command.folder / "own.pt"
    )
    return command.run(
        "bench", "--model", f"{name}:build", "--set", 'kwargs={"width": 4}', "--checkpoint", "own.pt",
        "-s", "load_assign", "--isolation", "process", "--dtype", "bf16", "--out", f"of_{name}",
    )  # fmt: skip


def record(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "records.jsonl").read_text())
    return found


@pytest.mark.slow
def test_a_model_is_called_with_what_its_module_gives_in_the_cells_dtype(
    command: CommandLine,
) -> None:
    ended = benched(command, "called", NETS + INPUTS)
    assert ended.code == 0, ended.err
    found = record(command.folder / "of_called")
    assert found["outcome"] == "ok"
    assert found["cost"]["first_use_ns"]  # type: ignore[index]
    assert "example_inputs" not in ended.out


@pytest.mark.slow
def test_a_module_that_prints_much_before_the_load_is_measured(command: CommandLine) -> None:
    printing = "import sys\nprint('w' * 1_000_000, file=sys.stderr)\n"
    ended = benched(command, "printing", printing + NETS)
    assert ended.code == 0, ended.err[-1000:]
    assert record(command.folder / "of_printing")["outcome"] == "ok"


@pytest.mark.slow
def test_a_model_that_nobody_says_how_to_call_is_ok_with_a_word_on_it(command: CommandLine) -> None:
    ended = benched(command, "uncalled", NETS)
    assert ended.code == 0, ended.err
    found = record(command.folder / "of_uncalled")
    assert found["outcome"] == "ok"
    assert found["cost"]["first_use_ns"] is None  # type: ignore[index]
    assert "uncalled defines no example_inputs" in " ".join(ended.out.split())


@pytest.mark.slow
@pytest.mark.parametrize("isolation", isolations("docker"))
@pytest.mark.parametrize("place", ["file", "pythonpath"])
def test_a_module_is_found_where_it_lives(command: CommandLine, isolation: str, place: str) -> None:
    folder = command.folder / "lib" / "parts"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "sizes.py").write_text("SCALE = 2")
    text = NETS.replace("import torch", "import torch\nfrom .sizes import SCALE", 1)
    (folder / "nets.py").write_text(text.replace("Net(width)", "Net(width * SCALE)"))
    name = "lib/parts/nets.py:build" if place == "file" else "parts.nets:build"
    settings: dict[str, Any] = {} if place == "file" else {"PYTHONPATH": f"{ROOT / 'harness'}:lib"}
    ended = command.run(
        "bench", "--model", name, "--set", 'kwargs={"width": 2}', "--isolation", isolation,
        "-s", "load_assign", "--out", "run", **settings,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert record(command.folder / "run")["outcome"] == "ok"


@pytest.mark.slow
@pytest.mark.docker
def test_a_container_sees_a_package_with_compiled_code_and_what_is_mounted(
    command: CommandLine,
) -> None:
    (package := command.folder / "site" / "mynets").mkdir(parents=True)
    (width := command.folder / "width.txt").write_text("4")
    text = NETS.replace("Net(width)", f"Net(int(open({str(width)!r}).read()))")
    (package / "__init__.py").write_text(f"import numpy.linalg._umath_linalg\n{text}")
    (package / "fast.so").touch()
    ended = command.run(
        "bench", "--model", "mynets:build", "--set", 'kwargs={"width": 4}', "--isolation", "docker",
        "--set", "mounts=width.txt", "-s", "load_assign", "--out", "run",
        PYTHONPATH=f"{ROOT / 'harness'}:{package.parent}",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert record(command.folder / "run")["outcome"] == "ok"


def training_checkpoint(folder: Path) -> Path:
    """Write a training checkpoint of ``torch.nn.Linear(4, 4)``, wrapped for data-parallel training."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    weights = {f"module.{name}": value for name, value in model.state_dict().items()}
    path = folder / "train.pt"
    torch.save({"epoch": 1, "model": weights, "optimizer": optimizer.state_dict()}, path)
    return path


LINEAR = ("--model", "torch.nn:Linear", "--set", 'kwargs={"in_features": 4, "out_features": 4}')


@pytest.mark.slow
def test_a_training_checkpoint_is_measured_with_the_options_that_the_errors_propose(
    command: CommandLine,
) -> None:
    training_checkpoint(command.folder)
    options = [*LINEAR, "--checkpoint", "train.pt", "-s", "load_assign,streaming"]
    bench = ["bench", *options, "--isolation", "process", "--out", "run"]
    refused = command.run(*bench)
    assert refused.code == 2
    assert "select the weights: --key model" in " ".join(refused.err.split())
    refused = command.run(*bench, "--key", "model")
    assert refused.code == 2
    assert "--set strip_prefix=module." in " ".join(refused.err.split())
    ended = command.run(*bench, "--key", "model", "--set", "strip_prefix=module.")
    assert ended.code == 0, ended.err
    assert outcomes(command.folder / "run") == ["ok", "ok"]
    ended = command.run("predict", *options, "--key", "model", "--set", "strip_prefix=module.")
    assert ended.code == 0, ended.err
    ended = command.run("recommend", "train.pt", "--key", "model", "--set", "strip_prefix=module.")
    assert ended.code == 0, ended.err
    assert "weighin convert" not in ended.out  # the code takes the part itself
    call = "load_model(build_model, 'train.pt', key='model', strip_prefix='module.')"
    assert call in ended.out
    ended = command.run("recommend", "--key", "model")
    assert (ended.code, "add --checkpoint PATH" in ended.err) == (2, True)


@pytest.mark.slow
def test_a_suite_selects_the_weights_in_a_training_checkpoint(command: CommandLine) -> None:
    training_checkpoint(command.folder)
    model = {
        "builder": LINEAR[1], "kwargs": json.loads(LINEAR[3].removeprefix("kwargs=")), "checkpoint": "train.pt",
        "key": "model", "strip_prefix": "module.",
    }  # fmt: skip
    suite = {"models": model, "strategies": ["load_assign", "streaming"], "isolation": "process"}
    (command.folder / "suite.yaml").write_text(json.dumps(suite))
    ended = command.run("bench", "--suite", "suite.yaml", "--out", "run")
    assert ended.code == 0, ended.err
    assert outcomes(command.folder / "run") == ["ok", "ok"]
    ended = command.run("predict", "--suite", "suite.yaml")
    assert ended.code == 0, ended.err


@pytest.mark.slow
def test_strategies_with_a_key_load_the_training_checkpoint_itself(command: CommandLine) -> None:
    """The optimizer's state, twice the weights, is in the peak of torch.load, and in no other."""
    size_bytes = 64 * MIB
    weights = {"weight": torch.zeros(1, size_bytes // 4), "bias": torch.zeros(1)}
    adam = {name: torch.ones(size_bytes // 4) for name in ("exp_avg", "exp_avg_sq")}
    torch.save({"model": weights, "optimizer": {"state": [adam]}}, command.folder / "train.pt")
    arguments = json.dumps({"in_features": size_bytes // 4, "out_features": 1})
    names = ("baseline", "mmap_assign", "streaming")
    asked = [*names, *({"name": name, "options": {"key": "model"}} for name in names)]
    suite = {
        "models": "torch.nn:Linear",
        "strategies": asked,
        "isolation": "process",
        "uses": "none",
    }
    (command.folder / "suite.yaml").write_text(json.dumps(suite))
    ended = command.run(
        "bench", "--suite", "suite.yaml", "--set", f"kwargs={arguments}", "--checkpoint", "train.pt",
        "--key", "model", "--out", "run", patience_s=300,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    lines = (command.folder / "run/records.jsonl").read_text().splitlines()
    peaks = {
        (one["cell"]["strategy"], bool(one["cell"]["options"])): one["peaks"]["rss_bytes"]
        for one in map(json.loads, lines)
    }
    optimizer = peaks["baseline", True] - peaks["baseline", False]
    assert optimizer == pytest.approx(2 * size_bytes, rel=0.05)
    for name in ("mmap_assign", "streaming"):
        assert peaks[name, True] == pytest.approx(peaks[name, False], abs=size_bytes // 2)


@pytest.mark.slow
@pytest.mark.nightly  # by day as a newcomer's first command
@pytest.mark.parametrize("isolation", isolations("process"))
def test_a_checkpoint_without_code_is_a_model(command: CommandLine, isolation: str) -> None:
    training_checkpoint(command.folder)
    options = ["--model", "from:train.pt", "--key", "model", "-s", "mmap_assign,streaming"]
    ended = command.run("bench", *options, "--isolation", isolation, "--out", "run")
    assert ended.code == 0, ended.err
    assert outcomes(command.folder / "run") == ["ok"] * 2
    (command.folder / "run/records.jsonl").unlink()
    ended = command.run("bench", "--resume", "run")
    assert ended.code == 0, ended.err
    assert outcomes(command.folder / "run") == ["ok"] * 2
    ended = command.run("predict", *options)
    assert ended.code == 0, ended.err
    ended = command.run("recommend", "--model", "from:train.pt", "--key", "model")
    assert ended.code == 0, ended.err


def outcomes(folder: Path) -> list[str]:
    lines = (folder / "records.jsonl").read_text().splitlines()
    return [json.loads(line)["outcome"] for line in lines]
