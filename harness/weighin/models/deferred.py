"""Writes that nobody has looked at: kept in order, made when somebody looks, or never.

A constructor initialises weights that a checkpoint replaces. Under a ``WriteLog`` each write in place
to memory that was allocated under it is noted and not made; so memory that nobody reads is never
touched, and takes no RAM. Whatever reads such memory gets what a real run would have left there: the
writes that it depends on are made first, in their order, and random numbers are drawn in theirs.

Nothing is patched, and only the thread that records is concerned. What Python reads of a tensor past
torch's operations is seen for the methods of ``_LOOKS``; memory that is read by address is not.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, NamedTuple, TypeGuard

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

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
_SHAPES: Final = frozenset({
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
    "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "is_same_size",
})  # fmt: skip
"""Operations that look at a tensor's shape and dtype alone."""

_LATER: Final = frozenset({_ONES, *_DRAWS, *_CLONES, *_TRIANGLES})
"""Operations whose results are fresh memory, written by one of the writes that can wait."""

_RESIZES: Final = frozenset({"set_", "resize_", "resize_as_", "_resize_output_"})
_LOOKS: Final = frozenset({
    torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__,
})  # fmt: skip
_PLAIN: Final = torch.Tensor.__torch_dispatch__
_LARGE_BYTES: Final = 1024**2  # of constants, which are computed at once where they are smaller


class DeferredLoad(NamedTuple):
    """A copy of a promised tensor that is still to be made: ``target`` gets the values of ``source``.

    ``source`` is a view of the promised tensor, which has no values itself; ``promise`` is what
    ``WriteLog.promise`` was given for it.
    """

    target: torch.Tensor
    source: torch.Tensor
    promise: Any


@dataclass(slots=True, eq=False)
class _Write:
    """One write: an operation, or a load. ``touched`` are the storages that it reads and writes.

    ``held`` are all tensors that it keeps, the ``target`` among them. ``rng_state`` is the state of
    the generator that it begins from; None: where the random write before it ends.
    """

    target: torch.Tensor
    touched: tuple[int, ...]
    held: tuple[torch.Tensor, ...]
    operation: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None
    random: bool = False
    rng_state: torch.Tensor | None = None
    load: DeferredLoad | None = None


@dataclass(slots=True)
class _Loads:
    """Loads to be made together: from where to where they reach in storages, and which bytes they fill."""

    chosen: list[DeferredLoad] = field(default_factory=list)
    reached: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    filled: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def covers(self, key: int, start: int, end: int) -> bool:
        """Tell whether they fill all bytes of a stretch."""
        for first, last in sorted(self.filled.get(key, ())):
            if first > start:
                return False
            start = max(start, last)
        return start >= end

    def meets(self, key: int, start: int, end: int) -> bool:
        """Tell whether one of them may fill a byte of a stretch."""
        return any(first < end and start < last for first, last in self.reached.get(key, ()))


