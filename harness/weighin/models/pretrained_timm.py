"""Build a model of the timm library from its configuration, as ``create_model("local-dir:...")`` does."""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock, get_ident
from types import SimpleNamespace
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch

from weighin import install
from weighin.errors import CheckpointError, ConfigError
from weighin.formats.pretrained_folder import folder_of
from weighin.formats.pretrained_library import TIMM
from weighin.models.pretrained import import_failed
from weighin.stream.slices import TensorSlice
from weighin.text import first_names


class _Load(NamedTuple):
    """The arguments with which timm would load a model's weights."""

    pretrained_cfg: Mapping[str, Any]
    arguments: Mapping[str, Any]


_LOADS: WeakKeyDictionary[torch.nn.Module, _Load] = WeakKeyDictionary()
_replacing: Final = Lock()


def from_config(architecture: str, config: Mapping[str, Any]) -> torch.nn.Module:
    """Return the model in training mode, as timm does, and in torch's default dtype.

    The model is built in float32 and then converted.

    Args:
        architecture: the name of the model in timm, such as "vit_tiny_patch16_224".
        config: the content of ``config.json``.

    Raises:
        ConfigError: timm is not installed, or has no such model.
    """
    dtype = torch.get_default_dtype()
    with tempfile.TemporaryDirectory(prefix="weighin-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        torch.set_default_dtype(torch.float32)
        try:
            model = _created(architecture, Path(folder), lambda *_, **__: None)
        finally:
            torch.set_default_dtype(dtype)
    model.to(dtype)
    model.keeps_dtypes = True  # type: ignore[assignment]
    return model


def _created(
    architecture: str, folder: Path, load: Callable[..., None] | None = None
) -> torch.nn.Module:
    """Create the model of a folder, and store the arguments of its load in ``_LOADS``.

    ``load`` replaces timm's function that loads the weights; None keeps this function.
    """
    timm = _timm()
    if not timm.is_model(architecture):
        raise ConfigError(
            f"timm {timm.__version__} has no model {architecture!r}", "install a newer timm"
        )
    seen: list[tuple[torch.nn.Module, _Load]] = []
    with _replaced_load(load, seen):
        try:
            model: torch.nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True)
        except (TypeError, KeyError, AssertionError) as error:
            raise ConfigError(
                f"timm {timm.__version__} cannot build {architecture!r} from config.json:"
                f" {type(error).__name__}: {error}",
                "install a newer timm, or correct config.json",
            ) from error
    if not seen or seen[0][0] is not model:
        raise ConfigError(
            f"timm returns {architecture} as a feature extractor, which weighin cannot load",
            "leave 'features_only' out of model_args in config.json",
        )
    _LOADS[model] = seen[0][1]
    return model


@contextmanager
def _replaced_load(
    load: Callable[..., None] | None, seen: list[tuple[torch.nn.Module, _Load]]
) -> Iterator[None]:
    from timm.models import _builder

    with _replacing:
        own, thread = _builder.load_pretrained, get_ident()

        def load_pretrained(
            model: torch.nn.Module, pretrained_cfg: Mapping[str, Any], **arguments: Any
        ) -> None:
            is_here = get_ident() == thread  # another thread's load gets its weights
            if is_here:
                seen.append((model, _Load(pretrained_cfg, arguments)))
            (load if load and is_here else own)(model, pretrained_cfg=pretrained_cfg, **arguments)

        _builder.load_pretrained = load_pretrained
        try:
            yield
        finally:
            _builder.load_pretrained = own


def import_class(kwargs: Mapping[str, Any]) -> None:  # noqa: ARG001 (an interface)
    """Import timm, so that no later phase of the load contains this import."""
    _timm()


def _timm() -> Any:
    try:
        import timm
    except ImportError as error:
        raise ConfigError(
            f"the package timm, which this model needs, cannot be imported: {error}",
            install.command(TIMM.extra),
        ) from None
    except RuntimeError as error:  # torchvision of another build, without which timm does not work
        raise import_failed("timm", error) from None
    return timm


