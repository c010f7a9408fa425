"""The source code of the line at which a program stood."""

import os
import time
from pathlib import Path

import pytest

from weighin.run.commands import code_of

SOURCE = "import torch\nstate = torch.load(path)  # slow\n    model.load_state_dict(state)\n"


def code(folder: Path, *frames: str, started_s: float | None = None) -> str:
    started_s = time.time() + 60 if started_s is None else started_s
    return code_of(frames, str(folder), started_s)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "a.py").write_text(SOURCE)
    return tmp_path


def test_the_code_is_that_of_the_programs_own_innermost_line(here: Path) -> None:
    library = f"load ({here}/site-packages/torch/a.py:1)"
    assert (
        code(here, library, "run (a.py:3)", "<module> (a.py:1)") == "model.load_state_dict(state)"
    )
    assert code(here, "run (a.py:2)") == "state = torch.load(path)"  # without its comment
    assert code(Path("/"), f"run ({here}/a.py:1)") == "import torch"


def test_where_there_is_no_such_line_there_is_no_code(here: Path) -> None:
    for frame in (
        "run (b.py:1)",
        "run (a.py:99)",
        "no frame",
        f"load ({here}/site-packages/a.py:1)",
    ):
        assert code(here, frame) == ""
    assert code(here, f"run ({'x' * 5000}:1)") == ""  # no path can be so long
    assert code(here, "run (.:1)") == ""


def test_a_file_that_was_written_after_the_start_may_be_another_version(here: Path) -> None:
    os.utime(here / "a.py", (100, 100))
    assert code(here, "run (a.py:1)", started_s=100.0) == "import torch"
    assert code(here, "run (a.py:1)", started_s=99.9) == ""
