"""Metadata of torch.distributed.checkpoint that lie, or that hold code."""

import pickle
import struct
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from harms.given import Command, Given, Said, case


def place(given: Given, **changes: object) -> None:
    """Change where .metadata says that a.weight lies."""
    metadata: Metadata = pickle.loads(given.index.read_bytes())
    (info,) = [one for index, one in metadata.storage_data.items() if index.fqn == "a.weight"]
    vars(info).update(changes)
    given.index.write_bytes(pickle.dumps(metadata))


@case("dcp")
def overlapping_blocks(given: Given) -> Said:
    metadata: Metadata = pickle.loads(given.index.read_bytes())
    one: Any = metadata.state_dict_metadata["a.weight"]
    one.size = torch.Size([5, 2])
    starts = torch.Size([0, 0]), torch.Size([2, 0])
    one.chunks = [ChunkStorageMetadata(start, torch.Size([3, 2])) for start in starts]
    (at,) = [index for index in metadata.storage_data if index.fqn == "a.weighu"]
    metadata.storage_data[MetadataIndex("a.weight", starts[1], 1)] = metadata.storage_data[at]
    given.index.write_bytes(pickle.dumps(metadata))
    return given.index, "the parts of 'a.weight' at (0, 0) and (2, 0) overlap"


@case("dcp")
def a_negative_place(given: Given) -> Said:
    place(given, offset=-1)
    return given.index, "no valid offset of 'a.weight'"


@case("dcp")
def an_enormous_place(given: Given) -> Said:
    place(given, offset=2**62)
    return given.data, "truncated: 'a.weight' ends at byte 4,611,686,018,427,"


@case("dcp")
def an_enormous_text_in_the_metadata(given: Given) -> Said:
    given.index.write_bytes(b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"x")
    return given.index, "the file ends inside the pickle"


@case("dcp")
def metadata_with_code(given: Given) -> Said:
    metadata = pickle.loads(given.index.read_bytes())
    metadata.planner_data = Command(given.proof)
    given.index.write_bytes(pickle.dumps(metadata))
    return given.index, "did NOT execute it: it refers to posix.system"
