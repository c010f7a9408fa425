"""Saving onto a file whose pages are a model's weights: our loader's model does not depend on its file."""

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest
from fork_server import ForkServer
from typed import ROOT

SETUP: Final = """
import os, shutil
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from weighin import load_pretrained, load_streaming
import weighin.stream.load_streaming, weighin.stream.load_pretrained
"""
FILES: Final = """
def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


def llama(seed=0):
    torch.manual_seed(seed)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64)
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes))


def check(expected, state):
    assert [name for name, one in expected.state_dict().items() if not torch.equal(state[name], one)] == []


torch.save(build(1).state_dict(), "model.pt")
torch.save(build(2).state_dict(), "other.pt")
save_file(build(1).state_dict(), "model.safetensors")
if IS_FOLDER:
    llama(1).save_pretrained("folder")
    torch.save(llama(1).state_dict(), "folder/pytorch_model.bin")
    Path("folder/model.safetensors").unlink()
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    with closing(ForkServer(SETUP)) as server:
        yield server


def run(forks: ForkServer, folder: Path, *lines: str) -> None:
    """Run code in a child, beside its files."""
    code = "\n".join(lines)
    is_folder = f"IS_FOLDER = {'pytorch_model' in code}"
    ended = forks.run("\n".join((SETUP, is_folder, FILES, code)), folder=folder)
    assert ended.returncode == 0, ended.stderr


def test_the_pages_snippet_leaves_the_mapped_model_as_it_was(
    forks: ForkServer, tmp_path: Path
) -> None:
    """docs/recommend.md writes a file beside, and renames it."""
    page = (ROOT / "docs" / "recommend.md").read_text()
    (safely,) = re.findall(r"```python\n(new = .*?)```", page, re.DOTALL)
    run(
        forks, tmp_path,
        'path, model, expected = Path("model.pt"), build(), build(1)',
        "model.load_state_dict(torch.load(path, mmap=True), assign=True)",
        "with torch.no_grad(): model[0].bias.fill_(7); expected[0].bias.fill_(7)",
        safely,
        "check(expected, model.state_dict())",
        "check(expected, torch.load(path))",
    )  # fmt: skip
    assert not list(tmp_path.glob("*.new"))


CHANGES = {
    "copied over": 'shutil.copyfile("other.pt", path)',
    "overwritten with zeros": "path.write_bytes(bytes(path.stat().st_size))",
    "emptied": "os.truncate(path, 0)",
    "removed": "path.unlink()",
    "saved onto": "save(model.state_dict(), path); check(expected, read(path))",
}
LOADS = {
    "pt": 'Path("model.pt"), build(1), load_streaming(build, "model.pt")',
    "safetensors": 'Path("model.safetensors"), build(1), load_streaming(build, "model.safetensors")',
    "folder": 'Path("folder/pytorch_model.bin"), llama(1), load_pretrained("folder")',
}
CASES = [*(("pt", change) for change in CHANGES), ("safetensors", "overwritten with zeros"), ("safetensors", "saved onto"), ("folder", "emptied"), ("folder", "saved onto")]  # fmt: skip


@pytest.mark.parametrize(("load", "change"), CASES)
def test_a_model_of_our_loader_does_not_depend_on_its_file(
    forks: ForkServer, tmp_path: Path, load: str, change: str
) -> None:
    tools = "(save_file, load_file)" if load == "safetensors" else "(torch.save, torch.load)"
    run(
        forks, tmp_path,
        f"path, expected, model = {LOADS[load]}",
        f"save, read = {tools}",
        CHANGES[change],
        "check(expected, model.state_dict())",
    )  # fmt: skip
