"""The commands of README and docs that need no hour run as they stand, in a folder that has their files."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from documented import commands, words
from safetensors.torch import save_file
from typed import ROOT, CommandLine

from weighin.models.pretrained import pretrained_class

NET = """
import torch
def build(width=64):
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, width))
"""
USE = """
def use(model):
    return model.half()
"""
LONG = (
    "gpt2-medium", "gpt2-large", "gpt2-xl", "half-precision", "layouts", "saving", "--disk",
)  # fmt: skip
"""What takes more than a minute or two; test_runs_on_slow_disks.py runs small loads with --disk."""
OTHERS = (
    "--device cuda",
    "--engine ray",
    "--resume",
    "--update",
    "Qwen",
    "--suite suite.yaml",
    "--suite training",
    ".github/weighin.yaml",
    "results/first",
    "./pipeline",
    " -- ",
    "/mnt/",
    "converting-files",
)
"""What needs a GPU, a cluster, a network's cache or disk, or an earlier command of the same page; the first gate,
which test_foreign_repository.py runs; files that only test_library_folders.py makes; commands of a user's own, which
test_commands.py runs; and programs of the folder benchmarks."""


def quick() -> list[str]:
    """The commands to run, without those that differ from another one only in the RAM limit."""
    found = {re.sub(r"--ram \S+", "", command): command for _, command in commands()}
    return [one for one in found.values() if not any(word in one for word in (*LONG, *OTHERS))]


@pytest.fixture(scope="module")
def prepared(disk: Path) -> Path:
    """A folder with the files that the commands name."""
    folder = disk / "documented"
    folder.mkdir()
    (folder / "mynets.py").write_text(NET)
    (folder / "half.py").write_text(USE)
    (folder / "mylib").mkdir()
    (folder / "mylib/nets.py").write_text(NET)
    (folder / "mylib/__init__.py").touch()
    shutil.copy(ROOT / "strategies/mmap_assign.py", folder / "mine.py")
    layer = torch.nn.Linear(64, 64).state_dict()
    state = {f"{number}.{name}": one.clone() for number in (0, 1) for name, one in layer.items()}
    torch.save(state, folder / "weights.pt")
    torch.save(state, folder / "model.pt")
    save_file(state, folder / "model.safetensors")
    save_file(state, folder / "weights.safetensors")
    save_file(state, folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(state, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    wrapped = {f"module.{name}": one for name, one in state.items()}
    torch.save({"model": wrapped, "epoch": 3}, folder / "training.pt")
    kind = pretrained_class("LlamaForCausalLM")
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
    kind(kind.config_class(**small, intermediate_size=64)).save_pretrained(folder / "folder")
    for other in ("my-folder-or-file", "FOLDER"):
        (folder / other).symlink_to("folder")
    lora(folder / "ADAPTER", hidden_size=small["hidden_size"])
    return folder


def lora(folder: Path, hidden_size: int) -> None:
    """Write an adapter of rank 4 for the first query projection of a Llama, as peft saves it."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    query = "base_model.model.model.layers.0.self_attn.q_proj"
    a, b = torch.randn(4, hidden_size), torch.randn(hidden_size, 4)
    matrices = {f"{query}.lora_A.weight": a, f"{query}.lora_B.weight": b}
    save_file(matrices, folder / "adapter_model.safetensors")


@pytest.mark.cgroup
@pytest.mark.slow
@pytest.mark.nightly
def test_the_commands_that_need_no_hour_run_as_they_stand(
    command: CommandLine, prepared: Path
) -> None:
    shutil.copytree(prepared, command.folder, symlinks=True, dirs_exist_ok=True)
    # The defaults of the machine, not of the commands: without them, every bench has six cells.
    settings = '[tool.weighin]\nisolation = "cgroup"\nstrategies = "baseline,mmap_assign"\n'
    (command.folder / "pyproject.toml").write_text(settings)
    made = command.run("bench", "gpt2-tiny", "--ram", "1g", "--out", "results/RUN")
    assert made.code == 0, made.err
    for name in ("RUN_A", "RUN_B", "ci"):
        shutil.copytree(command.folder / "results/RUN", command.folder / "results" / name)
    frozen = command.run("check", "results/RUN", "--baseline", "baseline.yaml", "--update")
    assert frozen.code == 0, frozen.err
    failed = {}
    for line in quick():
        done = command.run(*words(line), patience_s=600)
        allowed = {0, 1} if words(line)[0] in ("doctor", "check") else {0}
        if done.code not in allowed:
            failed[line] = f"exit code {done.code}: {done.err[-300:]}"
    assert failed == {}
