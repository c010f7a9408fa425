"""With a GPU: the allocator's figures are the arithmetic of the model, and a limit is a limit."""

import pytest
from typed import CommandLine

from weighin.records import run_folder
from weighin.result import Outcome, Result

pytestmark = [pytest.mark.cuda, pytest.mark.slow]

MODEL_BYTES = 163_037_184 * 4 + 12 * 1024**2 * 4  # gpt2-small: parameters, and a mask a layer
LARGEST_BYTES = 50_257 * 768 * 4


def measured(command: CommandLine, options: str) -> dict[str, Result]:
    bench = "bench gpt2-small --device cuda --isolation process --out run"
    ended = command.run(f"{bench} {options}")
    assert ended.code == 0, ended.err
    results = run_folder.read(command.folder / "run").results
    return {result.cell.strategy: result for result in results}


def test_the_notebooks_methods_request_what_arithmetic_says(command: CommandLine) -> None:
    results = measured(command, "-s baseline,sequential,meta_copy,mmap_assign,per_param")
    assert {result.outcome for result in results.values()} == {Outcome.OK}
    requested = {name: result.peaks.cuda_requested_bytes for name, result in results.items()}
    assert requested == {
        "baseline": 2 * MODEL_BYTES,
        "sequential": MODEL_BYTES + LARGEST_BYTES,
        "meta_copy": 2 * MODEL_BYTES,
        "mmap_assign": MODEL_BYTES,
        "per_param": MODEL_BYTES,
    }
    for result in results.values():
        peaks = result.peaks
        assert peaks.cuda_requested_bytes <= peaks.cuda_allocated_bytes  # type: ignore[operator]
        assert peaks.cuda_allocated_bytes <= peaks.cuda_reserved_bytes  # type: ignore[operator]
        assert (peaks.cuda_driver_sampled_bytes or 0) > 0


def test_a_limit_ends_what_needs_two_copies(command: CommandLine) -> None:
    results = measured(command, "-s baseline,mmap_assign --set vram=1g")
    assert results["baseline"].outcome is Outcome.CUDA_OOM
    assert results["baseline"].last_phase == "read"
    assert "Allocated memory" in results["baseline"].allocator_summary
    assert results["mmap_assign"].outcome is Outcome.OK


def test_page_locked_copies_are_seen(command: CommandLine) -> None:
    (command.folder / "suite.yaml").write_text(
        "models: gpt2-small\ndevice: cuda\nisolation: process\n"
        "strategies: [sequential, {name: sequential, options: {pinned: true}}]\n"
    )
    ended = command.run("bench --suite suite.yaml --out run")
    assert ended.code == 0, ended.err
    pageable, pinned = run_folder.read(command.folder / "run").results
    assert pageable.peaks.pinned_bytes == 0
    assert (pinned.peaks.pinned_bytes or 0) >= LARGEST_BYTES
