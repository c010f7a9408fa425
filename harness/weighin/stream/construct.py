"""Build a model without writing its weights, and restore the buffers that no checkpoint contains.

A constructor initialises weights that a checkpoint then replaces. A ``WriteLog`` records in-place
writes to memory that was allocated during the recording, instead of executing the writes. Memory
that no code reads is therefore never touched, and takes no RAM. If code reads such memory, the log
first executes the writes on which the values depend. Writes that the log executes later have the
same order and the same random numbers as without a log.

A ``WriteLog`` replaces no function of torch, and affects only the thread that records. The log also
notices the methods in ``_DIRECT_READS``, which read a tensor's memory without a torch operation.
The log cannot notice code that reads a tensor's memory through ``data_ptr()``.

No model is built on the meta device, for two reasons. A model on the meta device has no values in its
buffers. The first Python operation on the meta device imports 800 modules, and this import takes
0.75 s and 68 MiB.
"""

import ctypes
import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, Literal, NamedTuple, TypeVar, cast

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from weighin.errors import ConfigError
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
_CLONES: Final = frozenset({_aten.clone.default, _aten._to_copy.default})
_TRIANGLES: Final = {_aten.triu.default: _aten.triu.out, _aten.tril.default: _aten.tril.out}
_ONES: Final = _aten.ones.default
_DRAWS: Final = {
    _aten.randn.default: _aten.normal_.default,
    _aten.rand.default: _aten.uniform_.default,
}
_LATER: Final = frozenset({_ONES, *_DRAWS, *_CLONES, *_TRIANGLES})
"""Operations that are equivalent to an allocation and one write; the log can defer this write."""

_SHAPES: Final = frozenset({
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
    "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "is_same_size",
})  # fmt: skip
"""Operations that use only a tensor's shape and dtype, not its values."""

_RESIZES: Final = frozenset({"set_", "resize_", "resize_as_", "_resize_output_"})
_DIRECT_READS: Final = frozenset({
    torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__,
})  # fmt: skip
_INITIALISERS: Final = frozenset({nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_})
_PLAIN: Final = torch.Tensor.__torch_dispatch__
_PLAIN_TYPES: Final = frozenset({torch.Tensor, nn.Parameter})
_LARGE_BYTES: Final = 1024**2  # of a constant: a smaller constant is computed immediately

Builder = Callable[..., nn.Module]
RealBuffers = Literal["all", "non_persistent"]
Model = TypeVar("Model", bound=nn.Module)


class DeferredLoad(NamedTuple):
    """A deferred copy to ``target`` from a promised tensor, whose values are still in a file.

    Attributes:
        source: a view of the promised tensor; None for the whole tensor.
        promise: the source of the values, as given to ``WriteLog.promise`` or ``WriteLog.load``.
    """

    target: torch.Tensor
    source: torch.Tensor | None
    promise: Any


class _Kind(NamedTuple):
    """The properties of an operation of torch, derived from its schema.

    Attributes:
        written: the position and name of the argument that the operation writes and returns; None
            if there is none, or the operation resizes tensors or writes to several arguments.
    """

    is_view: bool
    reads_shape: bool
    resizes: bool
    random: bool
    written: tuple[int, str] | None


@dataclass(slots=True, eq=False)
class _Write:
    """One deferred write: an operation of torch, or a load from a checkpoint.

    Attributes:
        touched: the keys of the storages that the write reads or writes.
        held: all tensors among the arguments of the write, ``target`` included.
        rng_state: the state of torch's random generator before a random write; None if this is the
            state that the previous random write leaves.
    """

    target: torch.Tensor
    touched: tuple[int, ...]
    held: tuple[torch.Tensor, ...]
    operation: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None
    random: bool = False
    rng_state: torch.Tensor | None = None
    load: DeferredLoad | None = None


