"""A torchvision that does not fit torch: the user is told what to mend."""

import json
from pathlib import Path

import pytest
import torch
from fork_server import ForkServer
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 8,
    "vocab_size": 16, "tie_word_embeddings": False,
}  # fmt: skip
USERS_OWN = """
import sys
sys.modules.pop("torchvision", None)
sys.path.insert(0, "packages")
import transformers
try:
    import weighin
    weighin.load_pretrained("model")
except weighin.errors.HarnessError as error:
    print(error)
assert sys.modules["transformers"] is transformers
assert transformers.utils.ModelOutput is sys.modules["transformers.utils"].ModelOutput
open("packages/torchvision/__init__.py", "w").close()  # the user mends it
import torchvision
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a model, and with a torchvision that fails as one of another build does."""
    package, info = (
        tmp_path / "packages/torchvision",
        tmp_path / "packages/torchvision-0.28.0.dist-info",
    )
    package.mkdir(parents=True)
    info.mkdir()
    fails = 'raise RuntimeError("operator torchvision::nms does not exist")'
    (package / "__init__.py").write_text(fails)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(CONFIG))
    shapes = {
        "model.embed_tokens.weight": (16, 8), "lm_head.weight": (16, 8), "model.norm.weight": (8,),
        **{f"model.layers.0.self_attn.{name}_proj.weight": (8, 8) for name in "qkvo"},
        **{f"model.layers.0.mlp.{name}_proj.weight": (8, 8) for name in ("gate", "up", "down")},
        **{f"model.layers.0.{name}_layernorm.weight": (8,) for name in ("input", "post_attention")},
    }  # fmt: skip
    tensors = {name: torch.rand(shape) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model/model.safetensors", {"format": "pt"})
    return tmp_path


def test_a_users_process_keeps_its_modules_and_is_told_what_to_mend(
    folder: Path, torch_fork_server: ForkServer
) -> None:
    ended = torch_fork_server.run(USERS_OWN, folder=folder)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == (
        "the package transformers, which this model needs, cannot be imported: RuntimeError: operator"
        " torchvision::nms does not exist\ninstall the torchvision that was built for this torch, or"
        " remove it: pip uninstall torchvision\n"
    )
