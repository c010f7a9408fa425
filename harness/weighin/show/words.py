"""The words of reports: how a setting, an outcome, a machine and the kinds of measurements are called."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from weighin.cell import FORWARD, NONE
from weighin.records.machine import policy_of, settings_of
from weighin.records.metrics import COLUMNS, grouped
from weighin.records.series import DIMENSIONS, Measured, Row, split, values, varying
from weighin.records.verdict import MOST_REREAD, REFAULTS_PER_MODEL, SLOWDOWN, STALLED_SHARE
from weighin.result import NOT_DROPPED, Outcome, Result
from weighin.text import few
from weighin.units import format_bytes, format_exact

# The keys of a record's environment that a caption prints, each with the text before its value.
_MACHINE: Final = {"machine": "", "cpu": "", "kernel": "Linux ", "cgroup_version": "cgroup v", "torch": "torch "}  # fmt: skip
_PAGE_CACHE: Final = {
    NOT_DROPPED: "checkpoint in the page cache",
    "as found": "page cache as found",
}
_WORDED: Final = {"cache": " page cache", "dtype": "", "ranks": " ranks"}
HEADINGS: Final = {
    "ram_limit_bytes": "RAM limit",
    "vram_limit_bytes": "GPU limit",
    "disk_latency": "disk latency",
}


@dataclass(frozen=True, slots=True)
class Kind:
    """The words and table columns for one operation: a load, a save or a command."""

    doing: str  # as in the title "Peak memory while loading"
    subject: str  # the processes whose memory the plots show
    until: str  # the event up to which the peak is measured
    words: Mapping[str, str]  # nouns and verbs for the sentences of the answer
    figures: tuple[str, ...]  # the keys in ``COLUMNS`` of a table's columns of numbers, in order
    lacks: frozenset[str]  # the keys of a row that are always empty for this operation
    outcome: str  # an explanation of the outcomes
    meanings: Mapping[str, str] = field(default_factory=dict)  # in place of those in ``COLUMNS``
    headings: Mapping[str, str] = field(default_factory=dict)  # in place of those in ``COLUMNS``
    held: tuple[str, str] = ("anon_sampled_bytes", "anonymous")  # the first part of a bar
    cached: str = "file-backed, reclaimable"  # the second part of a bar
    peak: tuple[str, str, str] = ("peak_rss_bytes", "peak RSS", "exact")  # the marker on a bar
    axis: str = "RSS, GiB"
    zero: str = "the load began"  # where the time axis of a timeline begins
    life: str = "Time: for the load until every byte was read"
    lost: str = (  # the signs of thrashing
        f"waited for memory for {STALLED_SHARE:.0%} of the time or more, or read at least"
        f" {REFAULTS_PER_MODEL:.0%} of the model again and took at least {SLOWDOWN:g}x the time without"
        f" a limit, or read more than {MOST_REREAD:g}x the model again"
    )
    floor: str = (
        "RAM floor: the smallest RAM limit, with swap off, under which three of three loads survived and"
        " all weights were right. Under the limit one step below, the load was killed for lack of memory,"
        " thrashed or timed out. x: the time of the load as a multiple of its time without a limit."
    )
    ready: str = "ready: time until every byte was read once, in the median cell."


ABOVE_IMPORT: Final = "above_import_per_model"
BELOW_IMPORT: Final = (
    "Left out: above import x model, because the model is smaller than import torch."
)
# The times of imports are no part of a load, because imports end before a load begins.
BEFORE_LOAD: Final = ("import_s", "import_transformers_s")
OF_USES: Final = (
    "use_s", "use_peak_rss_bytes", "use_most_per_model", "use_anon_per_model", "use_peak_cgroup_bytes",
    "use_peak_cuda_allocated_bytes", "use_child_bytes",
)  # fmt: skip
"""Columns on the use of a loaded model; tables leave them out if all uses were forward passes."""
_OF_MODELS: Final = (
    "load_s", "ready_s", "ready_and_pass_s", "peak_rss_bytes", ABOVE_IMPORT, "anon_sampled_bytes",
    "unreclaimable_sampled_bytes", "peak_cgroup_bytes", "pss_bytes", "sum_of_peaks_bytes",
    "peak_cuda_requested_bytes", "peak_cuda_allocated_bytes", "peak_cuda_reserved_bytes",
    "cuda_driver_sampled_bytes", "peak_pinned_bytes", "written_bytes", "written_files",
)  # fmt: skip
_OF_COMMANDS: Final = (
    "ready_s", "needed_bytes", "peak_cgroup_bytes", "anon_sampled_bytes", "shmem_sampled_bytes",
    "file_sampled_bytes", "exit_code",
)  # fmt: skip
_NOT_OF_MODELS: Final = frozenset(("needed_bytes", "needed_is_sampled", "shmem_sampled_bytes", "exit_code"))  # fmt: skip
_NOT_OF_COMMANDS: Final = frozenset((
    "model", "device", "vram_limit_bytes", "disk", "disk_latency", "ranks", "use", "format", "dtype",
    *({*COLUMNS} - {*_OF_COMMANDS, "unreclaimable_sampled_bytes"}),
))  # fmt: skip
_STRATEGIES: Final = {"what": "strategy", "several": "strategies", "variants": "strategy variants"}

KINDS: Final[Mapping[str, Kind]] = {
    "load": Kind(
        doing="loading",
        subject="the loading process",
        until="every byte was read",
        words={"does": "load", "ready": "ready", "before": "the import"} | _STRATEGIES,
        figures=(*BEFORE_LOAD, *_OF_MODELS, *OF_USES),
        lacks=_NOT_OF_MODELS,
        outcome="ok: every parameter and buffer was compared with the checkpoint, and the model ran once. oom_killed: reported by the kernel's own counter",
    ),
    "save": Kind(
        doing="saving",
        zero="the save began",
        subject="the saving process",
        until="every byte was on the disk",
        words={"does": "save", "ready": "on the disk", "before": "the model in memory"} | _STRATEGIES,
        figures=_OF_MODELS,  # a save has no times of imports, which end before a save begins
        lacks=_NOT_OF_MODELS | {"use", "use_anon_bytes", "use_anon_sampled_bytes", *OF_USES},
        headings={"load_s": "save", "ready_s": "on the disk", ABOVE_IMPORT: "above the model"},
        meanings={
            "ready_s": "save plus the time until every file was synced (fsync)",
            ABOVE_IMPORT: "peak RSS minus the resident set size with the model in memory, divided by the size of all parameters and buffers",
        },
        outcome="ok: the written files were read back from the disk, and every tensor was compared with the model. oom_killed: reported by the kernel's own counter",
    ),
    "command": Kind(
        doing="running",
        subject="all processes of the command",
        until="the command ended",
        words={"does": "succeed", "ready": "done", "before": "", "what": "command", "several": "commands", "variants": "command variants"},
        figures=_OF_COMMANDS,
        lacks=_NOT_OF_COMMANDS,
        headings={"ready_s": "time"},
        held=("unreclaimable_sampled_bytes", "anonymous and shared"),
        cached="page cache, reclaimable",
        peak=("needed_bytes", "need", "at least"),
        axis="memory, GiB",
        zero="the command started",
        life="Time: until the first process of the command ended",
        lost=f"waited for memory for {STALLED_SHARE:.0%} of the time or more",
        floor="RAM floor: the smallest RAM limit, with swap off, under which the command succeeded three times"
        " out of three and did not thrash. Under the limit one step below, the command was killed for lack of"
        " memory, thrashed or timed out. x: the time of the command as a multiple of its time without a limit.",
        ready="ready: time until the command ended, or until its server was ready, in the median cell.",
        meanings={
            "ready_s": "from the start of the command to the end of its first process",
            "anon_sampled_bytes": "sampled maximum of the anonymous memory of all processes",
            "file_sampled_bytes": "sampled maximum of the page cache that is charged to the command, which the kernel can reclaim; without a cgroup, of the mapped files",
            "peak_cgroup_bytes": "highest memory charge of the cgroup of all processes, including the page cache of files that they read first; a peak at the limit does not show that the command needs so much",
        },
        outcome="ok: exit code 0. oom_killed: the kernel killed at least one process for lack of memory, by its own counter. command_failed: another exit code, or a signal",
    ),
}  # fmt: skip


def kinds_of(rows: Sequence[Row]) -> list[Kind]:
    """Return the ``Kind`` of each operation in these rows; without rows, the kind of loads."""
    names = {row["operation"] for row in rows} or {"load"}
    return [kind for name, kind in KINDS.items() if name in names]


def kind_of(rows: Sequence[Row]) -> Kind:
    """Return the ``Kind`` of the first row's operation; without rows, the kind of loads."""
    return KINDS[rows[0]["operation"] if rows else "load"]


