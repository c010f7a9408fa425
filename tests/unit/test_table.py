"""One table in three forms: what fits, what is left out, and what a stranger's text may not do."""

import re

from rich.console import Console
from snapshots import Compare

from weighin.show.table import Column, Entry, Lines, Table, markdown, pivot

COLUMNS = [
    Column("strategy", is_name=True), Column("peak RSS", "GiB"), Column("cgroup peak", "GiB", rank=2),
    Column("load", "s", rank=1),
]  # fmt: skip
ROWS: list[list[Entry | str]] = [
    ["streaming", Entry("1.500", "1.400..1.600"), "2.000", "3.10"],
    ["mmap_assign from a long name", Entry("killed", kind="killed", tip="<why>"), "-", "-"],
]
TABLE = Table("All results", COLUMNS, ROWS, ["A note."], ["A reason."])


def printed(part: Table | Lines, width: int) -> list[str]:
    console = Console(width=width, emoji=False)
    with console.capture() as captured:
        console.print(part)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_no_number_is_cut_off_at_any_width() -> None:
    for width in range(34, 100):
        lines = printed(TABLE, width)
        assert all(len(line) <= width for line in lines)
        words = " ".join(lines).split()
        assert {"1.500", "1.400..1.600", "killed", "streaming", "mmap_assign", "name"} <= {*words}


def test_a_narrow_terminal_leaves_the_highest_ranks_out_and_says_so() -> None:
    assert "Left out at 36 columns: cgroup peak. A wider" in " ".join(printed(TABLE, 36))
    assert not any("Left out" in line for line in printed(TABLE, 70))


def test_a_word_as_wide_as_the_screen_takes_no_figure_away() -> None:
    long = Table.of(["tensor", "size"], [["x" * 90, "1.500 GiB"]])
    [row] = [line for line in printed(long, 80) if "x" in line]
    assert re.fullmatch(r" x+… +1\.500 GiB", row)


def test_markdown(same: Compare) -> None:
    same("table.md", markdown([TABLE, Lines("Notes", ["a *b*"])]))


def test_html_escapes_every_text() -> None:
    page = Table("<b>", [Column("<i>", "<u>")], [[Entry("<s>", "<p>", "killed", '"<q>"')]]).html()
    assert not any(tag in page for tag in ("<b>", "<i>", "<u>", "<s>", "<q>"))
    assert '<span aria-hidden="true">✗</span> &lt;s&gt;<small>&lt;p&gt;</small>' in page


def test_a_terminal_gets_no_control_character_of_a_record() -> None:
    lines = printed(Table("", [Column("x", is_name=True)], [["a\x1b[31mb"]]), 40)
    assert any("a?[31mb" in line for line in lines)


def test_a_pivot_has_a_row_and_a_column_for_each_value() -> None:
    items = [("a", 1, 5), ("a", 2, 6), ("b", 2, 7), ("b", 2, 8)]
    table = pivot(
        "sums", items, lambda one: one[0], lambda one: f"n={one[1]}",
        lambda ours: str(sum(one[2] for one in ours)),
    )  # fmt: skip
    assert [column.title for column in table.columns] == ["strategy", "n=1", "n=2"]
    assert table.rows == [["a", "5", "6"], ["b", "-", "15"]]
