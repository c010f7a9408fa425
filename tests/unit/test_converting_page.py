"""Loads that change the weights are shown as multiples of what they give."""

from dataclasses import replace

from factories import make_cell, make_result, make_skipped

from pages.run_tables import CONVERTING, markdown_converting
from weighin.cell import ModelSpec
from weighin.result import Memory, Peaks
from weighin.units import MIB


def test_the_peaks_are_above_the_imports_and_in_multiples_of_the_result() -> None:
    cell = make_cell("transformers", options={"disable_mmap": True})
    result = replace(
        make_result(replace(cell, model=ModelSpec("fp8 to bfloat16", "a:b"))),
        model_bytes=100 * MIB,
        baseline=Memory(300 * MIB, 200 * MIB, 100 * MIB, 0),
        peaks=Peaks(rss_bytes=450 * MIB, anon_sampled_bytes=320 * MIB),
    )
    heads, _, row, *others = markdown_converting([result, make_skipped()]).splitlines()
    assert heads == f"| {' | '.join(CONVERTING).replace('_', chr(92) + '_')} |"
    assert "| fp8 to bfloat16 | transformers disable" in row
    assert "| ok | 100 | 1.200 | 1.500 |" in row
    assert not [line for line in others if line.startswith("|")]