def plain(text: str) -> str:
    """Return a text as one line of printable characters; error messages may contain any others."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def scaled(value: float | None, scale: float | None, digits: int) -> str:
    """Return ``value / scale`` as text; "-" without a value, or if the scale is None or 0."""
    return "-" if value is None or not scale else f"{value / scale:.{digits}f}"


def size(value: int | None) -> str:
    return format_exact(int(value), " ") if value else "none"


def setting(name: str, row: Row) -> str:
    """Return one setting of a row as text for a column, such as "8 GiB" for a RAM limit."""
    value = row[name]
    return size(value) if name.endswith("_limit_bytes") else plain(str(value or "-"))


def dimension(name: str, value: Any, model_bytes: int | None = None) -> str:
    """Return one setting of a measurement as text for a caption: "RAM limit 8 GiB", "no GPU limit"."""
    if name == "operation":
        return KINDS[value].doing
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


def ending(row: Mapping[str, Any]) -> str:
    """Return a row's outcome, with the last phase if the row ended early: "oom_killed in load"."""
    is_whole = row["outcome"] in {Outcome.OK, Outcome.SKIPPED, Outcome.WRONG_WEIGHTS}
    phase = None if is_whole else row["last_phase"]
    return plain(f"{row['outcome']} in {phase}" if phase else str(row["outcome"]))


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
        pairs = zip(names, found, strict=True)
        yield " · ".join(dimension(name, value, model_size(group)) for name, value in pairs), group


