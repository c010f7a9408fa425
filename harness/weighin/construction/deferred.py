"""Defer a constructor's writes until code reads the values; skip writes whose values no code reads.

A constructor initialises weights that a checkpoint then replaces. A ``WriteLog`` records in-place
writes to memory that was allocated during the recording, instead of executing the writes. Memory
that no code reads is therefore never touched, and takes no RAM. If code reads such memory, the log
first executes the writes on which the values depend. Writes that the log executes later have the
same order and the same random numbers as without a log.

A ``WriteLog`` replaces no function of torch, and affects only the thread that records. The log also
notices the methods in ``_DIRECT_READS``, which read a tensor's memory without a torch operation.
The log cannot notice code that reads a tensor's memory through ``data_ptr()``.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from weighin.construction.operations import (
    INITIALISERS,
    is_plain_call,
    kind_of,
    tensors_in,
    with_aliases,
)
from weighin.construction.tensors import extent, is_dense, is_whole_storage, storage_key, use_count

_COPY: Final = torch.ops.aten.copy_.default
_CLONES: Final = frozenset({torch.ops.aten.clone.default, torch.ops.aten._to_copy.default})
_TRIANGLES: Final = {
    torch.ops.aten.triu.default: torch.ops.aten.triu.out,
    torch.ops.aten.tril.default: torch.ops.aten.tril.out,
}
_ONES: Final = torch.ops.aten.ones.default
_FILL: Final = torch.ops.aten.fill_.Scalar
_DRAWS: Final = {
    torch.ops.aten.randn.default: torch.ops.aten.normal_.default,
    torch.ops.aten.rand.default: torch.ops.aten.uniform_.default,
}
_LATER: Final = frozenset({_ONES, *_DRAWS, *_CLONES, *_TRIANGLES})
"""Operations that are equivalent to an allocation and one write; the log can defer this write."""

_DIRECT_READS: Final = frozenset({
    torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__,
})  # fmt: skip
_PLAIN: Final = torch.Tensor.__torch_dispatch__
_LARGE_BYTES: Final = 1024**2  # of a constant: a smaller constant is computed immediately


class DeferredLoad(NamedTuple):
    """A deferred copy to ``target`` from a promised tensor, whose values are still in a file.

    Attributes:
        source: a view of the promised tensor; None for the whole tensor.
        promise: the source of the values, as given to ``WriteLog.promise`` or ``WriteLog.load``.
    """

    target: torch.Tensor
    source: torch.Tensor | None
    promise: Any


@dataclass(slots=True)
class IndependentLoads:
    """Loads that can be executed in any order, chosen from the last recorded load to the first.

    Attributes:
        whole: the storages that a load replaces completely.
        reached: the byte ranges that loads span, with or without gaps, in storages not in ``whole``.
        filled: the byte ranges that loads fill without gaps, in storages not in ``whole``.
    """

    chosen: list[DeferredLoad] = field(default_factory=list)
    whole: set[int] = field(default_factory=set)
    reached: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    filled: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def covers(self, key: int, start: int, end: int) -> bool:
        """Tell whether the chosen loads fill every byte from ``start`` to ``end`` of a storage."""
        for first, last in sorted(self.filled.get(key, ())):
            if first > start:
                return False
            start = max(start, last)
        return start >= end

    def meets(self, key: int, start: int, end: int) -> bool:
        """Tell whether a chosen load may fill any byte from ``start`` to ``end`` of a storage."""
        return any(first < end and start < last for first, last in self.reached.get(key, ()))

    def add(self, key: int, load: DeferredLoad) -> bool:
        """Add a load that was recorded before the chosen loads; return False, without adding the
        load, if it must also be executed before them.

        If the chosen loads overwrite the load's whole target, ``add`` drops the load and returns True.
        """
        if key not in self.reached and is_whole_storage(load.target):
            self.chosen.append(load)
            self.whole.add(key)
            return True
        start, end = extent(load.target)
        if self.covers(key, start, end):
            return True
        if self.meets(key, start, end):
            return False
        self.chosen.append(load)
        self.reached.setdefault(key, []).append((start, end))
        if is_dense(load.target):
            self.filled.setdefault(key, []).append((start, end))
        return True


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

        The caller may execute these loads in any order. A write is unnecessary if loads replace all
        values that the write produces, or if these values are only in ``unwanted`` or freed
        tensors. An unwanted tensor that shares memory with a ``wanted`` tensor counts as wanted.
        """
        loads, live, touched, random = IndependentLoads(), [], set[int](), False
        ignored = set(map(storage_key, unwanted)) - set(map(storage_key, wanted))
        aliases: Counter[int] | None = None
        for number in reversed(self._writes):
            write = self._writes[number]
            key = storage_key(write.target)
            if not touched.isdisjoint(write.touched) or (random and write.random):
                necessary = True
            elif key in loads.whole:
                necessary = False
            elif write.load is not None and key not in self._promised:
                necessary = not loads.add(key, write.load)
            else:
                size = write.target.untyped_storage().nbytes()
                aliases = self._aliases() if aliases is None else aliases
                held = use_count(write.target) > aliases[key]
                necessary = held and key not in ignored and not loads.covers(key, 0, size)
            if necessary:
                live.append(number)
                touched.update(write.touched)
                random |= write.random
        self._run(reversed(live))
        self._writes.clear()
        self._pending.clear()
        self._promised.clear()
        return loads.chosen[::-1]

    def _aliases(self) -> Counter[int]:
        """Return for each storage how many tensor objects recorded writes hold as arguments."""
        held = {id(tensor): tensor for write in self._writes.values() for tensor in write.held}
        return Counter(map(storage_key, held.values()))

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = kind_of(func)
        if kind.is_view or self._at_once:
            return func(*args, **kwargs)
        if func in _LATER:
            instead = self._made_later(func, args, kwargs)
            if instead is not None:
                return self.operate(*instead)
        tensors = kind.tensors(args, kwargs)
        target = kind.target(args, kwargs)
        if target is not None and self._can_wait(func, target, tensors):
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

    def initialise(self, func: Any, tensor: torch.Tensor, settings: dict[str, Any]) -> bool:
        """Record a call of a function of ``torch.nn.init``; return False if the log cannot record
        the call, and the caller must make it.

        A call for which torch would raise an exception is not recorded, so that the constructor gets
        the exception.
        """
        if (
            self._at_once
            or torch._C._len_torch_dispatch_stack() != 1
            or not is_plain_call(func, tensor, settings)
            or not self.owns(tensor)
        ):
            return False
        with torch._C._DisableTorchDispatch():  # the log must not record its own operations
            self._note(func, (tensor,), settings, tensor, random=True, alone=True)
        torch.autograd.graph.increment_version(tensor)
        return True

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
        for number in chosen:
            if self._writes[number].load is None:
                self.initialised_bytes += self._writes[number].target.nbytes
        self._run(reversed(chosen))

    def _run(self, numbers: Iterable[int]) -> None:
        """Execute recorded writes in the given order, each with its recorded random state."""
        before = None
        with torch.no_grad(), self._making():
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
                self._do(write)
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

    @contextmanager
    def _making(self) -> Iterator[None]:
        before, self._at_once = self._at_once, True
        try:
            yield
        finally:
            self._at_once = before

    def _do(self, write: _Write) -> None:
        if write.load is not None:
            assert self._make is not None
            self._make(write.load)
        elif write.operation is not None:
            func, args, kwargs = write.operation
            func(*args, **kwargs)

    def _append_load(self, load: DeferredLoad) -> None:
        touched = (storage_key(load.target),)
        held = (load.target,) if load.source is None else (load.target, load.source)
        self._append(_Write(load.target, touched, held, load=load))

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
            args = with_aliases(args)
            kwargs = {name: with_aliases(value) for name, value in kwargs.items()}
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
        if func in _DRAWS or func is _ONES:
            fresh = torch.empty(*args, dtype=kwargs.get("dtype"), device="cpu")
            if func is _ONES and fresh.nbytes < _LARGE_BYTES:
                return None
            instead: tuple[Any, tuple[Any, ...], dict[str, Any]]
            instead = (_FILL, (fresh, 1), {}) if func is _ONES else (_DRAWS[func], (fresh,), {})
        else:
            source = args[0]
            if storage_key(source) not in self._pending or not _is_plain(source):
                return None
            form = kwargs.get("memory_format") or torch.preserve_format
            fresh = torch.empty_like(source, dtype=kwargs.get("dtype"), memory_format=form)
            copies = func in _CLONES
            instead = (
                (_COPY, (fresh, source), {}) if copies else (_TRIANGLES[func], args, {"out": fresh})
            )
        self._own_results(fresh, set())
        return instead

    def _own_results(self, result: Any, given: set[int]) -> None:
        for tensor in (result,) if isinstance(result, torch.Tensor) else tensors_in(result):
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
        elif func in INITIALISERS and kwargs and not args:
            settings = {name: value for name, value in kwargs.items() if name != "tensor"}
            if self._log.initialise(func, kwargs["tensor"], settings):
                return kwargs["tensor"]
        return func(*args, **(kwargs or {}))


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
