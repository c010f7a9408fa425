"""No worker compiles our code on a strategy's clock."""

from importlib.util import cache_from_source
from pathlib import Path

from typed import ROOT, CommandLine


def test_a_run_leaves_bytecode_also_where_python_leaves_none(command: CommandLine) -> None:
    compiled = Path(cache_from_source(str(ROOT / "harness" / "weighin" / "stream" / "model.py")))
    compiled.unlink(missing_ok=True)
    ended = command.run(
        *("bench", "gpt2-tiny", "--strategies", "baseline", "--isolation", "process"),
        PYTHONDONTWRITEBYTECODE="1",
    )
    assert (ended.code, ended.left) == (0, [])
    assert compiled.is_file()
