"""The commands of README and docs that need no hour run as they stand, in a folder that has their files."""

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
LEFT_OUT = {
    "it takes more than two minutes": ("gpt2-medium", "gpt2-large", "gpt2-xl", "half-precision", "layouts", "saving"),
    "test_runs_on_slow_disks.py runs small loads with it": ("--disk",),
    "it needs a GPU, a cluster, or a network's cache or disk": ("--device cuda", "--engine ray", "Qwen", "/mnt/"),
    "it needs an earlier command of its page": ("--resume", "--update", "--suite suite.yaml", "./pipeline"),
    "test_foreign_repository.py runs it": (".github/weighin.yaml", "results/first"),
    "it needs programs of the folder benchmarks": ("converting-files", "--suite training"),
    "test_commands.py runs commands of a user's own": (" -- ",),
}  # fmt: skip
"""Words of commands that are not run."""


def quick() -> list[str]:
    """The commands to run, without those that differ from another one only in the RAM limit."""
    found = {re.sub(r"--ram \S+", "", command): command for _, command in commands()}
    left_out = [word for some in LEFT_OUT.values() for word in some]
    return [one for one in found.values() if not any(word in one for word in left_out)]


def write_files(folder: Path) -> None:
    """Write the files that the commands name."""
    (folder / "mylib").mkdir()
    (folder / "mylib/__init__.py").touch()
    for name in ("mynets.py", "mylib/nets.py"):
        (folder / name).write_text(NET)
    (folder / "half.py").write_text("def use(model):\n    return model.half()\n")
    shutil.copy(ROOT / "strategies/mmap_assign.py", folder / "mine.py")
    layer = torch.nn.Linear(64, 64).state_dict()
    state = {f"{number}.{name}": one.clone() for number in (0, 1) for name, one in layer.items()}
    for name in ("weights", "model"):
        torch.save(state, folder / f"{name}.pt")
    for name in ("model", "weights", "model-00001-of-00001"):
        save_file(state, folder / f"{name}.safetensors")
    index = {"weight_map": dict.fromkeys(state, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    wrapped = {f"module.{name}": one for name, one in state.items()}
    torch.save({"model": wrapped, "epoch": 3}, folder / "training.pt")
    kind = pretrained_class("LlamaForCausalLM")
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
    kind(kind.config_class(**small, intermediate_size=64)).save_pretrained(folder / "folder")
    for other in ("my-folder-or-file", "FOLDER"):
        (folder / other).symlink_to("folder")
    # An adapter of rank 4 for the first query projection, as peft saves it.
    (folder / "ADAPTER").mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "ADAPTER/adapter_config.json").write_text(json.dumps(config))
    query = "base_model.model.model.layers.0.self_attn.q_proj"
    sizes = {"lora_A": (4, small["hidden_size"]), "lora_B": (small["hidden_size"], 4)}
    matrices = {f"{query}.{name}.weight": torch.randn(size) for name, size in sizes.items()}
    save_file(matrices, folder / "ADAPTER/adapter_model.safetensors")


@pytest.mark.cgroup
@pytest.mark.slow
@pytest.mark.nightly
def test_the_commands_that_need_no_hour_run_as_they_stand(command: CommandLine) -> None:
    write_files(command.folder)
    # The defaults of the machine, not of the commands: without them, every bench has six cells.
    settings = '[tool.weighin]\nisolation = "cgroup"\nstrategies = "baseline,mmap_assign"\n'
    (command.folder / "pyproject.toml").write_text(settings)
    made = command.run("bench gpt2-tiny --ram 1g --out results/RUN")
    assert made.code == 0, made.err
    for name in ("RUN_A", "RUN_B", "ci"):
        shutil.copytree(command.folder / "results/RUN", command.folder / "results" / name)
    frozen = command.run("check results/RUN --baseline baseline.yaml --update")
    assert frozen.code == 0, frozen.err
    failed = {}
    for line in quick():
        verb, *more = words(line)
        done = command.run(verb, *more, patience_s=600)
        allowed = {0, 1} if verb in ("doctor", "check") else {0}
        if done.code not in allowed:
            failed[line] = f"exit code {done.code}: {done.err[-300:]}"
    assert failed == {}
