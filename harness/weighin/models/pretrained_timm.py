"""Build a model of the timm library from its configuration, as ``create_model("local-dir:...")`` does."""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Lock, get_ident
from typing import Any, Final

import torch

from weighin.errors import ConfigError
from weighin.models.pretrained import imported, says
from weighin.stream.foreign import lacks
from weighin.stream.hugging_face_folder import CONFIG, folder_of
from weighin.stream.pretrained_library import TIMM

State = Mapping[str, torch.Tensor]

_REPAIR: Final = "correct 'architecture', 'num_classes' and 'model_args' in config.json"

_replacing: Final = Lock()


def from_config(architecture: str, config: Mapping[str, Any]) -> torch.nn.Module:
    """Return a model such as "vit_tiny_patch16_224" in training mode, as timm does, in torch's default dtype."""
    return model_and_load(architecture, config)[0]


def model_and_load(
    architecture: str, config: Mapping[str, Any]
) -> tuple[torch.nn.Module, Callable[[State, Path], None]]:
    """Return the model of ``from_config``, and a function that loads a file's tensors into it as timm does."""
    imported(TIMM)
    from timm.models import _builder

    dtype, calls = torch.get_default_dtype(), list[tuple[Any, ...]]()
    with tempfile.TemporaryDirectory(prefix="weighin-") as folder, _replacing:
        (Path(folder) / CONFIG).write_text(json.dumps(config))
        own, thread = _builder.load_pretrained, get_ident()

        def load_pretrained(
            model: Any, pretrained_cfg: Any = None, *given: Any, **arguments: Any
        ) -> None:
            if get_ident() == thread:
                calls.append((model, pretrained_cfg, given, arguments))
            else:  # another thread's load gets its weights
                own(model, pretrained_cfg, *given, **arguments)

        try:
            _builder.load_pretrained = load_pretrained
            torch.set_default_dtype(torch.float32)
            model = _created(architecture, Path(folder))
        finally:
            torch.set_default_dtype(dtype)
            _builder.load_pretrained = own
    if not calls or calls[0][0] is not model:
        what = f"timm builds {architecture} as a feature extractor, into which weighin cannot load weights"
        raise ConfigError(what, "leave 'features_only' out of model_args in config.json")
    _, pretrained_cfg, given, arguments = calls[0]
    model.to(dtype)
    model.keeps_dtypes = True

    def load(state: State, file: Path) -> None:
        source = {**pretrained_cfg, "source": "", "state_dict": dict(state)}
        with says(f"{file}: timm", _REPAIR), _refusing_gaps(model, file):
            own(model, source, *given, **arguments)

    return model, load


@contextmanager
def _refusing_gaps(model: Any, file: Path) -> Iterator[None]:
    """Raise CheckpointError if a file lacks weights that timm would leave at their random values."""
    load_state_dict = model.load_state_dict

    def take(values: State, strict: bool = True) -> Any:
        wanted = model.state_dict() if strict else dict(model.named_parameters())
        if missing := sorted(wanted.keys() - values.keys()):
            raise lacks(file, missing, type(model).__name__)
        return load_state_dict(values, strict=strict)

    model.load_state_dict = take
    try:
        yield
    finally:
        del model.load_state_dict


def _created(architecture: str, folder: Path) -> Any:
    timm = imported(TIMM)
    if not timm.is_model(architecture):
        what = f"timm {timm.__version__} has no model {architecture!r}"
        raise ConfigError(what, "correct 'architecture' in config.json, or install a newer timm")
    try:
        return timm.create_model(f"local-dir:{folder}", pretrained=True)
    except (TypeError, KeyError, AssertionError) as error:
        what = f"timm {timm.__version__} cannot build {architecture!r} from config.json"
        reason = f"{type(error).__name__}: {error}"
        repair = "install a newer timm, or correct config.json"
        raise ConfigError(f"{what}: {reason}", repair) from error


def import_class(kwargs: Mapping[str, Any]) -> None:  # noqa: ARG001 (an interface)
    imported(TIMM)


def reference(
    kwargs: Mapping[str, Any], checkpoint: Path, dtype: torch.dtype
) -> tuple[torch.nn.Module, list[str]]:
    """Return the model that timm loads, and an empty list; CheckpointError if the file lacks weights."""
    imported(TIMM)
    from timm.models import _builder

    own, thread = _builder.load_pretrained, get_ident()

    def load_pretrained(model: Any, *given: Any, **arguments: Any) -> None:
        with _refusing_gaps(model, checkpoint) if get_ident() == thread else nullcontext():
            own(model, *given, **arguments)

    with says(f"{checkpoint}: timm.create_model", _REPAIR), _replacing:
        _builder.load_pretrained = load_pretrained
        try:
            return _created(kwargs["architecture"], folder_of(checkpoint)).to(dtype), []
        finally:
            _builder.load_pretrained = own


def example_inputs(architecture: str, config: Mapping[str, Any]) -> torch.Tensor | None:  # noqa: ARG001
    """Return an image for one forward pass; None if the configuration has no image size."""
    size = (config.get("pretrained_cfg") or config).get("input_size")
    if not isinstance(size, list | tuple):
        return None
    arguments = config.get("model_args") or {}
    side = arguments.get("img_size") or size[1:]
    height, width = side if isinstance(side, list | tuple) else (side, side)
    return torch.zeros(1, arguments.get("in_chans") or size[0], height, width)
