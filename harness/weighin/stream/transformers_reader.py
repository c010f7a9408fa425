"""Let transformers read a folder's tensors straight into the memory that becomes the model.

``from_pretrained`` decides everything but the bytes: while a load of this thread runs, transformers'
functions that read files (private ones: see ``_install``) hand out ``Lazy`` tensors. One that is only
renamed gets its memory at once, and its values, with all others, when transformers has placed the last
one. A tensor that transformers converts is read when the conversion needs it; ``conversions`` fills some
results piece by piece. Other threads, and files that weighin cannot read, get the original functions,
and so the library's own protection against pickles that run code.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from threading import RLock, local
from typing import Any, Final

import torch

from weighin.errors import CheckpointError
from weighin.stream import conversions, filling, formats
from weighin.stream.bytes import Disk
from weighin.stream.construct import map_large_tensors
from weighin.stream.filling import empty
from weighin.stream.safetensors_files import DTYPES
from weighin.stream.slices import Fill, Slice, are_equal

_CPU: Final = torch.device("cpu")
_NAMES: Final = {torch_name: name for name, torch_name in DTYPES.items()}
_EXTRA_STATE: Final = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX

_here = local()  # .load: the Load that runs in this thread
# For one load at a time, because from_pretrained itself replaces functions meanwhile.
_lock: Final = RLock()


@dataclass(frozen=True, slots=True, eq=False)
class Lazy:
    """A tensor in a file, as a slice of safetensors; a call returns it, in the model's dtype."""

    load: "Load"
    where: Slice
    dtype: torch.dtype
    device: torch.device = _CPU

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.where.shape)

    def get_shape(self) -> list[int]:
        return list(self.where.shape)

    def get_dtype(self) -> str:
        return str(_NAMES.get(self.where.dtype_name, self.where.dtype_name))

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def read(self) -> torch.Tensor:
        out = empty(self.where, self.dtype, self.device)
        filling.fill([Fill(self.where, out)], self.load.disk)
        return out

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.read()[index]

    def __call__(self) -> torch.Tensor:
        """Return the tensor, filled by ``Load.finish`` if only renamed; names of one place share one."""
        load, where = self.load, self.where
        if not load.defers:
            return self.read()
        # Where they are converted, names of one storage stay apart, as from_pretrained leaves them.
        source = where.place if self.dtype == where.dtype else where
        key = source, self.dtype, self.device
        if key not in load.shared:
            load.shared[key] = out = empty(where, self.dtype, self.device)
            load.fills.append(Fill(where, out))
        return load.shared[key]


@dataclass(frozen=True, slots=True, eq=False)
class SafeFile:
    """Stands in for the file that ``safetensors.safe_open`` opens."""

    tensors: dict[str, Lazy]

    def keys(self) -> list[str]:
        return sorted(self.tensors)  # as safetensors does

    def get_slice(self, name: str) -> Lazy:
        return self.tensors[name]

    def __exit__(self, *_: object) -> None:
        pass


class Load:
    """One load: what is still to be read, and the tensors that several names of the file share.

    ``slices`` are places of tensors in files whose headers have been read. ``missing`` and ``unexpected`` are the keys that
    transformers reports. ``defers`` tells whether nothing needs a tensor's values before ``finish``.
    """

    def __init__(
        self, slices: Sequence[Slice], threads: int | None, *, ignores_adapter: bool = False
    ) -> None:
        self.ignores_adapter = ignores_adapter
        self.missing, self.unexpected = set[str](), set[str]()
        self.defers = False
        self.fills: list[Fill] = []
        self.shared: dict[object, torch.Tensor] = {}
        self.disk = Disk(threads)
        self._files: dict[Path, list[Slice]] = {}
        for one in slices:
            self._files.setdefault(one.file, []).append(one)

    def lazy(self, slices: Sequence[Slice]) -> dict[str, Lazy]:
        return {one.name: Lazy(self, one, one.dtype) for one in slices}

    def in_file(self, path: Path) -> Sequence[Slice] | None:
        """Return a file's tensors; None for a file that only the library can read."""
        if path in self._files:
            return self._files[path]
        try:
            slices = formats.read(path)
        except CheckpointError:
            return None
        return slices if slices.only_tensors else None

    def finish(self) -> None:
        self.shared.clear()
        fills, self.fills = self.fills, []
        filling.fill(fills, self.disk)


# Replaced functions: the first arguments are the load of this thread and the original


def _safe_open(
    load: Load, real: Any, filename: Any, *args: Any, device: Any = "cpu", **more: Any
) -> Any:
    slices = load.in_file(Path(filename)) if str(device) == "cpu" else None
    if slices is None:
        return real(filename, *args, device=device, **more)
    return SafeFile(load.lazy(slices))


def _load_state_dict(
    load: Load, real: Any, file: Any, map_location: Any = "cpu", *args: Any, **more: Any
) -> Any:
    slices = load.in_file(Path(file))
    if slices is None or str(map_location) not in {"cpu", "meta"}:
        return real(file, map_location, *args, **more)
    if str(map_location) == "meta":
        return {one.name: torch.empty(one.shape, dtype=one.dtype, device="meta") for one in slices}
    return load.lazy(slices)


def _load_gguf_checkpoint(load: Load, real: Any, path: Any, *args: Any, **more: Any) -> Any:
    model = more.get("model_to_load")
    if not more.get("return_tensors") or model is None:
        return real(path, *args, **more)
    from weighin.models.gguf_keys import map_gguf_keys  # few loads need this import

    slices = load.in_file(Path(path)) or formats.read(Path(path))
    return {"tensors": load.lazy(map_gguf_keys(model, slices))}


