"""Repeats that were measured with different code or weights are not mixed silently."""

from dataclasses import replace
from pathlib import Path

from factories import make_cell, make_result

from weighin.records import run_folder


def test_repeats_of_different_code_or_weights_are_named(tmp_path: Path) -> None:
    first = replace(make_result(make_cell("streaming")), sources_hash="aaaa", model_bytes=4096)
    again = replace(first.cell, repeat=1)
    run_folder.append(tmp_path, first)
    run_folder.append(tmp_path, replace(first, cell=again, sources_hash="bbbb", model_bytes=8192))
    other = replace(first, cell=make_cell("baseline"), sources_hash="cccc")
    run_folder.append(tmp_path, other)
    assert run_folder.read(tmp_path).warnings == (
        "streaming: one row of the tables mixes repeats with different code (aaaa, bbbb)",
        "streaming: one row of the tables mixes repeats with different model sizes (4096, 8192)",
    )