def named_as_in(model: torch.nn.Module, slices: Sequence[TensorSlice]) -> dict[str, TensorSlice]:
    """Return a checkpoint's tensors, with timm's names as keys.

    To find the names, this function runs timm's own load on tensors without values.

    Raises:
        CheckpointError: timm computes a tensor from other tensors, or the file does not fit the model:
            timm would refuse the file, or initialise weights with random numbers.
    """
    from timm.models import _builder

    blank = {each.name: torch.empty((), dtype=each.dtype).expand(each.shape) for each in slices}
    places = {id(tensor): each for tensor, each in zip(blank.values(), slices, strict=True)}
    loaded: dict[str, Any] = {}

    def take(state: Mapping[str, Any], strict: bool = True) -> Any:
        loaded.update(state)
        _check_complete(model, state, strict, slices)
        return SimpleNamespace(missing_keys=[], unexpected_keys=[])

    config, arguments = _LOADS[model]
    model.load_state_dict = take  # type: ignore[method-assign, assignment]
    try:
        _builder.load_pretrained(
            model, {**config, "source": "", "state_dict": dict(blank)}, **arguments
        )
    finally:
        del model.load_state_dict
    computed = sorted(name for name, tensor in loaded.items() if id(tensor) not in places)
    if computed:
        raise CheckpointError(
            f"timm computes {computed[0]} and {len(computed) - 1} more tensors from values of the file,"
            " which weighin does not do",
            'save the loaded model: timm.models.save_for_hf(timm.create_model("local-dir:FOLDER",'
            " pretrained=True), NEW_FOLDER)",
        )
    return {name: places[id(tensor)] for name, tensor in loaded.items()}


def _check_complete(
    model: torch.nn.Module, state: Mapping[str, Any], strict: bool, slices: Sequence[TensorSlice]
) -> None:
    """Raise CheckpointError if the state dict that timm would load does not fit the model."""
    wanted = model.state_dict().keys() if strict else dict(model.named_parameters()).keys()
    problems = {
        "has no values for": sorted(wanted - state.keys()),
        "has more tensors than the model:": sorted(state.keys() - wanted) if strict else [],
    }
    for what, names in problems.items():
        if names:
            raise CheckpointError(
                f"{slices[0].file}: {what} {first_names(names)} of this {type(model).__name__}",
                "correct 'architecture', 'num_classes' and 'model_args' in config.json: with the"
                " present values, timm would refuse the file, or give some weights random values",
            )


def reference(
    kwargs: Mapping[str, Any], checkpoint: Path, dtype: torch.dtype
) -> tuple[torch.nn.Module, list[str]]:
    """Return the model that timm loads, and an empty list, because timm leaves no weight out.

    Raises:
        CheckpointError: timm cannot load the file.
    """
    try:
        model = _created(kwargs["architecture"], folder_of(checkpoint))
    except RuntimeError as error:
        raise CheckpointError(
            f"{checkpoint}: timm cannot load the checkpoint: {error}",
            "choose the architecture from which the checkpoint was saved",
        ) from error
    return model.to(dtype), []


def finish(model: Any, folder: Path | str) -> None:
    """Store the folder in a loaded model's ``pretrained_cfg``, as timm does."""
    model.pretrained_cfg["file"] = str(folder)
    del model.keeps_dtypes


def example_inputs(architecture: str, config: Mapping[str, Any]) -> torch.Tensor | None:  # noqa: ARG001
    """Return an image for one forward pass; None if the configuration has no image size."""
    size = (config.get("pretrained_cfg") or config).get("input_size")
    if not isinstance(size, list | tuple):
        return None
    arguments = config.get("model_args") or {}
    side = arguments.get("img_size") or size[1:]
    height, width = side if isinstance(side, list | tuple) else (side, side)
    return torch.zeros(1, arguments.get("in_chans") or size[0], height, width)
