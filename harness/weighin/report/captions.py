"""Write the captions of a report: what all measurements have in common, and notes on the numbers."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

from weighin.cell import FORWARD, NONE
from weighin.records.machine import policy_of, settings_of
from weighin.report import operations
from weighin.report.rows import DIMENSIONS, Row, has, is_below_import, split, values, varying
from weighin.result import NOT_DROPPED, Outcome, Result
from weighin.text import few
from weighin.units import format_bytes, format_exact

# The keys of a record's environment that a caption prints, each with the text before its value.
_MACHINE: Final = {"machine": "", "cpu": "", "kernel": "Linux ", "cgroup_version": "cgroup v", "torch": "torch "}  # fmt: skip

_COMMIT_DIGITS: Final = 10  # as many as `weighin compare` shows
_PAGE_CACHE: Final = {
    NOT_DROPPED: "checkpoint in the page cache",
    "as found": "page cache as found",
}
_WORDED: Final = {"cache": " page cache", "dtype": "", "ranks": " ranks"}
BELOW_IMPORT: Final = (
    "Left out: above import x model, because the model is smaller than import torch."
)


def size(value: int | None) -> str:
    """Return a memory limit as text for a sentence: "8 GiB", "6500 MiB"."""
    return re.sub(r"(?<=\d)(?=[A-Z])", " ", format_exact(int(value))) if value else "none"


def dimension(name: str, value: Any, model_bytes: int | None = None) -> str:
    """Return one setting of a measurement as text for a caption: "RAM limit 8 GiB", "no GPU limit"."""
    if name == "operation":
        return operations.KINDS[value].doing
    if name == "model":
        return f"{value} ({format_bytes(model_bytes)})" if model_bytes else str(value)
    if name in ("ram_limit_bytes", "vram_limit_bytes"):
        whose = "RAM" if name == "ram_limit_bytes" else "GPU"
        return f"no {whose} limit" if value is None else f"{whose} limit {size(value)}"
    if value in _PAGE_CACHE:
        return _PAGE_CACHE[value]
    if name in _WORDED:
        return f"{value}{_WORDED[name]}" if value else "1 rank"
    words = name.replace("_", " ")
    return f"{words} {value}" if value else f"no {words}"


def has_uses(rows: Sequence[Row]) -> bool:
    """Return whether a loaded model was used for more than forward passes, as in a training step."""
    return not {*values(rows, "use")} <= {FORWARD, NONE, None}


def model_size(rows: Sequence[Row]) -> int | None:
    """Return the size of the model in bytes; None if the rows have several sizes or none."""
    sizes: set[int | None] = {*values(rows, "model_bytes")} - {None}
    return sizes.pop() if len(sizes) == 1 else None


def apart(rows: Sequence[Row], names: Sequence[str]) -> Iterator[tuple[str, list[Row]]]:
    """Split the rows by the columns ``names``, and yield the title and the rows of each group."""
    for found, group in split(rows, names).items():
        size = model_size(group)
        pairs = zip(names, found, strict=True)
        yield " · ".join(dimension(name, value, size) for name, value in pairs), group


def shared(rows: Sequence[Row], results: Sequence[Result], without: Sequence[str] = ()) -> str:
    """Return one line: the settings that all rows share, then the machine, the days and the commit."""
    if not rows:
        return "No cells were measured."
    first = rows[0]
    changing = {*varying(rows), *without, *operations.first_of(rows).lacks}
    if first["operation"] in operations.UNNAMED:
        changing.add("operation")
    if not has_uses(rows):
        changing.add("use")
    words = [
        dimension(name, first[name], model_size(rows))
        for name in DIMENSIONS
        if name not in changing
        and len(values(rows, name)) == 1
        and (first[name] or name == "ram_limit_bytes")
    ]
    return " · ".join([*words, *machine([result.environment for result in results]), code(results)])


def code(results: Sequence[Result]) -> str:
    """Return when and with what was measured: "measured 2026-11-23 with weighin commit d71778a29d"."""
    measured = [result for result in results if result.outcome is not Outcome.SKIPPED] or results
    made = [(result.environment, result.started_at) for result in measured]
    return f"measured {when_and_what(made)}"


def when_and_what(made: Sequence[tuple[Mapping[str, Any], str]]) -> str:
    """Return days and commits as text; ``made`` has each measurement's environment and start time."""
    commits = list(dict.fromkeys(_commit(environment) for environment, _ in made))
    days = sorted({day[:10] for _, day in made} - {""})
    when = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "on an unknown day"
    noun = "commit" if len(commits) == 1 else "commits"
    return f"{when} with weighin {noun} {', '.join(commits)}"


def _commit(environment: Mapping[str, Any]) -> str:
    commit = environment.get("git_commit")
    changed = " with changes" if environment.get("git_dirty") else ""
    return f"{str(commit)[:_COMMIT_DIGITS]}{changed}" if commit else "unknown"


def doing(rows: Sequence[Row]) -> str:
    """Return what the measurements did: "loading", "saving", or "loading and saving"."""
    return " and ".join(kind.doing for kind in operations.of(rows)) if rows else ""


def title(rows: Sequence[Row]) -> str:
    """Return the title of a report: "Loading gpt2-xl", "Running train.py, serve.py"."""
    named = "strategy" if "model" in operations.first_of(rows).lacks else "model"
    names = ", ".join(values(rows, named)) or "nothing"
    return f"{doing(rows).capitalize() or 'Loading'} {names}"


