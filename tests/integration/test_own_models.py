"""A user's own model: a module, a training checkpoint, a folder of Hugging Face."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from nightly import isolations, nightly
from remote_folder import write_folder
from typed import ROOT, CommandLine, Ended

from weighin.models.pretrained import pretrained_class
from weighin.units import MIB

pytestmark = pytest.mark.slow

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
PRINTING = "import sys\nprint('w' * 1_000_000, file=sys.stderr)\n"


def bench(command: CommandLine, words: str, **settings: Any) -> Ended:
    ended = command.run(f"bench {words} --out run", patience_s=300, **settings)
    assert ended.code == 0, ended.err[-1000:]
    return ended


def outcomes(command: CommandLine) -> set[str]:
    return {record["outcome"] for record in command.records("run")}


def benched(command: CommandLine, nets: str, options: str) -> Ended:
    """Measure loads of the module ``nets`` of width 4, whose weights are in a file."""
    (command.folder / "nets.py").write_text(nets)
    weights = {"line.weight": torch.ones(4, 4), "line.bias": torch.ones(4)}
    torch.save(weights, command.folder / "own.pt")
    model = "--model nets:build --set kwargs.width=4 --checkpoint own.pt"
    ended = bench(command, f"{model} --isolation process {options}")
    assert outcomes(command) == {"ok"}
    return ended


@pytest.mark.parametrize(
    ("nets", "is_called"),
    [(NETS + INPUTS, True), (PRINTING + NETS, False)],
    ids=["with inputs", "printing much, without"],
)
def test_a_model_is_called_with_what_its_module_gives_in_the_cells_dtype(
    command: CommandLine, nets: str, is_called: bool
) -> None:
    ended = benched(command, nets, "-s load_assign --dtype bf16")
    assert bool(command.record("run")["cost"]["first_use_ns"]) == is_called
    words = "nets defines no example_inputs"
    assert (words in " ".join(ended.out.split())) != is_called


SHAPE = "RuntimeError: shape '[3]' is invalid for input of size 4"
ABORTED = "the measured process was ended by SIGABRT in phase 'forward'"
INFINITE = "the forward pass returns values that are not finite"
BROKEN = [
    ("self.line(x).reshape(3)", SHAPE),
    pytest.param("self.line(x) / 0", INFINITE, marks=pytest.mark.nightly),
    pytest.param("__import__('os').abort()", ABORTED, marks=pytest.mark.nightly),
]


def blames(record: dict[str, Any]) -> list[str]:
    return [text for text in record["warnings"] if "forward pass" in text]


@pytest.mark.parametrize(("body", "how"), BROKEN)
def test_a_model_whose_forward_pass_fails_is_blamed_once_for_all_strategies(
    command: CommandLine, body: str, how: str
) -> None:
    nets = (NETS + INPUTS).replace("torch.where(mask, self.line(x), 0)", body)
    ended = benched(command, nets, "-s baseline,streaming")
    records = command.records("run")
    assert {record["message"] for record in records} == {""}
    (warning,) = {text for record in records for text in blames(record)}
    fails = "the forward pass of nets:build(width=4) fails"
    assert warning.startswith(f"{fails}: {how}")
    assert warning.endswith("Every weight is right. To measure the load alone: --use none")
    assert " ".join(ended.out.split()).count(fails) == 1


def test_without_a_forward_pass_there_is_nothing_to_blame(command: CommandLine) -> None:
    nets = (NETS + INPUTS).replace("self.line(x)", "__import__('os').abort()")
    benched(command, nets, "-s baseline --use none")
    assert blames(command.record("run")) == []


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
    built(command, name, f"2 --isolation {isolation}", None if place == "file" else "lib")


def built(command: CommandLine, model: str, width: str, path: Path | str | None) -> None:
    """Measure a load of a model of a width, and more options, with a folder of modules on the path."""
    variables: dict[str, Any] = {"PYTHONPATH": f"{ROOT / 'harness'}:{path}"} if path else {}
    bench(command, f"--model {model} --set kwargs.width={width} -s load_assign", **variables)
    assert outcomes(command) == {"ok"}


@pytest.mark.docker
def test_a_container_sees_a_package_with_compiled_code_and_what_is_mounted(
    command: CommandLine,
) -> None:
    (package := command.folder / "site" / "mynets").mkdir(parents=True)
    (width := command.folder / "width.txt").write_text("4")
    text = NETS.replace("Net(width)", f"Net(int(open({str(width)!r}).read()))")
    (package / "__init__.py").write_text(f"import numpy.linalg._umath_linalg\n{text}")
    (package / "fast.so").touch()
    built(command, "mynets:build", "4 --isolation docker --set mounts=width.txt", package.parent)


def write_training_checkpoint(path: Path) -> None:
    """Write a training checkpoint of ``torch.nn.Linear(4, 4)``, wrapped for data-parallel training."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    weights = {f"module.{name}": value for name, value in model.state_dict().items()}
    torch.save({"epoch": 1, "model": weights, "optimizer": optimizer.state_dict()}, path)