class WriteLog:
    """The deferred writes of one thread.

    Args:
        make: a function that executes a ``DeferredLoad``.
    """

    def __init__(self, make: Callable[[DeferredLoad], None] | None = None) -> None:
        self._make = make
        self._writes: dict[int, _Write] = {}  # in the order of their numbers
        self._count = 0
        self._draws = 0  # the number of recorded writes that draw random numbers
        self._pending: dict[int, int] = {}  # the number of recorded writes to each storage
        self._own: dict[int, StorageWeakRef] = {}  # a weak reference prevents the reuse of the key
        self._promised: dict[int, Any] = {}
        self._accepted: set[tuple[Any, ...]] = set()  # calls of torch.nn.init that raised no error
        self._rng_state = torch.empty(0)
        self._at_once = False
        self.initialised_bytes = 0
        """The bytes of all tensors that deferred writes initialised because code read their values."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the writes of the current thread to tensors, until the context exits."""
        with _DirectReads(self), _Operations(self):
            yield

    def promise(self, tensor: torch.Tensor, source: Any) -> None:
        """Declare that a load from ``source`` will give ``tensor`` its values."""
        key, alias = storage_key(tensor), tensor.detach()
        self._own[key] = _weak(tensor)
        self._promised[key] = source
        self._append_load(DeferredLoad(alias, alias, source))

    def load(self, copies: Sequence[tuple[torch.Tensor, Any]]) -> None:
        """Record copies to dense tensors from sources of the same shapes, without calls of ``copy_``.

        Do not call ``load`` inside ``recording``.
        """
        for tensor, source in copies:
            self._append_load(DeferredLoad(tensor.detach(), None, source))
        torch.autograd.graph.increment_version(tensor for tensor, _ in copies)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor's memory was allocated while this log recorded."""
        storage = self._own.get(storage_key(tensor))
        return storage is not None and not storage.expired()

    def finish(
        self, unwanted: Iterable[torch.Tensor] = (), wanted: Iterable[torch.Tensor] = ()
    ) -> list[DeferredLoad]:
        """Execute the necessary writes, and return the loads that the caller must execute.

        The caller may execute these loads in any order. A write is unnecessary if a later load replaces
        its whole storage, or if the values that it produces are only in ``unwanted`` or freed
        tensors. An unwanted tensor that shares memory with a ``wanted`` tensor counts as wanted.
        """
        loads: list[DeferredLoad] = []
        whole, filled = set[int](), dict[int, list[tuple[int, int]]]()
        live, touched, random = list[int](), set[int](), False
        ignored = set(map(storage_key, unwanted)) - set(map(storage_key, wanted))
        aliases: Counter[int] | None = None
        for number in reversed(self._writes):
            write = self._writes[number]
            key = storage_key(write.target)
            if not touched.isdisjoint(write.touched) or (random and write.random):
                necessary = True
            elif key in whole:
                necessary = False
            elif write.load is not None and key not in self._promised:
                start, end = extent(write.target)
                ranges = filled.setdefault(key, [])
                # Of loads to the same bytes, the last one is executed last.
                necessary = any(first < end and start < last for first, last in ranges)
                if not necessary:
                    loads.append(write.load)
                    ranges.append((start, end))
                    if len(ranges) == 1 and is_whole_storage(write.target):
                        whole.add(key)
            else:
                if aliases is None:  # how many tensors of each storage are held by writes alone
                    held = {id(one): one for each in self._writes.values() for one in each.held}
                    aliases = Counter(map(storage_key, held.values()))
                necessary = use_count(write.target) > aliases[key] and key not in ignored
            if necessary:
                live.append(number)
                touched.update(write.touched)
                random |= write.random
        self._run(reversed(live))
        self._writes.clear()
        self._pending.clear()
        self._promised.clear()
        return loads[::-1]

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = _kind_of(func)
        if kind.is_view or self._at_once:
            return func(*args, **kwargs)
        if func in _LATER:
            instead = self._made_later(func, args, kwargs)
            if instead is not None:
                return self.operate(*instead)
        tensors = [*tensors_in((args, kwargs))]
        if kind.written is not None:
            position, name = kind.written
            target = args[position] if position < len(args) else kwargs.get(name)
            if isinstance(target, torch.Tensor) and self._can_wait(func, target, tensors):
                self._note(func, args, kwargs, target, random=kind.random, alone=len(tensors) == 1)
                return target
        if self._writes:
            read = [] if kind.reads_shape else tensors
            self.look(read, random=kind.random)
            for tensor in read:
                self._promised.pop(storage_key(tensor), None)
        result = func(*args, **kwargs)
        if not kind.resizes:
            self._own_results(result, {storage_key(tensor) for tensor in tensors})
        return result

    def allocate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Call ``torch.empty``, without the log's slow dispatch mode if no other mode is active."""
        if self._at_once or "out" in kwargs or torch._C._len_torch_dispatch_stack() != 1:
            return torch.empty(*args, **kwargs)
        with torch._C._DisableTorchDispatch():
            tensor = torch.empty(*args, **kwargs)
        if tensor.is_cpu and (key := storage_key(tensor)):
            self._own[key] = _weak(tensor)
        return tensor

    def initialise(self, func: Any, tensor: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
        """Call a function of ``torch.nn.init`` that writes random numbers, and return the tensor.

        A call like one that torch has accepted is recorded as a whole, which is faster than its
        operations are. A call that torch refuses raises the exception in the constructor.
        """
        call = (func, tensor.dtype, tensor.ndim, *settings.values())
        whole = (
            not self._at_once
            and torch._C._len_torch_dispatch_stack() == 1
            and type(tensor) in _PLAIN_TYPES
            and tensor.is_cpu
            and tensor.numel() > 0
            and tensor.is_contiguous()
            and all(isinstance(one, int | float | str | None) for one in settings.values())
        )
        if whole and call in self._accepted and self.owns(tensor):
            with torch._C._DisableTorchDispatch():  # the log must not record its own operations
                self._note(func, (tensor,), settings, tensor, random=True, alone=True)
            torch.autograd.graph.increment_version(tensor)
        else:
            func(tensor, **settings)
            if whole:
                self._accepted.add(call)
        return tensor

    def look(self, tensors: Iterable[torch.Tensor], *, random: bool = False) -> None:
        """Before code reads ``tensors``, execute the recorded writes on which their values depend.

        With ``random``, also execute all writes that draw random numbers, because the caller will draw
        the next random numbers.
        """
        keys = {key for tensor in tensors if (key := storage_key(tensor)) in self._pending}
        if not keys and not random:
            return
        chosen = []
        for number in reversed(self._writes):
            write = self._writes[number]
            if (random and write.random) or not keys.isdisjoint(write.touched):
                chosen.append(number)
                keys.update(write.touched)
                random |= write.random
                if write.load is None:
                    self.initialised_bytes += write.target.nbytes
        self._run(reversed(chosen))

    def _run(self, numbers: Iterable[int]) -> None:
        """Execute recorded writes in the given order, each with its recorded random state."""
        before, at_once = None, self._at_once
        self._at_once = True
        try:
            for number in list(numbers):
                write = self._writes.pop(number)
                self._draws -= write.random
                for key in write.touched:
                    self._pending[key] -= 1
                    if not self._pending[key]:
                        del self._pending[key]
                if write.random and before is None:
                    before = torch.get_rng_state()
                if write.rng_state is not None:
                    torch.set_rng_state(write.rng_state)
                with torch.no_grad():
                    if write.load is not None:
                        assert self._make is not None
                        self._make(write.load)
                    elif write.operation is not None:
                        func, args, kwargs = write.operation
                        func(*args, **kwargs)
        finally:
            self._at_once = at_once
        if before is not None:
            if not torch.equal(before, self._rng_state):
                torch.set_rng_state(before)  # the caller has set another random state
            self._rng_state = torch.get_rng_state()

    def _append(self, write: _Write) -> None:
        self._writes[self._count] = write
        self._count += 1
        self._draws += write.random
        for key in write.touched:
            self._pending[key] = self._pending.get(key, 0) + 1

    def _append_load(self, load: DeferredLoad) -> None:
        held = (load.target,) if load.source is None else (load.target, load.source)
        self._append(_Write(load.target, (storage_key(load.target),), held, load=load))

    def _note(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: torch.Tensor,
        *,
        random: bool,
        alone: bool,
    ) -> None:
        """Record a write with aliases of its tensors; code may later give the tensors other memory.

        ``alone`` tells whether the target is the only tensor among the arguments.
        """
        if (load := self._as_load(func, args)) is not None:
            self._append_load(load)
            return
        target_key = storage_key(target)
        self._promised.pop(target_key, None)
        held: tuple[torch.Tensor, ...]
        touched: tuple[int, ...]
        if alone and args and args[0] is target:
            own = target.detach()
            args, held, touched = (own, *args[1:]), (own,), (target_key,)
        else:
            args = _with_aliases(args)
            kwargs = {name: _with_aliases(value) for name, value in kwargs.items()}
            held = tuple(tensors_in((args, kwargs)))
            own = next(tensor for tensor in held if storage_key(tensor) == target_key)
            touched = tuple({storage_key(tensor) for tensor in held})
        write = _Write(own, touched, held, (func, args, kwargs), random)
        if random:
            state = torch.get_rng_state()
            follows = self._draws and torch.equal(state, self._rng_state)
            write.rng_state = None if follows else state
            self._rng_state = state
        self._append(write)

    def _as_load(self, func: Any, args: tuple[Any, ...]) -> DeferredLoad | None:
        """Return the load that replaces a plain ``copy_`` from a promised tensor; None for other calls."""
        if func is not _COPY or (key := storage_key(args[1])) not in self._promised:
            return None
        target, source = args[:2]
        lazily = source.is_conj() or source.is_neg()
        if lazily or source.shape != target.shape or storage_key(target) == key:
            return None
        return DeferredLoad(target.detach(), source.detach(), self._promised[key])

    def _can_wait(self, func: Any, target: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
        if torch._debug_has_internal_overlap(target) == 1:  # torch refuses to write to it
            return False
        if self._as_load(func, (target, *tensors[1:])) is not None:
            return target.layout is torch.strided and not target.is_meta
        fits = all(
            _is_plain(tensor) and (tensor is target or _fits(tensor, target)) for tensor in tensors
        )
        return fits and self.owns(target)  # torch raises for an operation that does not fit

    def _made_later(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
        """Return a write to new memory that replaces ``func``; None if the log cannot defer ``func``."""
        given = {name for name, value in kwargs.items() if value is not None and value is not False}
        if given - {"dtype", "device", "memory_format", "non_blocking"}:
            return None
        if torch.device(kwargs.get("device") or "cpu").type != "cpu":
            return None
        instead: tuple[Any, tuple[Any, ...], dict[str, Any]]
        if func in _DRAWS or func is _ONES:
            fresh = torch.empty(*args, dtype=kwargs.get("dtype"), device="cpu")
            if func is _ONES and fresh.nbytes < _LARGE_BYTES:
                return None
            if func is _ONES:
                instead = (_aten.fill_.Scalar, (fresh, 1), {})
            else:
                instead = (_DRAWS[func], (fresh,), {})
        else:
            source = args[0]
            if storage_key(source) not in self._pending or not _is_plain(source):
                return None
            form = kwargs.get("memory_format") or torch.preserve_format
            fresh = torch.empty_like(source, dtype=kwargs.get("dtype"), memory_format=form)
            if func in _CLONES:
                instead = (_COPY, (fresh, source), {})
            else:
                instead = (_TRIANGLES[func], args, {"out": fresh})
        self._own_results(fresh, set())
        return instead

    def _own_results(self, result: Any, given: set[int]) -> None:
        for tensor in tensors_in(result):
            key = storage_key(tensor)
            if key and key not in given and tensor.device.type == "cpu" and not self.owns(tensor):
                self._own[key] = _weak(tensor)


class _Operations(TorchDispatchMode):
    """Passes every torch operation to the log, including operations that C++ code calls."""

    def __init__(self, log: WriteLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = log

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that skips dynamo would import dynamo: 820 modules, 68 MiB

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(getattr(kind, "__torch_dispatch__", _PLAIN) != _PLAIN for kind in types):
            return NotImplemented  # the tensor subclass then calls operations on plain tensors
        return self._log.operate(func, args, kwargs or {})


class _DirectReads(TorchFunctionMode):
    """Tells the log of direct memory reads, and of calls of ``torch.empty`` and ``torch.nn.init``."""

    def __init__(self, log: WriteLog) -> None:
        super().__init__()
        self._log = log

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DIRECT_READS:
            self._log.look(args[:1])
        elif func is torch.empty:
            return self._log.allocate(args, kwargs or {})
        elif func in _INITIALISERS and kwargs and not args:
            settings = {name: value for name, value in kwargs.items() if name != "tensor"}
            return self._log.initialise(func, kwargs["tensor"], settings)
        return func(*args, **(kwargs or {}))


@cache
def _kind_of(func: Any) -> _Kind:
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    writes = [
        (number, argument.name)
        for number, argument in enumerate(schema.arguments)
        if argument.alias_info and argument.alias_info.is_write
    ]
    moves_only = torch.Tag.inplace_view in func.tags and name not in _RESIZES
    returned = schema.returns[0].alias_info if len(schema.returns) == 1 else None
    waits = len(writes) == 1 and returned is not None and returned.is_write
    return _Kind(
        is_view=moves_only or (not writes and any(one.alias_info for one in schema.returns)),
        reads_shape=name in _SHAPES,
        resizes=name in _RESIZES,
        random=torch.Tag.nondeterministic_seeded in func.tags,
        written=writes[0] if waits and name not in _RESIZES else None,
    )


def _with_aliases(value: Any) -> Any:
    """Return ``value`` with each tensor replaced by a second tensor object for the same memory."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    return type(value)(map(_with_aliases, value)) if isinstance(value, list | tuple) else value


def _fits(tensor: torch.Tensor, target: torch.Tensor) -> bool:
    """Tell whether a tensor can be broadcast to the target's shape."""
    extra = target.ndim - tensor.ndim
    return extra >= 0 and all(
        size in (1, wanted) for size, wanted in zip(tensor.shape, target.shape[extra:], strict=True)
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided and tensor.device.type == "cpu" and storage_key(tensor) != 0
    )


def _weak(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


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
    """Return the model with uninitialised weights, built in ``dtype``; see ``without_weights``.

    Raises:
        ConfigError: the builder does not accept ``kwargs`` or does not return a module.
    """
    with _constructing(dtype):
        return without_weights(partial(_call, builder, kwargs), real_buffers=real_buffers)


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
    # Module.to() would untie buffers, and convert complex tensors.
    converted: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is None or not parameter.is_floating_point():
                continue
            if parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)
        for leaf, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                converted.setdefault(id(buffer), buffer.to(dtype))
                module._buffers[leaf] = converted[id(buffer)]
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
    """Return a context in which the CPU is the default device.

    If the CPU already is the default device, the result is a null context, which is faster.
    """
    # torch 2.6 cannot return the default device in a context
    is_default = torch.empty(0).device.type == "cpu"
    return nullcontext() if is_default else torch.device("cpu")


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
    skeleton = construct(lambda: without_weights(partial(_call, builder, kwargs)), dtype)
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
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name
        if missing and (module_name == missing or module_name.startswith(f"{missing}.")):
            raise ConfigError(
                f"builder {name!r}: there is no module {missing!r}",
                "correct the builder's name, or install the module's package",
            ) from error
        raise ConfigError(
            f"builder {name!r}: importing {module_name!r} failed: {error}",
            f'to see the whole traceback, run: python -c "import {module_name}"',
        ) from error
    builder = getattr(module, function_name, None)
    if not callable(builder):
        raise ConfigError(
            f"builder {name!r}: module {module_name!r} has no function {function_name!r}",
            f"define `def {function_name}(...)` in {sys.modules[module_name].__file__}",
        )
    return cast(Builder, builder)


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
