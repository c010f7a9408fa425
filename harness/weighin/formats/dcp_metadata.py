"""Read the tensors and their places from the ``.metadata`` of ``torch.distributed.checkpoint``."""

from dataclasses import dataclass
from itertools import combinations
from math import prod
from operator import le
from pathlib import Path
from typing import Any, Final

from weighin.errors import CheckpointError
from weighin.formats import dcp_pickle
from weighin.formats.dcp_pickle import AGAIN, BYTES, INDEX, MERGE, TENSOR, field, is_a, state
from weighin.formats.dtypes import ITEM_BYTES, is_sizes
from weighin.formats.state_dicts import largest, with_key
from weighin.formats.tensor_refs import Named
from weighin.formats.unknown_file import shown

FILE_NAME: Final = ".metadata"
_DEEPEST: Final = 5  # parts of a path in nested dicts
_MOST_BLOCKS: Final = 2_000  # of one tensor; every pair of blocks is compared


@dataclass(frozen=True, slots=True)
class DcpBlock:
    """A block of a tensor: an archive inside a file, with its offset and length in bytes."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor, and the blocks (one or several) that together cover it exactly."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    blocks: tuple[DcpBlock, ...]


def read(folder: Path, key: str = "") -> tuple[list[DcpTensor], list[str]]:
    """Return all tensors, and the names of the values that are no tensors, such as extra states.

    With a ``key``, only names that begin with it and a dot are returned. Both lists are in the
    metadata's order.

    Raises:
        CheckpointError: the file is not dcp metadata or is damaged, or it is the metadata of a training
            checkpoint of nested dicts with values that are no tensors, and there is no ``key``.
    """
    path = folder / FILE_NAME
    metadata = dcp_pickle.load(path)
    tensors, places = field(metadata, "state_dict_metadata"), field(metadata, "storage_data")
    if not (isinstance(tensors, dict) and isinstance(places, dict) and tensors):
        raise CheckpointError(f"{path}: damaged: it has no tensors or no offsets", AGAIN)
    by_key: dict[str, list[tuple[Any, Any]]] = {}
    for index, place in places.items():
        name = field(index, "fqn") if is_a(INDEX, index) else None
        if not isinstance(name, str):
            raise CheckpointError(f"{path}: damaged: an offset belongs to no key", AGAIN)
        by_key.setdefault(name, []).append((field(index, "offset"), place))
    chosen, values = [], []
    for name, tensor in tensors.items():
        if key and not (isinstance(name, str) and name.startswith(f"{key}.")):
            continue
        if is_a(BYTES, tensor) and isinstance(name, str):
            values.append(name)
        else:
            chosen.append(_stored(path, name, tensor, by_key.get(name, [])))
    if values and not key and (places := _places(field(metadata, "planner_data"), chosen)):
        raise CheckpointError(
            f"{path}: not a flat state dict of tensors: {shown(values[0])} is not a tensor",
            with_key(places),
        )
    return chosen, values


def _places(paths: Any, tensors: list[DcpTensor]) -> dict[str, int]:
    """Return the keys of the state dicts in a checkpoint of nested dicts, and their sizes in bytes.

    ``paths`` maps each name to its path in the dicts; only a checkpoint of nested dicts has paths of
    more than one part. State dicts of optimizers are left out.
    """
    sizes: dict[str, int] = {}
    for one in tensors:
        path = paths.get(one.key) if isinstance(paths, dict) else None
        if not isinstance(path, tuple) or len(path) < 2 or len(path) > _DEEPEST:
            continue
        place = ".".join(str(part) for part in path[:-1])
        if "optim" not in place.lower():
            sizes[place] = sizes.get(place, 0) + prod(one.shape) * ITEM_BYTES[one.dtype]
    return largest(sizes)


def _stored(path: Path, key: Any, tensor: Any, places: list[tuple[Any, Any]]) -> DcpTensor:
    if not isinstance(key, str):
        raise CheckpointError(f"{path}: damaged: a key is not a string: {shown(key)}", AGAIN)
    if not is_a(TENSOR, tensor):
        raise CheckpointError(
            f"{path}: not a flat state dict of tensors: {shown(key)} is not a tensor",
            "save the weights alone: torch.distributed.checkpoint.save(model.state_dict(), ...)",
        )
    chunks, shape = field(tensor, "chunks"), field(tensor, "size")
    properties = state(field(tensor, "properties"))
    named = properties[0] if isinstance(properties, tuple) and properties else None
    dtype = named.name.removeprefix("torch.") if isinstance(named, Named) else None
    if isinstance(dtype, str) and dtype not in ITEM_BYTES:
        raise CheckpointError(
            f"{path}: {shown(key)} has the dtype torch.{dtype}, which weighin does not read",
            "load it with torch, and save tensors of another dtype",
        )
    if not isinstance(dtype, str) or not places:
        raise CheckpointError(f"{path}: damaged: {shown(key)} has no dtype or no offset", AGAIN)
    if not is_sizes(shape):
        raise CheckpointError(f"{path}: damaged: invalid shape or offset of {shown(key)}", AGAIN)
    shape = tuple(shape)
    if not (isinstance(chunks, list) and len(chunks) > 1) and len(places) == 1:
        begin = (0,) * len(shape)
        return DcpTensor(key, shape, dtype, (_block(path, key, begin, shape, places[0][1]),))
    blocks = _blocks(path, key, chunks, places)
    _check_tiles(path, key, shape, blocks)
    return DcpTensor(key, shape, dtype, tuple(blocks))


def _block(
    path: Path, key: str, start: tuple[int, ...], shape: tuple[int, ...], place: Any
) -> DcpBlock:
    file, offset, length = (field(place, name) for name in ("relative_path", "offset", "length"))
    if field(place, "transform_descriptors"):
        raise CheckpointError(
            f"{path}: {shown(key)} was transformed (compressed) when saved", MERGE
        )
    if not (is_sizes((offset, length)) and isinstance(file, str)):
        raise CheckpointError(f"{path}: damaged: invalid shape or offset of {shown(key)}", AGAIN)
    return DcpBlock(start, shape, file, offset, length)


def _blocks(path: Path, key: str, chunks: Any, places: list[tuple[Any, Any]]) -> list[DcpBlock]:
    """Return the blocks of a tensor that has several, each with its place in a file."""
    by_start = {tuple(start): place for start, place in places if is_sizes(start)}
    blocks = []
    for chunk in chunks if isinstance(chunks, list) else []:
        start, shape = field(chunk, "offsets"), field(chunk, "sizes")
        if not (is_sizes(start) and is_sizes(shape)):
            raise CheckpointError(
                f"{path}: damaged: invalid shape or offset of {shown(key)}", AGAIN
            )
        if tuple(start) not in by_start:
            raise CheckpointError(
                f"{path}: the part of {shown(key)} at {tuple(start)} is missing", AGAIN
            )
        blocks.append(_block(path, key, tuple(start), tuple(shape), by_start[tuple(start)]))
    if len(blocks) != len(places):
        raise CheckpointError(
            f"{path}: {shown(key)} has {len(places)} offsets for {len(blocks)} parts", AGAIN
        )
    return blocks


def _check_tiles(path: Path, key: str, shape: tuple[int, ...], blocks: list[DcpBlock]) -> None:
    """Raise CheckpointError unless the blocks cover each element of the tensor exactly once."""
    for block in blocks:
        ends = [at + size for at, size in zip(block.start, block.shape, strict=False)]
        inside = len(block.start) == len(block.shape) == len(shape) and all(map(le, ends, shape))
        if not inside:
            raise CheckpointError(
                f"{path}: the part of {shown(key)} at {block.start} is outside the shape {shape}",
                AGAIN,
            )
    if len(blocks) > _MOST_BLOCKS:
        raise CheckpointError(f"{path}: {shown(key)} is stored in {len(blocks):,} parts", MERGE)
    solid = [block for block in blocks if prod(block.shape)]
    for first, second in combinations(solid, 2):
        if all(
            a < b + n and b < a + m
            for a, m, b, n in zip(first.start, first.shape, second.start, second.shape, strict=True)
        ):
            raise CheckpointError(
                f"{path}: the parts of {shown(key)} at {first.start} and {second.start} overlap",
                AGAIN,
            )
    if sum(prod(block.shape) for block in solid) != prod(shape):  # no overlap, so there is a gap
        raise CheckpointError(f"{path}: the parts of {shown(key)} leave a gap in {shape}", AGAIN)