class WriteLog:
    """The writes of one thread that were not made yet.

    Args:
        make: gives the target of a ``Load`` its values at once.
    """

    def __init__(self, make: Callable[[DeferredLoad], None] | None = None) -> None:
        self._make = make
        self._writes: dict[int, _Write] = {}  # by number, in order
        self._count = 0
        self._draws = 0  # how many writes are random
        self._pending: dict[int, int] = {}  # how many writes touch a storage
        self._own: dict[
            int, StorageWeakRef
        ] = {}  # the reference keeps the number from being reused
        self._promised: dict[int, Any] = {}
        self._rng_state = torch.empty(0)
        self._at_once = False
        self.initialised_bytes = 0
        """How much was initialised since somebody looked, in bytes."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note this thread's writes."""
        with _Looks(self), _Operations(self):
            yield

    def promise(self, tensor: torch.Tensor, source: Any) -> None:
        """Let ``tensor``, whose memory nobody has touched, have the values of ``source``."""
        key, alias = storage_key(tensor), tensor.detach()
        self._own[key] = _weak(tensor)
        self._promised[key] = source
        self._append_load(DeferredLoad(alias, alias, source))

    def owns(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor's memory was allocated while this log recorded."""
        known = self._own.get(storage_key(tensor))
        return known is not None and not known.expired()  # type: ignore[no-untyped-call]

    def finish(
        self, unwanted: Iterable[torch.Tensor] = (), wanted: Iterable[torch.Tensor] = ()
    ) -> list[DeferredLoad]:
        """Make the writes that count, and return the loads that are left, in their order.

        These can be made in any order. A write does not count where loads replace all that it leaves,
        or nobody holds it any more: ``unwanted`` tensors need no values, but where they share memory
        with ``wanted`` ones.
        """
        loads, live, touched, random = _Loads(), [], set[int](), False
        ignored = set(map(storage_key, unwanted)) - set(map(storage_key, wanted))
        aliases = self._aliases()
        for number in reversed(self._writes):
            write = self._writes[number]
            key = storage_key(write.target)
            if not touched.isdisjoint(write.touched) or (random and write.random):
                counts = True
            elif write.load is not None and key not in self._promised:
                counts = not _choose(loads, key, write.load)
            else:
                size = write.target.untyped_storage().nbytes()
                held = use_count(write.target) > aliases[key]
                counts = held and key not in ignored and not loads.covers(key, 0, size)
            if counts:
                live.append(number)
                touched.update(write.touched)
                random |= write.random
        self._run(reversed(live))
        self._writes.clear()
        self._pending.clear()
        self._promised.clear()
        return loads.chosen[::-1]

    def _aliases(self) -> Counter[int]:
        """Return how many tensors the writes hold over each storage."""
        held = {id(one): one for write in self._writes.values() for one in write.held}
        return Counter(map(storage_key, held.values()))

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what an operation does, now or later."""
        kind = _kind(func)
        if kind.is_view or self._at_once:
            return func(*args, **kwargs)
        if func in _LATER:
            instead = self._made_later(func, args, kwargs)
            if instead is not None:
                return self.operate(*instead)
        tensors = kind.tensors(args, kwargs)
        target = kind.target(args, kwargs)
        if target is not None and self._can_wait(func, target, tensors):
            self._note(func, args, kwargs, target, random=kind.random)
            return target
        if self._writes:
            read = [] if kind.reads_shape else tensors
            self.look(read, random=kind.random)
            for one in read:
                self._promised.pop(storage_key(one), None)
        result = func(*args, **kwargs)
        if not kind.resizes:
            self._own_results(result, {storage_key(one) for one in tensors})
        return result

    def look(self, tensors: Iterable[torch.Tensor], *, random: bool = False) -> None:
        """Make the writes that these tensors' values depend on.

        With ``random``, also all that draw random numbers: somebody is about to.
        """
        keys = {key for one in tensors if (key := storage_key(one)) in self._pending}
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
        """Make these writes, in their order, each from the state of the generator that it needs."""
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
                torch.set_rng_state(before)  # somebody has chosen another one since the last draw
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
        self._append(_Write(load.target, touched, (load.target, load.source), load=load))

    def _note(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: torch.Tensor,
        *,
        random: bool,
    ) -> None:
        """Keep a write, with tensors of its own: those that it was given may be changed later."""
        if (load := self._as_load(func, args)) is not None:
            self._append_load(load)
            return
        self._promised.pop(storage_key(target), None)
        args, kwargs = _map_tensors(args), {name: _map_tensors(one) for name, one in kwargs.items()}
        held = tuple(_tensors((args, kwargs)))
        own = next(one for one in held if storage_key(one) == storage_key(target))
        touched = tuple({storage_key(one) for one in held})
        write = _Write(own, touched, held, (func, args, kwargs), random)
        if random:
            state = torch.get_rng_state()
            follows = self._draws and torch.equal(state, self._rng_state)
            write.rng_state = None if follows else state
            self._rng_state = state
        self._append(write)

    def _as_load(self, func: Any, args: tuple[Any, ...]) -> DeferredLoad | None:
        """Return the load that a copy is, if it is one: of what still is as it was promised."""
        if func is not _COPY or (key := storage_key(args[1])) not in self._promised:
            return None
        target, source = args[:2]
        lazily = source.is_conj() or source.is_neg()
        if lazily or source.shape != target.shape or storage_key(target) == key:
            return None
        return DeferredLoad(target.detach(), source.detach(), self._promised[key])

    def _can_wait(self, func: Any, target: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
        if torch._debug_has_internal_overlap(target) == 1:  # torch refuses to write there
            return False
        if self._as_load(func, (target, *tensors[1:])) is not None:
            return target.layout is torch.strided and not target.is_meta
        fits = all(_is_plain(one) and _fits(one, target) for one in tensors)
        return fits and self.owns(target)  # what raises does so at once

    def _made_later(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
        """Return the write into fresh memory that an operation is; None where it is to be done at once."""
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
        for one in _tensors(result):
            key = storage_key(one)
            if key and key not in given and one.device.type == "cpu" and not self.owns(one):
                self._own[key] = _weak(one)


def _choose(loads: _Loads, key: int, load: DeferredLoad) -> bool:
    """Take a load among those that are made together; False where it has to be made before them.

    One that later ones replace is taken by taking none of it.
    """
    start, end = extent(load.target)
    if loads.covers(key, start, end):
        return True
    if loads.meets(key, start, end):
        return False
    loads.chosen.append(load)
    loads.reached.setdefault(key, []).append((start, end))
    if is_dense(load.target):
        loads.filled.setdefault(key, []).append((start, end))
    return True


def use_count(tensor: torch.Tensor) -> int:
    """Return how many tensors there are over a tensor's storage, itself among them."""
    storage = tensor.untyped_storage()  # this object of Python's counts as one more
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return from where to where in its storage a tensor's elements lie, in bytes."""
    start, size = int(tensor.storage_offset()), tensor.element_size()
    if not tensor.numel():
        return start * size, start * size
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start * size, (start + last + 1) * size


def is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's elements fill a stretch of its storage, in whatever order, each once."""
    expected = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and step != expected:
            return tensor.numel() == 0
        expected *= size
    return True


class _Operations(TorchDispatchMode):
    """Hands every operation to the log, those that C++ calls, too."""

    def __init__(self, log: WriteLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = log

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper against dynamo would import it: 820 modules, 68 MiB

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(getattr(one, "__torch_dispatch__", _PLAIN) != _PLAIN for one in types):
            return NotImplemented  # the subclass does it by operations on plain tensors
        return self._log.operate(func, args, kwargs or {})


class _Looks(TorchFunctionMode):
    """Tells the log of what reads a tensor's memory by no operation."""

    def __init__(self, log: WriteLog) -> None:
        super().__init__()
        self._log = log

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _LOOKS:
            self._log.look(args[:1])
        return func(*args, **(kwargs or {}))


class _Kind(NamedTuple):
    """What an operation's schema says of it.

    ``given`` are the arguments that may be tensors, ``written`` is that which it writes and returns.
    """

    is_view: bool
    reads_shape: bool
    resizes: bool
    random: bool
    given: tuple[tuple[int, str], ...]
    written: tuple[int, str] | None

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Return all tensors among the arguments."""
        count = len(args)
        return [
            tensor
            for position, name in self.given
            for tensor in _tensors(args[position] if position < count else kwargs.get(name))
        ]

    def target(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Return the one tensor that it writes to and returns; None where it does otherwise."""
        if self.written is None:
            return None
        position, name = self.written
        target = args[position] if position < len(args) else kwargs.get(name)
        return target if isinstance(target, torch.Tensor) else None


@cache
def _kind(func: Any) -> _Kind:
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    writes = [
        (number, one.name)
        for number, one in enumerate(schema.arguments)
        if one.alias_info and one.alias_info.is_write
    ]
    moves_only = torch.Tag.inplace_view in func.tags and name not in _RESIZES
    is_view = moves_only or (not writes and any(one.alias_info for one in schema.returns))
    returned = schema.returns[0].alias_info if len(schema.returns) == 1 else None
    waits = len(writes) == 1 and returned is not None and returned.is_write
    return _Kind(
        is_view=is_view,
        reads_shape=name in _SHAPES,
        resizes=name in _RESIZES,
        random=torch.Tag.nondeterministic_seeded in func.tags,
        given=tuple(
            (number, one.name)
            for number, one in enumerate(schema.arguments)
            if "Tensor" in str(one.type)
        ),
        written=writes[0] if waits and name not in _RESIZES else None,
    )


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
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def storage_key(tensor: torch.Tensor) -> int:
    """Return the number of a tensor's storage; 0 for one that has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, ValueError):  # sparse, or a lazy module's
        return 0


def _is_sequence(value: Any) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    return isinstance(value, list | tuple)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif _is_sequence(value):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _map_tensors(value: Any) -> Any:
    """Return the same with tensors of its own over the same memory."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    return type(value)(map(_map_tensors, value)) if _is_sequence(value) else value
