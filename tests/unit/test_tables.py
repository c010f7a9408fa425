"""The exact texts of a run in markdown, and its figures as CSV."""

import csv
import io
from collections.abc import Sequence
from dataclasses import replace

from factories import LIMIT, make_cell, make_result, make_skipped, mixed_run

from weighin.report.captions import size
from weighin.report.tables import write_summary
from weighin.report.writing import write_markdown
from weighin.result import IMPORT_TRANSFORMERS, Outcome, Peaks, Result

GIB = 1024**3


def markdown(results: Sequence[Result], warnings: Sequence[str] = ()) -> list[str]:
    file = io.StringIO()
    write_markdown(results, file, warnings=warnings)
    return file.getvalue().splitlines()


def summary(results: Sequence[Result]) -> list[dict[str, str]]:
    file = io.StringIO(newline="")
    write_summary(results, file)
    return list(csv.DictReader(io.StringIO(file.getvalue(), newline="")))


def test_names_are_not_read_as_markup_and_repeats_show_their_range() -> None:
    cells = [make_cell("[b]x|y", repeat=repeat) for repeat in range(3)]
    results = [make_result(cell, load_ns=10**9 * (cell.repeat + 1)) for cell in cells]
    assert r"| \[b\]x\|y | ok | 1.60 | 2.00 (1.00..3.00) | 7.30 |" in "\n".join(markdown(results))


def test_what_varies_is_a_column_and_models_and_devices_are_headings() -> None:
    cuda = make_result(make_cell(device="cuda"))
    results = [
        make_result(make_cell(ram_limit_bytes=None)),
        make_result(),
        replace(cuda, peaks=replace(cuda.peaks, cuda_allocated_bytes=GIB)),
    ]
    lines = markdown(results)
    cpu, gpu = lines.index("### device cpu"), lines.index("### device cuda")
    assert lines[cpu + 2].startswith(
        "| strategy | RAM limit | outcome | import s | load s | ready s | peak RSS GiB |"
    )
    assert "CUDA" not in lines[cpu + 2]
    assert [line.split(" | ")[1] for line in lines[cpu + 4 : cpu + 6]] == ["none", "8 GiB"]
    assert lines[gpu + 2].endswith("| cgroup peak GiB | CUDA allocated GiB |")
    assert lines[gpu + 4].endswith("| 6.820 | 1.000 |")


