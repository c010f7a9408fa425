"""The models are what the notebook's figures speak of."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from weighin.models import gpt2, llama, stack, tied
from weighin.models.skeleton import resolve_builder

CONFIGS = Path(__file__).parents[2] / "configs" / "models"


def read(name: str) -> Any:
    return yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())


def test_gpt2_xl_has_the_notebooks_size() -> None:
    config = read("gpt2-xl")
    with torch.device("meta"):
        model = resolve_builder(config["builder"])(**config["kwargs"])
    sizes = [tensor.nbytes for tensor in model.state_dict().values()]
    assert len(sizes) == 821
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_638_022_400
    assert f"{sum(sizes) / 1024**3:.3f}" == "6.290"
    assert f"{max(sizes) / 1024**3:.4f}" == "0.2996"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_model_file_has_the_known_keys_and_its_own_name(path: Path) -> None:
    text = path.read_text()
    config = yaml.safe_load(text)
    assert text.startswith("# ")
    assert set(config) == {"name", "builder", "kwargs", "description"}
    assert config["name"] == path.stem
    resolve_builder(config["builder"])


@pytest.mark.parametrize(("name", "tensors"), [("tensors-200", 200), ("tensors-20000", 20_000)])
def test_stacks_of_one_size_have_few_or_many_tensors(name: str, tensors: int) -> None:
    config = read(name)
    with torch.device("meta"):
        state = resolve_builder(config["builder"])(**config["kwargs"]).state_dict()
    assert len(state) == tensors
    assert sum(tensor.nbytes for tensor in state.values()) == 20_000 * 64 * 64 * 4
    model = stack.stack(layers=2, width=8)
    assert model(stack.example_inputs(width=8)).shape == (1, 8)


@pytest.mark.parametrize(("name", "module"), [("gpt2-tiny", gpt2), ("tied-tiny", tied)])
def test_a_tiny_model_is_about_two_mib_and_runs(name: str, module: Any) -> None:
    config = read(name)
    model = resolve_builder(config["builder"])(**config["kwargs"])
    assert not model.training
    assert 1.5 < sum(tensor.nbytes for tensor in model.parameters()) / 1024**2 < 2.5
    inputs = module.example_inputs(**config["kwargs"])
    assert inputs[0].shape == (1, 16)
    with torch.inference_mode():
        logits = model(*inputs)
    assert logits.shape == (1, 16, config["kwargs"]["vocab_size"])
    assert torch.isfinite(logits).all()


def test_attention_sees_no_later_token() -> None:
    model = gpt2.gpt2(vocab_size=64, context_length=16, emb_dim=16, n_layers=2, n_heads=2)
    ids = torch.arange(8).unsqueeze(0)
    changed = ids.clone()
    changed[0, -1] = 63
    with torch.inference_mode():
        torch.testing.assert_close(model(ids)[:, :-1], model(changed)[:, :-1])


def test_the_tied_model_is_tied_and_keeps_its_tables_out_of_the_checkpoint() -> None:
    model = tied.tied(vocab_size=32, emb_dim=16, n_layers=1, n_heads=2)
    assert model.head.weight is model.embedding.weight
    assert not any("rotary" in key for key in model.state_dict())
    assert set(dict(model.named_buffers())) == {"rotary.cos", "rotary.sin"}


def test_llama_70b_has_the_published_shapes() -> None:
    config = read("llama-70b")
    with torch.device("meta"):
        model = resolve_builder(config["builder"])(**config["kwargs"])
    state = model.state_dict()
    assert len(state) == 723
    assert sum(parameter.numel() for parameter in model.parameters()) == 70_553_706_496
    assert state["model.layers.79.self_attn.k_proj.weight"].shape == (1024, 8192)


def test_a_small_llama_runs_and_looks_only_back() -> None:
    sizes = {"emb_dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 8, "n_kv_heads": 2}
    torch.manual_seed(0)
    model = llama.llama(vocab_size=256, **sizes)
    (tokens,) = llama.example_inputs(vocab_size=256)
    changed = tokens.clone()
    changed[0, -1] = (tokens[0, -1] + 1) % 256
    with torch.inference_mode():
        logits, others = model(tokens), model(changed)
    assert logits.shape == (1, 16, 256)
    assert torch.equal(logits[:, :-1], others[:, :-1])
    assert not torch.equal(logits[:, -1], others[:, -1])
    assert not model.training
