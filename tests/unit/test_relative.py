"""Times as multiples: of the first series of the same model, memory as it is."""

from factories import make_cell, make_result

from pages.run_tables import markdown_relative
from weighin.result import Outcome, Result


def results() -> list[Result]:
    cells = [make_cell(name, ram_limit_bytes=None) for name in ("baseline", "mmap_assign")]
    found = [make_result(cell) for cell in cells]
    slow = make_cell("streaming", ram_limit_bytes=None)
    found += [
        make_result(slow, load_ns=36_000_000_000, ready_ns=36_000_000_000),
        make_result(
            make_cell("streaming", ram_limit_bytes=None, repeat=1),
            load_ns=18_000_000_000,
            ready_ns=18_000_000_000,
        ),
    ]
    found.append(
        make_result(
            make_cell("broken", ram_limit_bytes=None),
            outcome=Outcome.STRATEGY_FAILED,
            load_ns=None,
            ready_ns=None,
        )
    )
    return found


def test_times_are_multiples_of_the_first_ones() -> None:
    lines = markdown_relative(results()).splitlines()
    assert lines[0] == (
        "| strategy | outcome | load x | ready x | peak RSS GiB | above import x model |"
        " anonymous (sampled) GiB | cgroup peak GiB |"
    )
    cells = [[text.strip() for text in line.split("|")[1:5]] for line in lines[2:6]]
    assert cells == [
        ["baseline", "ok", "1.00", "1.00"],
        ["mmap_assign", "ok", "0.02", "0.30"],
        ["streaming", "ok", "1.00 (1.00..2.00)", "1.00 (1.00..2.00)"],
        ["broken", "strategy_failed", "-", "-"],
    ]
    assert lines[7] == "Times are multiples of the first line's: load 18.0 s, ready 18.0 s."
    assert lines[9].startswith("gpt2-xl (6.290 GiB) · device cpu · no RAM limit")


def test_an_empty_run_says_so() -> None:
    assert markdown_relative([]) == "No cells were measured."
