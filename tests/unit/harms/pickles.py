"""Pickles of tensors that cannot be, or that hold code."""

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from dataclasses import dataclass

import torch

from harms.given import PICKLED, PLANS, Command, Given, Said, case, change
from harms.metadata import place

MAGIC = 0x1950A86A20F9469CFC6C


@dataclass(frozen=True)
class Storage:
    numel: int


@dataclass(frozen=True)
class Tensor:
    """What a pickle says of a tensor of 24 bytes."""

    offset: int = 0
    shape: tuple[int, ...] = (3, 2)
    stride: tuple[int, ...] = (2, 1)
    numel: int = 6

    def __reduce__(self) -> tuple[object, ...]:
        storage = Storage(self.numel)
        hooks: OrderedDict[object, object] = OrderedDict()
        fields = storage, self.offset, self.shape, self.stride, False, hooks
        return torch._utils._rebuild_tensor_v2, fields


def put(given: Given, value: object) -> None:
    """Write a file of data that pickles this in place of a.weight, or of the state dict it lies in."""
    file = io.BytesIO()

    class Pickler(pickle.Pickler):
        def persistent_id(self, one: object) -> object:
            if isinstance(one, Storage):
                return "storage", torch.FloatStorage, "0", "cpu", one.numel, None
            return None

    alone = given.layout in ("per_param", "dcp")
    Pickler(file, protocol=2).dump(value if alone else {"a.weight": value})
    put_pickle(given, file.getvalue())


def put_pickle(given: Given, text: bytes) -> None:
    if given.layout == "pt_legacy":
        head = b"".join(pickle.dumps(one, 2) for one in (MAGIC, 1001, {"little_endian": True}))
        given.data.write_bytes(
            head + text + pickle.dumps(["0"], 2) + struct.pack("<q", 6) + bytes(24)
        )
        return
    records = {"data.pkl": text, "byteorder": b"little", "data/0": bytes(24)}
    put_archive(given, records, zipfile.ZIP_STORED)


def put_archive(given: Given, records: dict[str, bytes], method: int) -> None:
    with zipfile.ZipFile(given.data, "w", method) as file:
        for name, record in records.items():
            file.writestr(f"m/{name}", record)
    if given.layout == "dcp":
        place(given, offset=0, length=given.data.stat().st_size)


@case("pt_legacy")
def overlapping_storages(given: Given) -> Said:
    keys = pickle.dumps([str(n) for n in range(len(PLANS))], 2)
    change(given.data, keys, keys.replace(b"X\1\0\0\0001", b"X\1\0\0\0000"))
    return given.data, "of 'a.weight' has 24 bytes, but its record in the file has 0"


@case(*PICKLED)
def a_negative_offset_in_the_pickle(given: Given) -> Said:
    put(given, Tensor(offset=-1))
    return given.data, "a tensor in storage '0' has an impossible shape"


@case(*PICKLED)
def a_negative_size(given: Given) -> Said:
    put(given, Tensor(shape=(-3, -2)))
    return given.data, "a tensor in storage '0' has an impossible shape"


@case(*PICKLED)
def a_negative_stride(given: Given) -> Said:
    put(given, Tensor(offset=5, stride=(-2, -1)))
    return given.data, "a tensor in storage '0' has an impossible shape"


@case(*PICKLED)
def an_enormous_offset_in_the_pickle(given: Given) -> Said:
    put(given, Tensor(offset=2**60))
    return given.data, "a tensor in storage '0' has an impossible shape"


@case(*PICKLED)
def an_enormous_size(given: Given) -> Said:
    put(given, Tensor(shape=(2**40, 2**40)))
    return given.data, "a tensor in storage '0' has an impossible shape"


@case(*PICKLED)
def an_enormous_stride(given: Given) -> Said:
    put(given, Tensor(stride=(2**62, 1)))
    return given.data, "a tensor in storage '0' has an impossible shape"


@case(*PICKLED)
def an_enormous_storage(given: Given) -> Said:
    put(given, Tensor(numel=2**40))
    said = {"pt_legacy": "truncated: storage '0' ends at byte 4,398,046,511,"}
    return given.data, said.get(given.layout, "of 'a.weight' has 4,398,046,511,104 bytes")


@case(*PICKLED)
def an_enormous_text_in_the_pickle(given: Given) -> Said:
    put_pickle(given, b"\x80\x02X" + struct.pack("<I", 2**31 - 1) + b"a.")
    return given.data, "the file ends inside the pickle"


@case(*PICKLED)
def a_pickle_with_code(given: Given) -> Said:
    put(given, Command(given.proof))
    return given.data, "refers to posix.system"
