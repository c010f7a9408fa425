"""Parse and evaluate budgets (upper bounds of metrics), such as ``peak_rss <= 1.1 x model``.

::

    budget  = [pattern ":"] metric ("<=" | "<") term {"+" term} ["above import"]
    term    = size | duration | [number "x"] ("model" | "limit")
    pattern = a word of a measurement's name, such as the strategy; may have shell wildcards

The words "above import" mean that the memory of ``import torch`` does not count, so that
``peak_rss <= 1.1 x model above import`` is the budget ``above_import <= 1.1 x model``. ``parse`` can
read the text that ``str(budget)`` returns.
"""

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, Literal

from weighin.errors import ConfigError
from weighin.records.metrics import Metric, named
from weighin.records.series import Series, selects

Reference = Literal["model", "limit"]

_BUDGET: Final = re.compile(
    r"\s*(?:(?P<pattern>\S+?)\s*:)?\s*(?P<metric>\w+)\s*(?P<sign><=|<)\s*(?P<bound>[^<>=]+?)\s*"
)
_SHARE: Final = re.compile(
    r"(?:(?P<factor>\d+(?:\.\d*)?|\.\d+)\s*[x*]\s*)?(?P<reference>model|limit)"
)
_ABOVE_IMPORT: Final = re.compile(r"\s+above[\s_]import$")
_EXAMPLES: Final = (
    'write a budget such as "peak_rss <= 1.1 x model + 64MiB above import", "floor <= 8GiB" or'
    ' "streaming: anon <= model + 300MiB"'
)


@dataclass(frozen=True, slots=True)
class Term:
    """A term of a bound: ``amount`` in the metric's unit, or ``factor`` x the model's size or RAM limit."""

    amount: int = 0
    factor: float = 0.0
    reference: Reference | None = None


@dataclass(frozen=True, slots=True)
class Budget:
    """An upper bound of one metric, for each measurement whose name matches ``pattern``."""

    metric: Metric
    sign: Literal["<=", "<"]
    terms: tuple[Term, ...]
    pattern: str = "*"

    def __str__(self) -> str:
        """The budget as a text that ``parse`` can read."""
        scope = "" if self.pattern == "*" else f"{self.pattern}: "
        bound = " + ".join(self._shown(term) for term in self.terms)
        return f"{scope}{self.metric.name} {self.sign} {bound}"

    def covers(self, name: str) -> bool:
        """Return whether the budget applies to the measurement with this name."""
        return selects(self.pattern, name)

    def bound(self, series: Series) -> int | None:
        """Return the bound in bytes or ns; None if it depends on an unknown model size or RAM limit."""
        total = 0.0
        for term in self.terms:
            if term.reference is None:
                total += term.amount
                continue
            base = series.model_bytes if term.reference == "model" else series.limit_bytes
            if base is None:
                return None
            total += term.factor * base
        return round(total)

    def is_kept(self, value: int, bound: int) -> bool:
        return value <= bound if self.sign == "<=" else value < bound

    def _shown(self, term: Term) -> str:
        if term.reference is None:
            return self.metric.precise(term.amount)
        if term.factor == 1:
            return term.reference
        factor = f"{Decimal(repr(term.factor)):f}".removesuffix(".0")
        return f"{factor} x {term.reference}"


def parse(text: str) -> Budget:
    """Parse a budget.

    Raises:
        ConfigError: the text is not a budget, or its bound or "above import" does not fit the metric.
        UnknownName: no metric has the name in the text.
    """
    match = _BUDGET.fullmatch(text)
    if match is None:
        raise ConfigError(f"cannot read the budget {text!r}", _EXAMPLES)
    metric = named(match["metric"])
    bound = _ABOVE_IMPORT.sub("", match["bound"])
    if bound != match["bound"]:
        metric = _above_import(metric, text)
    terms = tuple(_term(part.strip(), metric, text) for part in bound.split("+"))
    sign: Literal["<=", "<"] = "<=" if match["sign"] == "<=" else "<"
    return Budget(metric, sign, terms, match["pattern"] or "*")


def _above_import(metric: Metric, budget: str) -> Metric:
    if metric.name not in ("peak_rss", "above_import"):
        raise ConfigError(
            f"cannot read the budget {budget!r}: 'above import' is possible for peak_rss and"
            f" above_import, but not for {metric.name}",
            'write a budget such as "peak_rss <= 1.1 x model + 64MiB above import"',
        )
    return named("above_import")


def _term(text: str, metric: Metric, budget: str) -> Term:
    share = _SHARE.fullmatch(text)
    if share is None:
        try:
            return Term(amount=metric.parse(text))
        except ConfigError as error:
            raise ConfigError(
                f"cannot read the budget {budget!r}: {error.message}", error.repair or _EXAMPLES
            ) from None
    if metric.unit != "bytes":
        raise ConfigError(
            f"cannot read the budget {budget!r}: {metric.name} is a time, but {share['reference']} is a size",
            f'write a duration, as in "{metric.name} <= 10 s"',
        )
    reference: Reference = "model" if share["reference"] == "model" else "limit"
    return Term(factor=float(share["factor"] or 1), reference=reference)
