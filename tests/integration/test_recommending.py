"""What is recommended lives, what is refused dies, and records change no name.

``benchmarks/recommending.py`` does the same for larger models and other dtypes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, CommandLine


@pytest.mark.slow
@pytest.mark.cgroup
def test_over_a_grid_of_limits_recommendations_are_kept(
    command: CommandLine, shared_cache: Path
) -> None:
    script = ROOT / "benchmarks" / "recommending.py"
    done = subprocess.run(
        [sys.executable, str(script), "gpt2-small", "--out", str(command.folder / "run")],
        env=os.environ | {"PYTHONPATH": str(ROOT), "WEIGHIN_CACHE": str(shared_cache)},
        cwd=command.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_command_says_what_fits_with_its_code(command: CommandLine) -> None:
    asked = command.run("recommend", "gpt2-tiny", "--ram", "1g", "--json", patience_s=400)
    assert asked.code == 0, asked.err
    found = json.loads(asked.out)
    assert found["ram_limit_bytes"] == 1024**3
    first = found["candidates"][0]
    assert (first["strategy"], first["verdict"]) == (found["recommended"], "fits")
    assert first["memory_from"] == first["time_from"] == "predicted"
    compile(found["code"], "pasted", "exec")
    nothing = command.run("recommend", "gpt2-tiny", "--ram", "64m", patience_s=400)
    assert nothing.code == 1, nothing.err
    assert "Nothing fits for sure." in nothing.out
