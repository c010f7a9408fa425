"""What a newcomer types first, in an empty folder: whole texts, in ``snapshots/newcomer``.

Figures, names of machines and spaces are masked, because they differ from one machine to the next.
"""

import json
import re

import pytest
import torch
from nightly import by_day
from safetensors.torch import save_file
from snapshots import Compare
from typed import CommandLine

from weighin import install
from weighin.models.pretrained import pretrained_class

COMMANDS = {
    "own-pt": "weighin bench ./weights.pt --strategies streaming --isolation process",
    "own-safetensors": "weighin predict weights.safetensors --strategies streaming",
    "own-folder": "weighin bench ./folder --strategies streaming --isolation process",
    "own-builder": "weighin bench --model nets.py:build --set kwargs.width=64"
    " --strategies streaming --isolation process",
    "own-strategy": "weighin bench gpt2-tiny --strategies ./mine.py --isolation process",
    "missing-path": "weighin recommend ./gone.pt --ram 8g",
    "empty-folder": "weighin bench ./empty --ram 8g",
    "adapter-folder": "weighin predict ./adapter",
    "typo": "weighin bench gpt2-smal --ram 8g",
}
BY_DAY = ("own-pt", "own-safetensors", "adapter-folder", "missing-path", "typo")

MASKS = {
    # The first may be wrapped anywhere.
    r"(isolation\s+process\s+·).*?weighin\s+commit\s+\w+": r"\1 MACHINE",
    r"-[0-9a-f]{10}-r(\d)": r"-SERIES-r\1",
    r"\b\d[\d.,]*( (ms|s|B|KiB|MiB|GiB)\b)": r"#\1",
    r"# (ms|s)\b": "# s",
    r"# (B|KiB|MiB|GiB)\b": "# B",
    r"\d+T\d+-": "DATE-",
    r"(?<![\w.-])\d[\d.,]*\d(?![\w-])": "#",
    r"─+": "─",
    r"[ ]{2,}": "  ",
    r"[ ]+\n": "\n",
}

NETS = """
import torch


def build(width):
    return torch.nn.Linear(width, width)
"""
MINE = '''"""Load with torch.load."""

import torch


def load(job):
    model = job.build_model()
    model.load_state_dict(torch.load(job.checkpoint, map_location="cpu"))
    return model
'''


@pytest.fixture
def newcomer(command: CommandLine) -> CommandLine:
    """A folder with what a newcomer has: weights, a builder, a strategy, an adapter."""
    folder = command.folder
    for name in ("empty", "adapter"):
        (folder / name).mkdir()
    tensors = {"line.weight": torch.ones(64, 64), "line.bias": torch.ones(64)}
    torch.save(tensors, folder / "weights.pt")
    save_file(tensors, folder / "weights.safetensors")
    (folder / "nets.py").write_text(NETS)
    (folder / "mine.py").write_text(MINE)
    adapter = {"base_model_name_or_path": "Qwen/Qwen3-0.6B", "peft_type": "LORA"}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    save_file(tensors, folder / "adapter" / "adapter_model.safetensors")
    return CommandLine(folder, folder / ".cache")


def save_pretrained(command: CommandLine) -> None:
    """Write a Hugging Face folder of a small model."""
    pytest.importorskip("transformers", reason=install.command("hf"))
    kind = pretrained_class("LlamaForCausalLM")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    config = kind.config_class(num_attention_heads=2, num_key_value_heads=2, **sizes)
    kind(config).save_pretrained(command.folder / "folder")


def masked(text: str) -> str:
    for pattern, mask in MASKS.items():
        text = re.sub(pattern, mask, text, flags=re.DOTALL)
    return text


@pytest.mark.parametrize("name", by_day(COMMANDS, *BY_DAY))
def test_the_first_commands_of_a_newcomer(newcomer: CommandLine, name: str, same: Compare) -> None:
    if name == "own-folder":
        save_pretrained(newcomer)
    ended = newcomer.run(COMMANDS[name].removeprefix("weighin "))
    text = f"$ {COMMANDS[name]}\n{masked(ended.out)}{masked(ended.err)}exit {ended.code}\n"
    same(f"newcomer/{name}.txt", text.replace(str(newcomer.folder), "HERE"))
