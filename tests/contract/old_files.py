"""Files of an older weighin: runs, baselines and a cache, as the folder ``before`` keeps them."""

import json
import os
import shutil
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
BEFORE: Final = Path(__file__).with_name("before")
BUILDER: Final = "weighin.models.tied:tied"
KWARGS: Final[dict[str, Any]] = {"vocab_size": 64, "emb_dim": 16, "n_layers": 1, "n_heads": 2}
"""The model of the runs and of the cache: 20 KiB, with tied weights."""


def put_run(name: str, target: Path, checkout: Path = ROOT) -> Path:
    """Copy a run to ``target``; its plan names files of ``checkout``, and commands start beside it."""
    shutil.copytree(BEFORE / "runs" / name, target)
    plan = target / "plan.json"
    places = {"CHECKOUT": checkout, "HERE": target.parent}
    for word, place in places.items():
        plan.write_text(plan.read_text().replace(word, str(place)))
    return target


def put_cache(folder: Path) -> Path:
    """Copy the cache with the times and permissions that it had, and return its only entry."""
    shutil.copytree(BEFORE / "cache", folder)
    (entry,) = (folder / "models").iterdir()
    for marker in set(entry.glob("*.json")) - {entry / "manifest.json"}:
        for name, (_, mtime_ns) in json.loads(marker.read_text())["files"].items():
            file = entry / marker.stem / name
            os.utime(file, ns=(mtime_ns, mtime_ns))
            file.chmod(0o444)
    return entry
