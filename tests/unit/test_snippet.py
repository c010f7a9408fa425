"""The code to paste runs as it stands, in a fresh interpreter that has torch and not us."""

import subprocess
import sys
from pathlib import Path

import pytest

from harness import registry
from harness.recommend.snippet import CannotWriteOut, snippet

PLAIN = {"baseline", "sequential", "meta_copy", "load_assign", "mmap_assign", "per_param", "per_param_mmap", "per_module"}  # fmt: skip

# Tied weights, persistent and non-persistent buffers, an integer buffer.
USE = """
import sys
from pathlib import Path


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


saved, dtype = Path(sys.argv[1]), getattr(torch, sys.argv[2])
expected = torch.load(saved / "whole.pt", weights_only=True)
model = load_model(Net, saved / sys.argv[3], dtype=dtype)
assert model.first.weight is model.last.weight
state = model.state_dict()
assert list(state) == list(expected)
for name, tensor in expected.items():
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    assert state[name].dtype == kind, name
    assert torch.equal(state[name], tensor.to(kind)), name
assert torch.equal(model.table, torch.arange(3.0).to(dtype))
assert not any(name.split(".")[0] == "harness" for name in sys.modules if sys.modules[name])
print("right")
"""
BEFORE = "import sys; sys.modules['harness'] = None; sys.modules['safetensors'] = None\n"


def saved(folder: Path) -> None:
    import json

    import torch

    weight, names = torch.randn(3, 3), ["first.weight", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "last.weight"]  # fmt: skip
    values = [weight, *(torch.randn(3) for _ in range(4)), torch.tensor(7), weight]
    state = dict(zip(names, values, strict=True))
    torch.save(state, folder / "whole.pt")
    for layout in ("per_param", "per_module"):
        (folder / layout).mkdir()
    tensors = {name: f"{name}.pt" for name in names[:-1]} | {"last.weight": "first.weight.pt"}
    for name, file in tensors.items():
        torch.save(state[name], folder / "per_param" / file)
    (folder / "per_param" / "index.json").write_text(json.dumps({"tensors": tensors}))
    for part in ("first", "norm"):
        inside = {name: one for name, one in state.items() if name.startswith(part)}
        torch.save(
            inside | ({"last.weight": weight} if part == "first" else {}),
            folder / "per_module" / f"{part}.pt",
        )
    (folder / "per_module" / "index.json").write_text(
        json.dumps({"files": {"first.pt": [], "norm.pt": []}})
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(PLAIN))
def test_a_snippet_runs_with_torch_alone(tmp_path: Path, name: str, dtype: str) -> None:
    saved(tmp_path)
    info = registry.strategy(name)
    code = tmp_path / "pasted.py"
    code.write_text(BEFORE + snippet(info, dtype=dtype) + USE)
    layout = info.formats[0] if info.formats[0].startswith("per_") else "whole.pt"
    done = subprocess.run(
        [sys.executable, str(code), str(tmp_path), dtype, layout],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


def test_a_snippet_is_the_strategys_own_code() -> None:
    text = snippet(registry.strategy("meta_copy"), checkpoint="x.pt")
    start = text.index("def load_model")
    assert text[start:] == (
        'def load_model(build_model, checkpoint, device="cpu", dtype=torch.float32):\n'
        "    with torch.device('meta'):\n"
        "        model = build_model()\n"
        "    tied = tied_names(model)\n"
        "    model.to_empty(device=device)\n"
        "    retie(model, tied)\n"
        "    where = device\n"
        "    state = torch.load(checkpoint, map_location=where, weights_only=True)\n"
        "    model.load_state_dict(state)\n"
        "    reset_buffers(model, build_model, device, dtype)\n"
        "    return model\n"
        "\n\n"
        "# model = load_model(build_model, 'x.pt')   # build_model() returns your model\n"
    )


def test_only_a_strategy_of_ours_imports_us() -> None:
    ours = {
        name
        for name, info in registry.strategies().items()
        if "load" in info.path.read_text() and "harness" in _written(info)
    }
    assert ours == {"streaming"}


def _written(info: registry.StrategyInfo) -> str:
    try:
        return snippet(info)
    except CannotWriteOut:
        return ""


def test_what_cannot_be_written_out_says_why(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def load(job):\n    return helper(job)\n")
    with pytest.raises(CannotWriteOut, match=r"^line 2 of load\(\) needs the job itself$"):
        snippet(registry.read_strategy(path))
