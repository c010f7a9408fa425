"""A run of one short command starts quickly: it imports nothing that takes time."""

import json
import subprocess
import sys
from pathlib import Path

from weighin.records import run_folder

HEAVY = {
    *("torch", "numpy", "pandas", "rich", "docker", "requests", "yaml", "filelock"),
    *("statistics", "difflib", "http.client", "py_spy"),
    *("weighin.stream.formats", "weighin.suite.registry", "weighin.suite.user_code"),
    *("weighin.plan.loads", "weighin.predict.client", "weighin.checkpoint.cache"),
}
PROGRAM = """
import sys
from weighin.cli.app import app
arguments = ["run", "--no-stacks", "--isolation", "process", "--out", "r", "--", "true"]
assert app(arguments, standalone_mode=False) == 0
print("imported:", *sys.modules)
"""


def test_a_short_command_imports_nothing_that_takes_time(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    imported = done.stdout.splitlines()[-1].split()
    assert "weighin.run.commands" in imported
    assert sorted(HEAVY & {*imported}) == []
    # The record was not checked when it was written: it is as any reader wants it.
    (result,) = run_folder.read(tmp_path / "r").results
    assert result.outcome == "ok"
    (line,) = (tmp_path / "r" / "records.jsonl").read_text().splitlines()
    assert json.loads(line)["cell"]["command"] == ["true"]
