"""Building a model without paying for its weights, and giving back the buffers no file holds.

A *skeleton* is a model built on the CPU whose parameters lie in memory that nobody has written, which
takes none; its buffers have their constructor's values. Building on the meta device would lose the
buffers, and its first operation that is written in Python imports 800 modules (0.75 s, 68 MiB).
"""

import ctypes
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn

from weighin.errors import ConfigError
from weighin.models.deferred import WriteLog

Builder = Callable[..., nn.Module]
RealBuffers = Literal["all", "non_persistent"]
Model = TypeVar("Model", bound=nn.Module)


def resolve_builder(name: str) -> Builder:
    """Return the function that "package.module:function" names.

    Raises:
        ConfigError: the name has another form, or the module or the function is missing.
    """
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise ConfigError(
            f"{name!r} is not a builder", "write it as package.module:function in the model's YAML"
        )
    builder = getattr(_import_module(module_name, name), function_name, None)
    if not callable(builder):
        raise ConfigError(
            f"builder {name!r}: module {module_name!r} has no function {function_name!r}",
            f"define `def {function_name}(...)` in {sys.modules[module_name].__file__}",
        )
    return cast(Builder, builder)


def _import_module(module_name: str, builder: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name
        if missing and (module_name == missing or module_name.startswith(f"{missing}.")):
            raise ConfigError(
                f"builder {builder!r}: there is no module {missing!r}",
                "correct the builder's name, or install the package that holds the module",
            ) from error
        raise ConfigError(
            f"builder {builder!r}: importing {module_name!r} failed: {error}",
            f'see the whole traceback with: python -c "import {module_name}"',
        ) from error


def build_skeleton(
    builder: Builder, kwargs: Mapping[str, Any], *, real_buffers: RealBuffers = "all"
) -> nn.Module:
    """Return the model without weights, as a float32 one; see ``without_weights``.

    Raises:
        ConfigError: the builder does not accept ``kwargs`` or returns no module.
    """
    build = partial(_call, builder, kwargs)
    with _constructing(torch.float32):
        return without_weights(build, real_buffers=real_buffers)


def without_weights(
    build: Callable[[], Model], *, real_buffers: RealBuffers = "non_persistent"
) -> Model:
    """Return what ``build`` builds, at almost no cost: nothing is written to memory that nobody reads.

    Parameters end with whatever their memory holds, but where the constructor looked at their values,
    and so do persistent buffers, unless ``real_buffers="all"``: a checkpoint is to follow, or
    somebody who needs their shapes alone. All other tensors have the values of a real construction.
    GPT-2 XL: 0.1 s, and no memory.
    """
    log = WriteLog()
    with on_cpu(), log.recording():
        model = build()
    wanted = dict(model.named_buffers(remove_duplicate=False))
    unwanted: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    if real_buffers == "non_persistent":
        kept = {name for name, _ in non_persistent_buffers(model)}
        unwanted |= {name: wanted.pop(name) for name in wanted.keys() - kept}
    log.finish(unwanted=unwanted.values(), wanted=wanted.values())
    give_back_heap()
    return model


def construct(build: Callable[[], Model], dtype: torch.dtype) -> Model:
    """Return what ``build`` builds where ``dtype`` is the default: the model to load into, or its truth.

    What its constructor makes in another floating-point dtype is converted; where it computes what
    torch cannot in ``dtype``, such as an orthogonal matrix in half precision, all of it is built as
    float32. Random numbers are the same at every call; the caller's random state is as before.
    """
    try:
        with _constructing(dtype):
            model = build()
    except RuntimeError as error:  # NotImplementedError, and what torch raised before it
        if "not implemented for" not in str(error):
            raise
        with _constructing(torch.float32):
            model = build()
    tensors = itertools.chain(model.parameters(), model.buffers())
    if any(one.is_floating_point() and one.dtype != dtype for one in tensors):
        _convert(model, dtype)
    return model


def _convert(model: nn.Module, dtype: torch.dtype) -> None:
    """Make all floating-point tensors ``dtype``. ``Module.to`` would untie buffers, and halve complex ones."""
    converted: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        for leaf, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                converted.setdefault(id(buffer), buffer.to(dtype))
                module._buffers[leaf] = converted[id(buffer)]


@contextmanager
def _constructing(dtype: torch.dtype) -> Iterator[None]:
    default_dtype, random_state = torch.get_default_dtype(), torch.get_rng_state()
    torch.set_default_dtype(dtype)
    torch.default_generator.manual_seed(0)
    try:
        yield
    finally:
        torch.set_default_dtype(default_dtype)
        torch.set_rng_state(random_state)


def on_cpu() -> AbstractContextManager[object]:
    """Make the CPU the default device where it is not: the mode costs each of torch's calls a detour."""
    if torch.empty(0).device.type == "cpu":  # torch 2.6 does not tell its own contexts by name
        return nullcontext()
    return torch.device("cpu")


def give_back_heap() -> None:
    """Return the free pages of the heap to the kernel, where the C library is glibc.

    Temporaries of a few MiB, such as the masks that a constructor computes, leave them there.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def map_large_tensors() -> None:
    """Make this process give tensors of 1 MiB and more back to the kernel when they are freed.

    glibc moves its threshold up to 32 MiB by itself, and then temporaries strand pages in the
    heap. Not for a measured process: users do not set this. Does nothing without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-3, 1024 * 1024)  # M_MMAP_THRESHOLD


