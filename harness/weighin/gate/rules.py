"""Parse the rules of ``weighin check``: budgets, tolerances, expected outcomes and policies for settings.

Rules are options of the command, which ``[tool.weighin.check]`` in pyproject.toml can set, and keys
of a baseline file that a user wrote::

    budget    = [selector ":"] metric ("<=" | "<") term {"+" term} ["above import"]
    term      = size | duration | [number "x"] ("model" | "limit")
    tolerance = metric "=" ("off" | [number "%"] [size | duration] ["lower" | "higher" | "both"])
    expected  = selector "=" outcome
    setting   = name "=" ("ignore" | "warn" | "fail")

A selector has words, which may have shell wildcards. It matches a series if each of its words is a
word of the series' name. "above import" means that the memory of ``import torch`` does not count.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, get_args

from weighin.errors import ConfigError
from weighin.records.machine import Policy
from weighin.records.metrics import METRICS, Direction, Metric, Tolerance, named
from weighin.records.series import Series
from weighin.result import BROKEN, Outcome

EXPECTABLE: Final = (
    Outcome.OOM_KILLED, Outcome.CHILD_KILLED, Outcome.CUDA_OOM, Outcome.TIMEOUT, Outcome.THRASHING,
    Outcome.SKIPPED,
)  # fmt: skip
_BUDGET: Final = re.compile(
    r"\s*(?:(?P<selector>\S+?)\s*:)?\s*(?P<metric>\w+)\s*(?P<sign><=|<)\s*(?P<bound>[^<>=]+?)"
    r"(?P<above>\s+above[\s_]import)?\s*"
)
_SHARE: Final = r"(?:(?P<factor>\d+(?:\.\d*)?|\.\d+)\s*[x*]\s*)?(?P<reference>model|limit)"
_ITEM: Final = re.compile(rf"\s*(?P<selector>.+?)\s*=\s*(?P<outcome>{'|'.join(Outcome)})\s*(?:,|$)")
_BUDGETS: Final = (
    'write a budget such as "peak_rss <= 1.1 x model + 64MiB above import", "floor <= 8GiB" or'
    ' "streaming: anon <= model + 300MiB"'
)
_TOLERANCES: Final = (
    'write a tolerance such as "peak_rss=2%", "ready=30% 1s", "anon=64MiB both" or "load=off"'
)
_OUTCOMES: Final = (
    "write an expected outcome as in baseline=oom_killed; outcomes that can be expected:"
    f" {', '.join(EXPECTABLE)}"
)


@dataclass(frozen=True, slots=True)
class Budget:
    """An upper bound of one metric: ``amount`` in its unit, plus shares of the model's size and RAM limit."""

    selector: str
    text: str
    metric: Metric
    is_below: bool  # whether the figure must be smaller than the bound ("<")
    amount: int
    models: float
    limits: float

    def __str__(self) -> str:
        return self.text

    def bound(self, series: Series) -> int | None:
        """Return the bound in bytes or ns; None if it depends on an unknown model size or RAM limit."""
        shares = ((self.models, series.model_bytes), (self.limits, series.limit_bytes))
        if any(share and size is None for share, size in shares):
            return None
        return self.amount + round(sum(share * (size or 0) for share, size in shares))

    def is_kept(self, value: int, bound: int) -> bool:
        return value < bound if self.is_below else value <= bound


