"""A run of commands in every output: its own columns, no column of a load, and who used the memory."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from factories import make_cell, make_result
from ran_commands import RAN, make_command, make_killed, make_ran, write_command_samples

from weighin.records.floor import floors
from weighin.records.run_folder import parse
from weighin.records.series import Measured, name_of
from weighin.result import Outcome, Process, Result, Sample
from weighin.show import timeline, write
from weighin.show.findings import floors as floors_table
from weighin.show.findings import survival
from weighin.show.plots import draw_peaks
from weighin.show.report import answer, as_json
from weighin.show.table import markdown as of_document
from weighin.units import MIB

OF_LOADS = ("model", "dtype", "format", "device", "import", "x model", "peak RSS", "load")


def two() -> list[Result]:
    return [make_ran(), make_killed()]


def markdown(results: list[Result]) -> str:
    return write.report_md(Measured(results))


def table_under(text: str, heading: str) -> list[list[str]]:
    lines = text.partition(f"## {heading}\n\n")[2].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_the_table_has_the_columns_of_commands() -> None:
    heads, _, *rows = table_under(markdown(two()), "All results")
    assert heads == [
        "command", "RAM limit", "outcome", "time s", "needs GiB", "cgroup peak GiB",
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
    text = markdown([make_ran()])
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


def test_the_answer_in_words() -> None:
    assert answer(Measured(two())) == [
        "Without a RAM limit, the only command that was tried, train.py, works. train.py is done in"
        " 3.00 s.",
        "With 600 MiB of RAM, the only command that was tried, train.py, does not work.",
    ]


def test_a_failed_command_is_named() -> None:
    failed = make_ran(outcome=Outcome.COMMAND_FAILED, message="exit code 3", exit_code=3)
    assert "- train.py: command_failed: exit code 3" in markdown([failed])


def test_the_csv_and_the_json_have_no_columns_of_loads() -> None:
    row = next(csv.DictReader(io.StringIO(write.summary_csv(Measured(two(), missing=0)))))
    assert row["needed_bytes"] == str(757 * MIB)
    assert (row["exit_code"], row["needed_is_sampled"]) == ("0", "True")
    assert not {"model", "dtype", "format", "peak_rss_bytes", "import_s", "load_s"} & set(row)
    (first, _) = as_json(Measured(two()), [])["series"]
    assert list(first) == [name for name in row if name != "missing_cells"]
    json.dumps(first)


def test_the_csv_of_loads_has_no_columns_of_commands() -> None:
    text = write.summary_csv(Measured([make_result(make_cell("mmap_assign"))]))
    heads = next(csv.reader(io.StringIO(text)))
    assert not {"needed_bytes", "exit_code", "shmem_sampled_bytes"} & {*heads}


def test_exports_name_a_command_by_its_label_and_limit() -> None:
    found = json.loads(write.bencher(Measured(two())))
    name = "command train.py as_found cgroup ram=none"
    assert list(found) == [name, "command train.py as_found cgroup ram=600MiB"]
    assert {key: value["value"] for key, value in found[name].items()} == {
        "not_ok_repeats": 0,
        "anon_bytes": 657 * MIB,
        "peak_cgroup_bytes": 957 * MIB,
        "needed_bytes": 757 * MIB,
        "time_ns": 3 * 10**9,
    }


def test_the_name_tells_soft_settings_and_environment_apart() -> None:
    cell = make_command(cache="cold", environment={"A": "1"})
    assert name_of(cell) == "command train.py cold cgroup ram=none A=1"


def test_the_pictures_of_commands(tmp_path: Path) -> None:
    run = Measured(two(), folder=tmp_path)
    for result in run.results:
        write_command_samples(tmp_path, result)
    (figure,) = timeline.draw_timelines(run)
    texts = [each.get_text() for each in figure.texts]
    assert any("Memory over time while running" in text for text in texts)
    first = figure.axes[0]
    tips = [str(line.get_gid()) for line in first.lines]
    assert "tip:epoch 1 · at 1.00 s, a line of output" in tips
    curves = [numpy.asarray(line.get_ydata()) for line in first.lines]
    highest = max(float(curve.max()) for curve in curves if len(curve) > 2)
    assert highest == pytest.approx(957 / 1024, rel=0.01)
    (cut,) = [line for line in figure.axes[1].lines if line.get_label() == "cut off"]
    assert numpy.asarray(cut.get_xdata())[0] == pytest.approx(2.0)
    bars = draw_peaks(run)
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
    text = of_document(list(survival(Measured(sweep()))))
    assert text.splitlines()[2] == "| command | no limit | 800 MiB | 792 MiB |"
    assert "the first process of the command ended" in text
    assert "model" not in text


def test_commands_of_one_run_share_a_matrix() -> None:
    other = [
        replace(result, cell=replace(result.cell, strategy="serve.py", command=("serve",)))
        for result in sweep()
    ]
    (matrix,) = Measured([*sweep(), *other]).matrices
    assert matrix.labels == ["train.py", "serve.py"]


def test_a_floor_of_a_command() -> None:
    (floor,) = floors(sweep())
    assert floor.bytes == 800 * MIB
    text = of_document(list(floors_table(Measured(sweep()))))
    assert text.splitlines()[2] == (
        "| command | RAM floor GiB | one step below | at the floor ready | at 1.1x ready |"
        " no limit ready |"
    )
    assert "the command succeeded three times" in text
    assert "import" not in text


def test_a_record_of_a_command_can_be_read_again() -> None:
    from dataclasses import asdict

    result = make_killed()
    line = json.dumps(asdict(result)).encode()
    assert parse(Result, line, "test") == result


AT_PEAK = Sample(
    1, 6 * MIB, 2 * MIB, 0, 4 * MIB, 0, 0, 0, 160 * MIB, 9 * MIB, cgroup_shmem_bytes=4 * MIB,
    locked_bytes=MIB, freed_bytes=3 * MIB, kernel_bytes=150 * MIB, kernel_reclaimable_bytes=10 * MIB,
    socket_bytes=7 * MIB, slab_bytes=30 * MIB, page_tables_bytes=100 * MIB,
)  # fmt: skip


def test_the_kinds_of_memory_at_the_peak_are_a_table() -> None:
    text = markdown([make_ran(ran=replace(RAN, at_peak=AT_PEAK))])
    assert table_under(text, "Kinds of memory at the peak")[2] == [
        "2.0", "4.0", "1.0", "140.0", "7.0", "100.0", "20.0", "4.0", "3.0", "10.0"
    ]  # fmt: skip
    assert "Kinds of memory" not in markdown([make_ran()])
