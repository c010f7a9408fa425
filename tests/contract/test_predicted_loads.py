"""The figures of ``weighin predict`` for models, strategies and devices that differ in kind.

Memory is counted from after the imports, whose size depends on packages. A heap differs by a few MiB
from process to process; the sizes of tensors are exact.
"""

import json
from itertools import zip_longest
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


def settled(now: Any, kept: Any, host: int, files: int, key: str = "") -> Any:
    """Return figures without the memory of the imports; one that differs little from the kept one as it is there."""
    if key in EXACT:
        return now
    if isinstance(now, dict):
        kept = kept or {}
        return {name: settled(one, kept.get(name), host, files, name) for name, one in now.items()}
    if isinstance(now, list):
        both = zip(now, kept if len(kept or ()) == len(now) else [None] * len(now), strict=True)
        return [settled(one, was, host, files) for one, was in both]
    if now is not None and (key.startswith("host_anon") or key == "floor_bytes"):
        now -= host
    if now is not None and key.startswith("host_file"):
        now -= files
    is_size = key.endswith("_bytes") and type(now) is type(kept) is int
    return kept if is_size and abs(now - kept) <= MOST_BYTES else now


@pytest.mark.parametrize("name", by_day(CASES, "six-strategies", "cuda", "a-use"))
def test_the_predicted_figures(name: str, tmp_path: Path, same: Compare) -> None:
    words = ("predict", *CASES[name].split(), "--json", "-")
    with outside.predicting():
        printed = weighin(tmp_path, *words, OMP_NUM_THREADS="2")
    assert printed.code == 0
    found = printed.data["predictions"]
    ranks = 2 if "--ranks" in words else 1
    file = outside.SNAPSHOTS / f"predict/{name}.json"
    kept = json.loads(file.read_text()) if file.exists() else []
    for number, (one, was) in enumerate(zip_longest(found, kept[: len(found)])):
        host, files = (one.pop(f"baseline_{kind}_bytes") or 0 for kind in ("anon", "file"))
        for key in COUNTED:
            del one["work"][key]
        found[number] = settled(one, was, host * ranks, files)
    same(f"predict/{name}.json", json.dumps(found, indent=1) + "\n")