def doing(rows: Sequence[Row]) -> str:
    """Return what the measurements did: "loading", "saving", or "loading and saving"."""
    return " and ".join(kind.doing for kind in kinds_of(rows))


def title(rows: Sequence[Row]) -> str:
    """Return the title of a report: "Loading gpt2-xl", "Running train.py, serve.py"."""
    named = "strategy" if "model" in kind_of(rows).lacks else "model"
    names = ", ".join(values(rows, named)) or "nothing"
    return plain(f"{doing(rows).capitalize()} {names}")


def shared(run: Measured, without: Sequence[str] = (), rows: Sequence[Row] | None = None) -> str:
    """Return one line: the settings that ``rows`` (or all of the run) share, the machine, the days and the commit."""
    rows = run.rows if rows is None else rows
    if not rows:
        return "No cells were measured."
    first = rows[0]
    changing = {*varying(rows), *without, *kind_of(rows).lacks}
    if first["operation"] != "save":  # most measurements are loads, and commands have labels
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
    about = machine([result.environment for result in run.results])
    return " · ".join([*words, *about, code(run.results)])


def code(results: Sequence[Result]) -> str:
    """Return when and with what was measured: "measured 2026-11-23 with weighin commit d71778a29d"."""
    measured = [result for result in results if result.outcome is not Outcome.SKIPPED] or results
    made = [(result.environment, result.started_at) for result in measured]
    return f"measured {when_and_what(made)}"


def when_and_what(made: Sequence[tuple[Mapping[str, Any], str]]) -> str:
    """Return days and commits as text; ``made`` has each measurement's environment and start time."""
    commits: dict[str, None] = {}
    for environment, _ in made:
        commit = str(environment.get("git_commit") or "")[:10]  # as weighin compare does
        changed = " with changes" if commit and environment.get("git_dirty") else ""
        commits[f"{commit or 'unknown'}{changed}"] = None
    days = sorted({day[:10] for _, day in made} - {""})
    when = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "on an unknown day"
    return f"{when} with weighin commit{'s' * (len(commits) > 1)} {', '.join(commits)}"


def machine(environments: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return texts for those facts about machine and software that are equal in all measurements."""
    words = []
    for key, before in _MACHINE.items():
        found = {str(one[key]) for one in environments if one and one.get(key)}
        if len(found) == 1:
            value = found.pop()
            is_named = before.strip() and value.startswith(before.strip())
            words.append(value if is_named else before + value)
    return words


def settings(results: Sequence[Result]) -> dict[str, list[str]]:
    """Return each recorded setting of machine and software; where results differ, all its values."""
    seen: dict[str, dict[str, None]] = {}
    for result in results:
        for name, value in settings_of([result.environment]).items():
            # A missing value is no difference, because a skipped measurement lacks some settings.
            if name.startswith("releases."):  # those of --with, which differ on purpose
                continue
            if value is not None and not (name == "threads" and result.cell.ranks > 1):
                seen.setdefault(name, {})[str(value)] = None
    return {name: [*found] for name, found in seen.items()}


def warnings(run: Measured) -> list[str]:
    """Return the warnings of a run: about records.jsonl, then about machines, then about measurements."""
    found = list(run.warnings)
    differing = [
        f"{name} ({', '.join(several)})"
        for name, several in settings(run.results).items()
        if len(several) > 1 and (name == "git_commit" or policy_of(name, {}) != "ignore")
    ]
    if differing:
        found.append(
            "the measurements were made on different machines or with different software:"
            f" {'; '.join(differing)}. Compare memory figures with care; do not compare times"
        )
    said = [(" ".join(text.split()), one.cell.id) for one in run.results for text in one.warnings]
    for text, same in grouped(said, lambda one: one[0]).items():
        found.append(f"{text} ({few([cell for _, cell in same])})")
    return found


def notes(run: Measured) -> list[str]:
    """Return what a reader of a table of results must know of this run's figures."""
    lines = []
    if any(row["outcome"] != Outcome.OK for row in run.rows):
        lines.append(
            "Not ok: the figures are the last readings before the end, and not the memory that a load needs."
        )
    if (repeats := max((row["repeats"] for row in run.rows), default=0)) > 1:
        lines.append(f"Median of up to {repeats} repeats, with the whole range.")
    builders = {
        one.cell.model.name: one.cell.model.builder.partition(":")[0]
        for one in run.results
        if (one.outcome, one.cell.operation) == (Outcome.OK, "load")
        and one.cell.passes > 0
        and one.cost is not None
        and not any(phase.name == "forward" for phase in one.phases)
    }
    return lines + [
        f"{name}: no forward pass was run, because {module} defines no example_inputs"
        " (docs/models.md): ok means that every weight is right, not that the model runs."
        for name, module in builders.items()
    ]
