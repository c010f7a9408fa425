"""Which of our sources decide a cell's figures, and the hash of their code."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from factories import make_cell

from pages import sources
from weighin.cell import Cell, Operation
from weighin.suite import registry

ROOT = Path(__file__).parents[2]


def deciding(strategy: str, operation: Operation = "load") -> set[str]:
    info = registry.strategy(strategy, operation)
    found = sources.deciding(info.path, cell(strategy, operation))
    return {str(path.relative_to(ROOT)) for path in found}


def cell(strategy: str, operation: Operation = "load") -> Cell:
    return replace(make_cell(strategy, operation=operation), model=registry.model("gpt2-tiny"))


def test_a_strategy_is_decided_by_itself_the_model_and_the_worker() -> None:
    found = deciding("baseline")
    assert {
        "strategies/baseline.py",
        "harness/weighin/models/gpt2.py",
        "harness/weighin/worker/__main__.py",
        "harness/weighin/worker/loading.py",
        "harness/weighin/worker/verify.py",
    } <= found
    assert not {"harness/weighin/stream/model.py", "harness/weighin/worker/pytest_body.py"} & found
    assert not [
        name for name in found if name.startswith(("harness/weighin/show", "harness/weighin/run"))
    ]


def test_a_strategy_is_decided_by_the_loader_and_the_layouts_that_it_imports() -> None:
    found = deciding("streaming")
    assert {"harness/weighin/stream/model.py", "harness/weighin/stream/filling.py"} <= found
    assert "harness/weighin/stream/torch_files.py" in found
    assert "harness/weighin/models/llama.py" not in found


def test_a_save_is_decided_by_what_writes_and_reads_back() -> None:
    assert {"strategies/saving/torch_save.py", "harness/weighin/worker/saving.py"} <= deciding(
        "torch_save", "save"
    )


@pytest.mark.parametrize(
    ("change", "is_other_code"),
    [
        (('"""Load."""', '"""Load it all."""'), False),
        (('    """Load."""\n', ""), False),
        (("  # fast", "  # slow"), False),
        (('"no file"', '"no file there"'), False),
        (("{job}", "{job!r}"), True),
        (("ValueError", "TypeError"), True),
        (('"rb"', '"r+b"'), True),
        (("open", "memoryview"), True),
        (("\n        return", "\n        pass\n        return"), True),
    ],
)
def test_the_hash_is_of_the_code_and_not_of_its_texts(
    tmp_path: Path, change: tuple[str, str], is_other_code: bool
) -> None:
    mine = tmp_path / "mine.py"
    text = (
        '"""Load."""\n\ndef load(job):\n    """Load."""\n    if job:\n'
        '        raise ValueError("no file" + f"{job}")\n    else:  # fast\n'
        '        return open(job, "rb")\n'
    )
    mine.write_text(text)
    first = sources.digest_of_file(mine)
    assert change[0] in text
    mine.write_text(text.replace(*change))
    assert (sources.digest_of_file(mine) != first) is is_other_code
    assert sources.digest_of_code(mine.read_bytes()) == sources.digest_of_file(mine)


def test_no_source_is_imported_for_it() -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from pages import sources\nfrom weighin.suite import registry\n"
        "from weighin.cell import Cell\n"
        "info = registry.strategy('streaming')\n"
        "sources.deciding(info.path, Cell(registry.model('gpt2-tiny'), 'streaming', 'process'))\n"
        "print('torch' in sys.modules, 'weighin.stream.model' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]


def test_a_helper_of_strategies_is_the_module_that_it_comes_from(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    loader = "harness/weighin/stream/model.py"

    def names() -> set[str]:
        found = sources.deciding(mine, cell("mine"))
        return {str(path.relative_to(ROOT)) for path in found if path.is_relative_to(ROOT)}

    for line, is_reached in (
        ("from weighin.strategy import load_streaming", True),
        ("from weighin.strategy import Load", False),
        ("from other.strategy import load_streaming", False),
        ("from .strategy import load_streaming", False),
        ("import weighin.stream.model", True),
        ("if TYPE_CHECKING:\n    import weighin.stream.model", False),
        ("if typing.TYPE_CHECKING:\n    pass\nelse:\n    import weighin.stream.model", True),
        ("if os:\n    import weighin.stream.model", True),
    ):
        mine.write_text(f"{line}\ndef load(job): ...\n")
        assert (loader in names()) == is_reached, line
