"""Build a model without writing its weights, and restore the buffers that no checkpoint contains.

A *skeleton* is a model on the CPU whose buffers have the constructor's values. The parameters of a
skeleton take no RAM, because nothing was written to their memory. A skeleton is not built on the meta
device for two reasons. A model on the meta device has no values in its buffers. The first Python
operation on the meta device imports 800 modules, and this import takes 0.75 s and 68 MiB.
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

from weighin.construction.deferred import WriteLog
from weighin.errors import ConfigError

Builder = Callable[..., nn.Module]
RealBuffers = Literal["all", "non_persistent"]
Model = TypeVar("Model", bound=nn.Module)


def resolve_builder(name: str) -> Builder:
    """Return the function that a string "package.module:function" names.

    Raises:
        ConfigError: the name has another form, or the module or the function is missing.
    """
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise ConfigError(
            f"{name!r} is not a builder",
            "write the builder as package.module:function in the model's YAML file",
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
                "correct the builder's name, or install the module's package",
            ) from error
        raise ConfigError(
            f"builder {builder!r}: importing {module_name!r} failed: {error}",
            f'to see the whole traceback, run: python -c "import {module_name}"',
        ) from error


def build_skeleton(
    builder: Builder,
    kwargs: Mapping[str, Any],
    *,
    real_buffers: RealBuffers = "all",
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Return the model with uninitialised weights, built in ``dtype``; see ``without_weights``.

    Raises:
        ConfigError: the builder does not accept ``kwargs`` or does not return a module.
    """
    build = partial(_call, builder, kwargs)
    with _constructing(dtype):
        return without_weights(build, real_buffers=real_buffers)


def without_weights(
    build: Callable[[], Model], *, real_buffers: RealBuffers = "non_persistent"
) -> Model:
    """Build a model with uninitialised weights, for callers that load the weights or need only shapes.

    Parameters are uninitialised, except those that the constructor reads. Persistent buffers are
    uninitialised too, unless ``real_buffers="all"``. All other tensors have the values that a normal
    construction gives them. The construction of GPT-2 XL takes 0.1 s, and no memory for weights.
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
    """Build a model while ``dtype`` is torch's default dtype.

    Tensors that the constructor creates in another floating-point dtype are converted to ``dtype``,
    unless the model has an attribute ``keeps_dtypes`` that is true. If torch lacks an operation of
    the constructor in half precision, such as an orthogonal initialisation, the model is built in
    float32 and converted. Each call uses the same random numbers, and the caller's random state
    does not change.
    """
    try:
        with _constructing(dtype):
            model = build()
    except RuntimeError as error:  # later versions of torch raise its subclass NotImplementedError
        if "not implemented for" not in str(error):
            raise
        with _constructing(torch.float32):
            model = build()
    if getattr(model, "keeps_dtypes", False):
        return model
    tensors = itertools.chain(model.parameters(), model.buffers())
    if any(tensor.is_floating_point() and tensor.dtype != dtype for tensor in tensors):
        _convert(model, dtype)
    return model


def _convert(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert floating-point tensors to ``dtype``.

    ``_convert`` does not call ``Module.to``, which would untie buffers and convert complex tensors.
    """
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
    """Return a context in which the CPU is the default device.

    If the CPU already is the default device, the result is a null context, which is faster.
    """
    if (
        torch.empty(0).device.type == "cpu"
    ):  # torch 2.6 cannot return the default device in a context
        return nullcontext()
    return torch.device("cpu")


def give_back_heap() -> None:
    """Return free pages of the heap to the kernel, if the C library is glibc.

    glibc keeps the memory of freed tensors of a few MiB, such as masks that a constructor makes.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def map_large_tensors() -> None:
    """Make glibc return the memory of tensors of 1 MiB or more to the kernel when they are freed.

    By default, glibc keeps the memory of freed tensors up to a threshold, which glibc raises to as
    much as 32 MiB. The measured processes do not call ``map_large_tensors``, because users' programs
    do not call it, and the measured memory should be that of users' programs.
    ``map_large_tensors`` does nothing without glibc.
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
            "correct the model's arguments: `kwargs` in the model's YAML file, or --set kwargs.NAME=VALUE",
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
    """Set every non-persistent buffer of ``model`` to its constructor's value, on ``device``.

    The values come from a new model, which ``construct`` builds in ``dtype``. Persistent buffers do
    not change, because the checkpoint has their values. Buffers that share one tensor in the new
    model also share one tensor in ``model`` afterwards.

    Raises:
        ConfigError: the new model lacks one of these buffers, or the builder fails.
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
                f"cannot reset buffer {name!r}: the model of builder {_name(builder)} has no such buffer",
                "in the model's code, register the buffer with persistent=True, or keep the names"
                " that buffers have after the builder's call",
            )
        if id(value) not in moved:
            moved[id(value)] = value.to(device)
        owner._buffers[leaf] = moved[id(value)]


def constructed_buffers(
    builder: Builder, kwargs: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Construct the model with all its weights, and return its non-persistent buffers.

    ``dtype`` is torch's default dtype during the construction, and the dtype of the returned
    floating-point buffers.

    Raises:
        ConfigError: for the same reasons as ``build_skeleton``.
    """
    with on_cpu():
        model = construct(partial(_call, builder, kwargs), dtype)
    return {
        name: value
        for name, (owner, leaf) in non_persistent_buffers(model)
        if (value := owner._buffers[leaf]) is not None
    }


def non_persistent_buffers(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    """Yield (full name, (module, the buffer's name in the module)) of each non-persistent buffer."""
    for prefix, module in model.named_modules():
        # Iterate in the order of registration: the order of a set differs between processes.
        for leaf, buffer in module._buffers.items():
            if leaf in module._non_persistent_buffers_set and buffer is not None:
                yield (f"{prefix}.{leaf}" if prefix else leaf), (module, leaf)
