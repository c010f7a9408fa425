"""A GGUF file is loaded as from_pretrained loads it, bit by bit, in little memory."""

import json
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import MIB, ConfigError
from conversions import assert_equal
from gguf_files import WIDE, _experts, _file, _folder, _gemma, _gpt2, read_types, reference
from layouts import Maker
from nightly import nightly
from safetensors.torch import load_file
from typed import CommandLine

from weighin import load_pretrained

pytest.importorskip("gguf", reason="pip install gguf")
pytest.importorskip("accelerate", reason="pip install accelerate")

MAKERS: dict[str, Maker] = {
    "tied": _folder("Q8_0", tie_word_embeddings=True),
    "plain and tied": _folder("F16", tie_word_embeddings=True),
    "one head for each key": _folder("Q8_0", num_key_value_heads=4),
    "of odd sizes": _folder("Q8_0", vocab_size=67, intermediate_size=96),
    "with shifted norms": _gemma,
    "with transposed matrices": _gpt2,
    "with joined experts": _experts,
}
_MEASURE = """
import sys, torch, transformers, gguf, accelerate
from pathlib import Path
from transformers import LlamaForCausalLM
from weighin import load_pretrained
load_pretrained(sys.argv[1])  # imports what a load needs
Path("/proc/self/clear_refs").write_text("5")
status = lambda key: next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
before = status("VmRSS")
model = load_pretrained(sys.argv[2])
peak = status("VmHWM") - before
size = sum(tensor.nbytes for tensor in model.state_dict().values())
import json; print(json.dumps([peak, size]))
"""


@pytest.mark.parametrize("kind", read_types())
def test_every_type_becomes_what_from_pretrained_makes_of_it(tmp_path: Path, kind: str) -> None:
    _file(kind, **WIDE)(tmp_path)
    assert_equal(load_pretrained(tmp_path / "model.gguf"), reference(tmp_path))


HALVES = product(("tied", "with transposed matrices"), (torch.bfloat16, torch.float16))


@pytest.mark.parametrize(("name", "dtype"), [*product(MAKERS, [None]), *HALVES])
def test_a_model_is_equal_in_every_dtype(
    tmp_path: Path, name: str, dtype: torch.dtype | None
) -> None:
    MAKERS[name](tmp_path)
    options: dict[str, Any] = {"dtype": dtype} if dtype else {}
    assert_equal(load_pretrained(tmp_path, **options), reference(tmp_path, **options))


@pytest.mark.parametrize("name", nightly(*MAKERS))  # by day as layouts
def test_convert_writes_the_values_under_the_keys_of_the_model(tmp_path: Path, name: str) -> None:
    MAKERS[name](tmp_path)
    target = tmp_path / "model.safetensors"
    command = CommandLine(tmp_path, tmp_path / "cache")
    ended = command.run("convert model.gguf model.safetensors --keys model")
    assert ended.code == 0, ended.err
    written = load_file(target)
    expected = reference(tmp_path).state_dict()
    assert expected.keys() - written.keys() <= {"lm_head.weight"}  # tied to the embedding
    assert all(torch.equal(one.float(), expected[key]) for key, one in written.items())


def test_a_large_row_and_many_rows_are_read_in_parts(tmp_path: Path) -> None:
    _folder("Q8_0", hidden_size=64, intermediate_size=65536, vocab_size=2048)(tmp_path)
    assert_equal(load_pretrained(tmp_path), reference(tmp_path))


@pytest.mark.parametrize(
    ("write_small", "write_large"),
    [
        (_folder("Q8_0"), _folder("Q8_0", hidden_size=512, intermediate_size=2048, vocab_size=32768)),
        (_gpt2, partial(_gpt2, n_embd=2048, n_layer=1)),
    ],
    ids=["llama", "gpt2, whose matrices are turned"],
)  # fmt: skip
def test_the_peak_is_the_model_and_little_more(
    write_small: Maker, write_large: Maker, tmp_path: Path
) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    for folder, write in ((small, write_small), (large, write_large)):
        folder.mkdir()
        write(folder)
    command = [sys.executable, "-c", _MEASURE, str(small), str(large)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    peak, size = json.loads(output.splitlines()[-1])
    assert size > 128 * MIB
    assert peak <= 1.05 * size + 32 * MIB


def test_an_option_for_training_checkpoints_is_refused(tmp_path: Path) -> None:
    _folder("F32")(tmp_path)
    with pytest.raises(ConfigError, match="a GGUF file, for which load_pretrained has no key"):
        load_pretrained(tmp_path, key="model")
