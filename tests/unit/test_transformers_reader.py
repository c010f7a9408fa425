"""What a load replaces in transformers: each name exists, for one thread alone, and is put back on every exit."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from quantised_folders import plain_model
from safetensors.torch import load_file, save_file

from weighin import load_pretrained
from weighin.errors import CheckpointError
from weighin.models.pretrained import pretrained_class
from weighin.stream.transformers_reader import Lazy, Load, reading

from transformers import core_model_loading as core  # isort: skip
from transformers import modeling_gguf_pytorch_utils as of_gguf  # isort: skip
from transformers import modeling_utils  # isort: skip
from transformers.utils import logging  # isort: skip

utils: Any = modeling_utils  # it does not export what a load replaces

REPLACED: dict[str, tuple[Any, str]] = {
    "safe_open": (utils, "safe_open"),
    "load_state_dict": (utils, "load_state_dict"),
    "maybe_load_adapters": (utils, "maybe_load_adapters"),
    "convert_and_load": (utils, "convert_and_load_state_dict_in_model"),
    "spawn_materialize": (core, "spawn_materialize"),
    "WeightRenaming.convert": (core.WeightRenaming, "convert"),
    "WeightConverter.convert": (core.WeightConverter, "convert"),
    "load_gguf_checkpoint": (of_gguf, "load_gguf_checkpoint"),
}


def now() -> dict[str, Any]:
    """Return all that a load changes in the process."""
    functions = {name: vars(owner)[attribute] for name, (owner, attribute) in REPLACED.items()}
    settings = logging.get_verbosity(), logging.is_progress_bar_enabled()
    # A load of the library replaces it, too:
    functions["tie_weights"] = utils.PreTrainedModel.tie_weights
    return functions | {"logging": settings, "threads": torch.get_num_threads()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    plain_model("fp8").float().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", REPLACED)
def test_each_name_exists_and_is_replaced(name: str) -> None:
    before = now()
    with reading(Load((), None)):
        assert now()[name] is not before[name]
    assert now() == before


@pytest.mark.parametrize("end", ["a load", "an error", "Ctrl-C"])
def test_everything_is_put_back(folder: Path, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    verbosity = logging.get_verbosity()
    shown: Any = logging
    shown.set_verbosity_info()
    shown.enable_progress_bar()
    before = now()
    if end == "a load":
        load_pretrained(folder)
    elif end == "an error":
        state = load_file(folder / "model.safetensors") | {"model.norm.weight": torch.ones(3)}
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=r"of another shape \(model\.norm\.weight\)"):
            load_pretrained(folder)
    else:
        monkeypatch.setattr(Load, "finish", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            load_pretrained(folder)
    assert now() == before
    logging.set_verbosity(verbosity)


def test_another_thread_calls_the_library(folder: Path) -> None:
    kind = pretrained_class("LlamaForCausalLM")
    found: list[Any] = []

    def act() -> None:
        file = utils.safe_open(folder / "model.safetensors", framework="pt")
        found.append(type(file.get_slice("model.norm.weight")))
        found.append(kind.from_pretrained(folder).state_dict())

    with reading(Load((), None)):
        file = utils.safe_open(folder / "model.safetensors", framework="pt")
        assert isinstance(file.get_slice("model.norm.weight"), Lazy)
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()
    assert found[0] is not Lazy
    own = load_pretrained(folder).state_dict()
    assert all(torch.equal(one, own[name]) for name, one in found[1].items())


def test_loads_of_several_threads_are_equal_and_the_last_one_puts_back(folder: Path) -> None:
    before = now()
    both = threading.Barrier(2, timeout=60)

    def load() -> dict[str, torch.Tensor]:
        both.wait()  # as transformers sets the default dtype for all threads
        return dict(load_pretrained(folder).state_dict())

    with ThreadPoolExecutor(2) as pool:
        one, other = (done.result() for done in [pool.submit(load) for _ in range(2)])
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert now() == before


@pytest.mark.parametrize("error", [AttributeError("'list' has no keys"), AssertionError("odd")])
def test_an_error_of_a_constructor_is_ours_with_the_librarys_words(
    folder: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained_class("LlamaForCausalLM"), "__init__", Mock(side_effect=error))
    with pytest.raises(
        CheckpointError, match=rf"LlamaForCausalLM.from_pretrained fails: {type(error).__name__}: "
    ):
        load_pretrained(folder)
