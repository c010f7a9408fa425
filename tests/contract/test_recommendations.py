"""What ``weighin recommend`` chooses, in which order and why, without and with records of published runs.

The predictions are kept ones, so that the answers depend on no machine. The printed code is not kept:
it may be written in another way.
"""

from pathlib import Path
from typing import Any

import outside
import pytest
from outside import weighin
from snapshots import Compare

LIMITS = {
    "gpt2-medium": "none 4g 3g 2g 1g", "gpt2-large": "none 8g 5g 4g 2g",
    "gpt2-xl": "none 16g 8g 6840m 6450m 3g", "llama-8b --dtype bf16": "none 40g 20g 16g 8g",
    "qwen3-0.6b --dtype bf16": "none 4g 2g 1500m 1g", "gpt2-xl --allow none": "none 8g 3g",
    "gpt2-xl --allow packages": "8g", "gpt2-xl --disk 100MB/s --disk-latency 5ms": "none 8g",
}  # fmt: skip
"""The limits of RAM under which each model is asked for."""

MEASURED = {
    "gpt2-large-layouts": ("gpt2-large", "none 4g"),
    "gpt2-medium-floors": ("gpt2-medium", "none 4g 3520m 2g 500m"),
    "gpt2-medium-floors-again": ("gpt2-medium", "none 4g 2g"),
    "gpt2-medium-floors-cgroup": ("gpt2-medium", "none 4g 2g"),
    "gpt2-xl-16GiB": ("gpt2-xl", "none 16g 8g"),
    "gpt2-xl-8GiB": ("gpt2-xl", "none 16g 8g 7g"),
    "gpt2-xl-floors": ("gpt2-xl", "none 14g 8g 7g 1g"),
    "gpt2-xl-survival": ("gpt2-xl", "none 16g 8g 4g 1g"),
}
"""Runs, with their model and the limits for which its records are asked."""


def told(advice: Any) -> str:
    """Return the answer as lines: what is recommended, and each strategy with all that is said of it."""
    lines = [f"recommended: {advice['recommended']}"]
    for one in advice["candidates"]:
        seconds = [
            "-" if one[key] is None else f"{one[key]:.3f} s" for key in ("ready_s", "noise_s")
        ]
        sizes = [str(one[key]) for key in ("need_bytes", "margin_bytes", "cuda_bytes")]
        lines.append(
            f"  {one['strategy']} {one['format']}: {one['verdict']}: {one['why']}"
            f" | {' '.join(sizes)} | {' '.join(seconds)}"
            f" | {one['memory_from']} {one['time_from']} | {', '.join(one['asks'])}"
        )
    lines += [f"  note: {note}" for note in advice["notes"]]
    return "".join(f"{line}\n" for line in lines)


def asked(folder: Path, words: str, limits: str, *more: str) -> str:
    """Return the answers for a model under each limit; a recommended strategy has code that compiles."""
    texts = []
    for limit in limits.split():
        printed = weighin(folder, "recommend", *words.split(), "--ram", limit, *more, "--json", "-")
        advice = printed.data
        assert printed.code == (not advice["recommended"])
        assert bool(advice["code"]) is bool(advice["recommended"])
        compile(advice["code"], "code", "exec")
        texts.append(f"--ram {limit}\n{told(advice)}")
    return "\n".join(texts)


@pytest.mark.parametrize("words", LIMITS)
def test_what_is_recommended_without_records(words: str, tmp_path: Path, same: Compare) -> None:
    with outside.machine_of("gpt2-xl-8GiB"):
        text = asked(tmp_path, words, LIMITS[words])
    name = words.replace("--", "").replace("/", "").replace(" ", "-")
    same(f"recommend/{name}.txt", text)


@pytest.mark.parametrize("run", MEASURED)
def test_what_is_recommended_with_the_records_of_a_run(
    run: str, tmp_path: Path, same: Compare
) -> None:
    model, limits = MEASURED[run]
    outside.published(run, tmp_path)
    with outside.machine_of(run):
        text = asked(tmp_path, model, limits, "--results", run)
    assert "measured measured" in text
    same(f"recommend/after-{run}.txt", text)


def test_the_json_of_an_answer(tmp_path: Path, same: Compare) -> None:
    words = ("gpt2-xl", "--ram", "8g", "--json", "-")
    with outside.machine_of("gpt2-xl-8GiB"):
        advice = weighin(tmp_path, "recommend", *words).data
    advice["code"] = "..."
    advice["candidates"] = advice["candidates"][:2]
    same("verbs/recommend.txt", outside.flat(advice))
