"""What a load replaces in transformers: each name exists, for one thread alone, and is put back on every exit."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fork_server import ForkServer
from model_differences import state_differences
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
    assert state_differences(load_pretrained(folder).state_dict(), found[1]) == []


def test_loads_of_several_threads_are_equal_and_the_last_one_puts_back(folder: Path) -> None:
    before = now()
    both = threading.Barrier(2, timeout=60)

    def load() -> dict[str, torch.Tensor]:
        both.wait()  # as transformers sets the default dtype for all threads
        return dict(load_pretrained(folder).state_dict())

    with ThreadPoolExecutor(2) as pool:
        one, other = (done.result() for done in [pool.submit(load) for _ in range(2)])
    assert state_differences(one, other) == []
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


# A torchvision beside the model that does not fit torch

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


def test_a_users_process_keeps_its_modules_and_is_told_what_to_mend(
    tmp_path: Path, torch_fork_server: ForkServer
) -> None:
    """It fails as one that was built for another torch does."""
    package = tmp_path / "packages/torchvision"
    info = package.with_name("torchvision-0.28.0.dist-info")
    package.mkdir(parents=True)
    info.mkdir()
    fails = 'raise RuntimeError("operator torchvision::nms does not exist")'
    (package / "__init__.py").write_text(fails)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    plain_model("fp8").save_pretrained(tmp_path / "model")
    ended = torch_fork_server.run(USERS_OWN, folder=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == (
        "this model needs the package transformers, which cannot be imported: RuntimeError: operator"
        " torchvision::nms does not exist\ninstall the torchvision that was built for this torch, or"
        " remove it: pip uninstall torchvision\n"
    )
