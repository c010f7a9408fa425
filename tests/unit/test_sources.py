"""Which of our sources decide a cell's figures, and the hash of them that its record keeps."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from factories import make_cell

from weighin.cell import Cell, Operation
from weighin.records import sources
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
    assert not {"harness/weighin/loader/load.py", "harness/weighin/worker/pytest_body.py"} & found
    assert not [
        name for name in found if name.startswith(("harness/weighin/report", "harness/weighin/run"))
    ]


def test_a_strategy_is_decided_by_the_loader_and_the_layouts_that_it_imports() -> None:
    found = deciding("streaming")
    assert {"harness/weighin/loader/load.py", "harness/weighin/loader/reads.py"} <= found
    assert "harness/weighin/formats/pt.py" in found
    assert "harness/weighin/models/llama.py" not in found


def test_a_save_is_decided_by_what_writes_and_reads_back() -> None:
    assert {"strategies/saving/torch_save.py", "harness/weighin/worker/saving.py"} <= deciding(
        "torch_save", "save"
    )


def test_the_hash_changes_with_the_strategys_file_and_with_nothing_else(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def load(job): ...\n")
    first = sources.hashed(mine, cell("mine"))
    (tmp_path / "copy").mkdir()
    copy = tmp_path / "copy" / "mine.py"
    copy.write_text(mine.read_text())
    assert sources.hashed(copy, cell("mine")) == first
    mine.write_text("def load(job): pass\n")
    assert sources.hashed(mine, cell("mine")) != first


def test_the_hash_changes_with_what_a_strategy_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("from weighin.loader import load as loading\ndef load(job): ...\n")
    first = sources.hashed(mine, cell("mine"))
    package = tmp_path / "weighin"
    subprocess.run(["cp", "-r", ROOT / "harness" / "weighin", package], check=True)
    monkeypatch.setattr(sources, "_PACKAGE", package)
    assert sources.hashed(mine, cell("mine")) == first
    with (package / "loader" / "reads.py").open("a") as file:
        file.write("CHANGED = 1\n")
    assert sources.hashed(mine, cell("mine")) != first
    subprocess.run(["cp", ROOT / "harness/weighin/loader/reads.py", package / "loader"], check=True)
    with (package / "run" / "runner.py").open("a") as file:
        file.write("CHANGED = 1\n")
    assert sources.hashed(mine, cell("mine")) == first


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
    first = sources.hashed(mine, cell("mine"))
    assert change[0] in text
    mine.write_text(text.replace(*change))
    assert (sources.hashed(mine, cell("mine")) != first) is is_other_code


def test_no_source_is_imported_for_it() -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from weighin.records import sources\nfrom weighin.suite import registry\n"
        "from weighin.cell import Cell\n"
        "info = registry.strategy('streaming')\n"
        "sources.hashed(info.path, Cell(registry.model('gpt2-tiny'), 'streaming', 'process'))\n"
        "print('torch' in sys.modules, 'weighin.loader.load' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_the_digest_of_the_code_changes_with_any_file(tmp_path: Path) -> None:
    program = "from weighin.records import sources; print(sources.digest_of_all())"
    shutil.copytree(ROOT / "harness", tmp_path / "harness")
    shutil.copytree(ROOT / "strategies", tmp_path / "strategies")

    def digest() -> str:
        command = [sys.executable, "-P", "-c", program]
        variables = {"PYTHONPATH": str(tmp_path / "harness")}
        return subprocess.check_output(command, env=variables, text=True).strip()

    assert digest() == sources.digest_of_all()
    with (tmp_path / "harness/weighin/report/tables.py").open("a") as file:
        file.write("# changed\n")
    assert digest() != sources.digest_of_all()


def test_a_helper_of_strategies_is_the_module_that_it_comes_from(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    loader = "harness/weighin/loader/load.py"

    def names() -> set[str]:
        found = sources.deciding(mine, cell("mine"))
        return {str(path.relative_to(ROOT)) for path in found if path.is_relative_to(ROOT)}

    for line, is_reached in (
        ("from weighin.strategy import load_streaming", True),
        ("from weighin.strategy import Load", False),
        ("from other.strategy import load_streaming", False),
        ("from .strategy import load_streaming", False),
        ("import weighin.loader.load", True),
        ("if TYPE_CHECKING:\n    import weighin.loader.load", False),
        ("if typing.TYPE_CHECKING:\n    pass\nelse:\n    import weighin.loader.load", True),
        ("if os:\n    import weighin.loader.load", True),
    ):
        mine.write_text(f"{line}\ndef load(job): ...\n")
        assert (loader in names()) == is_reached, line


def test_the_hash_of_what_cannot_be_read_is_not_known(tmp_path: Path) -> None:
    mine, use = tmp_path / "mine.py", tmp_path / "use.py"
    mine.write_text("def load(job): ...\n")
    use.write_text("def use(model): ...\n")
    alone = sources.hashed(mine, cell("mine"))
    with_use = sources.hashed(mine, cell("mine"), str(use))
    assert None not in (alone, with_use) and alone != with_use
    assert alone and len(alone) == 16
    assert sources.hashed(tmp_path / "gone.py", cell("mine")) is None
    assert sources.hashed(mine, cell("mine"), str(tmp_path / "gone.py")) is None
    for text in (b"def load(", b"x = '\0'"):
        mine.write_bytes(text)
        assert sources.hashed(mine, cell("mine")) is None
