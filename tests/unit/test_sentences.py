"""A run in words: every sentence as it is printed."""

from dataclasses import replace

from factories import LIMIT, SCRIPTS, make_cell, make_result, make_skipped, mixed_run, notebook_run
from sweeps import a_sweep
from test_floors_report import a_search

from weighin.report.rows import series
from weighin.report.sentences import paragraphs
from weighin.result import Faults, Outcome

GIB = 1024**3


def test_three_of_six_work() -> None:
    assert paragraphs(series(notebook_run())) == [
        "With 8 GiB of RAM, 3 of 6 strategies load gpt2-xl: mmap_assign, per_param and streaming."
        " The fastest is mmap_assign, ready in 5.44 s."
        " The smallest peak RSS is that of streaming: 6.750 GiB, 1.03 x the model above the import."
        " Killed by the kernel for lack of memory: baseline, sequential and meta_copy."
    ]


def test_each_limit_is_a_paragraph() -> None:
    results = [
        make_result(make_cell(name, ram_limit_bytes=limit))
        for limit in (LIMIT, None)
        for name in ("baseline", "streaming")
    ]
    first, second = paragraphs(series(results))
    assert first == (
        "With 8 GiB of RAM, 1 of 2 strategies loads gpt2-xl: streaming. streaming is ready in"
        " 7.30 s. Killed by the kernel for lack of memory: baseline."
    )
    assert second.startswith(
        "Without a RAM limit, all 2 strategies load gpt2-xl: baseline and streaming."
    )


def test_what_sets_two_settings_apart_is_said() -> None:
    results = [make_result(), make_result(make_cell(cache="warm"))]
    assert [text.partition(", the only")[0] for text in paragraphs(series(results))] == [
        "With 8 GiB of RAM (cold page cache)",
        "With 8 GiB of RAM (warm page cache)",
    ]


def test_one_cell() -> None:
    assert paragraphs(series([make_result()])) == [
        "With 8 GiB of RAM, the only strategy that was tried, mmap_assign, works."
        " mmap_assign is ready in 5.44 s."
    ]
    assert paragraphs(series([make_result(make_cell("baseline"))])) == [
        "With 8 GiB of RAM, the only strategy that was tried, baseline, does not work."
        " Killed by the kernel for lack of memory: baseline."
    ]


def test_nothing() -> None:
    assert paragraphs(series([])) == ["No cells were measured."]
    assert paragraphs(series([make_skipped()])) == [
        "With 8 GiB of RAM, nothing was run. Not run: direct_cuda."
    ]


def test_what_thrashes_is_said() -> None:
    results = a_sweep()
    said = paragraphs(series(results), results)
    thrashing = "Thrashing (the same pages are read again and again): mmap_assign."
    assert [text.endswith(thrashing) for text in said] == [False] * 4 + [True]


def test_a_model_of_80_mib_under_1_gib_is_not_said_to_thrash() -> None:
    results = [
        make_result(
            make_cell(name, ram_limit_bytes=GIB),
            (("import", 1.6, 0.19, 0.11), ("read", 1.0, 0.3, 0.11), ("touch", 0.1, 0.3, 0.11)),
            model_bytes=80 * 1024**2,
            faults=Faults(1, 1, 80 * 256),
        )
        for name in ("streaming", "baseline")
    ]
    (text,) = paragraphs(series(results), results)
    assert "again and again" not in text


def test_a_search_for_floors_says_the_floors() -> None:
    results = a_search()
    assert paragraphs(series(results), results) == [
        "mmap_assign needs the least RAM: 256 MiB (0.06 x the model), where it thrashes. Next: streaming"
        " 4300 MiB (1.05 x the model). No floor was found for broken.",
        "Without a RAM limit, 2 of 3 strategies load gpt2-xl: streaming and mmap_assign."
        " The fastest is streaming, ready in 2.00 s. The smallest peak RSS is that of streaming:"
        " 1.000 GiB, 0.19 x the model above the import. Killed by the kernel for lack of memory:"
        " broken.",
    ]


def test_every_outcome_is_named() -> None:
    (text,) = paragraphs(series(mixed_run()))
    assert text == (
        "With 8 GiB of RAM, 1 of 5 strategies loads gpt2-xl: streaming."
        " streaming is ready in 7.30 s."
        " Killed by the kernel for lack of memory: baseline."
        " Timed out: sequential."
        " Failed with an error: broken."
        " Produced wrong weights: lossy."
        " Not run: direct_cuda."
    )


def test_repeats_that_overlap_name_no_winner_alone() -> None:
    results = []
    for repeat, (quick, slow) in enumerate([(1.0, 1.5), (2.0, 2.5), (3.0, 3.5)]):
        for name, ready_s in (("streaming", quick), ("per_param", slow)):
            cell = make_cell(name, repeat=repeat)
            results.append(make_result(cell, ready_ns=int(ready_s * 1e9)))
    (text,) = paragraphs(series(results))
    assert "The fastest is streaming, ready in 2.00 s (the times of its repeats overlap with per_param)." in text  # fmt: skip


def test_a_strategy_that_works_only_sometimes_does_not_count_as_working() -> None:
    results = [
        make_result(make_cell("streaming")),
        make_result(make_cell("streaming", repeat=1), outcome=Outcome.TIMEOUT),
        make_result(make_cell("per_param")),
    ]
    (text,) = paragraphs(series(results))
    assert text.startswith("With 8 GiB of RAM, 1 of 2 strategies loads gpt2-xl: per_param.")
    assert text.endswith("The repeats ended differently: streaming (ok 1, timeout 1).")


def test_a_long_sweep_is_cut() -> None:
    results = [make_result(make_cell(ram_limit_bytes=n * GIB)) for n in range(8, 28)]
    said = paragraphs(series(results))
    assert len(said) == 17
    assert said[-1] == "4 more settings are in the table."


def test_several_formats_of_a_strategy_are_variants() -> None:
    results = [
        make_result(make_cell("streaming", format=fmt), SCRIPTS["streaming"])
        for fmt in ("pt", "safetensors")
    ]
    (text,) = paragraphs(series([replace(result) for result in results]))
    assert text.startswith("With 8 GiB of RAM, all 2 strategy variants load gpt2-xl: streaming pt and streaming safetensors.")  # fmt: skip