def ending(row: Mapping[str, Any]) -> str:
    """Return a row's outcome, with the last phase if the row ended early: "oom_killed in load"."""
    is_whole = row["outcome"] in {Outcome.OK, Outcome.SKIPPED, Outcome.WRONG_WEIGHTS}
    phase = None if is_whole else row["last_phase"]
    return f"{row['outcome']} in {phase}" if phase else str(row["outcome"])


def machine(environments: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return texts for those facts about machine and software that are equal in all measurements."""
    described = [environment for environment in environments if environment]
    words = []
    for key, before in _MACHINE.items():
        values = {str(environment[key]) for environment in described if environment.get(key)}
        if len(values) == 1:
            value = values.pop()
            words.append(value if value.startswith(before.strip() or "\0") else before + value)
    return words


def _mixed_machines(results: Sequence[Result]) -> list[str]:
    """Return a warning if measurements were made on different machines or with different software."""
    seen: dict[str, dict[str, None]] = {}
    compared = cache(lambda name: name == "git_commit" or policy_of(name, {}) != "ignore")
    for result in results:
        for name, value in settings_of([result.environment]).items():
            is_set_by_ranks = name == "threads" and result.cell.ranks > 1
            # A missing value is no difference, because a skipped measurement lacks some settings.
            if value is not None and compared(name) and not is_set_by_ranks:
                seen.setdefault(name, {})[str(value)] = None
    differing = [
        f"{name} ({', '.join(values)})" for name, values in seen.items() if len(values) > 1
    ]
    if not differing:
        return []
    return [
        "the measurements were made on different machines or with different software:"
        f" {'; '.join(differing)}. Compare memory figures with care; do not compare times"
    ]


def warnings(results: Sequence[Result], of_the_file: Sequence[str]) -> list[str]:
    """Return the warnings of a run: about records.jsonl, then about machines, then about measurements."""
    cells_of: dict[str, list[str]] = {}
    for result in results:
        for warning in result.warnings:
            cells_of.setdefault(" ".join(warning.split()), []).append(result.cell.id)
    of_cells = [f"{text} ({few(cells)})" for text, cells in cells_of.items()]
    return [*of_the_file, *_mixed_machines(results), *of_cells]


def note_figures(rows: Sequence[Row]) -> list[str]:
    """Return lines that explain the figures of these rows and how accurate each figure is."""
    if not rows:
        return []
    kinds = operations.of(rows)
    left_out = operations.KINDS["load"] if is_below_import(rows) else None
    exact, *sampled = dict.fromkeys(line for kind in kinds for line in kind.accuracy)
    lines = [
        exact,
        *(BELOW_IMPORT if kind is left_out else kind.computed for kind in kinds if kind.computed),
        *sampled,
        *(line for kind in kinds for line in kind.times),
        "Not ok: the figures are the last readings before the end, and not the memory that a load needs.",
    ]
    if has(rows, "peak_cuda_allocated_bytes"):
        lines[1:1] = [
            "Exact, the allocator's peaks during the load: CUDA requested (by tensors), allocated"
            " (requests rounded up to blocks), reserved (from the driver).",
            "Sampled: CUDA driver, the driver's own figure, which includes the CUDA context.",
            "Exact: pinned, the peak of the allocator of page-locked host memory.",
        ]
    if has(rows, "ranks"):
        lines[1:1] = [
            "Exact: cgroup peak, of all ranks together, counts each page once. Exact when all ranks were"
            " ready: PSS of all ranks.",
            "Misleading: sum of peaks adds the ranks' peak RSS, and so counts shared pages once per rank;"
            " other tools print this sum. peak RSS, load and ready are those of the rank with the largest value.",
        ]
    if has_uses(rows):
        lines.append(
            "use: time of the use after the load; peak RSS of use: exact. most in use (sampled) and"
            " after use (exact): anonymous memory minus the anonymous memory after the imports."
        )
    if any(_is_above_its_limit(row) for row in rows):
        lines.append(
            "A peak RSS above the RAM limit: pages of libraries and files that were in memory before count"
            " in the RSS, and the kernel charges them to the cgroup that read them first."
        )
    if (repeats := max(row["repeats"] for row in rows)) > 1:
        lines.append(f"Median of up to {repeats} repeats, with the whole range.")
    return lines


def _is_above_its_limit(row: Row) -> bool:
    limit, peak = row["ram_limit_bytes"], row["peak_rss_bytes"]
    return row["outcome"] == Outcome.OK and bool(limit and peak) and peak > limit


def note_unused(results: Sequence[Result]) -> list[str]:
    """Return a note for each model whose requested forward pass was not run."""
    builders = {
        result.cell.model.name: result.cell.model.builder.partition(":")[0]
        for result in results
        if result.outcome is Outcome.OK and result.cell.operation == "load" and _is_unused(result)
    }
    return [
        f"{name}: no forward pass was run, because {module} defines no example_inputs"
        " (docs/models.md): ok means that every weight is right, not that the model runs."
        for name, module in builders.items()
    ]


def _is_unused(result: Result) -> bool:
    is_called = any(phase.name == "forward" for phase in result.phases)
    return result.cell.passes > 0 and result.cost is not None and not is_called
