"""Saving onto a file whose pages are a model's weights, as docs/recommend.md describes.

Each way runs in a child process of its own, because three of the ways end with SIGBUS.
"""

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest
from fork_server import ForkServer

PAGE: Final = Path(__file__).parents[2] / "docs" / "recommend.md"

SETUP: Final = """
import json, resource, shutil, sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
import weighin.stream.model, weighin.stream.hugging_face

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # SIGBUS would leave a core file
"""
COMMON: Final = """
import json, os, shutil, subprocess
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from weighin import load_pretrained, load_streaming


def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))  # 8 tensors


def llama(seed=0):
    torch.manual_seed(seed)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64)
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes))


def others(expected, state):
    return [name for name, tensor in expected.state_dict().items() if not torch.equal(state[name], tensor)]


torch.save(build(1).state_dict(), "model.pt")
torch.save(build(2).state_dict(), "other.pt")
save_file(build(1).state_dict(), "model.safetensors")
if FOLDER:
    llama(1).save_pretrained("folder")
if FOLDER == "bin":
    torch.save(llama(1).state_dict(), "folder/pytorch_model.bin")
    Path("folder/model.safetensors").unlink()
model = build()
"""
MEMORY: Final = "print(json.dumps(others({expected}, model.state_dict())))\n"
FILE: Final = "print(json.dumps(others({expected}, {state})))\n"


def code(number: int) -> str:
    """Return the code of a way on the page."""
    found = re.search(
        rf"^Way {number}\b.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    assert found
    return found[1]


def run(forks: ForkServer, folder: Path, *parts: str) -> subprocess.CompletedProcess[str]:
    """Run the code in a child, beside the files of the page: a folder only if the code names it."""
    code = "\n".join(parts)
    kind = "bin" if "pytorch_model.bin" in code else "safetensors" if '"folder"' in code else ""
    return forks.run(f"FOLDER = {kind!r}\n{COMMON}\n{code}", folder=folder)


def printed(ended: subprocess.CompletedProcess[str]) -> list[Any]:
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    with closing(ForkServer(SETUP)) as server:
        yield server


@pytest.mark.parametrize(
    ("way", "file", "most_bytes"),
    [
        (1, "model.pt", 0),
        (2, "model.safetensors", 0),
        pytest.param(3, "folder/pytorch_model.bin", 4096, id="3-its names may be written"),
    ],
)
def test_torch_save_onto_the_mapped_file_kills_the_process_and_empties_the_file(
    forks: ForkServer, tmp_path: Path, way: int, file: str, most_bytes: int
) -> None:
    ended = run(forks, tmp_path, code(way))
    assert ended.returncode == -signal.SIGBUS, ended.stderr
    assert (tmp_path / file).stat().st_size <= most_bytes


@pytest.mark.parametrize(
    ("way", "expected", "state"),
    [
        (4, "build(1)", 'load_file("model.safetensors")'),
        (5, "llama(1)", 'LlamaForCausalLM.from_pretrained("folder").state_dict()'),
    ],
)
def test_safetensors_keeps_the_model_and_the_file(
    forks: ForkServer, tmp_path: Path, way: int, expected: str, state: str
) -> None:
    checks = MEMORY.format(expected=expected), FILE.format(expected=expected, state=state)
    ended = run(
        forks,
        tmp_path,
        'inode = lambda: {p.stat().st_ino for p in Path().rglob("*.safetensors")}',
        "before = inode()",
        code(way),
        *checks,
        "print(len(before - inode()))",
    )
    assert printed(ended) == [[], [], 1]  # one file was replaced


def test_a_program_that_copies_over_the_file_changes_every_tensor_in_memory(
    forks: ForkServer, tmp_path: Path
) -> None:
    checks = (MEMORY.format(expected=f"build({seed})") for seed in (1, 2))
    own, other = printed(run(forks, tmp_path, code(6), *checks))
    assert (len(own), len(other)) == (8, 0)


def test_a_file_that_is_written_beside_and_renamed_leaves_the_mapped_model_as_it_was(
    forks: ForkServer, tmp_path: Path
) -> None:
    (safely,) = re.findall(r"```python\n(new = .*?)```", PAGE.read_text(), re.DOTALL)
    ended = run(
        forks, tmp_path,
        'path = Path("model.pt")',
        "model.load_state_dict(torch.load(path, mmap=True), assign=True)",
        "expected = build(1)",
        "with torch.no_grad(): model[0].bias.fill_(7); expected[0].bias.fill_(7)",
        safely,
        MEMORY.format(expected="expected"),
        FILE.format(expected="expected", state="torch.load(path)"),
    )  # fmt: skip
    assert printed(ended) == [[], []]
    assert not list(tmp_path.glob("*.new"))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param('shutil.copyfile("other.pt", path)', id="copied over"),
        pytest.param("path.write_bytes(bytes(path.stat().st_size))", id="overwritten with zeros"),
        pytest.param("os.truncate(path, 0)", id="emptied"),
        pytest.param("path.unlink()", id="removed"),
        pytest.param(
            "save(model.state_dict(), path); assert not others(expected, read(path))",
            id="saved onto",
        ),
    ],
)
@pytest.mark.parametrize(
    ("load", "file", "expected"),
    [
        pytest.param('load_streaming(build, "model.pt")', "model.pt", "build(1)", id="pt"),
        pytest.param(
            'load_streaming(build, "model.safetensors")', "model.safetensors", "build(1)",
            id="safetensors",
        ),
        pytest.param(
            'load_pretrained("folder")', "folder/pytorch_model.bin", "llama(1)", id="load_pretrained"
        ),
    ],
)  # fmt: skip
def test_a_model_of_our_loader_does_not_depend_on_its_file(
    forks: ForkServer, tmp_path: Path, load: str, file: str, expected: str, change: str
) -> None:
    ended = run(
        forks, tmp_path,
        f"path, expected, model = Path({file!r}), {expected}, {load}",
        'save, read = (save_file, load_file) if path.suffix == ".safetensors" else (torch.save, torch.load)',
        change,
        MEMORY.format(expected="expected"),
    )  # fmt: skip
    assert printed(ended) == [[]]
