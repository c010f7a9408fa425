"""Building a model without paying for its weights, and giving back the buffers no file holds.

A *skeleton* is a model built on the CPU whose initialisation was skipped and whose parameters
went to the meta device as they were registered, while buffers keep their constructor's values.
Building on the meta device itself would lose the buffers, and its first operation that is
written in Python imports 800 modules (0.75 s, 68 MiB); allocating there imports nothing.
"""

import ctypes
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, Literal, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from harness.errors import ConfigError
from harness.models.recycling import FUNCTIONS, RecycledConstants

Builder = Callable[..., nn.Module]
RealBuffers = Literal["all", "non_persistent"]

# Only values change here, never shapes: without effect on a tensor that has no values.
_VALUE_METHODS: Final = frozenset((
    "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_",
    "geometric_", "fill_", "zero_", "copy_", "add_", "sub_", "mul_", "div_", "clamp_",
    "clamp_min_", "clamp_max_", "erfinv_", "exp_", "log_", "masked_fill_", "triu_", "tril_",
    "fill_diagonal_", "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__",
))  # fmt: skip


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
    """Return the model with its parameters on the meta device and its buffers as constructed.

    With ``real_buffers="non_persistent"`` the persistent buffers go to the meta device too.
    The caller's default dtype has no effect, and the random state is left as it was.

    Raises:
        ConfigError: the builder does not accept ``kwargs`` or returns no module.
    """
    random_state = torch.get_rng_state()
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with without_weights(real_buffers=real_buffers):
            model = _call(builder, kwargs)
    finally:
        torch.set_default_dtype(default_dtype)
        torch.set_rng_state(random_state)
    return model


@contextmanager
def without_weights(*, real_buffers: RealBuffers = "non_persistent") -> Iterator[None]:
    """Build models inside at almost no cost: all that a checkpoint will bring is left out.

    Parameters and persistent buffers are on the meta device; non-persistent buffers, which no
    checkpoint brings, keep their constructor's values (with ``real_buffers="all"`` persistent ones
    do too). Tied parameters stay tied. Costs the real buffers, and while it builds a few tensors as
    large as the largest that a constructor computes; GPT-2 XL: 0.05 s, against 0.75 s and 68 MiB for
    the first use of ``torch.device("meta")`` in a process.
    """
    buffers = _meta_persistent_buffers() if real_buffers == "non_persistent" else nullcontext()
    with _on_cpu(), _meta_parameters(), buffers, _skipped_initialisation():
        yield
    give_back_heap()


def _on_cpu() -> AbstractContextManager[object]:
    """Make the CPU the default device where it is not: the mode costs each of torch's calls a detour."""
    if torch.get_default_device().type == "cpu":
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
    skeleton = build_skeleton(builder, kwargs, real_buffers="non_persistent")
    values = {
        name: owner._buffers[leaf] for name, (owner, leaf) in non_persistent_buffers(skeleton)
    }
    moved: dict[int, torch.Tensor] = {}
    for name, (owner, leaf) in wanted.items():
        value = values.get(name)
        if value is None or value.is_meta:
            why = "is computed from parameters" if value is not None else "is not in its model"
            raise ConfigError(
                f"cannot give buffer {name!r} its value back: for builder {_name(builder)} it {why}",
                "register the buffer with persistent=True, or keep the builder's names",
            )
        if id(value) not in moved:
            target = dtype if value.is_floating_point() else value.dtype
            moved[id(value)] = value.to(device=device, dtype=target)
        owner._buffers[leaf] = moved[id(value)]


def non_persistent_buffers(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    """Yield each non-persistent buffer as its full name and (its module, its name in there)."""
    for prefix, module in model.named_modules():
        # In the order of registration: a set has another one in every process.
        for leaf, buffer in module._buffers.items():
            if leaf in module._non_persistent_buffers_set and buffer is not None:
                yield (f"{prefix}.{leaf}" if prefix else leaf), (module, leaf)


class _skipped_initialisation(TorchFunctionMode):  # noqa: N801 (used as a context manager)
    """Let initialisation return at once: torch.nn.init, and writing values to parameters."""

    def __init__(self) -> None:
        super().__init__()
        self._constants = RecycledConstants()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # torch.nn.init hands its tensor over by name, methods by position.
        target = args[0] if args else (kwargs or {}).get("tensor")
        if isinstance(target, torch.Tensor):
            if getattr(func, "__module__", "") == "torch.nn.init":
                return target
            valueless = isinstance(target, nn.Parameter) or target.is_meta
            if valueless and getattr(func, "__name__", "") in _VALUE_METHODS:
                return target
        if func in FUNCTIONS:
            return self._constants.compute(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@contextmanager
def _meta_parameters() -> Iterator[None]:
    """Replace each parameter by one on the meta device when a module registers it."""
    # The originals are kept in the values: an id is unique only as long as its object lives.
    # They hold no memory any more, because their storages are given back.
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def replace(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        if id(parameter) not in replaced:
            with torch._C.DisableTorchFunction():
                meta = torch.empty_strided(
                    parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta"
                )
                stand_in = nn.Parameter(meta, requires_grad=parameter.requires_grad)
                parameter.data = torch.empty(0, dtype=parameter.dtype)
            replaced[id(parameter)] = (parameter, stand_in)
        return replaced[id(parameter)][1]

    handle = register_module_parameter_registration_hook(replace)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _meta_persistent_buffers() -> Iterator[None]:
    """Replace each persistent buffer by one on the meta device when a module registers it."""
    register = nn.Module.register_buffer

    def register_buffer(
        module: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True
    ) -> None:
        if persistent and tensor is not None:
            tensor = torch.empty_like(tensor, device="meta")
        register(module, name, tensor, persistent)

    # torch's hook for buffers does not say which are persistent.
    nn.Module.register_buffer = register_buffer  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_buffer = register  # type: ignore[method-assign]
