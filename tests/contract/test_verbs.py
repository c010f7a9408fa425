"""``--json`` of each verb that needs no published run; what this machine measures is left out."""

import json
import re
from pathlib import Path
from struct import pack

import outside
import pytest
from outside import verbs, weighin
from snapshots import Compare

ELSEWHERE = {"bisect", "report", "compare", "check", "history", "recommend", "predict"}
"""Verbs whose documents other files keep: of this folder, and integration/test_releases."""
HERE = {"doctor", "list", "bench", "run", "floor", "inspect", "convert", "cache"}

KEPT = (
    "schema", "run", "files", "strategy", "operation", "model", "device", "dtype", "format", "isolation",
    "options", "outcome", "repeats", "ok", "model_bytes", "model_bytes_min", "model_bytes_max", "name",
    "builder", "repeat", "passes", "ranks", "missing_cells", "ram_limit_bytes",
    "vram_limit_bytes", "use", "command", "exit_code", "message", "last_phase", "label",
)  # fmt: skip
"""What is the same on every machine."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small checkpoint, a measured load of a tiny model, and its cache."""
    folder = tmp_path_factory.mktemp("verbs")
    shapes = {"head.weight": [10, 4], "embedding.weight": [10, 4], "norm.bias": [3]}
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 4 * (shape[0] * (shape[1] if shape[1:] else 1))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    content = pack("<Q", len(text)) + text + bytes(range(256)) * (at // 256 + 1)
    (folder / "model.safetensors").write_bytes(content[: 8 + len(text) + at])
    words = ("gpt2-tiny", "--isolation", "process", "-s", "streaming", "--out", "run")
    assert weighin(folder, "bench", *words, "--json", "bench.json").code == 0
    return folder


def test_every_verb_has_its_document_here() -> None:
    typed = {name.split()[1] for name in verbs() if " " in name}
    assert typed == HERE | ELSEWHERE


def test_the_document_and_the_record_of_a_measured_load(place: Path, same: Compare) -> None:
    document = json.loads((place / "bench.json").read_text())
    same("verbs/bench.json", json.dumps(outside.outline(document, KEPT), indent=1) + "\n")
    (line,) = (place / "run" / "records.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record.pop("environment")
    same("verbs/record.json", json.dumps(outside.outline(record, KEPT), indent=1) + "\n")


def test_the_document_of_a_command(place: Path, same: Compare) -> None:
    words = ("--isolation", "process", "--out", "command", "--json", "command.json")
    assert weighin(place, "run", *words, "--", "true").code == 0
    document = json.loads((place / "command.json").read_text())
    same("verbs/run.json", json.dumps(outside.outline(document, KEPT), indent=1) + "\n")


def test_what_the_cache_has_and_what_is_deleted(place: Path, same: Compare) -> None:
    listed = weighin(place, "cache", "list", "--json", "-").data
    deleted = weighin(place, "cache", "clear", "gpt2-tiny", "--yes", "--json", "-").data
    assert weighin(place, "cache", "list", "--json", "-").data["checkpoints"] == []
    for one in (*listed["checkpoints"], *deleted["deleted"]):
        one |= {"bytes": "...", "last_used": "..."}
    assert deleted["freed_bytes"] > 2**20
    deleted["freed_bytes"] = "..."
    text = outside.flat(listed) + outside.flat(deleted)
    same("verbs/cache.txt", re.sub(r"(?<=gpt2-tiny-)[0-9a-f]{8}", "HASH", text))


@pytest.mark.parametrize("kind", ["all", "strategies"])
def test_what_is_listed(kind: str, tmp_path: Path, same: Compare) -> None:
    document = weighin(tmp_path, "list", kind, "--json", "-").data
    for one in (one for key in document.keys() - {"schema"} for one in document[key]):
        assert one["summary"]
        one["summary"] = "..."
    same(f"verbs/list-{kind}.txt", outside.flat(document))


def test_the_tensors_of_a_checkpoint(place: Path, same: Compare) -> None:
    printed = weighin(place, "inspect", "model.safetensors", "--json", "-")
    same("verbs/inspect.txt", outside.flat(printed.data))


def test_a_converted_checkpoint(place: Path, same: Compare) -> None:
    words = ("model.safetensors", "parts", "--format", "per_param", "--dtype", "bf16", "--verify")
    document = weighin(place, "convert", *words, "--json", "-").data
    assert document.pop("seconds") >= 0
    assert document.pop("bytes") > 166
    same("verbs/convert.txt", outside.flat(document))


@pytest.mark.parametrize("run", [name for name in outside.RUNS if "floors" in name])
def test_the_floors_of_a_search(run: str, tmp_path: Path, same: Compare) -> None:
    words = ("gpt2-medium", "--isolation", "process", "--out", "floors", "--json", "-")
    with outside.found_floors(run):
        printed = weighin(tmp_path, "floor", *words)
    same(f"verbs/floor-{run}.txt", outside.flat(printed.data))


def test_what_the_doctor_says(tmp_path: Path, same: Compare) -> None:
    with outside.examined():
        printed = weighin(tmp_path, "doctor", "--json", "-")
        shown = weighin(tmp_path, "doctor")
    assert (printed.code, shown.code) == (0, 0)
    same("verbs/doctor.txt", outside.flat(printed.data) + shown.out)
