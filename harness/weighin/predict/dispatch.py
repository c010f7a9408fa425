"""Intercept each torch operation of a simulated load; for large tensors, only update the ledger."""

import sys
from functools import cache
from math import prod
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from weighin.predict.ledger import SMALL_BYTES, Ledger, Place, anon_bytes

_EMPTY: Final = frozenset({
    "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted",
})  # fmt: skip
_METADATA: Final = frozenset({
    "set_", "resize_", "resize_as_", "detach_", "_resize_output_", "_unsafe_view",
})  # fmt: skip
_FILLED: Final = frozenset({"zeros", "ones", "full", "rand", "randn", "randint", "eye"})
_LIKE: Final = frozenset({
    "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
    "new_zeros", "new_ones", "new_full",
})  # fmt: skip
_RANDOM: Final = frozenset({
    "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_",
    "geometric_", "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal",
})  # fmt: skip
_SAME: Final = frozenset({"clone", "_to_copy", "triu", "tril"})  # the result has the input's shape


class CannotFollow(Exception):
    """The strategy executed code whose memory cannot be predicted."""


class Call:
    """One torch operation with its arguments; ``inputs`` are the tensors among the arguments."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.name = _name(func)
        self.inputs = _tensors((args, kwargs))

    def run(self) -> Any:
        return self.func(*self.args, **self.kwargs)


def _name(func: Any) -> str:
    return str(func._schema.name).removeprefix("aten::")


def _is_written(argument: Any) -> bool:
    return bool(argument.alias_info and argument.alias_info.is_write)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@cache
def _kind(func: Any) -> str:
    """Classify an operation by its schema: "_" and the result name the method of ``Operations``."""
    name = _name(func)
    if name in _METADATA or torch.Tag.inplace_view in func.tags:
        return "metadata"
    if any(map(_is_written, func._schema.arguments)):
        return "writes"
    if any(one.alias_info for one in func._schema.returns):
        return "metadata"  # the result is a view
    for names, kind in ((_EMPTY, "empty"), (_FILLED, "filled"), (_LIKE, "like")):
        if name in names:
            return kind
    return "computes"


class Operations(TorchDispatchMode):
    """Runs operations that make views, allocate, or have small inputs; other results get no values."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = ledger

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would make torch import dynamo: 820 modules, 68 MiB

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = Call(func, args, kwargs or {})
        if (target := call.kwargs.get("device")) is None:
            is_meta = bool(call.inputs) and all(tensor.is_meta for tensor in call.inputs)
        else:
            is_meta = torch.device(target).type == "meta"
        if is_meta:  # without memory
            return call.run()
        ledger = self._ledger
        inherited: Place | None = None
        if ledger.forced_place is None and any(
            tensor.ndim and ledger.place_of(tensor) == "cuda" for tensor in call.inputs
        ):
            inherited = "cuda"  # an operation puts its results on the device of its inputs
        with ledger.placed(inherited):
            return getattr(self, f"_{_kind(func)}")(call)

    def _metadata(self, call: Call) -> Any:
        result = call.run()
        for tensor in _tensors(result):
            self._ledger.place_of(tensor)
        return result

    def _empty(self, call: Call) -> Any:
        like = call.func(*call.args, **{**call.kwargs, "device": "meta", "pin_memory": False})
        with self._ledger.placed("pinned" if call.kwargs.get("pin_memory") else None):
            return self._allocate(like)

    def _filled(self, call: Call) -> Any:
        if call.name == "eye":
            rows, *columns = (each for each in call.args if isinstance(each, int))
            size = [rows, *(columns or [rows])]
        else:
            size = next(list(one) for one in call.args if isinstance(one, list | tuple))
        dtype = call.kwargs.get("dtype")
        if dtype is None and call.name in ("full", "randint"):
            dtype = torch.int64 if call.name == "randint" else torch.tensor(call.args[1]).dtype
        dtype = dtype or torch.get_default_dtype()
        if prod(size) * dtype.itemsize <= SMALL_BYTES:
            return self._really(call)
        return self._written(torch.empty(size, dtype=dtype, device="meta"), call)

    def _like(self, call: Call) -> Any:
        size = call.args[1] if call.name.startswith("new_") else call.args[0].shape
        dtype = call.kwargs.get("dtype") or call.args[0].dtype
        return self._written(torch.empty(size, dtype=dtype, device="meta"), call)

    def _writes(self, call: Call) -> Any:
        arguments = call.func._schema.arguments
        given = dict(zip((one.name for one in arguments), call.args, strict=False)) | call.kwargs
        written = _tensors([given.get(one.name) for one in arguments if _is_written(one)])
        if self._all_real(call.inputs):
            return call.run()
        for tensor in call.inputs:
            if not (tensor.is_meta or any(tensor is other for other in written)):
                self._ledger.read(tensor)
        if call.name == "copy_":
            target, source = written[0], call.args[1]
            to, origin = (self._ledger.place_of(tensor) for tensor in (target, source))
            if target.dtype != source.dtype and to == "cuda" and origin != "cuda":
                # ATen's copy_kernel_cuda converts the dtype in a buffer on the CPU.
                with self._ledger.holding(target.nbytes):
                    pass
        for tensor in written:
            self._write(tensor, call.name)
        returns = call.func._schema.returns
        if len(returns) > 1:
            return tuple(written)
        return written[0] if returns else None

    def _computes(self, call: Call) -> Any:
        if self._all_real(call.inputs):
            return self._really(call)
        for tensor in call.inputs:
            if not tensor.is_meta:
                self._ledger.read(tensor)
        if call.name == "_local_scalar_dense":  # torch.asarray reads one element
            if self._ledger.place_of(call.inputs[0]) != "file":
                why = "the code reads values of tensors, which a prediction does not have"
                raise CannotFollow(why)
            return call.run()
        shapes: Any
        if call.name in _SAME:
            dtype = call.kwargs.get("dtype") or call.args[0].dtype
            form = call.kwargs.get("memory_format") or torch.preserve_format
            shapes = torch.empty_like(call.args[0], dtype=dtype, device="meta", memory_format=form)
        else:
            shapes = self._shapes(call)
        results = tree_map_only(torch.Tensor, self._allocate, shapes)
        for tensor in _tensors(results):
            self._write(tensor, call.name)
        return results

    def _shapes(self, call: Call) -> Any:
        """Return the results on the meta device; what torch imports for it does not count."""
        before, modules = anon_bytes(), len(sys.modules)
        try:
            given = (call.args, call.kwargs)
            args, kwargs = tree_map_only(torch.Tensor, lambda one: one.to("meta"), given)
            if "device" in kwargs:
                kwargs["device"] = "meta"
            return call.func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            raise CannotFollow(f"{call.func}: {error}") from error
        finally:
            self._ledger.other_anon_bytes += anon_bytes() - before
            self._ledger.work["modules"] -= len(sys.modules) - modules

    def _really(self, call: Call) -> Any:
        """Run an operation on small tensors; replace a large result by a tensor without values."""

        def keep(result: torch.Tensor) -> torch.Tensor:
            if result.is_meta or result.untyped_storage().nbytes() <= SMALL_BYTES:
                self._ledger.place_of(result)
                return result
            return self._written(torch.empty_like(result, device="meta"), call)

        return tree_map_only(torch.Tensor, keep, call.run())

    def _all_real(self, inputs: list[torch.Tensor]) -> bool:
        """Tell whether all tensors are really written, with the same values as in a real load."""
        blocks = [self._ledger.block_of(one) for one in inputs if not one.is_meta]
        return all(block.real and block.known for block in blocks)

    def _written(self, like: torch.Tensor, call: Call) -> torch.Tensor:
        result = self._allocate(like)
        self._write(result, call.name)
        return result

    def _write(self, tensor: torch.Tensor, operation: str) -> None:
        ledger = self._ledger
        ledger.write(tensor)
        if ledger.place_of(tensor) != "cuda":
            kind = "random_bytes" if operation in _RANDOM else "written_bytes"
            ledger.work[kind] += tensor.nbytes

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Return an unwritten CPU tensor with the shape and dtype of ``like``, a meta tensor."""
        ledger = self._ledger
        nbytes = like.untyped_storage().nbytes()
        if nbytes > SMALL_BYTES or ledger.forced_place == "pinned":
            blank = torch.empty(0, dtype=like.dtype, device="cpu")
            result = blank.set_(ledger.reserve(nbytes), 0, like.shape, like.stride())
        else:
            result = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
        ledger.block_of(result, allocated=True)
        ledger.update()
        return result
