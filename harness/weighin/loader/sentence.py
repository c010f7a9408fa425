"""Load a sentence-transformers folder of several parts as the package does, through weighin's loader.

The code of the package sentence-transformers builds the parts of the model. weighin replaces the
two functions with which the package reads weights: ``from_pretrained`` of transformers by
``load_pretrained``, and ``load_torch_weights`` of all other parts by ``load_streaming``. The peak
memory is therefore one copy of the model.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from weighin import install
from weighin.errors import CheckpointError, ConfigError
from weighin.formats import sentence_parts
from weighin.loader.load import load_streaming
from weighin.text import one_line

EXTRA: Final = "sentence-transformers"
_NAME: Final = "_name_or_path"
_FILES: Final = ("model.safetensors", "pytorch_model.bin")

LoadPart = Callable[..., Any]
"""A function with the interface of ``load_pretrained``."""


def load_whole(
    folder: Path,
    load_part: LoadPart,
    *,
    dtype: torch.dtype | str | None,
    device: torch.device | str,
    threads: int | None,
) -> Any:
    """Return the model that ``SentenceTransformer(folder, device=device)`` returns.

    ``dtype`` goes to the package's ``model_kwargs``; "auto" and None choose the package's own default.

    Raises:
        ConfigError: sentence-transformers is missing, or cannot build the parts.
        CheckpointError: the files of a part do not fit the part's model, or the package would change the
            configuration of this model before the load.
    """
    names = ", ".join(part.path.name for part in sentence_parts.parts(folder))
    what = f"{folder}: a sentence-transformers folder of several parts, with weights in {names},"
    try:
        import sentence_transformers as package
    except ImportError as error:
        raise ConfigError(
            f"{what} needs the package sentence-transformers, which cannot be imported: {error}",
            install.command(EXTRA),
        ) from None
    options: dict[str, Any] = {} if dtype in (None, "auto") else {"model_kwargs": {"dtype": dtype}}
    with torch.random.fork_rng(devices=[]), _streamed(load_part, threads):
        try:
            return package.SentenceTransformer(
                str(folder), device=str(device), local_files_only=True, **options
            )
        except (
            AttributeError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError,
        ) as error:  # fmt: skip
            raise ConfigError(
                f"{what} is a model that sentence-transformers {package.__version__} cannot build:"
                f" {type(error).__name__}: {error}",
                f"give the folder of one part: {sentence_parts.parts(folder)[0].path}",
            ) from error


@contextmanager
def _streamed(load_part: LoadPart, threads: int | None) -> Iterator[None]:
    """Replace the package's two functions that read weights, until the context ends."""
    import transformers
    from sentence_transformers.base.modules.module import Module

    base: Any = transformers.PreTrainedModel
    module: Any = Module
    own, own_weights = vars(base)["from_pretrained"], vars(module)["load_torch_weights"]

    def from_pretrained(
        cls: Any,
        /,
        place: str,
        *_: Any,
        config: Any,
        subfolder: str = "",
        dtype: Any = None,
        **__: Any,
    ) -> Any:
        part = Path(place) / subfolder
        base.from_pretrained = own
        try:
            model = load_part(part, dtype=dtype, threads=threads, model_class=cls.__name__)
        finally:
            base.from_pretrained = classmethod(from_pretrained)
        _give_settings(model, config, part)
        return model

    def load_torch_weights(
        cls: Any,
        /,
        model_name_or_path: str,
        subfolder: str = "",
        model: Any = None,
        **options: Any,
    ) -> Any:
        part = Path(model_name_or_path) / subfolder
        file = next((part / name for name in _FILES if (part / name).is_file()), None)
        # Without a model, the package wants the tensors; without a file, it raises its own error.
        if model is None or file is None:
            return own_weights.__get__(None, cls)(
                model_name_or_path, subfolder=subfolder, model=model, **options
            )
        return load_streaming(model, file, threads=threads)

    base.from_pretrained = classmethod(from_pretrained)
    module.load_torch_weights = classmethod(load_torch_weights)
    try:
        yield
    finally:
        base.from_pretrained = own
        module.load_torch_weights = own_weights


def _give_settings(model: Any, config: Any, part: Path) -> None:
    """Make the package's two changes to a model's configuration: ``use_cache=False``, and the name.

    Raises:
        CheckpointError: the package would also change other settings, which could change the model.
    """
    from sentence_transformers.base.modules.transformer import Transformer
    from transformers import AutoConfig, PretrainedConfig

    plain = AutoConfig.from_pretrained(part, local_files_only=True)
    for each in (plain, *(getattr(module, "config", None) for module in model.modules())):
        if isinstance(each, PretrainedConfig):
            Transformer._configure_use_cache(each, {})
    wanted, own = config.to_dict(), plain.to_dict()
    changed = [key for key in wanted.keys() | own.keys() if wanted.get(key) != own.get(key)]
    if type(plain) is not type(config) or set(changed) - {_NAME}:
        raise CheckpointError(
            f"{part / 'config.json'}: sentence-transformers would change these settings of the"
            f" model before the load, and weighin cannot: {one_line(', '.join(sorted(changed)))}",
            "load this folder alone, with the settings of its config.json:"
            f" load_pretrained({str(part)!r})",
        )
    model.config._name_or_path = model.name_or_path = config._name_or_path
