"""The figures of ``weighin predict`` for models, strategies and devices that differ in kind.

Memory is counted from after the imports, whose size depends on packages. A heap differs by a few MiB
from process to process; the sizes of tensors are exact.
"""

import json
from pathlib import Path
from typing import Any

import outside
import pytest
from nightly import by_day
from outside import weighin
from snapshots import Compare

CASES = {
    "six-strategies": "gpt2-small", "cuda": "llama-8b --device cuda --dtype bf16 -s streaming,baseline",
    "ranks": "gpt2-small --ranks 2 -s mmap_assign", "a-use": "gpt2-small --use adamw -s streaming",
    "a-library": "qwen3-0.6b --dtype bf16 -s transformers,safetensors_mmap",
}  # fmt: skip
MOST_BYTES = 8 * 2**20
EXACT = ("model_bytes", "tensor_peak_bytes", "work")
COUNTED = ("modules", "archives", "cpu_ns")
"""Of the work: how many modules a load imports depends on the packages, and a time on the machine."""


def above_import(data: Any, host: int, files: int, key: str = "") -> Any:
    """Return figures with the memory of the imports subtracted."""
    if isinstance(data, dict):
        return {name: above_import(one, host, files, name) for name, one in data.items()}
    if isinstance(data, list):
        return [above_import(one, host, files) for one in data]
    if data is not None and (key.startswith("host_anon") or key == "floor_bytes"):
        return data - host
    if data is not None and key.startswith("host_file"):
        return data - files
    return data


@pytest.mark.parametrize("name", by_day(CASES, "six-strategies", "cuda", "a-use"))
def test_the_predicted_figures(name: str, tmp_path: Path, same: Compare) -> None:
    with outside.predicting():
        printed = weighin(
            tmp_path, "predict", *CASES[name].split(), "--json", "-", OMP_NUM_THREADS="2"
        )
    assert printed.code == 0
    found = []
    for one in printed.data["predictions"]:
        ranks = 2 if "--ranks" in CASES[name] else 1
        host, files = (one.pop(f"baseline_{kind}_bytes") or 0 for kind in ("anon", "file"))
        figures = above_import(one, host * ranks, files)
        for key in COUNTED:
            del figures["work"][key]
        found.append(figures)
    file = outside.SNAPSHOTS / f"predict/{name}.json"
    if file.exists():
        kept = json.loads(file.read_text())
        found = [
            outside.settled(was, one, most_bytes=MOST_BYTES, exact=EXACT)
            for was, one in zip(kept, found, strict=True)
        ]
    same(f"predict/{name}.json", json.dumps(found, indent=1) + "\n")
