"""Build a model without writing its weights, and restore the buffers that no checkpoint contains.

A constructor initialises weights that a checkpoint then replaces. A ``WriteLog`` records in-place
writes to memory that was allocated during the recording, instead of executing them, so that memory
which no code reads takes no RAM. If code reads such memory, the log first executes the writes on which
the values depend, in the same order and with the same random numbers as without a log. It affects only
the thread that records, and misses code that reads a tensor's memory through ``data_ptr()``.

No model is built on the meta device: its buffers would have no values, and the first Python operation
there imports 800 modules, which takes 0.75 s and 68 MiB.
"""

import ctypes
import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Final, Literal, TypeVar, cast

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from weighin.errors import ConfigError
from weighin.stream.slices import Fill, Slice
from weighin.stream.tensors import (
    extent,
    is_whole_storage,
    non_persistent_buffers,
    storage_key,
    tensors_in,
    use_count,
)

_aten: Final = torch.ops.aten
_COPY: Final = _aten.copy_.default


def _copied(one: torch.Tensor, *, non_blocking: bool = False, **how: Any) -> torch.Tensor:  # noqa: ARG001
    return torch.empty_like(one, **how).copy_(one)


# Operations as an allocation and one write, which the log can defer.
_DEFERRED: Final[dict[Any, Callable[..., torch.Tensor]]] = {
    _aten.ones.default: lambda size, **how: torch.empty(size, **how).fill_(1),
    _aten.randn.default: lambda size, **how: torch.empty(size, **how).normal_(),
    _aten.rand.default: lambda size, **how: torch.empty(size, **how).uniform_(),
    _aten.clone.default: _copied,
    _aten._to_copy.default: _copied,
    _aten.triu.default: lambda one, *k: torch.triu(one, *k, out=torch.empty_like(one)),
    _aten.tril.default: lambda one, *k: torch.tril(one, *k, out=torch.empty_like(one)),
}
_SHAPES: Final = frozenset({  # operations that use only a tensor's shape and dtype, not its values
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
    "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "is_same_size",
})  # fmt: skip
_RESIZES: Final = frozenset({"set_", "resize_", "resize_as_", "_resize_output_"})
_DIRECT_READS: Final = frozenset({
    torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__,
})  # fmt: skip
_INITIALISERS: Final = frozenset({nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_})

Builder = Callable[..., nn.Module]
RealBuffers = Literal["all", "non_persistent"]
Model = TypeVar("Model", bound=nn.Module)


@dataclass(slots=True, eq=False)
class _Write:
    """One deferred write to ``target``: the call of an operation, or values of a file."""

    target: torch.Tensor
    held: tuple[torch.Tensor, ...]  # aliases of all arguments, whose memory code may later replace
    call: tuple[Any, tuple[Any, ...], dict[str, Any]] | Fill
    random: bool = False
    rng_state: torch.Tensor | None = None  # before a random write; None: as the last one leaves it
    touched: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.touched = set(map(storage_key, self.held))


