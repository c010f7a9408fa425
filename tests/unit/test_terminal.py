"""The exact texts of a run in a terminal: whatever its width, no figure is cut."""

import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

import pytest
from factories import (
    IMPORT,
    SCRIPTS,
    make_cell,
    make_result,
    make_skipped,
    mixed_run,
    notebook_run,
    saving_run,
)

from weighin.cell import ModelSpec
from weighin.cli._fitting import FittingConsole
from weighin.records import run_folder
from weighin.report import html_page
from weighin.report.rows import series
from weighin.report.sections import terminal_table
from weighin.report.sentences import paragraphs
from weighin.report.tables import text_tables
from weighin.report.writing import write_markdown
from weighin.result import Result
from weighin.units import MIB

PUBLISHED = Path(__file__).parents[2] / "results" / "published"


def terminal(results: Sequence[Result], width: int = 100) -> list[str]:
    console = FittingConsole(width=width, file=io.StringIO(), color_system=None)
    console.print(terminal_table(results))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def characters(text: str) -> Counter[str]:
    return Counter(character for character in text if character.isalnum())


def test_the_terminal_table_of_a_run() -> None:
    assert terminal(notebook_run()) == [
        "All results",
        "",
        "                                                         peak    above  anonymous  cgroup",
        "                                   import  load  ready    RSS   import  (sampled)    peak",
        " strategy     outcome                   s     s      s    GiB  x model        GiB     GiB",
        " ────────────────────────────────────────────────────────────────────────────────────────",
        " baseline     oom_killed in read     1.60     -      -  7.988     1.22      7.868   7.988",
        " sequential   oom_killed in read     1.60     -      -  7.988     1.22      7.868   7.988",
        " meta_copy    oom_killed in apply    1.60     -      -  7.981     1.22      7.861   7.981",
        " mmap_assign  ok                     1.60  0.44   5.44  6.820     1.04      0.400   6.820",
        " per_param    ok                     1.60  9.61  10.31  6.930     1.05      6.800   6.930",
        " streaming    ok                     1.60  6.60   7.30  6.750     1.03      6.550   6.750",
        "",
        "gpt2-xl (6.290 GiB) · device cpu · RAM limit 8 GiB · float32 · cold page cache · isolation docker ·",
        "testbench · Example CPU · Linux 6.18.0 · cgroup v2 · torch 2.13.0 · measured 2025-01-02 with weighin",
        "commit unknown",
        "Not ok",
        "baseline: oom_killed: killed by the kernel for lack of memory in phase 'read'",
        "sequential: oom_killed: killed by the kernel for lack of memory in phase 'read'",
        "meta_copy: oom_killed: killed by the kernel for lack of memory in phase 'apply'",
        "How to read the figures",
        "Exact, the kernel's high-water marks: peak RSS, cgroup peak (includes page cache).",
        "Exact, computed: above import = (peak RSS - RSS after import torch) / the model's size.",
        "Sampled, so short spikes may be missed: anonymous.",
        "import: time of import torch, before the load; import transformers: of a model's class.",
        "load: time until the strategy returned; ready: time until every byte was read once.",
        "Not ok: the figures are the last readings before the end, and not the memory that a load needs.",
    ]


def test_a_table_of_saves_in_80_columns_keeps_names_whole_and_leaves_columns_out() -> None:
    assert terminal(saving_run(), 80) == [
        "All results",
        "",
        "                                           on         above",
        "                                          the  peak     the anonymous",
        "                                    save disk   RSS   model (sampled) written",
        " strategy                   outcome    s    s   GiB x model       GiB     GiB",
        " ────────────────────────────────────────────────────────────────────────────",
        " sharded                    ok      6.00 7.00 6.620    1.00     6.500   6.290",
        " max_shard_bytes=1073741824",
        " safetensors                ok      6.00 7.00 6.620    1.00     6.500   6.290",
        "",
        "Left out at 80 columns: cgroup peak, files. All columns are in report.md and",
        "--json.",
        "saving · gpt2-xl (6.290 GiB) · device cpu · RAM limit 8 GiB · float32 · cold",
        "page cache · isolation docker · testbench · Example CPU · Linux 6.18.0 · cgroup",
        "v2 · torch 2.13.0 · measured 2025-01-02 with weighin commit unknown",
        "How to read the figures",
        "Exact, the kernel's high-water marks: peak RSS, cgroup peak (includes page",
        "cache).",
        "Exact, computed: above the model = (peak RSS - RSS with the model loaded) / the",
        "model's size.",
        "Sampled, so short spikes may be missed: anonymous.",
        "save: time until the strategy returned; on the disk: time until every file was",
        "synced (fsync).",
        "Not ok: the figures are the last readings before the end, and not the memory",
        "that a load needs.",
    ]


def test_a_table_that_is_too_wide_leaves_columns_out_and_says_which() -> None:
    script = (IMPORT, ("import transformers", 3.5, 0.3, 0.2), *SCRIPTS["streaming"][1:])
    result = make_result(make_cell("streaming", format="safetensors"), script)
    assert terminal([result], 100)[6].startswith(" streaming  ok         1.60          3.50  10.10")
    assert terminal([result], 80)[2:9] == [
        "                         import              peak   above anonymous cgroup",
        "                   transformers  load ready   RSS  import (sampled)   peak",
        " strategy  outcome            s     s     s   GiB x model       GiB    GiB",
        " ─────────────────────────────────────────────────────────────────────────",
        " streaming ok              3.50 10.10 10.80 6.750    1.03     6.550  6.750",
        "",
        "Left out at 80 columns: import. All columns are in report.md and --json.",
    ]