def _call(builder: Builder, kwargs: Mapping[str, Any]) -> nn.Module:
    try:
        model: object = builder(**kwargs)
    except TypeError as error:
        raise ConfigError(
            f"builder {_name(builder)} failed: {error}",
            "correct the model's arguments: `kwargs` in its YAML, or --kwargs",
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"builder {_name(builder)} returned {type(model).__name__}, not a torch.nn.Module",
            "return the model from the builder",
        )
    return model


def _name(builder: Builder) -> str:
    module = getattr(builder, "__module__", "?")
    return f"{module}:{getattr(builder, '__qualname__', type(builder).__qualname__)}"


def reset_buffers(
    model: nn.Module,
    builder: Builder,
    kwargs: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Give every non-persistent buffer of ``model`` its constructor's value, on ``device``.

    Floating-point buffers end as ``dtype``. Persistent buffers are left alone: they are in the
    checkpoint. Buffers that are one tensor in the builder's model stay one tensor.

    Raises:
        ConfigError: a buffer is none of the builder's, or its value depends on parameters.
    """
    wanted = dict(non_persistent_buffers(model))
    if not wanted:
        return
    build = partial(_call, builder, kwargs)
    skeleton = construct(lambda: without_weights(build), dtype)
    values = {
        name: owner._buffers[leaf] for name, (owner, leaf) in non_persistent_buffers(skeleton)
    }
    moved: dict[int, torch.Tensor] = {}
    for name, (owner, leaf) in wanted.items():
        value = values.get(name)
        if value is None:
            raise ConfigError(
                f"cannot give buffer {name!r} its value back: builder {_name(builder)} makes none",
                "register the buffer with persistent=True, or keep the builder's names",
            )
        if id(value) not in moved:
            target = dtype if value.is_floating_point() else value.dtype
            moved[id(value)] = value.to(device=device, dtype=target)
        owner._buffers[leaf] = moved[id(value)]


def constructed_buffers(
    builder: Builder, kwargs: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the non-persistent buffers of a model that is really constructed, with all its weights.

    Floating-point ones are ``dtype``, which is the default dtype of the construction, too.

    Raises:
        ConfigError: as ``build_skeleton``.
    """
    with on_cpu():
        model = construct(partial(_call, builder, kwargs), dtype)
    return {
        name: value
        for name, (owner, leaf) in non_persistent_buffers(model)
        if (value := owner._buffers[leaf]) is not None
    }


def non_persistent_buffers(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    """Yield each non-persistent buffer as its full name and (its module, its name in there)."""
    for prefix, module in model.named_modules():
        # In the order of registration: a set has another one in every process.
        for leaf, buffer in module._buffers.items():
            if leaf in module._non_persistent_buffers_set and buffer is not None:
                yield (f"{prefix}.{leaf}" if prefix else leaf), (module, leaf)