@dataclass(frozen=True, slots=True)
class Expectation:
    """An outcome other than ok that passes."""

    selector: str
    outcome: Outcome

    def __str__(self) -> str:
        return f"{self.selector}={self.outcome}"


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of ``weighin check``. A metric that ``tolerances`` lacks is not compared."""

    tolerances: Mapping[str, Tolerance] = field(
        default_factory=lambda: {name: metric.tolerance for name, metric in METRICS.items()}
    )
    budgets: tuple[Budget, ...] = ()
    policies: Mapping[str, Policy] = field(default_factory=dict)
    expected: tuple[Expectation, ...] = ()

    def typed(
        self,
        budgets: Iterable[str] = (),
        expected: Iterable[str] = (),
        tolerances: Iterable[str] = (),
        settings: Iterable[str] = (),
    ) -> "Rules":
        """Return these rules and those of the command line, which override."""
        merged = {**self.tolerances, **dict(map(parse_tolerance, tolerances))}
        # The first policy that matches counts: a new one comes first, and replaces one of the same name.
        policies = dict[str, Policy]()
        for text in settings:
            name, _, policy = text.rpartition("=")
            if not name or policy not in get_args(Policy):
                raise ConfigError(
                    f"cannot read --setting {text!r}",
                    "say what a difference does: --setting kernel=ignore, kernel=warn or kernel=fail",
                )
            policies[name] = policy  # type: ignore[assignment]
        policies |= {name: one for name, one in self.policies.items() if name not in policies}
        return Rules(
            {name: one for name, one in merged.items() if one},
            (*self.budgets, *map(parse_budget, budgets)),
            policies,
            (*self.expected, *(one for text in expected for one in parse_expected(text))),
        )

    def only(self, metrics: Sequence[str]) -> "Rules":
        """Return the rules with these metrics alone, even if turned off; without metrics, all rules."""
        if not metrics:
            return self
        chosen = (named(one) for one in metrics)
        return replace(self, tolerances={one.name: self.tolerances.get(one.name, one.tolerance) for one in chosen})  # fmt: skip


def parse_budget(text: str) -> Budget:
    def refused(why: str = "", repair: str = _BUDGETS) -> ConfigError:
        return ConfigError(f"cannot read the budget {text!r}{why}", repair)

    match = _BUDGET.fullmatch(text)
    if match is None:
        raise refused()
    metric = named(match["metric"])
    if match["above"]:
        if metric.name not in ("peak_rss", "above_import"):
            raise refused(
                f": 'above import' is possible for peak_rss and above_import, but not for {metric.name}",
                'write a budget such as "peak_rss <= 1.1 x model + 64MiB above import"',
            )
        metric = named("above_import")
    amount, shares = 0, {"model": 0.0, "limit": 0.0}
    for term in match["bound"].split("+"):
        if share := re.fullmatch(_SHARE, term.strip()):
            if metric.unit != "bytes":
                raise refused(
                    f": {metric.name} is a time, but {share['reference']} is a size",
                    f'write a duration, as in "{metric.name} <= 10 s"',
                )
            shares[share["reference"]] += float(share["factor"] or 1)
            continue
        try:
            amount += metric.parse(term.strip())
        except ConfigError as error:
            raise refused(f": {error.message}", error.repair or _BUDGETS) from None
    return Budget(
        selector=match["selector"] or "*",
        text=" ".join(text.split()).removeprefix("*:").strip(),
        metric=metric,
        is_below=match["sign"] == "<",
        amount=amount,
        models=shares["model"],
        limits=shares["limit"],
    )


def parse_tolerance(text: str) -> tuple[str, Tolerance | None]:
    """Return the name and the tolerance of a metric from a text: "ready=30% 1s"; "load=off" has None."""
    name, _, said = text.partition("=")
    metric, words = named(name.strip()), said.split()
    if words == ["off"]:
        return metric.name, None
    if not words:
        raise ConfigError(f"cannot read the tolerance {text!r}", _TOLERANCES)
    direction = next((one for one in get_args(Direction) if one in words), None)
    shares = [word for word in words if re.fullmatch(r"\d+(\.\d+)?%", word)]
    relative = float(shares[-1][:-1]) / 100 if shares else None
    absolute = " ".join(word for word in words if word not in (*shares, *get_args(Direction)))
    try:
        return metric.name, changed(metric, relative, absolute or None, direction)
    except ConfigError as error:
        raise ConfigError(f"cannot read the tolerance {text!r}: {error.message}", _TOLERANCES) from None  # fmt: skip


def changed(
    metric: Metric, relative: float | None, absolute: str | int | None, direction: Direction | None
) -> Tolerance:
    """Return the metric's default tolerance with these changes; a share without an amount counts alone."""
    result = metric.tolerance
    if relative is not None or absolute is not None:
        amount = metric.parse(absolute) if isinstance(absolute, str) else absolute or 0
        result = replace(result, relative=relative or 0.0, absolute=amount)
    return replace(result, direction=direction) if direction else result


def parse_expected(text: str) -> list[Expectation]:
    """Parse the value of ``--expect``, such as ``streaming=oom_killed,sequential=timeout``."""
    items, place = list[re.Match[str]](), 0
    while place < len(text) or not items:
        if (item := _ITEM.match(text, place)) is None:
            raise ConfigError(f"cannot read --expect {text[place:]!r}", _OUTCOMES)
        items.append(item)
        place = item.end()
    return [expectation(item["selector"], item["outcome"]) for item in items]


def expectation(selector: str, outcome: str) -> Expectation:
    """Return an expected outcome; raise ConfigError if the outcome cannot be expected."""
    if outcome not in {*Outcome}:
        why = f"expect: {selector}={outcome}: there is no outcome {outcome!r}"
        raise ConfigError(why, _OUTCOMES)
    if outcome not in EXPECTABLE:
        why = "this outcome says nothing about the strategy"
        why = "a failed strategy always fails a check" if outcome in BROKEN else why
        refused = f"{selector}={outcome}: {outcome} cannot be an expected outcome: {why}"
        raise ConfigError(refused, _OUTCOMES)
    return Expectation(selector, Outcome(outcome))
