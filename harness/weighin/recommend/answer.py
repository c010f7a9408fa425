"""What ``weighin recommend`` was asked for, and its answer: as tables, as JSON, as code to paste."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from weighin import formats
from weighin.cell import Cell, ModelSpec
from weighin.errors import UnknownName
from weighin.predict.client import predict
from weighin.predict.prediction import Prediction
from weighin.recommend import calibration as calibrating
from weighin.recommend.calibration import Calibration
from weighin.recommend.ordering import ranked
from weighin.recommend.prior_runs import Evidence, find
from weighin.recommend.ranking import SAVED_AS, Candidate, FitVerdict, Limits, assess, slowness
from weighin.recommend.snippet import CannotWriteOut, snippet
from weighin.suite import registry
from weighin.suite.matrix import Planned
from weighin.units import format_bytes, format_exact

SCHEMA: Final = 1
ALLOWED: Final = ("resave", "packages", "weighin")
"""What a way of loading may ask for, by the words of --allow."""

_MIRROR: Final = "weighin.models.mirror:mirror"  # the model of a checkpoint whose own is not known
_STYLES: Final = {FitVerdict.FITS: "green", FitVerdict.TOO_LARGE: "red", FitVerdict.UNKNOWN: "dim"}
_HELP: Final = "A smaller dtype (--dtype bf16) or a higher limit may help."
_USABLE: Final = (FitVerdict.FITS, FitVerdict.THRASHES, FitVerdict.BARELY)


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be loaded, where to, under which limits, and what may be asked for."""

    model: ModelSpec
    limits: Limits
    checkpoint: Path | None = None
    device: str = "cpu"
    dtype: str = "float32"
    allow: tuple[str, ...] = ALLOWED
    results: Path = Path("results")
    python_path: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Advice:
    """The answer: all candidates in the order in which to try them, and the best one's code."""

    question: Question
    candidates: tuple[Candidate, ...]
    code: str = ""

    @property
    def best(self) -> Candidate | None:
        """What to use; None where nothing works for sure."""
        first = self.candidates[0] if self.candidates else None
        return first if first and first.verdict in _USABLE else None

    @property
    def notes(self) -> tuple[str, ...]:
        """What the answer does not know, and how it would."""
        asked = self.question
        if asked.model.builder != _MIRROR:
            return ()
        return (
            f"{asked.model.name} alone tells less than it does with its model: neither what the"
            " constructor takes, nor buffers that are in no checkpoint, nor what runs of the model"
            " measured. To count them: weighin recommend --model package:builder --checkpoint"
            f" {asked.checkpoint}",
        )

    def as_json(self) -> dict[str, Any]:
        """Return all of it for ``--json``."""
        asked = self.question
        return {
            "schema": SCHEMA,
            "model": asked.model.title,
            "device": asked.device,
            "dtype": asked.dtype,
            "ram_limit_bytes": asked.limits.ram_bytes,
            "vram_limit_bytes": asked.limits.vram_bytes,
            "recommended": self.best.strategy if self.best else None,
            "candidates": [asdict(one) for one in self.candidates],
            "code": self.code,
            "notes": list(self.notes),
        }


def of_checkpoint(path: Path) -> ModelSpec:
    """Return a model of a checkpoint's own keys; raises CheckpointError where it is none."""
    formats.detect(path)
    where = str(path.resolve())
    return ModelSpec(path.name, _MIRROR, {"checkpoint": where})


def check_allowed(words: Sequence[str]) -> tuple[str, ...]:
    """Return what --allow names; raises UnknownName."""
    if list(words) == ["none"]:
        return ()
    for word in words:
        if word not in ALLOWED:
            raise UnknownName("thing to allow", word, [*ALLOWED, "none"])
    return tuple(words)


@dataclass(frozen=True, slots=True)
class PriorKnowledge:
    """What is known of every way of loading, whatever the limits: predictions, and records."""

    planned: tuple[Planned, ...]
    predictions: tuple[Prediction, ...]
    evidence: dict[tuple[str, str], Evidence]
    calibration: Calibration
    layout: str


