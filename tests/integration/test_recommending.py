"""What is recommended lives, and what is refused dies.

``benchmarks/recommending.py`` does the same for larger models and other dtypes, and judges too
whether records change a name: that is a question of time, which a busy machine answers wrongly.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, CommandLine


@pytest.mark.slow
@pytest.mark.cgroup
@pytest.mark.nightly
def test_over_a_grid_of_limits_recommendations_are_kept(
    command: CommandLine, shared_cache: Path
) -> None:
    script = ROOT / "benchmarks" / "recommending.py"
    done = subprocess.run(
        [sys.executable, str(script), "--out", str(command.folder / "run")],
        env=os.environ | {"PYTHONPATH": str(ROOT / "harness"), "WEIGHIN_CACHE": str(shared_cache)},
        cwd=command.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    counts = re.search(r"(\d+) of (\d+) cells ended as predicted", done.stdout)
    assert counts, done.stderr
    assert counts[1] == counts[2], done.stdout


@pytest.mark.slow
def test_a_command_says_what_fits_with_its_code(command: CommandLine) -> None:
    asked = command.run("recommend", "gpt2-tiny", "--ram", "1g", "--json", "-", patience_s=400)
    assert asked.code == 0, asked.err
    found = json.loads(asked.out)
    assert found["ram_limit_bytes"] == 1024**3
    first = found["candidates"][0]
    assert (first["strategy"], first["verdict"]) == (found["recommended"], "fits")
    assert first["memory_from"] == first["time_from"] == "predicted"
    compile(found["code"], "pasted", "exec")
    assert asked.err == ""  # only a terminal shows the progress
    nothing = command.run("recommend", "gpt2-tiny", "--ram", "64m", patience_s=400)
    assert nothing.code == 1, nothing.err
    assert "No strategy certainly fits." in nothing.out