def test_the_markdown_report_of_a_run_in_which_much_went_wrong() -> None:
    lines = markdown(mixed_run(), warnings=["line 7 is incomplete"])
    assert lines[:8] == [
        "# Loading gpt2-xl",
        "",
        "gpt2-xl (6.290 GiB) · device cpu · RAM limit 8 GiB · float32 · cold page cache · isolation "
        "docker · testbench · Example CPU · Linux 6.18.0 · cgroup v2 · torch 2.13.0 · measured 2025-01-02 with weighin commit unknown",
        "",
        "## All results",
        "",
        "| strategy | outcome | import s | load s | ready s | peak RSS GiB | above import x model | "
        "anonymous (sampled) GiB | cgroup peak GiB |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    assert lines[11] == "| direct_cuda | skipped | - | - | - | - | - | - | - |"
    bad = lines.index("## Not ok")
    assert lines[bad : bad + 12] == [
        "## Not ok",
        "",
        "- baseline: oom_killed: killed by the kernel for lack of memory in phase 'read'",
        "- sequential: timeout in copy: not ready after 600 s",
        "- direct_cuda: skipped: needs the device cuda",
        r"- broken: strategy_failed in read: KeyError: 'h.0.attn\|bias'",
        "- lossy: wrong_weights: h.0.attn.mask differs from the checkpoint",
        "",
        "## Warnings",
        "",
        "- line 7 is incomplete",
        "",
    ]


def test_messages_of_other_peoples_code_stay_on_one_line() -> None:
    result = make_result(
        outcome=Outcome.STRATEGY_FAILED, message="\x1b[31m<b>\n__init__ *x* `y`\n" + 400 * "z"
    )
    (line,) = [line for line in markdown([result]) if line.startswith("- mmap_assign: ")]
    start = r"- mmap_assign: strategy_failed: \[31m&lt;b&gt; \_\_init\_\_ \*x\* \`y\` zzz"
    assert line.startswith(start)
    assert line.endswith("z…")


def test_an_empty_run_says_so() -> None:
    assert markdown([]) == ["# Loading nothing", "", "No cells were measured."]
    assert summary([]) == []


def test_the_summary_is_not_rounded_and_leaves_out_what_is_missing() -> None:
    first, second = summary([make_result(), make_skipped()])
    assert first["ram_limit_bytes"] == str(LIMIT)
    assert first["peak_rss_bytes"] == str(make_result().peaks.rss_bytes)
    assert first["load_s"] == "0.44"
    assert first["peak_cuda_allocated_bytes"] == ""
    assert second["peak_rss_bytes"] == second["model_bytes"] == ""
    assert second["message"] == "needs the device cuda"


def test_the_summary_is_safe_to_open_in_a_spreadsheet() -> None:
    for start in ("=", "+", "-", "@", "\t=", "\r=", "\n=", "\uff1d"):
        (row,) = summary([make_result(make_cell(f"{start}cmd"))])
        assert row["strategy"] == f"'{start.strip()}cmd"


def test_a_limit_reads_as_the_user_wrote_it() -> None:
    assert [size(value) for value in (8 * GIB, 6500 * 1024**2, 1000, None)] == [
        "8 GiB", "6500 MiB", "1000 B", "none",
    ]  # fmt: skip


def test_cells_of_two_machines_are_a_warning_in_the_report() -> None:
    other = make_result(make_cell("baseline"), environment={"kernel": "6.1.0", "git_commit": "b"})
    first = make_result(environment={"kernel": "6.18.0", "torch": "2.13.0", "git_commit": "a"})
    lines = markdown([first, other, make_skipped()])
    assert lines[lines.index("## Warnings") + 2] == (
        "- the measurements were made on different machines or with different software: git_commit"
        " (a, b); kernel (6.18.0, 6.1.0). Compare memory figures with care; do not compare times"
    )


def test_where_the_gpu_refused_the_allocators_summary_is_shown() -> None:
    refused = make_result(
        make_cell("baseline", device="cuda", vram_limit_bytes=LIMIT),
        outcome=Outcome.CUDA_OOM,
        message="CUDA out of memory.",
        allocator_summary="| Metric | Cur |\n| `a` | 1 |\n",
    )
    lines = markdown([refused])
    start = lines.index("## baseline ran out of GPU memory: the allocator's summary")
    assert lines[start : start + 6] == [
        "## baseline ran out of GPU memory: the allocator's summary",
        "",
        "```",
        "| Metric | Cur |",
        "| 'a' | 1 |",
        "```",
    ]
    assert "GPU limit 8 GiB" in lines[2]


def test_the_four_figures_of_a_gpu_stand_side_by_side() -> None:
    peaks = Peaks(
        cuda_requested_bytes=GIB, cuda_allocated_bytes=2 * GIB, cuda_reserved_bytes=3 * GIB,
        cuda_driver_sampled_bytes=4 * GIB, pinned_bytes=5 * GIB,
    )  # fmt: skip
    lines = markdown([make_result(make_cell(device="cuda"), peaks=peaks)])
    assert lines[6].endswith(
        "| CUDA requested GiB | CUDA allocated GiB | CUDA reserved GiB | CUDA driver (sampled) GiB"
        " | pinned GiB |"
    )
    assert lines[8].endswith("| 1.000 | 2.000 | 3.000 | 4.000 | 5.000 |")
    assert lines[lines.index("## How to read the figures") :][3:6] == [
        "- Exact, the allocator's peaks during the load: CUDA requested (by tensors), allocated"
        " (requests rounded up to blocks), reserved (from the driver).",
        "- Sampled: CUDA driver, the driver's own figure, which includes the CUDA context.",
        "- Exact: pinned, the peak of the allocator of page-locked host memory.",
    ]


def test_what_cannot_be_reclaimed_is_a_column_where_memory_is_shared() -> None:
    plain = make_result()
    assert "unreclaimable" not in "\n".join(markdown([plain]))
    peaks = replace(plain.peaks, anon_sampled_bytes=GIB, unreclaimable_sampled_bytes=3 * GIB)
    header, _, row = [
        line for line in markdown([replace(plain, peaks=peaks)]) if line.startswith("|")
    ][:3]
    column = [cell.strip() for cell in header.split("|")].index("unreclaimable (sampled) GiB")
    assert row.split("|")[column].strip() == "3.000"
    # The load used shared memory, but none at its maximum: the column would repeat another one.
    same = replace(peaks, unreclaimable_sampled_bytes=GIB)
    assert "unreclaimable" not in "\n".join(markdown([replace(plain, peaks=same)]))


def test_the_import_of_transformers_is_a_column_of_its_own_where_it_was_measured() -> None:
    result = make_result()
    first = replace(result.phases[0], name=IMPORT_TRANSFORMERS, start_ns=10**9, end_ns=3 * 10**9)
    own = replace(result, phases=(first, *result.phases))
    (heads,) = (line for line in markdown([own]) if line.startswith("| strategy |"))
    assert heads.startswith("| strategy | outcome | import s | import transformers s | load s |")
    (row,) = (line for line in markdown([own]) if line.startswith(f"| {result.cell.strategy} |"))
    assert row.split(" | ")[2:4] == ["1.60", "2.00"]
    assert "import transformers s" not in "\n".join(markdown([result]))
    assert "import s" not in "\n".join(
        markdown([replace(own, cell=replace(own.cell, operation="save"))])
    )


def test_a_load_outside_of_a_cgroup_has_no_column_of_its_peak() -> None:
    result = make_result()
    plain = replace(result, peaks=replace(result.peaks, cgroup_bytes=None))
    other = make_result(make_cell("baseline"))
    assert "| cgroup peak GiB |" in "\n".join(markdown([other, plain]))
    assert "cgroup peak GiB" not in "\n".join(markdown([plain]))
