"""The code to paste runs as it stands, in a fresh interpreter that has torch and what it names."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache
from importlib.metadata import requires
from pathlib import Path
from shlex import quote
from typing import Any

import pytest
import torch
from fork_server import ForkServer
from safetensors.torch import save_file
from snapshots import Compare
from state_files import write_state

from weighin import install
from weighin.recommend.snippet import CannotWriteOut, snippet
from weighin.stream import formats
from weighin.stream.pretrained_library import module_in_pipelines
from weighin.suite import registry
from weighin.suite.registry import name_of

STRATEGIES = {
    name: info
    for name, info in registry.strategies().items()
    if "cpu" in info.devices and not info.pretrained
}
READABLE = [
    (name, fmt) for name, info in STRATEGIES.items() for fmt in info.formats if fmt != "pt_legacy"
]
PLAIN = [one for one in READABLE if one[0] != "streaming"]
NEEDS = {name: info.packages for name, info in STRATEGIES.items() if info.packages}
NEEDS["streaming"] = ("weighin",)

# Tied weights, persistent and non-persistent buffers, an integer buffer.
USE = """


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 3, bias=False)
        self.norm = torch.nn.BatchNorm1d(3)
        self.last = torch.nn.Linear(3, 3, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, x):
        return self.last(self.norm(self.first(x))) + self.table


group = torch.distributed
if {shares_load} and not group.is_initialized():
    group.init_process_group("gloo", store=group.HashStore(), rank=0, world_size=1)
dtype = torch.{dtype}
expected = torch.load("whole.pt", weights_only=True)
model = load_model(Net, {checkpoint!r}, dtype=dtype)
assert model.first.weight is model.last.weight
state = model.state_dict()
assert list(state) == list(expected)
for name, tensor in expected.items():
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    value = state[name]
    value = value.full_tensor() if hasattr(value, "full_tensor") else value  # of a shard
    assert value.dtype == kind, name
    assert torch.equal(value, tensor.to(kind)), name
assert torch.equal(model.table, torch.arange(3.0).to(dtype))
print("right")
"""


def saved(folder: Path, fmt: str) -> Path:
    """Write the whole state dict, and a checkpoint of this layout, whose path is returned."""
    weight, norm = torch.randn(3, 3), ("weight", "bias", "running_mean", "running_var")
    state = {"first.weight": weight} | {f"norm.{name}": torch.randn(3) for name in norm}
    state |= {"norm.num_batches_tracked": torch.tensor(7), "last.weight": weight}
    torch.save(state, folder / "whole.pt")
    path = formats.checkpoint_in(folder, fmt)
    path.parent.mkdir(exist_ok=True)
    write_state(path, fmt, state)
    return path


# A process's first tensor on the meta device imports sympy, which takes as long as torch itself.
WITH_TORCH = "import torch; torch.zeros(1, device='meta') + 1"
Servers = Callable[[frozenset[str]], ForkServer]


@pytest.fixture(scope="module")
def torch_without() -> Iterator[Servers]:
    """Interpreters that have torch, and not the given packages."""
    with ExitStack() as started:

        @cache
        def server(missing: frozenset[str]) -> ForkServer:
            return started.enter_context(closing(ForkServer(WITH_TORCH, sorted(missing))))

        yield server


def run(folder: Path, name: str, fmt: str, interpreter: ForkServer) -> None:
    """Paste a strategy's code, for two dtypes, and load with it."""
    checkpoint = saved(folder, fmt)
    code = ""
    for dtype in ("float32", "bfloat16"):
        text = snippet(registry.strategy(name), dtype=dtype)
        first = text.partition("\n")[0]
        assert first.startswith("#") == (name in NEEDS)
        needed = " ".join(map(quote, NEEDS.get(name, ())))
        assert name not in NEEDS or first == f"# pip install torch {needed}"
        code += text + USE.format(
            dtype=dtype, checkpoint=str(checkpoint), shares_load=STRATEGIES[name].shares_load
        )
    done = interpreter.run(code, folder=folder)
    assert (done.returncode, done.stdout) == (0, "right\nright\n"), done.stderr


@pytest.mark.parametrize(("name", "fmt"), PLAIN)
def test_a_snippet_runs_with_torch_and_what_it_names(
    tmp_path: Path, name: str, fmt: str, torch_without: Servers
) -> None:
    if lacks := STRATEGIES[name].missing:
        pytest.skip(f"{name} {lacks}")
    needed = {name_of(package) for package in NEEDS.get(name, ())}
    others = set() if needed - {"safetensors"} else {"numpy"}  # a loader may need numpy itself
    lines = [line for package in needed for line in requires(package) or ()]
    # A needed package may import those that it requires: accelerate imports safetensors.
    required = {name_of(line) for line in lines if "extra ==" not in line}
    missing = frozenset({"weighin", "safetensors", *others} - needed - required)
    run(tmp_path, name, fmt, torch_without(missing))


