"""Headers of safetensors that lie."""

import json
import pickle
import struct

from harms.given import HEADED, Command, Given, Said, case


def entry(given: Given, name: str, **fields: object) -> None:
    data = given.data.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header[name] |= fields
    text = json.dumps(header).encode()
    given.data.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


@case(*HEADED)
def overlapping_offsets(given: Given) -> Said:
    entry(given, "a.weighu", data_offsets=[4, 28])
    return given.data, "tensor 'a.weighu' at byte "


@case(*HEADED)
def negative_offsets(given: Given) -> Said:
    entry(given, "a.weight", data_offsets=[-24, 0])
    return (
        given.data,
        "tensor 'a.weight': F32 of shape [3, 2] at the offsets [-24, 0] is impossible",
    )


@case(*HEADED)
def an_enormous_offset(given: Given) -> Said:
    entry(given, "b.bias", data_offsets=[2**62, 2**62 + 10])
    return given.data, "'b.bias' at byte 4,611,686,018,427,"


@case(*HEADED)
def an_enormous_shape(given: Given) -> Said:
    entry(given, "a.weight", shape=[2**40, 2**40])
    return (
        given.data,
        "tensor 'a.weight': F32 of shape [1099511627776, 1099511627776] at the offsets ",
    )


@case(*HEADED)
def an_enormous_header(given: Given) -> Said:
    given.data.write_bytes(struct.pack("<Q", 2**63) + given.data.read_bytes()[8:])
    return given.data, "its first bytes are 00 00 00 00 00 00 00 80"


@case(*HEADED)
def a_pickle_with_code_called_safetensors(given: Given) -> Said:
    given.data.write_bytes(pickle.dumps(Command(given.proof)))
    return given.data, "a pickle that torch.save did not write, and was NOT executed"