def gather(question: Question, say: Callable[[str], None]) -> PriorKnowledge:
    """Predict every way of loading and look for records. Calibrates the machine where none did.

    Raises:
        HarnessError: the checkpoint, the model or a run's records cannot be used.
    """
    layout = formats.detect(question.checkpoint).NAME if question.checkpoint else "pt"
    planned = [*_planned(question, layout)]
    say(f"predicting {len(planned)} ways of loading {question.model.title}")
    predictions = predict(planned, checkpoint=question.checkpoint, python_path=question.python_path)
    found = find([question.results], planned[0].cell)
    calibration = calibrating.stored() or calibrating.calibrate(say)
    return PriorKnowledge(tuple(planned), tuple(predictions), found, calibration, layout)


def advise(question: Question, known: PriorKnowledge) -> Advice:
    """Return what to use under the question's limits, given what is known."""
    found = [known.evidence.get((one.cell.strategy, one.cell.format)) for one in known.planned]
    measured = [(one, seen) for one, seen in zip(known.predictions, found, strict=True) if seen]
    calibration = known.calibration.slowed(slowness(measured, known.calibration))
    judged = [
        assess(one.strategy, prediction, seen, calibration, question.limits, known.layout)
        for one, prediction, seen in zip(known.planned, known.predictions, found, strict=True)
    ]
    allowed = [one for one in judged if _is_allowed(one, question.allow)]
    advice = Advice(question, tuple(ranked(allowed)))
    if not advice.best:
        return advice
    info = registry.strategy(advice.best.strategy)
    checkpoint = str(question.checkpoint) if question.checkpoint else "model.pt"
    try:
        code = snippet(info, device=question.device, dtype=question.dtype, checkpoint=checkpoint)
    except CannotWriteOut as why:
        code = f"# {info.name} cannot be written out: {why}. Its code is in {info.path}\n"
    return Advice(question, advice.candidates, code)


def parts(advice: Advice) -> Iterator[RenderableType]:
    """Yield what ``weighin recommend`` prints."""
    asked = advice.question
    limits = [f"{format_exact(asked.limits.ram_bytes)} of RAM"] if asked.limits.ram_bytes else []
    if asked.limits.vram_bytes:
        limits.append(f"{format_exact(asked.limits.vram_bytes)} of the GPU")
    sources = [_sources(one) for one in advice.candidates]
    same = len(set(sources)) == 1
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.title = f"{asked.model.title} as {asked.dtype} on {asked.device}, " + (
        " and ".join(limits) or "without a limit"
    )
    table.caption = f"Memory and time are {sources[0]}." if same else None
    table.add_column("strategy", no_wrap=True)
    for heading in ("verdict", "why"):
        table.add_column(heading, overflow="fold")
    table.add_column("leaves", justify="right", no_wrap=True)
    table.add_column("ready", justify="right", no_wrap=True)
    for heading in [*([] if same else ["memory, time"]), "asks for"]:
        table.add_column(heading, overflow="fold")
    for one, source in zip(advice.candidates, sources, strict=True):
        table.add_row(
            escape(one.strategy),
            f"[{_STYLES.get(one.verdict, 'yellow')}]{one.verdict}[/]",
            escape(one.why),
            "-" if one.margin_bytes is None else format_bytes(one.margin_bytes, digits=1),
            "-" if one.ready_s is None else f"{one.ready_s:.1f} s",
            *([] if same else [source]),
            escape(", ".join(map(_asked, one.asks))),
        )
    yield table
    yield from (f"{escape(note)}\n" for note in advice.notes)
    if advice.best is None:
        yield f"Nothing fits for sure. {_HELP}"
        return
    if advice.best.verdict is FitVerdict.THRASHES:
        yield f"Nothing fits as a whole. What follows works, but slowly. {_HELP}\n"
    yield f"Use {advice.best.strategy}:\n"
    yield escape(advice.code)


def _sources(one: Candidate) -> str:
    return ", ".join(dict.fromkeys(filter(None, (one.memory_from, one.time_from)))) or "-"


def _asked(what: str) -> str:
    return what if what.startswith(SAVED_AS) else f"package {what}"


def _planned(question: Question, layout: str) -> Iterator[Planned]:
    for info in registry.strategies().values():
        if question.device.partition(":")[0] not in info.devices:
            continue
        fmt = layout if layout in info.formats else info.formats[0]
        cell = Cell(
            question.model, info.name, "process", device=question.device, dtype=question.dtype,
            format=fmt,
        )  # fmt: skip
        yield Planned.of(cell, info)


def _is_allowed(one: Candidate, allow: Sequence[str]) -> bool:
    for asked in one.asks:
        kind = "resave" if asked.startswith(SAVED_AS) else "packages"
        if (asked if asked == "weighin" else kind) not in allow:
            return False
    return True
