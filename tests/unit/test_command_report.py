"""A run of commands in every output: its own columns, no column of a load, and who used the memory."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy
import pandas as pd
import pytest
from factories import make_cell, make_result
from ran_commands import RAN, make_command, make_killed, make_ran, write_command_samples
from rich.console import Console

from pages import freshness
from weighin.records.floor import floors
from weighin.records.run_folder import parse
from weighin.records.series import matrices, name_of
from weighin.report import (
    commands,
    findings,
    html_page,
    peaks_plot,
    sections,
    sentences,
    survival,
    survival_plots,
    timeline,
    timeline_data,
)
from weighin.report import floors as floors_report
from weighin.report.exports import bencher, openmetrics, parquet
from weighin.report.rows import series
from weighin.report.run_json import of_run
from weighin.report.sections import terminal_table
from weighin.report.tables import write_summary
from weighin.report.writing import write_markdown
from weighin.result import Outcome, Process, Result, Sample
from weighin.units import MIB

OF_LOADS = ("model", "dtype", "format", "device", "import", "x model", "peak RSS", "load")


def two() -> list[Result]:
    return [make_ran(), make_killed()]


def markdown(results: list[Result]) -> str:
    file = io.StringIO()
    write_markdown(results, file)
    return file.getvalue()


def shown(results: list[Result], width: int = 200) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(terminal_table(results))
    return console.export_text()


def table_under(text: str, heading: str) -> list[list[str]]:
    lines = text.partition(f"## {heading}\n\n")[2].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_the_table_has_the_columns_of_commands() -> None:
    heads, _, *rows = table_under(markdown(two()), "All results")
    assert heads == [
        "strategy", "RAM limit", "outcome", "time s", "needs GiB", "cgroup peak GiB",
        "anonymous (sampled) GiB", "shared (sampled) GiB", "page cache (sampled) GiB", "exit code",
    ]  # fmt: skip
    assert rows == [
        ["train.py", "none", "ok", "3.00", "≥ 0.739", "0.935", "0.642", "0.098", "0.195", "0"],
        ["train.py", "600 MiB", "oom_killed", "3.00", "≥ 0.739", "0.935", "0.642", "0.098",
         "0.195", "137"],
    ]  # fmt: skip


def test_an_exact_need_has_no_sign() -> None:
    exact = make_ran(ran=replace(RAN, needed_is_sampled=False))
    assert table_under(markdown([exact]), "All results")[2][3] == "0.739"


def test_no_report_speaks_of_a_load() -> None:
    text = markdown(two())
    assert text.startswith("# Running train.py\n\npage cache as found · isolation cgroup ·")
    for word in ("import", "x model", "peak RSS", "loading", "gpt2", "dtype"):
        assert word not in text
        assert word not in shown(two())


def test_the_processes_at_the_peak_come_with_their_files() -> None:
    text = markdown([make_ran()])
    heads, _, *rows = table_under(text, "Processes at the peak")
    assert heads == ["command", "reads", "pid", "parent", "anonymous MiB", "file MiB", "shared MiB"]
    assert rows == [
        ["python train.py --epochs 1",
         "model-00003.safetensors, 2.1 GiB of 4.9 GiB; vocab.bin, 32.0 MiB of 64.0 MiB mapped",
         "4711", "4000", "500.0", "20.0", "0.0"],
        ["worker \\", "1", "-", "4712", "4711", "57.0", "20.0", "100.0"],
    ]  # fmt: skip
    assert "train.py also ran, at other times: git." in text


def test_a_table_of_several_commands_says_of_which() -> None:
    other = make_ran(make_command("serve", command=("serve",)))
    heads, _, *rows = table_under(markdown([*two(), other]), "Processes at the peak")
    assert heads[0] == "of"
    assert [row[0] for row in rows] == 2 * ["train.py"] + 2 * ["serve"]


def test_the_kill_names_its_victim_and_its_limit() -> None:
    heads, _, *rows = table_under(markdown(two()), "Killed for lack of memory")
    assert heads == ["of", "killed", "which", "limit", "pid", "anonymous MiB", "file MiB", "shared MiB"]  # fmt: skip
    assert rows == [["train.py 600 MiB", "python", "the first process", "its own", "4711", "480.0", "20.0", "0.0"]]  # fmt: skip


def test_the_stack_of_the_peak_is_shown_and_no_earlier_one() -> None:
    for text in (markdown([make_ran()]), shown([make_ran()])):
        assert "train.py, process 4711, thread MainThread, at 640.0 MiB:" in text
        assert "load_state_dict (torch/serialization.py:1500)" in text
        assert "io.py" not in text


def test_many_short_processes_are_counted() -> None:
    short = Process(9, 4711, "cat", 0, 1)
    result = make_ran(ran=replace(RAN, processes=(RAN.processes[0], *12 * [short])))
    assert "train.py also ran, at other times: cat (12 times)." in markdown([result])


def test_a_process_of_no_weight_has_no_row() -> None:
    shell = replace(RAN.processes[0], pid=9, command="/bin/sh -c x", anon_bytes=MIB, file_bytes=0, files=())  # fmt: skip
    text = markdown([make_ran(ran=replace(RAN, processes=(RAN.processes[0], shell)))])
    assert len(table_under(text, "Processes at the peak")) == 3
    assert "train.py: smaller processes are not shown: sh." in text


def test_a_sweep_shows_the_processes_of_the_largest_cell() -> None:
    small = replace(RAN, needed_bytes=MIB)
    killed = make_ran(make_command(ram_limit_bytes=8 * MIB), Outcome.OOM_KILLED, ran=small)
    heads, *_ = table_under(markdown([killed, make_ran()]), "Processes at the peak")
    assert heads[0] == "command"
    assert "train.py also ran" in markdown([killed, make_ran()])


def test_left_over_processes_are_named() -> None:
    text = markdown([make_ran(ran=replace(RAN, ended=("sleep 99",)))])
    assert "left these running, which weighin ended: sleep 99." in text


def test_a_terminal_of_80_columns_keeps_needs_and_peak() -> None:
    text = shown(two(), width=80)
    assert "≥ 0.739" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_the_summary_in_words() -> None:
    results = two()
    assert sentences.paragraphs(series(results), results) == [
        "Without a RAM limit, the only command that was tried, train.py, works. train.py is done in"
        " 3.00 s.",
        "With 600 MiB of RAM, the only command that was tried, train.py, does not work. Killed by the"
        " kernel for lack of memory: train.py.",
    ]


def test_a_failed_command_is_named() -> None:
    failed = make_ran(outcome=Outcome.COMMAND_FAILED, message="exit code 3", exit_code=3)
    assert "command_failed: exit code 3" in markdown([failed])
    assert "Failed: train.py." in sentences.paragraphs(series([failed]), [failed])[0]


def test_the_csv_and_the_json_have_no_columns_of_loads() -> None:
    file = io.StringIO()
    write_summary(two(), file, 0)
    row = next(csv.DictReader(io.StringIO(file.getvalue())))
    assert row["needed_bytes"] == str(757 * MIB)
    assert (row["exit_code"], row["needed_is_sampled"]) == ("0", "True")
    assert not {"model", "dtype", "format", "peak_rss_bytes", "import_s", "load_s"} & set(row)
    (first, _) = of_run(Path("run"), two(), [])["series"]
    assert list(first) == [name for name in row if name != "missing_cells"]
    json.dumps(first)


def test_the_csv_of_loads_has_no_columns_of_commands() -> None:
    file = io.StringIO()
    write_summary([make_result(make_cell("mmap_assign"))], file)
    assert not {"needed_bytes", "exit_code", "shmem_sampled_bytes"} & set(
        next(csv.reader(io.StringIO(file.getvalue())))
    )


def test_exports_name_a_command_by_its_label_and_limit() -> None:
    found = json.loads(bencher(two()))
    name = "command train.py as_found cgroup ram=none"
    assert list(found) == [name, "command train.py as_found cgroup ram=600MiB"]
    assert {key: value["value"] for key, value in found[name].items()} == {
        "not_ok_repeats": 0,
        "anon_bytes": 657 * MIB,
        "peak_cgroup_bytes": 957 * MIB,
        "needed_bytes": 757 * MIB,
        "time_ns": 3 * 10**9,
    }
    pytest.importorskip("prometheus_client")
    assert "weighin_needed_bytes" in openmetrics(two())


def test_parquet_has_one_row_per_cell() -> None:
    pytest.importorskip("pyarrow")
    table = pd.read_parquet(io.BytesIO(parquet(two())))
    assert table["exit_code"].tolist() == [0, 137]
    assert "model" not in table


def test_the_name_tells_soft_settings_and_environment_apart() -> None:
    cell = make_command(cache="cold", environment={"A": "1"})
    assert name_of(cell) == "command train.py cold cgroup ram=none A=1"


def test_the_page_has_timeline_processes_and_stack(tmp_path: Path) -> None:
    results = two()
    for result in results:
        write_command_samples(tmp_path, result)
    page = html_page.render(tmp_path, results)
    assert "<title>Running train.py · weighin</title>" in page
    assert "epoch 1\nat 1.00 s, a line of output" in page
    assert "seconds since the command started" in page
    assert "load_state_dict (torch/serialization.py:1500)" in page
    assert "model-00003.safetensors, 2.1 GiB of 4.9 GiB" in page
    assert "peak RSS" not in page
    assert "page cache, reclaimable (sampled)" in page


def test_the_pictures_of_commands(tmp_path: Path) -> None:
    results = two()
    for result in results:
        write_command_samples(tmp_path, result)
    figure = timeline.draw_timeline(tmp_path, results)
    texts = [each.get_text() for each in figure.texts]
    assert any("Memory over time while running" in text for text in texts)
    assert any("at 640.0 MiB: load_state_dict" in text for text in texts)
    first = figure.axes[0]
    assert [text.get_text() for text in first.texts if "epoch" in text.get_text()] == ["epoch 1"]
    curves = [numpy.asarray(line.get_ydata()) for line in first.lines]
    highest = max(float(curve.max()) for curve in curves if len(curve) > 2)
    assert highest == pytest.approx(957 / 1024, rel=0.01)
    (cut,) = [line for line in figure.axes[1].lines if line.get_label() == "cut off"]
    assert numpy.asarray(cut.get_xdata())[0] == pytest.approx(2.0)
    bars = peaks_plot.draw_peaks(results)
    assert bars.axes[-1].get_xlabel() == "memory of all processes of the command, GiB"
    labels = [text.get_text() for legend in bars.legends for text in legend.get_texts()]
    assert "need (at least)" in labels


def sweep() -> list[Result]:
    """Both a floor at 800 MiB, and a matrix of three limits."""
    cells = [
        make_ran(make_command(ram_limit_bytes=800 * MIB, repeat=repeat)) for repeat in range(3)
    ]
    return [make_ran(), *cells, make_killed(make_command(ram_limit_bytes=792 * MIB))]


def test_a_survival_matrix_of_commands() -> None:
    text = findings.markdown(survival.found(sweep()))
    assert text.splitlines()[0] == "| command | no limit | 800 MiB | 792 MiB |"
    assert "the first process of the command ended" in text
    assert "model" not in text
    survival_plots.draw_survival(sweep())


def test_commands_of_one_run_share_a_matrix() -> None:
    other = [
        replace(result, cell=replace(result.cell, strategy="serve.py", command=("serve",)))
        for result in sweep()
    ]
    (matrix,) = matrices([*sweep(), *other])
    assert [matrix.label(row) for row in range(len(matrix.rows))] == ["train.py", "serve.py"]


def test_a_floor_of_a_command() -> None:
    (floor,) = floors(sweep())
    assert floor.bytes == 800 * MIB
    text = findings.markdown(floors_report.found(sweep()))
    assert text.splitlines()[0] == (
        "| command | RAM floor GiB | one step below | at the floor ready | at 1.1x ready |"
        " no limit ready |"
    )
    assert "the command succeeded three times" in text
    assert "import" not in text


def test_freshness_says_that_a_command_has_no_recorded_code() -> None:
    standing = freshness.standing([make_ran()], Path())
    assert str(standing) == "cannot tell: train.py (weighin does not record the code of a command)"


def test_a_record_of_a_command_can_be_read_again() -> None:
    from dataclasses import asdict

    result = make_killed()
    line = json.dumps(asdict(result)).encode()
    assert parse(Result, line, "test") == result


def test_sections_of_loads_have_no_tables_of_commands() -> None:
    headings = [section.heading for section in sections.of([make_result(make_cell("mmap_assign"))])]
    assert headings == ["All results", "How to read the figures"]


AT_PEAK = Sample(
    1, 6 * MIB, 2 * MIB, 0, 4 * MIB, 0, 0, 0, 160 * MIB, 9 * MIB, cgroup_shmem_bytes=4 * MIB,
    locked_bytes=MIB, freed_bytes=3 * MIB, kernel_bytes=150 * MIB, kernel_reclaimable_bytes=10 * MIB,
    socket_bytes=7 * MIB, slab_bytes=30 * MIB, page_tables_bytes=100 * MIB,
)  # fmt: skip


def test_the_kinds_of_memory_at_the_peak_are_a_table() -> None:
    found = commands.charge([make_ran(ran=replace(RAN, at_peak=AT_PEAK))])
    assert found
    assert [each.text for each in found.rows[0]] == [
        "2.0", "4.0", "1.0", "140.0", "7.0", "100.0", "20.0", "4.0", "3.0", "10.0"
    ]  # fmt: skip
    assert commands.charge([make_ran()]) is None


def test_a_timeline_of_a_command_has_the_kernels_memory() -> None:
    drawn = timeline_data._of_group(AT_PEAK)
    assert drawn.kernel_bytes == 157 * MIB
    assert drawn.rss_bytes == (2 + 4 + 5 + 157) * MIB
    assert timeline_data.has_part([drawn], "kernel_bytes")
