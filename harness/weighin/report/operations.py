"""Define the words and table columns with which reports describe loads, saves and commands.

The other modules of the reports take words and columns from the ``Kind`` of a row's operation. They
test the operation itself only for what one operation alone has, such as uses of a loaded model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from weighin.records.verdict import MOST_REREAD, REFAULTS_PER_MODEL, SLOWDOWN, STALLED_SHARE
from weighin.report.rows import FIGURES, Row

_LOST: Final = (
    f"waited for memory for {STALLED_SHARE:.0%} of the time or more, or read at least"
    f" {REFAULTS_PER_MODEL:.0%} of the model again and took at least {SLOWDOWN:g}x the time without a"
    f" limit, or read more than {MOST_REREAD:g}x the model again"
)
_FLOOR: Final = (
    "RAM floor: the smallest RAM limit, with swap off, under which three of three loads survived and"
    " all weights were right. Under the limit one step below, the load was killed for lack of memory,"
    " thrashed or timed out. x: the time of the load as a multiple of its time without a limit."
)
_FLOOR_ENDS: Final = (
    "(ends): the smallest RAM limit under which three of three loads ended, although they thrashed. Run"
    " weighin floor without --thrashing to find the larger limit under which no load thrashes."
)
_FLOOR_READY: Final = "ready: time until every byte was read once, in the median cell."


@dataclass(frozen=True, slots=True)
class Kind:
    """The words and table columns for one operation: a load, a save or a command.

    Attributes:
        doing: the participle for titles such as "Peak memory while loading".
        subject: the processes whose memory the plots show, for the title of an axis.
        until: the event up to which the peak is measured, for a caption.
        words: nouns and verbs for the sentences of the summary.
        figures: the keys in ``figures.COLUMNS`` of the columns with numbers, in the order of tables.
        headings: headings that replace those in ``figures.COLUMNS``, by the key of the column.
        lacks: the keys of a row whose values are always empty for this operation.
        held: what the left part of a bar shows: its key in rows, and its name.
        cached: the name of what the right part of a bar shows.
        peak: what the marker on a bar shows: its key in rows, and its name.
        peak_accuracy: "exact" if the marker on a bar is exact, "at least" if it is a lower bound.
        marker: the meaning of the marker on a bar, for a caption.
        phase_peak: the name of that peak which a timeline shows for each phase.
        axis: the title of the memory axis of a timeline.
        zero: the event at which the time axis of a timeline begins.
        outside: the process or processes that the sampler observes.
        life: the meaning of the times in a table of survival.
        lost: the signs of thrashing, for the explanation of that verdict.
        floor: the meaning of a RAM floor.
        floor_ends: the meaning of a RAM floor under which a load ends ok, but may thrash.
        floor_ready: the meaning of the times in a table of RAM floors.
        computed: an explanation of the column "above import"; empty without this column.
        times: explanations of the times, one line each.
        accuracy: lines that list which figures are exact and which are sampled.
        meanings: explanations that replace those in ``figures.COLUMNS``, by the key of the column.
        outcome: an explanation of the outcomes.
    """

    doing: str
    subject: str
    until: str
    words: Mapping[str, str]
    figures: tuple[str, ...]
    accuracy: tuple[str, ...]
    outcome: str
    lacks: frozenset[str]
    meanings: Mapping[str, str] = field(default_factory=dict)
    headings: Mapping[str, str] = field(default_factory=dict)
    computed: str = ""
    times: tuple[str, ...] = ()
    held: tuple[str, str] = ("anon_sampled_bytes", "anonymous")
    cached: str = "file-backed, reclaimable"
    peak: tuple[str, str] = ("peak_rss_bytes", "peak RSS")
    peak_accuracy: str = "exact"
    marker: str = "the kernel's exact peak RSS"
    phase_peak: str = "peak RSS"
    axis: str = "RSS, GiB"
    zero: str = "the worker started"
    outside: str = "the worker"
    life: str = "Time: for the load until every byte was read"
    lost: str = _LOST
    floor: str = _FLOOR
    floor_ends: str = _FLOOR_ENDS
    floor_ready: str = _FLOOR_READY


ABOVE_IMPORT: Final = "above_import_per_model"
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
_NOT_OF_MODELS: Final = frozenset(
    ("needed_bytes", "needed_is_sampled", "shmem_sampled_bytes", "exit_code")
)
_USED: Final = frozenset(("use", "use_anon_bytes", "use_anon_sampled_bytes", *OF_USES))
_OF_COMMANDS: Final = (
    "ready_s", "needed_bytes", "peak_cgroup_bytes", "anon_sampled_bytes", "shmem_sampled_bytes",
    "file_sampled_bytes", "exit_code",
)  # fmt: skip
_NOT_OF_COMMANDS: Final = frozenset((
    "model", "device", "vram_limit_bytes", "disk", "disk_latency", "ranks", "use", "format", "dtype",
    *({*FIGURES} - {*_OF_COMMANDS, "unreclaimable_sampled_bytes"}),
))  # fmt: skip
_STRATEGIES: Final = {
    "what": "strategy",
    "several": "strategies",
    "variants": "strategy variants",
    "thrashes": "reads the model again and again",
}
_ACCURACY: Final = (
    "Exact, the kernel's high-water marks: peak RSS, cgroup peak (includes page cache).",
    "Sampled, so short spikes may be missed: anonymous.",
)

_LOAD: Final = Kind(
    doing="loading",
    subject="the loading process",
    until="every byte was read",
    words={"does": "load", "ready": "ready", "before": "the import"} | _STRATEGIES,
    figures=(*BEFORE_LOAD, *_OF_MODELS, *OF_USES),
    lacks=_NOT_OF_MODELS,
    accuracy=_ACCURACY,
    computed="Exact, computed: above import = (peak RSS - RSS after import torch) / the model's size.",
    times=(
        "import: time of import torch, before the load; import transformers: of a model's class.",
        "load: time until the strategy returned; ready: time until every byte was read once.",
    ),
    outcome="ok: every parameter and buffer was compared with the checkpoint, and the model ran once. oom_killed: reported by the kernel's own counter",
)  # fmt: skip
_SAVE: Final = Kind(
    doing="saving",
    subject="the saving process",
    until="every byte was on the disk",
    words={"does": "save", "ready": "on the disk", "before": "the model in memory"} | _STRATEGIES,
    figures=_OF_MODELS,  # a save has no times of imports, which end before a save begins
    lacks=_NOT_OF_MODELS | _USED,
    headings={"load_s": "save", "ready_s": "on the disk", ABOVE_IMPORT: "above the model"},
    accuracy=_ACCURACY,
    computed="Exact, computed: above the model = (peak RSS - RSS with the model loaded) / the model's size.",
    times=("save: time until the strategy returned; on the disk: time until every file was synced (fsync).",),
    meanings={
        "ready_s": "save plus the time until every file was synced (fsync)",
        ABOVE_IMPORT: "peak RSS minus the resident set size with the model in memory, divided by the size of all parameters and buffers",
    },
    outcome="ok: the written files were read back from the disk, and every tensor was compared with the model. oom_killed: reported by the kernel's own counter",
)  # fmt: skip
_COMMAND: Final = Kind(
    doing="running",
    subject="all processes of the command",
    until="the command ended",
    words={"does": "succeed", "ready": "done", "before": "", "what": "command", "several": "commands", "variants": "command variants", "thrashes": "waits for memory"},
    figures=_OF_COMMANDS,
    lacks=_NOT_OF_COMMANDS,
    headings={"ready_s": "time"},
    held=("unreclaimable_sampled_bytes", "anonymous and shared"),
    cached="page cache, reclaimable",
    peak=("needed_bytes", "need"),
    peak_accuracy="at least",
    marker="the memory that it needs at least",
    phase_peak="cgroup peak",
    axis="memory, GiB",
    zero="the command started",
    outside="the command",
    life="Time: until the first process of the command ended",
    lost=f"waited for memory for {STALLED_SHARE:.0%} of the time or more",
    floor="RAM floor: the smallest RAM limit, with swap off, under which the command succeeded three times"
    " out of three and did not thrash. Under the limit one step below, the command was killed for lack of"
    " memory, thrashed or timed out. x: the time of the command as a multiple of its time without a limit.",
    floor_ready="ready: time until the command ended, or until its server was ready, in the median cell.",
    accuracy=(
        "needs: the most memory of all processes that the kernel cannot reclaim: anonymous, shared, locked"
        " and the kernel's own, without page cache. ≥ marks a lower bound, because samples may miss a short"
        " spike.",
        "Exact, the kernel's high-water mark: cgroup peak. The cgroup peak includes page cache, so a cgroup"
        " peak at the limit does not show that the command needs so much.",
        "Sampled, so short spikes may be missed: anonymous, shared (tmpfs too), page cache.",
    ),
    times=("time: from the start of the command to the end of its first process.",),
    meanings={
        "ready_s": "from the start of the command to the end of its first process",
        "anon_sampled_bytes": "sampled maximum of the anonymous memory of all processes",
        "file_sampled_bytes": "sampled maximum of the page cache that is charged to the command, which the kernel can reclaim; without a cgroup, of the mapped files",
        "peak_cgroup_bytes": "highest memory charge of the cgroup of all processes, including the page cache of files that they read first; a peak at the limit does not show that the command needs so much",
    },
    outcome="ok: exit code 0. oom_killed: the kernel killed at least one process for lack of memory, by its own counter. command_failed: another exit code, or a signal",
)  # fmt: skip
KINDS: Final[Mapping[str, Kind]] = {"load": _LOAD, "save": _SAVE, "command": _COMMAND}
USUAL: Final = "load"
"""The operation whose words a report uses for a run without measurements."""
UNNAMED: Final = ("load", "command")
"""Captions do not name these operations: most measurements are loads, and commands have labels."""


def of(rows: Sequence[Row]) -> list[Kind]:
    """Return the ``Kind`` of each operation in these rows; without rows, the kind of loads."""
    names = {row["operation"] for row in rows} or {USUAL}
    return [kind for name, kind in KINDS.items() if name in names]


def first_of(rows: Sequence[Row]) -> Kind:
    """Return the ``Kind`` of the first row's operation; without rows, the kind of loads."""
    return KINDS[rows[0]["operation"] if rows else USUAL]


def concerning(rows: Sequence[Row], columns: Sequence[str]) -> list[str]:
    """Return those ``columns`` that at least one operation in these rows can fill, without "group"."""
    absent = frozenset.intersection(*(kind.lacks for kind in of(rows)))
    names = {"group", *(f"{name}{end}" for name in absent for end in ("", "_min", "_max"))}
    return [name for name in columns if name not in names]