@pytest.mark.parametrize("run", ["gpt2-xl-floors", "gpt2-medium-ranks", "gpt2-large-saving", "gpt2-xl-survival", "gpt2-xl-8GiB", "gpt2-large-layouts"])  # fmt: skip
def test_a_published_run_is_a_table_at_80_columns(run: str) -> None:
    console = FittingConsole(width=80, file=io.StringIO(), color_system=None)
    console.print(terminal_table(run_folder.read(PUBLISHED / run).results))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if re.match(r"  \S.*: ", line)]  # lines of blocks


def test_repeats_of_saves_in_80_columns_have_their_ranges_in_rows_of_their_own() -> None:
    assert terminal(saving_run(2), 80)[2:14] == [
        "                                           on         above",
        "                                          the  peak     the anonymous",
        "                                    save disk   RSS   model (sampled) written",
        " strategy                   outcome    s    s   GiB x model       GiB     GiB",
        " ────────────────────────────────────────────────────────────────────────────",
        " sharded                    ok      6.00 7.00 6.620    1.00     6.500   6.290",
        " max_shard_bytes=1073741824",
        "                            from    6.00 7.00 6.620    1.00     6.500",
        "                            to      7.00 8.00 6.621    1.01     6.501",
        " safetensors                ok      6.00 7.00 6.620    1.00     6.500   6.290",
        "                            from    6.00 7.00 6.620    1.00     6.500",
        "                            to      7.00 8.00 6.621    1.01     6.501",
    ]


@pytest.mark.parametrize("width", range(30, 140, 10))
def test_no_name_and_no_figure_is_cut_at_any_width(width: int) -> None:
    for results in (mixed_run(), saving_run(2)):
        shown, whole = (" ".join(terminal(results, columns)) for columns in (width, 300))
        left_out = set(
            ", ".join(re.findall(r"Left out at \d+ columns: (.+?)\.", shown)).split(", ")
        )
        texts = [
            text
            for table in text_tables(series(results))
            for place, (heading, unit) in enumerate(table.columns)
            if heading in left_out
            for text in (unit, *(row[place] for row in (*table.rows, *table.ranges)))
        ]
        assert not characters(whole) - characters("".join(texts)) - characters(shown)


def test_a_model_smaller_than_the_import_has_no_column_above_import() -> None:
    small = [replace(result, model_bytes=MIB) for result in notebook_run()]
    shown = terminal([*small, make_skipped()])
    assert "x model" not in "\n".join(shown[:8])
    assert (
        "Left out: above import x model, because the model is smaller than import torch." in shown
    )
    assert "x the model above the import" not in paragraphs(series(small))[0]
    file = io.StringIO()
    write_markdown(small, file)
    assert "| above import x model |" not in file.getvalue()
    saves = [replace(result, model_bytes=MIB) for result in saving_run()]
    assert "x model" in "\n".join(terminal(saves)[:8])


def test_names_are_not_read_as_markup_and_repeats_show_their_range() -> None:
    cells = [make_cell("[b]x|y", repeat=repeat) for repeat in range(3)]
    results = [make_result(cell, load_ns=10**9 * (cell.repeat + 1)) for cell in cells]
    assert terminal(results)[6:8] == [
        " [b]x|y    ok         1.60        2.00   7.30  6.750     1.03      6.550   6.750",
        "                            1.00..3.00",
    ]
    assert terminal(results)[-1] == "Median of up to 3 repeats, with the whole range."


def test_an_empty_run_says_so() -> None:
    assert terminal([]) == ["No cells were measured."]


def test_what_differs_between_environments_is_left_out_of_the_caption() -> None:
    other = make_result(make_cell("baseline"), environment={"kernel": "6.1.0", "torch": "2.13.0"})
    captions = [
        line
        for line in terminal([make_result(), make_skipped(), other], 200)
        if "cgroup v2" in line
    ]
    assert captions[0].endswith(
        "isolation docker · testbench · Example CPU · cgroup v2 · torch 2.13.0 · measured 2025-01-02 with weighin"
    )


def test_cells_of_two_machines_are_a_warning() -> None:
    other = make_result(make_cell("baseline"), environment={"kernel": "6.1.0"})
    first = make_result(environment={"kernel": "6.18.0", "torch": "2.13.0"})
    shown = " ".join(" ".join(terminal([first, other])).split())
    assert (
        "the measurements were made on different machines or with different software: kernel"
        " (6.18.0, 6.1.0). Compare memory figures with care; do not compare times" in shown
    )


def test_a_model_that_was_never_called_is_said_to_be_so_where_ok_stands() -> None:
    own = ModelSpec("toy", "mynets:build")
    never = [
        make_result(make_cell(name, model=own), SCRIPTS["streaming"][:-1])
        for name in ("streaming", "mmap_assign")
    ]
    note = (
        "toy: no forward pass was run, because mynets defines no example_inputs (docs/models.md): ok"
        " means that every weight is right, not that the model runs."
    )
    assert note in " ".join(terminal(never))
    file = io.StringIO()
    write_markdown(never, file)
    assert file.getvalue().count(f"- {note}\n") == 1
    assert escape(note) in html_page.render(Path("nowhere"), never)


def test_where_no_pass_was_asked_for_or_one_was_run_nothing_is_missing() -> None:
    called = make_result(make_cell("streaming"))
    not_asked = make_result(make_cell("streaming", passes=0), SCRIPTS["streaming"][:-1])
    saved, killed = saving_run()[0], make_result(make_cell("baseline"))
    assert "example_inputs" not in " ".join(terminal([called, not_asked, saved, killed]))
