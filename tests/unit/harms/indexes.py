"""Indexes: names of files that lead elsewhere, keys that occur twice, and one that is enormous."""

import json
import os

from harms.given import INDEXED, JSON, KEYED, Given, Harm, Said, case, change
from harms.metadata import place

ODD_NAMES = {
    "climbing": "../../outside/x",
    "absolute": "ABSOLUTE",
    "empty": "",
    "long": "x" * 10_000,
}


def named(given: Given, name: str) -> str:
    """Let the index call the file of a.weight so; return that name."""
    name = name.replace("ABSOLUTE", str(given.outside))
    if given.layout == "dcp":
        place(given, relative_path=name)
        return name
    index = json.loads(given.index.read_text())
    if given.layout == "per_module":
        index["files"][name] = index["files"].pop(given.data.name)
    else:
        field = "tensors" if given.layout == "per_param" else "weight_map"
        index[field]["a.weight"] = name
    given.index.write_text(json.dumps(index))
    return name


def file_called(kind: str) -> Harm:
    def harm(given: Given) -> Said:
        name = named(given, ODD_NAMES[kind])
        if kind in ("climbing", "absolute"):
            return given.index, f"lies outside the folder: {name!r}"
        if not name:
            return given.index, "lies outside the folder: ''"
        return given.index, "is missing"

    harm.__name__ = f"a_file_with_a_name_that_is_{kind}"
    return harm


for _kind in ODD_NAMES:
    case(*INDEXED)(file_called(_kind))


@case(*INDEXED)
def a_key_twice_in_the_index(given: Given) -> Said:
    change(given.index, b"a.weighu", b"a.weight")
    return given.index, "'a.weight' occurs twice"


@case(*KEYED)
def a_key_twice_in_the_data(given: Given) -> Said:
    change(given.data, b"a.weighu", b"a.weight")
    return given.data, "'a.weight' occurs twice"


@case(*JSON)
def an_enormous_index(given: Given) -> Said:
    os.truncate(given.index, 2**40)  # a hole: nobody may read it
    return given.index, "the file's 1,099,511,627,776 bytes are more than weighin reads"
