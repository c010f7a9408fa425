"""Noise, ends that are cut off, and files that are missing: what happens to a download."""

import os

from harms.given import HEADED, INDEXED, PICKLED, Given, Said, case, change
from weighin.stream import formats


@case(*formats.NAMES)
def noise_in_the_data(given: Given) -> Said:
    given.data.write_bytes(bytes(range(256)) * 8)
    return given.data, ""


@case(*INDEXED)
def noise_in_the_index(given: Given) -> Said:
    given.index.write_bytes(bytes(range(256)) * 8)
    return given.index, "damaged"


@case(*PICKLED)
def a_corrupt_pickle(given: Given) -> Said:
    change(given.data, b"X\7\0\0\0storage", b"\xff\7\0\0\0storage")
    return given.data, "weighin does not know its instruction 0xff"


@case(*HEADED)
def a_corrupt_header(given: Given) -> Said:
    change(given.data, b'"a.weight":{', b'"a.weight":(')
    return given.data, "the header is not JSON: "


# Truncated and missing


@case(*formats.NAMES)
def half_of_the_data(given: Given) -> Said:
    os.truncate(given.data, given.data.stat().st_size // 2)
    return given.data, "truncated"


@case(*formats.NAMES)
def data_without_the_last_byte(given: Given) -> Said:
    os.truncate(given.data, given.data.stat().st_size - 1)
    return given.data, "truncated"


@case(*INDEXED)
def half_of_the_index(given: Given) -> Said:
    os.truncate(given.index, given.index.stat().st_size // 2)
    return given.index, "truncated"


@case(*formats.NAMES)
def no_data(given: Given) -> Said:
    given.data.unlink()
    if given.layout in INDEXED:
        return given.index, f"{given.data.name!r}, which holds "
    return given.data, "no such file"


@case(*formats.NAMES)
def a_pipe_in_place_of_the_data(given: Given) -> Said:
    given.data.unlink()
    os.mkfifo(given.data)  # opening it would wait for ever
    return (given.index, "is missing") if given.layout in INDEXED else (given.data, "not a file")


@case(*INDEXED)
def no_index(given: Given) -> Said:
    given.index.unlink()
    of_shards = given.layout in ("sharded", "sharded_pt", "dcp")
    return given.path, "shards without their index" if of_shards else "no config.json and no index"
