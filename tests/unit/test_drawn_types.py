"""``make model-types ARGS=--all``: a sample of transformers' types, and a page that leaves nothing out."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KNOWN = "# Model types of transformers\n\nThe 44 types.\n\n"
BLOCK = "<!-- benchmarks/model_types.py drawn -->\n<!-- end -->\n"


def compared(work: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], list[Any], str]:
    """Run the command; return how it ended, its records, and the page."""
    page = work / "page.md"
    page.write_text(KNOWN + BLOCK)
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "model_types.py"), "--all"]
    ended = subprocess.run(
        [*command, "--work", str(work), "--out", str(page), *options],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    kept = next(work.glob("drawn-*.jsonl"))
    return ended, list(map(json.loads, kept.read_text().splitlines())), page.read_text()


def test_types_drawn_at_random_load_as_from_pretrained_loads_them(tmp_path: Path) -> None:
    ended, records, page = compared(tmp_path, "--seed", "5", "--types", "5")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(records) == 5
    loaded = [one for one in records if not one["reason"]]
    assert len(loaded) >= 3
    assert [one["unequal"] for one in loaded] == [[]] * len(loaded)
    assert page.startswith(KNOWN)
    assert "5 of " in page
    assert f"{len(loaded)} were compared in {4 * len(loaded)} pairs of loads" in page


def test_a_type_that_cannot_be_compared_is_counted_with_its_reason(tmp_path: Path) -> None:
    ended, records, page = compared(tmp_path, "--types", "edgetam_prompt_encoder,nougat")
    assert ended.returncode == 0
    assert all(one["reason"] for one in records)
    counted = page.partition("### How many types were not compared")[2]
    assert "* 1: transformers exports no model class" in counted
    assert sum(map(int, re.findall(r"^\* (\d+): ", counted, re.MULTILINE))) == 2