def test_a_training_checkpoint_is_measured_with_the_options_that_the_errors_propose(
    command: CommandLine,
) -> None:
    write_training_checkpoint(command.folder / "train.pt")
    model = '--model torch.nn:Linear --set \'kwargs={"in_features": 4, "out_features": 4}\''
    options = f"{model} --checkpoint train.pt -s load_assign,streaming"
    key, prefix = "--key model", "--key model --set strip_prefix=module."
    line = f"bench {options} --isolation process --out run"
    for given, proposed in (("", key), (key, "--set strip_prefix=module.")):
        refused = command.run(f"{line} {given}")
        assert (refused.code, proposed in " ".join(refused.err.split())) == (2, True), refused.err
    for each in (f"{line} {prefix}", "bench --resume run", f"predict {options} {prefix}"):
        ended = command.run(each)
        assert ended.code == 0, ended.err
    assert [one["outcome"] for one in command.records("run")] == ["ok", "ok"]
    ended = command.run(f"recommend train.pt {prefix}")
    assert ended.code == 0, ended.err
    assert "weighin convert" not in ended.out  # the code takes the part itself
    call = "load_model(build_model, 'train.pt', key='model', strip_prefix='module.')"
    assert call in ended.out
    ended = command.run("recommend --key model")
    assert (ended.code, "add --checkpoint PATH" in ended.err) == (2, True)


def test_strategies_with_a_key_load_the_training_checkpoint_itself(command: CommandLine) -> None:
    """The optimizer's state, twice the weights, is in the peak of torch.load, and in no other."""
    size_bytes = 64 * MIB
    count = size_bytes // 4
    weights = {"weight": torch.zeros(1, count), "bias": torch.zeros(1)}
    adam = {name: torch.ones(count) for name in ("exp_avg", "exp_avg_sq")}
    torch.save({"model": weights, "optimizer": {"state": [adam]}}, command.folder / "train.pt")
    names = ("baseline", "mmap_assign", "streaming")
    asked = [*names, *({"name": name, "options": {"key": "model"}} for name in names)]
    suite = {"models": "torch.nn:Linear", "strategies": asked, "uses": "none"}
    (command.folder / "suite.yaml").write_text(json.dumps(suite | {"isolation": "process"}))
    arguments = f"--set kwargs.in_features={count} --set kwargs.out_features=1"
    bench(command, f"--suite suite.yaml {arguments} --checkpoint train.pt --key model")
    peaks = {
        (one["cell"]["strategy"], bool(one["cell"]["options"])): one["peaks"]["rss_bytes"]
        for one in command.records("run")
    }
    optimizer = peaks["baseline", True] - peaks["baseline", False]
    assert optimizer == pytest.approx(2 * size_bytes, rel=0.05)
    for name in ("mmap_assign", "streaming"):
        assert peaks[name, True] == pytest.approx(peaks[name, False], abs=size_bytes // 2)


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
DECODER = SMALL | {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ALL = "streaming,transformers,accelerate,safetensors_mmap,baseline"


@pytest.fixture(scope="module")
def folders(disk: Path) -> Path:
    """Folders of Hugging Face: ``half`` in bfloat16, and ``experts``."""
    root = disk / "pretrained folders"
    for name, architecture, more in (
        ("half", "LlamaForCausalLM", {}),
        ("experts", "Qwen3MoeForCausalLM", EXPERTS),
    ):
        kind = pretrained_class(architecture)
        torch.manual_seed(0)
        model = kind(kind.config_class(**DECODER, **more))
        dtype = torch.bfloat16 if name == "half" else torch.float32
        model.to(dtype).save_pretrained(root / name)
    return root


@pytest.mark.parametrize("names", ["streaming,transformers", *nightly(ALL)])
def test_code_of_a_trusted_folder_runs_in_every_strategy(
    command: CommandLine, disk: Path, names: str
) -> None:
    folder = write_folder(disk / "remote code")
    bench(command, f"'{folder}' -s {names} --trust-remote-code --isolation process")
    assert outcomes(command) == {"ok"}


@pytest.mark.nightly
def test_a_strategy_that_cannot_convert_keys_says_so(command: CommandLine, folders: Path) -> None:
    bench(command, f"'{folders}/experts' -s streaming,safetensors_mmap --isolation process")
    skipped, right = sorted(command.records("run"), key=lambda one: str(one["cell"]["strategy"]))
    assert (right["outcome"], skipped["outcome"]) == ("ok", "skipped")
    assert skipped["message"] == (
        "needs keys converted, renamed, computed or left out, as from_pretrained does, but safetensors_mmap expects the model's"
        " own keys: give another --format, or write a checkpoint with those keys: weighin convert"
        " FOLDER TARGET --keys model"
    )


def test_a_prediction_in_another_format_reads_the_folders_own_dtype(
    command: CommandLine, folders: Path
) -> None:
    done = command.run(f"predict '{folders / 'half'}' -s mmap_assign --json -")
    assert done.code == 0, done.err
    (found,) = json.loads(done.out)["predictions"]
    assert (found["format"], found["cannot"]) == ("pt", "")
    size = (folders / "half/model.safetensors").stat().st_size
    assert found["disk_read_bytes"] == pytest.approx(size, rel=0.2)
