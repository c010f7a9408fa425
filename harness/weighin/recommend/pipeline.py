"""Answer ``weighin recommend`` for a pipeline of diffusers, with a strategy for each of its parts.

"Together": while a part is loaded, all other parts are in memory, and their weights are subtracted
from the limit. "One after the other": each part is freed before the next part is loaded, so that
each load has the whole limit.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from weighin.recommend.answer import Advice, Question, advise, gather
from weighin.recommend.candidates import Limits
from weighin.units import format_bytes

_TOGETHER: Final = "together"
_ONE_AFTER_THE_OTHER: Final = "one after the other"


@dataclass(frozen=True, slots=True)
class PipelineAdvice:
    """The advice for each part of a pipeline, for both ways to load the parts (see the module)."""

    title: str
    limits: Limits
    sizes: Mapping[str, int]
    together: Mapping[str, Advice]
    one_after_the_other: Mapping[str, Advice]

    @property
    def best(self) -> str:
        """The way in which all parts surely fit: "together", else "one after the other"; else ""."""
        for held, advices in (
            (_TOGETHER, self.together),
            (_ONE_AFTER_THE_OTHER, self.one_after_the_other),
        ):
            if all(each.best for each in advices.values()):
                return held
        return ""

    def as_json(self) -> dict[str, Any]:
        """Return the answer as data for ``--json``."""
        return {
            "pipeline": self.title,
            "ram_limit_bytes": self.limits.ram_bytes,
            "vram_limit_bytes": self.limits.vram_bytes,
            "recommended": self.best or None,
            "parts": [
                {
                    "name": name,
                    "model_bytes": self.sizes[name],
                    "together": self.together[name].as_json(),
                    "one_after_the_other": self.one_after_the_other[name].as_json(),
                }
                for name in self.sizes
            ],
        }


def advise_pipeline(
    title: str, questions: Mapping[str, Question], say: Callable[[str], None]
) -> PipelineAdvice:
    """Return the advice for each part of a pipeline; every question has the limits of the whole pipeline.

    Raises:
        HarnessError: a part of the pipeline, or the records of a run, cannot be read.
    """
    prior = {
        name: gather(question, lambda text, name=name: say(f"{name}: {text}"))  # type: ignore[misc]
        for name, question in questions.items()
    }
    sizes = {
        name: max((one.model_bytes or 0 for one in each.predictions), default=0)
        for name, each in prior.items()
    }
    others = {name: sum(sizes.values()) - size for name, size in sizes.items()}
    together = {
        name: advise(replace(question, limits=_left(question, others[name])), prior[name])
        for name, question in questions.items()
    }
    alone = {name: advise(question, prior[name]) for name, question in questions.items()}
    limits = next(iter(questions.values())).limits
    return PipelineAdvice(title, limits, sizes, together, alone)


def _left(question: Question, held_bytes: int) -> Limits:
    """Return the limits of a load while other parts take ``held_bytes`` on the same device."""
    ram, vram = question.limits.ram_bytes, question.limits.vram_bytes
    if question.device == "cpu":
        return Limits(None if ram is None else max(1, ram - held_bytes), vram)
    return Limits(ram, None if vram is None else max(1, vram - held_bytes))


def parts(advice: PipelineAdvice) -> Iterator[RenderableType]:
    """Yield what ``weighin recommend`` prints for a pipeline: a table, and the code for each part."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    size = format_bytes(sum(advice.sizes.values()))
    table.title = f"{escape(advice.title)} ({size}), all parts, {advice.limits}"
    for heading in ("part", "size", _TOGETHER, _ONE_AFTER_THE_OTHER):
        table.add_column(heading, overflow="fold")
    for name, part_bytes in advice.sizes.items():
        table.add_row(
            escape(name),
            format_bytes(part_bytes, digits=1),
            _choice(advice.together[name]),
            _choice(advice.one_after_the_other[name]),
        )
    yield table
    yield (
        f"{_TOGETHER}: every part stays in memory, and each load has the rest of the limit;"
        f" {_ONE_AFTER_THE_OTHER}: each part is freed before the next one is loaded.\n"
    )
    if not advice.best:
        yield "The pipeline is not sure to fit. A smaller dtype (--dtype bf16) or a higher limit may help."
        return
    chosen = advice.together if advice.best == _TOGETHER else advice.one_after_the_other
    yield f"Load the parts {advice.best}:\n"
    yield from _codes(chosen)


def _choice(advice: Advice) -> str:
    if advice.best is None:
        return "[red]does not fit[/]"
    return escape(f"{advice.best.strategy}: {advice.best.verdict}")


def _codes(chosen: Mapping[str, Advice]) -> Iterator[str]:
    for name, advice in chosen.items():
        assert advice.best is not None
        yield escape(f"# {name}: {advice.best.strategy}\n{advice.code}")