def test_the_snippet_of_a_strategy_of_ours_runs_with_us(
    tmp_path: Path, torch_fork_server: ForkServer
) -> None:
    run(tmp_path, "streaming", "pt", torch_fork_server)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["mmap_assign", "load_assign", "meta_copy", "safetensors_mmap"])
def test_the_code_for_a_plain_model_has_no_helpers_and_is_right(
    name: str, dtype: str, tmp_path: Path
) -> None:
    def build() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))

    kind, saved = getattr(torch, dtype), build().state_dict()
    path = tmp_path / "weights"
    save_file(saved, path) if name.startswith("safe") else torch.save(saved, path)
    text = snippet(registry.strategy(name), dtype=dtype, is_mixed=False, computes_buffers=False)
    assert len([line for line in text.splitlines() if line]) <= 13
    names: dict[str, Any] = {}
    exec(text, names)
    state = names["load_model"](build, str(path)).state_dict()
    for key, tensor in build().to(kind).state_dict().items():
        assert state[key].dtype == tensor.dtype
        assert torch.equal(state[key], saved[key].to(tensor.dtype))


def test_no_strategy_for_gpus_alone_imports_us() -> None:
    """The others, but for streaming, run without us above."""
    gpus = [one for one in registry.strategies().values() if "cpu" not in one.devices]
    assert gpus
    assert [one.name for one in gpus if "weighin" in snippet(one)] == []


HEAD = "import torch\nfrom weighin.strategy import assign, load_streaming, retie, tied_names\n\n\n"
TIES = "    model = job.build_model()\n    tied = tied_names(model)"
CODE = {
    "it passes on the whole job": "def load(job):\n    return helper(job)\n",
    "the job is no plain argument": "def load(job, /):\n    return job.build_model()\n",
    "it uses a name of its file": "SIZE = 3\n\n\ndef load(job):\n    return job.build_model()[:SIZE]\n",
    "it is no Python without its job": "def load(job):\n    if job.folder:\n        return None\n",
    "it uses the tied names in a way of its own":
        f"{HEAD}def load(job):\n{TIES}\n    if tied:\n        retie(model, tied)\n    return model\n",
    "a comment is no use of the tied names":
        f"{HEAD}def load(job):\n{TIES}  # the tied names\n    retie(model, tied)\n    return model  # none of the tied names is missing\n",
    "it imports the loader as it is documented":
        f"{HEAD}def load(job):\n    return load_streaming(job.build_model, job.checkpoint, device=job.device)\n",
}  # fmt: skip


def written(folder: Path, code: str) -> str:
    (path := folder / "mine.py").write_text(code)
    return snippet(registry.read_strategy(path), is_mixed=False, computes_buffers=False)


def test_what_is_written_out_and_why_not(tmp_path: Path, same: Compare) -> None:
    ours = snippet(registry.strategy("meta_copy"), checkpoint="x.pt")
    texts = [f"# the strategy's own code\n\n{ours[ours.index('def load_model') :]}"]
    for what, code in CODE.items():
        try:
            text = written(tmp_path, code)
        except CannotWriteOut as error:
            text = f"cannot: {error}\n"
        texts.append(f"# {what}\n\n{text}")
    same("snippets.txt", "\n\n".join(texts))


OTHER_CASE = """def load(job):
    with job.phase({quote}read{quote}):
        {start}
            raise OSError
        else:
            put = assign
            model = job.build_model()
            put(model, torch.load(job.checkpoint), job.device)
    return model
"""


@pytest.mark.parametrize("quote", ["'", '"'], ids=["single", "double"])
@pytest.mark.parametrize(
    "start",
    [
        "if job.folder:",
        "if job.folder:\n            raise OSError\n        elif job.device == 'x':",
    ],
    ids=["if", "elif"],
)
def test_the_other_case_of_a_folder_stays(tmp_path: Path, start: str, quote: str) -> None:
    """Also where a helper has another name, and with both kinds of quotes."""
    code = HEAD + OTHER_CASE.format(quote=quote, start=start)
    text = written(tmp_path, code)
    torch.save((net := torch.nn.Linear(2, 2)).state_dict(), tmp_path / "w.pt")
    names: dict[str, Any] = {}
    exec(text, names)
    loaded = names["load_model"](lambda: torch.nn.Linear(2, 2), tmp_path / "w.pt")
    assert torch.equal(loaded.weight, net.weight)


def test_a_class_of_transformers_in_a_pipeline_of_diffusers_is_imported_from_there() -> None:
    pytest.importorskip("diffusers", reason=install.command("diffusers"))
    own = module_in_pipelines("StableDiffusionSafetyChecker")
    assert own == "diffusers.pipelines.stable_diffusion.safety_checker"
    assert module_in_pipelines("GPT2LMHeadModel") == ""
