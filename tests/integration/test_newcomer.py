"""What a newcomer types first, in an empty folder, with the wheel alone: golden texts.

``WEIGHIN_WRITE_GOLDEN=1 pytest tests/integration/test_newcomer.py`` writes the texts again. Figures,
names of machines and spaces are masked, because they differ from one machine to the next.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from shlex import split

import pytest
import torch
from nightly import by_day
from safetensors.torch import save_file
from wheels import install, run

from weighin import install as installing
from weighin.models.pretrained import pretrained_class

GOLDEN = Path(__file__).parent / "fixtures" / "newcomer"
WRITE = "WEIGHIN_WRITE_GOLDEN" in os.environ

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
    "ram-8": "weighin bench gpt2-tiny --ram 8",
    "typo": "weighin bench gpt2-smal --ram 8g",
}
AT_NIGHT = ("own-folder", "own-builder", "own-strategy")  # each takes 10 s

MASKS = (
    (
        r"(isolation\s+process\s+·).*?weighin\s+commit\s+\w+",
        r"\1 MACHINE",
    ),  # may be wrapped anywhere
    (r"-[0-9a-f]{10}-r(\d)", r"-SERIES-r\1"),
    (r"\b\d[\d.,]*( (ms|s|B|KiB|MiB|GiB)\b)", r"#\1"),
    (r"# (ms|s)\b", "# s"),
    (r"# (B|KiB|MiB|GiB)\b", "# B"),
    (r"\d+T\d+-", "DATE-"),
    (r"(?<![\w.-])\d[\d.,]*\d(?![\w-])", "#"),
    (r"─+", "─"),
    (r"[ ]{2,}", "  "),
    (r"[ ]+\n", "\n"),
)

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


@pytest.fixture(scope="module")
def weighin(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of an environment that has the wheel; torch and others are those of the tests."""
    return install(tmp_path_factory.mktemp("environment"), wheel).parent / "weighin"


@pytest.fixture
def folder(disk: Path, tmp_path: Path) -> Iterator[Path]:
    """A folder with what a newcomer has: weights, a builder, a strategy, an adapter."""
    folder = disk / tmp_path.name
    for name in ("empty", "adapter"):
        (folder / name).mkdir(parents=True)
    tensors = {"line.weight": torch.ones(64, 64), "line.bias": torch.ones(64)}
    torch.save(tensors, folder / "weights.pt")
    save_file(tensors, folder / "weights.safetensors")
    (folder / "nets.py").write_text(NETS)
    (folder / "mine.py").write_text(MINE)
    adapter = {"base_model_name_or_path": "Qwen/Qwen3-0.6B", "peft_type": "LORA"}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    save_file(tensors, folder / "adapter" / "adapter_model.safetensors")
    yield folder
    shutil.rmtree(folder)


def save_pretrained(folder: Path) -> None:
    """Write a Hugging Face folder of a small model."""
    pytest.importorskip("transformers", reason=installing.command("hf"))
    kind = pretrained_class("LlamaForCausalLM")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    config = kind.config_class(num_attention_heads=2, num_key_value_heads=2, **sizes)
    kind(config).save_pretrained(folder)


def masked(text: str) -> str:
    for pattern, mask in MASKS:
        text = re.sub(pattern, mask, text, flags=re.DOTALL)
    return text


@pytest.mark.parametrize(
    "name", by_day(COMMANDS, *[one for one in COMMANDS if one not in AT_NIGHT])
)
def test_the_first_commands_of_a_newcomer(weighin: Path, folder: Path, name: str) -> None:
    if name == "own-folder":
        save_pretrained(folder / "folder")
    variables = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    variables["WEIGHIN_CACHE"] = str(folder / ".cache")
    ended = run([str(weighin), *split(COMMANDS[name])[1:]], folder, **variables)
    text = (
        f"$ {COMMANDS[name]}\n{masked(ended.stdout)}{masked(ended.stderr)}exit {ended.returncode}\n"
    )
    text = text.replace(str(folder), "HERE")
    golden = GOLDEN / f"{name}.txt"
    if WRITE:
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()