def _maybe_load_adapters(load: Load, real: Any, path: Any, *args: Any, **more: Any) -> Any:
    return (None, path, {}) if load.ignores_adapter else real(path, *args, **more)


def _spawn_materialize(
    _load: Load, real: Any, _pool: Any, tensor: Any, device: Any = None, dtype: Any = None,
    **more: Any,
) -> Any:  # fmt: skip
    """Read when the model asks, because transformers' pool of threads reads ahead without a bound."""
    if isinstance(tensor, Lazy) and more.get("sharding_op") is None:
        place = torch.device("cpu" if device is None else device)
        return replace(tensor, dtype=dtype or tensor.dtype, device=place)
    return real(None, tensor, device, dtype, **more)


def _rename(load: Load, real: Any, self: Any, layer_name: str, *args: Any, **more: Any) -> Any:
    """Convert by ``WeightRenaming``: nothing reads the values before the end, so they may come later."""
    load.defers = self.quantization_operation is None and not layer_name.endswith(_EXTRA_STATE)
    try:
        return real(self, layer_name, *args, **more)
    finally:
        load.defers = False


def _convert(
    load: Load, real: Any, self: Any, layer_name: str, model: Any = None, *args: Any, **more: Any
) -> Any:
    """Convert by ``WeightConverter``: fill the parts of the result, if ``conversions`` knows them."""
    groups = dict(self.collected_tensors)
    lazies = [one for group in groups.values() for one in group]
    devices = {one.device if isinstance(one, Lazy) else None for one in lazies}
    made = None
    if self.quantization_operation is None and len(devices) == 1 and None not in devices:
        made = conversions.in_place(self, layer_name, model, groups)
    if made is None:
        return real(self, layer_name, model, *args, **more)
    self.collected_tensors.clear()
    out, fills = made
    load.fills += fills
    found = {layer_name.replace("*.", "0."): out}
    # Before transformers 5.1, with the errors of all conversions so far.
    return (found, more["conversion_errors"]) if "conversion_errors" in more else found


def ties_equal_values() -> bool:
    """Tell whether transformers ties two names that the file has, with equal values: it does since 5.4."""
    from transformers import __version__

    return tuple(map(int, __version__.split(".")[:2])) >= (5, 4)


def _convert_and_load(
    load: Load, real: Any, model: Any, state_dict: dict[str, Any], *args: Any, **more: Any
) -> Any:
    """Let tied names of equal bytes share one tensor, and read all values when each has its place."""
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    for target, source in ties.items() if ties_equal_values() else ():
        pair = state_dict.get(target), state_dict.get(source)
        stored = [one.where for one in pair if isinstance(one, Lazy) and one.where.fill is None]
        comparable = len(stored) == 2 and stored[0].shape == stored[1].shape
        if comparable and all(one.contiguous for one in stored) and are_equal(*stored):
            state_dict[target] = state_dict[source]
    result = real(model, state_dict, *args, **more)
    first = result[0]  # before transformers 5.1, the sets of keys themselves
    load.missing |= first if isinstance(first, set) else first.missing_keys
    load.unexpected |= result[1] if isinstance(first, set) else first.unexpected_keys
    load.finish()
    return result


def _install(replaced: ExitStack) -> None:
    replaced.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")
    replaced.callback(torch.set_rng_state, torch.get_rng_state())
    map_large_tensors()
    replaced.callback(map_large_tensors, 32 * 1024**2)  # glibc's own highest threshold
    try:
        from transformers import core_model_loading as core
        from transformers import modeling_gguf_pytorch_utils as of_gguf
        from transformers import modeling_utils as utils
        from transformers.utils import logging as its_logging
    except ImportError:  # diffusers works without transformers
        return
    logging: Any = its_logging
    replaced.callback(logging.set_verbosity, logging.get_verbosity())
    if logging.is_progress_bar_enabled():
        replaced.callback(logging.enable_progress_bar)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    functions: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        (utils, "safe_open", _safe_open),
        (utils, "load_state_dict", _load_state_dict),
        (utils, "maybe_load_adapters", _maybe_load_adapters),
        (utils, "convert_and_load_state_dict_in_model", _convert_and_load),
        (core, "spawn_materialize", _spawn_materialize),
        (core.WeightRenaming, "convert", _rename),
        (core.WeightConverter, "convert", _convert),
        (of_gguf, "load_gguf_checkpoint", _load_gguf_checkpoint),
    )
    for owner, name, ours in functions:
        if real := vars(owner).get(name):  # some versions lack one
            replaced.callback(setattr, owner, name, real)
            setattr(owner, name, _in_loads(real, ours))


def _in_loads(real: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``ours`` in a thread that loads by this module, else ``real``."""

    @wraps(real, updated=())
    def either(*args: Any, **more: Any) -> Any:
        load = getattr(_here, "load", None)
        return ours(load, real, *args, **more) if load else real(*args, **more)

    return either


@contextmanager
def reading(load: Load) -> Iterator[None]:
    """Let transformers read by this module, in this thread, until the context ends.

    Until then, other loads wait, and warnings and transformers' log are silent in the whole process. At
    the end, torch's random numbers go on as if there had been no load, and glibc, whose former threshold
    for memory that it returns to the kernel cannot be restored, has one of 32 MiB.
    """
    before = getattr(_here, "load", None)
    with _lock, ExitStack() as replaced:
        if before is None:
            _install(replaced)
        replaced.callback(setattr, _here, "load", before)
        _here.load = load
        yield