class WriteLog(TorchDispatchMode):
    """The deferred writes of one thread, also copies from a file."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._writes: list[_Write] = []
        self._pending: set[int] = set()  # the storages that recorded writes touch
        self._own: dict[int, StorageWeakRef] = {}  # a weak reference prevents the reuse of the key
        self._promised: dict[int, Slice] = {}
        self._accepted: set[tuple[Any, ...]] = set()  # calls of torch.nn.init that raised no error
        self._rng_state: torch.Tensor | None = None  # from which the last recorded draw follows on
        self._at_once = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that skips dynamo would import dynamo: 820 modules, 68 MiB

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the writes of the current thread to tensors, until the context exits."""
        with _Functions(self), self:
            yield

    def promise(self, tensor: torch.Tensor, source: Slice) -> None:
        """Declare that ``tensor`` has the values of ``source``."""
        self._adopt(tensor)
        self._promised[storage_key(tensor)] = source
        self._append_fill(Fill(source, tensor.detach()))

    def load(self, copies: Sequence[Fill]) -> None:
        """Record the copies of ``load_state_dict`` to dense tensors; not inside ``recording``."""
        for source, tensor in copies:
            self._append_fill(Fill(source, tensor.detach()))
        torch.autograd.graph.increment_version(copy.out for copy in copies)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor's memory was allocated while this log recorded."""
        storage = self._own.get(storage_key(tensor))
        return storage is not None and not storage.expired()

    def finish(
        self, unwanted: Iterable[torch.Tensor] = (), wanted: Iterable[torch.Tensor] = ()
    ) -> list[Fill]:
        """Execute the writes that are needed. The caller must then fill what this returns, in any order.

        A write is unnecessary if a later fill replaces its whole storage, or if the values that it
        produces are only in ``unwanted`` or freed tensors. An unwanted tensor that shares memory with
        a ``wanted`` tensor counts as wanted.
        """
        fills: list[Fill] = []
        whole, filled = set[int](), dict[int, list[tuple[int, int]]]()
        ignored = set(map(storage_key, unwanted)) - set(map(storage_key, wanted))

        @cache
        def held_by_writes() -> Counter[int]:  # how many tensors of each storage
            held = {id(one): one for each in self._writes for one in each.held}
            return Counter(map(storage_key, held.values()))

        def is_seen(write: _Write) -> bool:
            key = storage_key(write.target)
            if key in whole:
                return False
            if not isinstance(write.call, Fill) or key in self._promised:
                return use_count(write.target) > held_by_writes()[key] and key not in ignored
            start, end = extent(write.target)
            ranges = filled.setdefault(key, [])
            # Of fills of the same bytes, the last one is executed last.
            if any(first < end and start < last for first, last in ranges):
                return True
            fills.append(write.call)
            ranges.append((start, end))
            if len(ranges) == 1 and is_whole_storage(write.target):
                whole.add(key)
            return False

        self._execute(set(), random=False, is_seen=is_seen)
        self._writes.clear()
        self._pending.clear()
        self._promised.clear()
        return fills[::-1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Defer or execute an operation, also of C++ code."""
        plain, kwargs = torch.Tensor.__torch_dispatch__, kwargs or {}
        if any(getattr(kind, "__torch_dispatch__", plain) != plain for kind in types):
            return NotImplemented  # the tensor subclass then calls operations on plain tensors
        is_view, reads_shape, resizes, random, written = _kind_of(func)
        if is_view or self._at_once:
            return func(*args, **kwargs)
        tensors = [*tensors_in((args, kwargs))]
        if (
            func in _DEFERRED
            and torch.device(kwargs.get("device") or "cpu").type == "cpu"
            and all(_is_plain(one) and storage_key(one) in self._pending for one in tensors)
        ):
            with self:
                return _DEFERRED[func](*args, **kwargs)
        if written is not None:
            position, name = written
            target = args[position] if position < len(args) else kwargs.get(name)
            if isinstance(target, torch.Tensor) and torch._debug_has_internal_overlap(target) != 1:
                if func is _COPY and (fill := self._as_fill(target, args[1])):
                    self._append_fill(fill)
                    return target
                if self.owns(target) and all(
                    _is_plain(one) and (one is target or _fits(one, target)) for one in tensors
                ):
                    self._record(func, args, kwargs, target, random=random)
                    return target
        if self._writes:
            read = [] if reads_shape else tensors
            self.look(read, random=random)
            for tensor in read:
                self._promised.pop(storage_key(tensor), None)
        result = func(*args, **kwargs)
        if not resizes:
            given = {storage_key(tensor) for tensor in tensors}
            for tensor in tensors_in(result):
                if storage_key(tensor) not in given and not self.owns(tensor):
                    self._adopt(tensor)
        return result

    def allocate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Call ``torch.empty``, without the slow dispatch to this log if no other mode is active."""
        if self._at_once or "out" in kwargs or torch._C._len_torch_dispatch_stack() != 1:
            return torch.empty(*args, **kwargs)
        with torch._C._DisableTorchDispatch():
            tensor = torch.empty(*args, **kwargs)
        self._adopt(tensor)
        return tensor

    def initialise(self, func: Any, tensor: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
        """Call a function of ``torch.nn.init`` that draws random numbers, and return the tensor."""
        # A call like one that torch has accepted is recorded as a whole, which is faster than its
        # operations are; a call that torch refuses raises in the constructor.
        call = (func, tensor.dtype, tensor.ndim, *settings.values())
        is_usual = (
            not self._at_once
            and torch._C._len_torch_dispatch_stack() == 1
            and type(tensor) in {torch.Tensor, nn.Parameter}
            and tensor.is_contiguous()
            and all(isinstance(one, int | float | str | None) for one in settings.values())
        )
        if is_usual and call in self._accepted and self.owns(tensor):
            with torch._C._DisableTorchDispatch():  # the log must not record its own operations
                self._record(func, (tensor,), settings, tensor, random=True)
            torch.autograd.graph.increment_version(tensor)
            return tensor
        func(tensor, **settings)
        if is_usual:
            self._accepted.add(call)
        return tensor

    def look(self, tensors: Iterable[torch.Tensor], *, random: bool = False) -> None:
        """Before code reads ``tensors``, or draws, execute the writes on which the values depend."""
        keys = self._pending.intersection(map(storage_key, tensors))
        if keys or random:
            self._execute(keys, random=random)

    def _execute(
        self, keys: set[int], *, random: bool, is_seen: Callable[[_Write], bool] = lambda _: False
    ) -> None:
        """Execute writes that touch storages ``keys``, are ``random`` or seen, and what they depend on."""
        chosen: list[_Write] = []
        left: list[_Write] = []
        for write in reversed(self._writes):
            is_needed = (random and write.random) or not keys.isdisjoint(write.touched)
            if is_needed or is_seen(write):
                chosen.append(write)
                keys.update(write.touched)
                random |= write.random
            else:
                left.append(write)
        if not chosen:
            return
        self._writes = left[::-1]
        self._pending = {key for write in left for key in write.touched}
        before, at_once, self._at_once = None, self._at_once, True
        try:
            for write in reversed(chosen):
                if write.random and before is None:
                    before = torch.get_rng_state()
                if write.rng_state is not None:
                    torch.set_rng_state(write.rng_state)
                if isinstance(write.call, Fill):
                    from weighin.stream import filling  # each worker imports this module
                    from weighin.stream.bytes import Disk

                    filling.fill([write.call], Disk(1))
                    continue
                func, args, kwargs = write.call
                with torch.no_grad():
                    func(*args, **kwargs)
        finally:
            self._at_once = at_once
        if before is None:
            return
        # Let the draws that were not executed follow those that were, and go on from the last of all if
        # the caller has not set another random state since it was recorded.
        continues = self._rng_state is not None and torch.equal(before, self._rng_state)
        after, self._rng_state = torch.get_rng_state(), None
        if rest := next((write for write in self._writes if write.random), None):
            rest.rng_state = after if rest.rng_state is None else rest.rng_state
            self._rng_state = after if continues else None
        if not continues:
            torch.set_rng_state(before)

    def _adopt(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "cpu" and (key := storage_key(tensor)):
            self._own[key] = StorageWeakRef(tensor.untyped_storage())

    def _append(self, write: _Write) -> None:
        self._writes.append(write)
        self._pending.update(write.touched)

    def _append_fill(self, fill: Fill) -> None:
        self._append(_Write(fill.out, (fill.out,), fill))

    def _record(
        self, func: Any, args: Any, kwargs: Any, target: torch.Tensor, *, random: bool
    ) -> None:
        self._promised.pop(storage_key(target), None)
        aliases: dict[int, torch.Tensor] = {}
        named = {name: _aliased(value, aliases) for name, value in kwargs.items()}
        call = func, _aliased(args, aliases), named
        write = _Write(aliases[id(target)], tuple(aliases.values()), call, random=random)
        if random:
            state = torch.get_rng_state()
            if self._rng_state is None or not torch.equal(state, self._rng_state):
                write.rng_state = self._rng_state = state
        self._append(write)

    def _as_fill(self, target: torch.Tensor, source: torch.Tensor) -> Fill | None:
        """Return what a copy from a promised tensor, or from a view of it, fills; None for other copies."""
        key = storage_key(source)
        if (
            key not in self._promised
            or source.is_conj()
            or source.is_neg()
            or source.shape != target.shape
            or storage_key(target) == key
            or target.layout is not torch.strided
            or target.is_meta
        ):
            return None
        from weighin.stream.filling import part_of  # each worker imports this module

        where = part_of(self._promised[key], source)
        return Fill(where, target.detach()) if where else None


class _Functions(TorchFunctionMode):
    """Tells the log of direct memory reads, and of calls of ``torch.empty`` and ``torch.nn.init``."""

    def __init__(self, log: WriteLog) -> None:
        super().__init__()
        self._log = log

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DIRECT_READS:
            self._log.look(args[:1])
        elif func is torch.empty:
            return self._log.allocate(args, kwargs)
        elif func in _INITIALISERS and kwargs and not args:
            settings = {name: value for name, value in kwargs.items() if name != "tensor"}
            return self._log.initialise(func, kwargs["tensor"], settings)
        return func(*args, **kwargs)


@cache
def _kind_of(func: Any) -> tuple[bool, bool, bool, bool, tuple[int, str] | None]:
    """Tell whether an operation returns a view, reads shapes alone, resizes or draws, and what it writes.

    The last item is the position and name of the argument that the operation writes and returns; None if
    no argument is written, if several are, or if the operation resizes tensors.
    """
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    writes = [
        (number, argument.name)
        for number, argument in enumerate(schema.arguments)
        if argument.alias_info and argument.alias_info.is_write
    ]
    resizes, is_random = name in _RESIZES, torch.Tag.nondeterministic_seeded in func.tags
    is_view = any(one.alias_info for one in schema.returns) and not writes
    is_view |= torch.Tag.inplace_view in func.tags and not resizes
    returned = schema.returns[0].alias_info if len(schema.returns) == 1 else None
    waits = not resizes and len(writes) == 1 and returned is not None and returned.is_write
    return is_view, name in _SHAPES, resizes, is_random, writes[0] if waits else None


def _aliased(value: Any, aliases: dict[int, torch.Tensor]) -> Any:
    """Return ``value`` with each tensor replaced by a second tensor object for the same memory."""
    # No closure of _record: one that calls itself would keep aliases while no garbage is collected.
    if isinstance(value, torch.Tensor):
        return aliases.setdefault(id(value), value.detach())
    if isinstance(value, list | tuple):
        return type(value)([_aliased(one, aliases) for one in value])
    return value


def _fits(tensor: torch.Tensor, target: torch.Tensor) -> bool:
    """Tell whether a tensor can be broadcast to the target's shape."""
    extra = target.ndim - tensor.ndim
    return extra >= 0 and all(
        size in (1, wanted) for size, wanted in zip(tensor.shape, target.shape[extra:], strict=True)
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_cpu and storage_key(tensor) != 0


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


def build_skeleton(
    builder: Builder,
    kwargs: Mapping[str, Any],
    *,
    real_buffers: RealBuffers = "all",
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Return the model with uninitialised weights, built in ``dtype``; see ``without_weights``."""
    with _constructing(dtype):
        return without_weights(partial(_call, builder, kwargs), real_buffers=real_buffers)


def construct(build: Callable[[], Model], dtype: torch.dtype) -> Model:
    """Build a model while ``dtype`` is torch's default dtype, always with the same random numbers.

    Tensors that the constructor creates in another floating-point dtype are converted to ``dtype``,
    unless the model has an attribute ``keeps_dtypes`` that is true. If torch lacks an operation of
    the constructor in half precision, such as an orthogonal initialisation, the model is built in
    float32 and converted.
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
    # Module.to() would untie buffers, and convert complex tensors.
    converted: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for leaf, tensor in tensors.items():
                if tensor is None or not tensor.is_floating_point() or tensor.dtype == dtype:
                    continue
                if isinstance(tensor, nn.Parameter):
                    tensor.data = tensor.data.to(dtype)
                else:
                    if id(tensor) not in converted:
                        converted[id(tensor)] = tensor.to(dtype)
                    module._buffers[leaf] = converted[id(tensor)]
    return model


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
    """Return a context in which the CPU is the default device."""
    # torch 2.6 cannot return the default device in a context
    return nullcontext() if torch.empty(0).device.type == "cpu" else torch.device("cpu")


def reset_buffers(
    model: nn.Module,
    builder: Builder,
    kwargs: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Set every non-persistent buffer of ``model`` to its constructor's value, on ``device``.

    The values come from a new model, which ``construct`` builds in ``dtype``. Buffers that share one
    tensor in the new model also share one tensor in ``model`` afterwards.
    """
    wanted = dict(non_persistent_buffers(model))
    if not wanted:
        return
    values = _buffers_of(lambda: without_weights(partial(_call, builder, kwargs)), dtype)
    moved: dict[int, torch.Tensor] = {}
    for name, (owner, leaf) in wanted.items():
        if name not in values:
            raise ConfigError(
                f"cannot reset buffer {name!r}: a new model from {_name(builder)} has no buffer of this name",
                "in the model's code, register the buffer with persistent=True, or don't rename it"
                " after the builder has returned",
            )
        value = values[name]
        owner._buffers[leaf] = moved.setdefault(id(value), value.to(device))


def constructed_buffers(
    builder: Builder, kwargs: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Construct the model with all its weights, and return its non-persistent buffers in ``dtype``."""
    with on_cpu():
        return _buffers_of(partial(_call, builder, kwargs), dtype)


def _buffers_of(build: Callable[[], nn.Module], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = construct(build, dtype)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return {name: buffers[name] for name, _ in non_persistent_buffers(model)}


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


def resolve_builder(name: str) -> Builder:
    """Return the function that a string "package.module:function" names."""
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise ConfigError(
            f"{name!r} is not a builder",
            "write the builder as package.module:function in the model's YAML file",
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name
        why = f"importing {module_name!r} failed: {error}"
        repair = f'to see the whole traceback, run: python -c "import {module_name}"'
        if missing and f"{module_name}.".startswith(f"{missing}."):
            why = f"there is no module {missing!r}"
            repair = "correct the builder's name, or install the module's package"
        raise ConfigError(f"builder {name!r}: {why}", repair) from error
    builder = getattr(module, function_name, None)
    if not callable(builder):
        raise ConfigError(
            f"builder {name!r}: module {module_name!r} has no function {function_name!r}",
            f"define `def {function_name}(...)` in {module.__file__}",
        )
    return cast(Builder, builder)


_libc: Final = ctypes.CDLL(None)
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # malloc.h


def give_back_heap() -> None:
    """Return free pages of glibc's heap to the kernel, such as those of masks that a constructor made."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def map_large_tensors(least_bytes: int = 1024**2) -> None:
    """Make glibc return the memory of tensors of ``least_bytes`` or more to the kernel when they are freed.

    glibc itself keeps it up to a threshold, which it raises to as much as 32 MiB. A measured process
    calls this only within ``load_pretrained``, because users' programs do not.
    """
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_MMAP_THRESHOLD, least_bytes)
        _libc.mallopt(_M_TRIM_THRESHOLD, 2 * least_bytes)
        _libc.malloc_trim(0)
