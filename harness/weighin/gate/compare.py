"""Compare the same series in several groups of records, such as runs or commits (``weighin compare``).

The output marks a figure that lies outside the range of the first group's repeats by more than the
metric's tolerance. Unlike ``weighin check``, the comparison neither passes nor fails.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from string import ascii_uppercase
from typing import Any, Final

from weighin.errors import ConfigError, UnknownName
from weighin.gate.check import Line, LineVerdict, Measured, judge_figure, read, summary_of
from weighin.gate.tables import short_names
from weighin.records.machine import differences, fingerprint, settings_of
from weighin.records.metrics import METRICS, Metric, grouped, named
from weighin.records.series import Series, SeriesRun
from weighin.result import Result
from weighin.text import one_line

_COMMIT_LENGTH: Final = 10
_OUTCOME: Final = "outcome"


@dataclass(frozen=True, slots=True)
class ComparedMetric:
    """One metric of one series in every group.

    Attributes:
        texts: the figure of each group as text; None for a group without the figure.
        lines: for each later group, the verdict on its figure against the first group's; None for
            outcomes, or if one of the two figures is missing.
    """

    series: str
    what: str
    texts: tuple[str | None, ...]
    lines: tuple[Line | None, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several groups side by side: a heading for each, and a row for each metric of a series.

    ``common`` has the words that all names of series share. The names in ``rows`` lack them.
    """

    headings: tuple[str, ...]
    rows: tuple[ComparedMetric, ...]
    common: str
    warnings: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        verdicts = [line.verdict for row in self.rows for line in row.lines if line]
        worse = verdicts.count(LineVerdict.REGRESSED)
        better = verdicts.count(LineVerdict.IMPROVED)
        outcomes = [row.texts for row in self.rows if row.what == _OUTCOME]
        failed = sum(
            was == "ok" and now not in (None, "ok") for was, *later in outcomes for now in later
        )
        return (
            f"{len(verdicts)} figures compared with A: {worse} larger and {better} smaller beyond noise"
            + (f"; {failed} measurement{'s' * (failed > 1)} no longer ok" if failed else "")
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "runs": list(self.headings),
            "common": self.common,
            "rows": [
                {
                    "series": row.series,
                    "metric": row.what,
                    "texts": list(row.texts),
                    "compared": [
                        line
                        and {
                            "unit": line.metric and line.metric.unit,
                            "before": line.was,
                            "now": line.now,
                            "changed_beyond_noise": line.verdict is not LineVerdict.SAME,
                        }
                        for line in row.lines
                    ],
                }
                for row in self.rows
            ],
            "warnings": list(self.warnings),
        }


def compare(folders: Sequence[Path], metrics: Sequence[str] = (), by: str = "run") -> Comparison:
    """Compare the first group of records with each later group.

    Series with equal names are compared. Words that are the same in all names of one group, such as
    the isolation, may differ between groups; the heading of each group then shows its words.

    Args:
        by: what the records of a group share: "run" (the folder), "machine" (the kind of machine),
            "commit", or the name of a setting of the environment, such as "torch".

    Raises:
        ConfigError: there are fewer than two groups, or more than 26.
        RecordError: a folder is not a run, or has no record.
    """
    groups, warnings = _groups(folders, by)
    if not 2 <= len(groups) <= len(ascii_uppercase):
        if by == "run":
            raise ConfigError(
                f"cannot compare {len(groups)} run{'s' * (len(groups) != 1)}",
                "name two or more folders of runs: weighin compare results/RUN_A results/RUN_B",
            )
        known = {name for _, group in groups for name in group.environment}
        known |= {"run", "machine", "commit"}
        if by not in known:
            raise UnknownName("setting", by, known)
        found = ", ".join(name for name, _ in groups[:5])
        raise ConfigError(
            f"cannot compare by {by}: the records have {len(groups)} of it{': ' * bool(found)}{found}",
            f"name runs of which it differs, or leave out --by {by}",
        )
    chosen = [named(name) for name in metrics] or list(METRICS.values())
    own = _own_words([group for _, group in groups])
    keyed = [
        {
            " ".join(
                "" if place in own else word for place, word in enumerate(name.split(" "))
            ): one
            for name, one in group.series.items()
        }
        for _, group in groups
    ]
    shorts, common = short_names(name for series in keyed for name in series)
    rows = [
        row
        for name, short in shorts.items()
        for row in _rows(short, [series.get(name) for series in keyed], chosen)
    ]
    return Comparison(tuple(_headings(groups, own)), tuple(rows), common, warnings)


