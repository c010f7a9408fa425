"""Make a layout, load it, and compare, each in a process of its own: ``tried.py`` starts them."""

import json
import re
import warnings
from collections.abc import Mapping
from contextlib import chdir, redirect_stdout, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from cells import HarnessError, arguments_to_dequantise
from layouts import Layout, every
from model_differences import state_differences, ties
from torch import nn

_MADE: Final = Path("made.json")
_TRUTH: Final = Path("truth.pt")
_WARM: Final = (
    "no architectures",
    "the unet of a pipeline",
    "GGUF in float16",
    "a residual network",
)
"""A layout of each library."""


def warm_up() -> None:
    """Import what most layouts need, by making and loading some, in seconds that forks save."""
    for name in _WARM:
        with (
            TemporaryDirectory(dir="/var/tmp") as folder,
            chdir(folder),
            redirect_stdout(None),
            suppress(ImportError),  # its library is not in this environment
        ):
            make(name)
            load(name)


def make(name: str) -> None:
    """Make the layout ``name`` in the current folder, and keep what is right beside it."""
    layout = _named(name)
    folder = Path("checkpoint")
    folder.mkdir()
    torch.manual_seed(20261125)
    made = layout.make(folder)
    is_folder = made.truth is None or made.is_folder
    truth, more, kind = made.truth or {}, dict[str, torch.Tensor](), None
    if made.truth is None and "load" not in layout.refused:
        truth, more = _tensors(model := _from_pretrained(made.path, layout))
        kind = type(model).__name__
    torch.save((dict(truth), more), _TRUTH)
    tensors = {
        key: [list(one.shape), str(one.dtype).removeprefix("torch.")] for key, one in truth.items()
    }
    found = {"path": str(made.path), "is_folder": is_folder, "tensors": tensors, "class": kind}
    _MADE.write_text(json.dumps(found))


def load(name: str) -> None:
    """Load the layout with weighin's loader, compare it with the truth, and print JSON."""
    import weighin

    layout = _named(name)
    made = json.loads(_MADE.read_text())
    options: dict[str, Any] = dict(layout.options)
    truth, more = _truth()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            if made["is_folder"]:
                model = weighin.load_pretrained(made["path"], **options)
            else:
                model = weighin.load_streaming(lambda: _model_of(truth), made["path"], **options)
        except HarnessError as error:
            print(json.dumps({"refused": str(error)}))
            return
    state, buffers = _tensors(model)
    differences = state_differences(state, truth)
    if more:
        differences += state_differences(buffers, more)
    if made["class"] not in (None, type(model).__name__):
        differences.append(f"a {type(model).__name__}, not a {made['class']}")
    _print(differences, [str(one.message) for one in said])


def converted() -> None:
    """Compare the converted file with the truth, and print JSON."""
    from safetensors.torch import load_file

    found, (truth, _) = load_file("converted.safetensors"), _truth()
    for key, tied_to in ties(truth).items():  # safetensors keeps one name of a shared tensor
        if key not in found and tied_to in found:
            found[key] = found[tied_to]
        elif tied_to not in found and key in found:
            found[tied_to] = found[key]
    found |= {key: one.to(truth[key].dtype) for key, one in found.items() if key in truth}
    _print(state_differences(found, truth), [])


def recommended() -> None:
    """Run the code that ``recommend`` answered, compare its model with the truth, and print JSON."""
    answer = json.loads(Path("recommended.json").read_text())
    truth, more = _truth()
    names: dict[str, Any] = {"build_model": lambda: _model_of(truth, more)}
    exec(re.sub(r"(?m)^# (model = |from peft )", r"\1", answer["code"]), names)
    state, buffers = _tensors(names["model"])
    wanted = {key: one.to(state[key].dtype) if key in state else one for key, one in truth.items()}
    differences = state_differences(state, wanted)  # in the dtype that was asked for
    if not state.keys() & truth.keys():
        differences = []  # transformers' names of a GGUF file's tensors: unit/test_pasted_code.py compares
    if more:
        differences += state_differences(buffers, more)
    _print(differences, [])


def _from_pretrained(path: Path, layout: Layout) -> nn.Module:
    """Return the model that its library loads; codes that weighin dequantises are dequantised here, too."""
    import transformers

    config = json.loads((path / "config.json").read_text())
    model: nn.Module
    if "_class_name" in config:
        import diffusers

        kind = getattr(diffusers, config["_class_name"])
        model = kind.from_pretrained(path, variant=layout.options.get("variant"))
    elif "architecture" in config:
        import timm

        model = timm.create_model(f"local-dir:{path}", pretrained=True)
    else:
        named = (
            layout.options.get("model_class") or (config.get("architectures") or ["AutoModel"])[0]
        )
        name = str(named).removeprefix("transformers.")
        library = transformers if hasattr(transformers, name) else _safety_checker()
        options = {
            key: one for key, one in layout.options.items() if key in ("variant", "revision")
        }
        more: dict[str, Any] = options | arguments_to_dequantise(path / "model.safetensors")
        model = getattr(library, name).from_pretrained(path, dtype="auto", **more)
    return model


def _safety_checker() -> Any:
    """Return the module of diffusers that has a class of transformers."""
    from diffusers.pipelines.stable_diffusion import safety_checker

    return safety_checker


def _tensors(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return what the state dict of a model has, and the buffers that it has not."""
    state = model.state_dict(keep_vars=True)
    tensors = {key: one for key, one in state.items() if isinstance(one, torch.Tensor)}
    return tensors, {key: one for key, one in model.named_buffers() if key not in state}


def _model_of(
    truth: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor] | None = None
) -> nn.Module:
    """Return a module with an empty tensor at each place, and ``buffers``; shared tensors are shared."""
    root, made = nn.Module(), dict[Any, Any]()
    for key, one in {**(buffers or {}), **truth}.items():
        *path, leaf = key.split(".")
        owner = root
        for part in path:
            owner = owner._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
        if key not in truth:
            owner.register_buffer(leaf, one.clone(), persistent=False)
            continue
        memory = one.data_ptr() or id(one), one.shape
        tensor = made.get(memory)
        if tensor is None:
            tensor = torch.empty(one.shape, dtype=one.dtype)
            tensor = nn.Parameter(tensor) if one.is_floating_point() else tensor
            made[memory] = tensor
        if isinstance(tensor, nn.Parameter):
            owner._parameters[leaf] = tensor
        else:
            owner._buffers[leaf] = tensor
    return root


def _truth() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the right state dict, and the right values of the buffers outside it."""
    found: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = torch.load(
        _TRUTH, weights_only=False
    )
    return found


def _print(differences: list[str], said: list[str]) -> None:
    print("\n" + json.dumps({"differences": differences, "said": said}))


def _named(name: str) -> Layout:
    return next(one for one in every() if one.name == name)