def _groups(folders: Sequence[Path], by: str) -> tuple[list[tuple[str, Measured]], tuple[str, ...]]:
    """Return the figures of each group, and warnings about the records."""
    warnings: list[str] = []
    mixed: list[str] = []
    groups: list[tuple[str, Measured]] = []
    runs: dict[str, list[SeriesRun]] = {}

    def value(result: Result) -> str:
        if by == "machine":
            return fingerprint(result.environment)
        name = "git_commit" if by == "commit" else by
        return str(settings_of([result.environment]).get(name, "not set"))

    for folder in folders:
        records, run = read(folder)
        warnings += records.warnings
        if by != "run":
            measured = [result for result in run.results if result.environment]
            for key, results in grouped(measured, value).items():
                runs.setdefault(key, []).append(replace(run, results=results))
            continue
        group = summary_of([run])
        if records.missing and records.coverage:
            group = replace(group, incomplete={folder: records.coverage})
        if len(group.machines) > 1:
            mixed.append(
                f"the figures of {folder} are from {len(group.machines)} kinds of machine:"
                f" weighin compare {quote(str(folder))} --by machine compares these"
            )
        groups.append((str(folder), group))
    for key, ours in runs.items():
        group = summary_of(ours)
        nodes = f" ({', '.join(group.nodes)})" if by == "machine" and group.nodes else ""
        groups.append((f"{by} {key[:_COMMIT_LENGTH] if by == 'commit' else key}{nodes}", group))
    return groups, tuple(dict.fromkeys((*mixed, *warnings)))


def _rows(
    name: str, series: Sequence[Series | None], metrics: Sequence[Metric]
) -> Iterator[ComparedMetric]:
    outcomes = [each.outcome if each else None for each in series]
    if any(outcome != "ok" for outcome in outcomes):
        yield ComparedMetric(name, _OUTCOME, tuple(outcomes), (None,) * (len(series) - 1))
    for metric in metrics:
        first, *later = (each.figures.get(metric.name) if each else None for each in series)
        if not any((first, *later)):
            continue
        lines = tuple(
            judge_figure(name, metric, metric.tolerance, first, other) if first and other else None
            for other in later
        )
        texts = (metric.text(one.median) if one else None for one in (first, *later))
        yield ComparedMetric(name, metric.title, tuple(texts), lines)


def _own_words(groups: Sequence[Measured]) -> set[int]:
    """Return the positions in names at which each group has a single word, but the groups differ."""
    words = [[name.split(" ") for name in group.series] for group in groups]
    own = set()
    for place in range(min(len(name) for names in words for name in names)):
        by_group = [{name[place] for name in names} for names in words]
        if all(len(here) == 1 for here in by_group) and len(set.union(*by_group)) > 1:
            own.add(place)
    return own


def _headings(groups: Sequence[tuple[str, Measured]], own: set[int]) -> Iterator[str]:
    """Yield a heading for each group: its name, commit, torch, and its differences from the first."""
    for letter, (name, group) in zip(ascii_uppercase, groups, strict=False):
        words = next(iter(group.series)).split(" ")
        facts = [str(covered) for covered in group.incomplete.values()]
        facts += [words[place] for place in sorted(own)]
        if commit := group.environment.get("git_commit"):
            facts.append(f"commit {str(commit)[:_COMMIT_LENGTH]}")
        if torch := group.environment.get("torch"):
            facts.append(f"torch {torch}")
        changes = differences(groups[0][1].environment, group.environment, {})
        facts += [str(change) for change in changes if change.name != "torch"]
        yield one_line(f"{letter} = {name}: {', '.join(facts) or 'environment unknown'}")
