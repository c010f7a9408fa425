"""Show groups of results beside each other (``weighin compare``), or in order of time (``weighin history``).

A group is a run, or the results that share a commit, a version of torch or a kind of machine. A figure
changed if it differs by more than ``weighin check`` tolerates; nothing passes or fails.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from string import ascii_uppercase
from typing import Any, Final

from weighin.errors import ConfigError, RecordError, UnknownName
from weighin.gate.check import Group, LineVerdict, judge_figure, read_runs
from weighin.gate.tables import KINDS, short_names
from weighin.records import run_folder
from weighin.records.machine import differences, settings_of
from weighin.records.metrics import METRICS, Metric, grouped, named
from weighin.records.series import Series
from weighin.result import Result
from weighin.show.table import Column, Document, Entry, Lines, Table
from weighin.text import one_line

_COMMIT_LENGTH: Final = 10
_NOT_SET: Final = "not set"
_OUTCOME: Final = "outcome"
_OF_MACHINE: Final = (
    "machine", "cpu", "cpus", "ram_gib", "swap_bytes", "kernel", "cgroup_version", "thp", "page_bytes",
    "gpu",
)  # fmt: skip
_OF_TIMES: Final = "Times differ for many reasons, so a step in a time alone proves nothing."

Found = tuple[Document, dict[str, Any]]
"""A comparison or history for readers, and the JSON of it for programs, which has the warnings."""


def compare(folders: Sequence[Path], metrics: Sequence[str] = (), by: str = "run") -> Found:
    """Compare the series of the first group with those of equal names in each later group.

    ``by`` is what a group shares: "run" (the folder), "machine" (its kind), "commit", or a setting.
    """
    runs = [read_runs([folder]) for folder in folders]
    groups = runs if by == "run" else _split(runs, by)
    if not 2 <= len(groups) <= len(ascii_uppercase):
        raise _incomparable(groups, by)
    # The places in names at which each group has a single word, such as the isolation, but the groups
    # differ: they count as equal, and the heading of each group shows its words.
    words = [
        [{*column} for column in zip(*(name.split(" ") for name in one.series), strict=False)]
        for one in groups
    ]
    own = {
        place
        for place, found in enumerate(zip(*words, strict=False))
        if all(len(here) == 1 for here in found) and len(set.union(*found)) > 1
    }
    keyed = [
        {
            " ".join("" if at in own else word for at, word in enumerate(name.split(" "))): one
            for name, one in group.series.items()
        }
        for group in groups
    ]
    shorts, common = short_names(name for series in keyed for name in series)
    chosen = [named(name) for name in metrics] or list(METRICS.values())
    rows = list[dict[str, Any]]()
    for name, short in shorts.items():
        rows += _rows(short, [series.get(name) for series in keyed], chosen)
    headings = []
    for letter, group in zip(ascii_uppercase, groups, strict=False):
        facts = [str(covered) for covered in group.incomplete.values()]
        first = next(iter(group.series)).split(" ")
        facts += [first[place] for place in sorted(own)]
        if commit := group.environment.get("git_commit"):
            facts.append(f"commit {str(commit)[:_COMMIT_LENGTH]}")
        if torch := group.environment.get("torch"):
            facts.append(f"torch {torch}")
        changes = differences(groups[0].environment, group.environment, {})
        facts += [str(change) for change in changes if change.name != "torch"]
        about = ", ".join(facts) or "environment unknown"
        headings.append(one_line(f"{letter} = {group.name}: {about}"))
    verdicts = [one["verdict"] for row in rows for one in row["compared"] if one]
    outcomes = [row["texts"] for row in rows if row["metric"] == _OUTCOME]
    ended = [now for was, *later in outcomes if was == "ok" for now in later]
    failed = sum(now not in (None, "ok") for now in ended)
    summary = (
        f"{len(verdicts)} figures compared with A: {verdicts.count(LineVerdict.REGRESSED)} larger and"
        f" {verdicts.count(LineVerdict.IMPROVED)} smaller beyond noise"
        + (f"; {failed} measurement{'s' * (failed > 1)} no longer ok" if failed else "")
    )
    warnings = [*dict.fromkeys(text for run in runs for text in run.warnings)]
    document: Document = [
        Lines("", headings),
        _table(rows, len(groups)),
        Lines("", [f"all: {common}"] if common else [], "dim"),
        Lines("", [summary], "result"),
    ]
    return document, {"runs": headings, "common": common, "rows": rows, "warnings": warnings}


def _incomparable(groups: Sequence[Group], by: str) -> ConfigError:
    if by == "run":
        return ConfigError(
            f"cannot compare {len(groups)} run{'s' * (len(groups) != 1)}",
            "name two or more folders of runs: weighin compare results/RUN_A results/RUN_B",
        )
    known = {"run", "machine", "commit", *(name for one in groups for name in one.environment)}
    if by not in known:
        return UnknownName("setting", by, known)
    if len(groups) > 1:
        what = f"cannot compare by {by}: it has {len(groups)} values in the records"
        most = len(ascii_uppercase)
        return ConfigError(f"{what}, more than {most}", f"name runs with at most {most} values")
    found = "".join(group.name for group in groups if group.name != f"{by} {_NOT_SET}")
    why = f"all records have {found}" if found else "no record has this fact"
    repair = f"name runs in which {by} differs, or leave out --by {by}"
    return ConfigError(f"cannot compare by {by}: {why}", repair)


def fingerprint(environment: Mapping[str, Any]) -> str:
    """Return a hash of processor, RAM, kernel, GPU and so on, which machines of one kind share."""
    settings = settings_of([environment])
    described = {name: settings.get(name) for name in _OF_MACHINE}
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:8]


def _split(runs: Sequence[Group], by: str) -> list[Group]:
    def value(result: Result) -> str:
        if by == "machine":
            return fingerprint(result.environment)
        settings = settings_of([result.environment])
        names = ("git_commit" if by == "commit" else by, f"releases.{by}", f"packages.{by}")
        return str(next((settings[name] for name in names if name in settings), _NOT_SET))

    parts = [
        (key, replace(run, results=results))
        for group in runs
        for run in group.runs
        for key, results in grouped((one for one in run.results if one.environment), value).items()
    ]
    groups = []
    for key, ours in grouped(parts, lambda part: part[0]).items():
        name = f"{by} {key[:_COMMIT_LENGTH] if by == 'commit' else key}"
        group = Group(name, tuple(run for _, run in ours))
        nodes = {str(one.get("node", {}).get("name", "")) for one in group.environments} - {""}
        if by == "machine" and nodes:
            group = replace(group, name=f"{name} ({', '.join(sorted(nodes))})")
        groups.append(group)
    return groups


def _rows(
    name: str, series: Sequence[Series | None], metrics: Sequence[Metric]
) -> Iterator[dict[str, Any]]:
    """Yield a row for outcomes, unless all are ok, and for each metric, ``compared`` with the first."""
    outcomes = [each.outcome if each else None for each in series]
    if any(text != "ok" for text in outcomes):
        none = [None] * (len(series) - 1)
        yield {"series": name, "metric": _OUTCOME, "texts": outcomes, "compared": none}
    for metric in metrics:
        first, *others = [each.figures.get(metric.name) if each else None for each in series]
        compared: list[dict[str, Any] | None] = []
        for other in others:
            if not (first and other):
                compared.append(None)
                continue
            line = judge_figure(name, metric, metric.tolerance, first, other)
            figures = {"unit": metric.unit, "before": line.was, "now": line.now}
            figures["changed_beyond_noise"] = line.verdict is not LineVerdict.SAME
            compared.append(figures | {"verdict": line.verdict})
        texts = [metric.text(one.median) if one else None for one in (first, *others)]
        if any(texts):
            yield {"series": name, "metric": metric.title, "texts": texts, "compared": compared}


def _table(rows: Sequence[dict[str, Any]], groups: int) -> Table:
    """Return a table with the change from the first group beside each figure of a later one."""
    shown: list[list[Entry | str]] = []
    for row in rows:
        entries = [Entry(text or "-") for text in row["texts"]]
        for place, one in enumerate(row["compared"], 1):
            if one and one["before"]:
                share = f"{(one['now'] - one['before']) / one['before'] * 100:+.1f} %"
                kind = KINDS[one["verdict"]] if one["changed_beyond_noise"] else ""
                entries[place] = Entry(entries[place].text, share, kind)
        shown.append([row["series"], row["metric"], *entries])
    names = (Column(one, is_name=True) for one in ("series", "metric"))
    return Table("", [*names, *map(Column, ascii_uppercase[:groups])], shown)


def history(folder: Path, metric: str, words: Sequence[str] = ()) -> Found:
    """Return a metric over every run below ``folder``, of the series with ``words`` in their names."""
    chosen, repair = named(metric), "name a folder that contains runs, such as results"
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder", repair)
    runs, warnings = list[Group](), list[str]()
    for path in sorted(file.parent for file in folder.rglob(run_folder.RECORDS)):
        try:
            records = run_folder.read(path, past_damage=True)
        except RecordError as error:
            warnings.append(f"{error.message}: this run is left out")
            continue
        warnings += records.warnings
        if records.results:
            name = folder.name if path == folder else str(path.relative_to(folder))
            runs.append(Group(name, [records]))
    if not runs:
        why = "; ".join([f"{folder} contains no run with a record", *warnings])
        raise ConfigError(why, f"{repair}, or the folder of one run")
    runs.sort(key=lambda run: (run.started_at, run.name))
    names = dict.fromkeys(name for run in runs for name in run.series)
    found = [
        _over_time(name, runs, chosen) for name in names if all(word in name for word in words)
    ]
    series = [one for one in found if one["points"]]
    if not series:
        why = f"no series in the runs of {folder} has {' and '.join(map(repr, words))} in its name"
        raise ConfigError(why, "leave --series out to see the names of all series")
    series.sort(key=lambda one: (-len(one["steps"] + one["outcome_changes"]), one["series"]))
    about = [
        {
            "run": run.name,
            "started_at": run.started_at,
            "commit": str(run.environment.get("git_commit") or "")[: _COMMIT_LENGTH - 1],
            "torch": str(run.environment.get("torch") or ""),
        }
        for run in runs
    ]
    json = {
        "metric": chosen.name,
        "unit": chosen.unit,
        "runs": about,
        "series": series,
        "warnings": warnings,
        "files": [],  # of the pictures that earlier versions drew
    }
    return _changes_over_time(chosen, about, series), json


def _over_time(name: str, runs: Sequence[Group], metric: Metric) -> dict[str, Any]:
    """Return a series in the runs that measured it; a step of a noisy metric must stay in the next."""
    points: list[dict[str, Any]] = []
    for run in runs:
        one = run.series.get(name)
        if one and one.outcome != "skipped":
            figure = one.figures.get(metric.name)
            known = asdict(figure) if figure else dict.fromkeys(("low", "median", "high"))
            points.append({"run": run.name, "outcome": one.outcome} | known)
    found = [(one["run"], one["median"]) for one in points if one["median"] is not None]
    steps, level = [], found[0][1] if found else 0
    for at, (since, now) in enumerate(found):
        allowed = metric.tolerance.allowance(level)
        later = found[at + 1][1] if at + 1 < len(found) else level
        stays = abs(later - level) > allowed and (later > level) == (now > level)
        if abs(now - level) > allowed and (stays or (metric.exact and metric.unit == "bytes")):
            steps.append({"run": since, "before": level, "now": now})
            level = now
    changes = [
        {"run": now["run"], "before": was["outcome"], "now": now["outcome"]}
        for was, now in pairwise(points)
        if was["outcome"] != now["outcome"]
    ]
    return {"series": name, "points": points, "steps": steps, "outcome_changes": changes}


def _changes_over_time(
    metric: Metric, about: Sequence[dict[str, str]], series: Sequence[dict[str, Any]]
) -> Document:
    rows, changes = list[list[str]](), list[str]()
    commits = {run["run"]: run["commit"] for run in about}
    earlier = {after["run"]: before["commit"] for before, after in pairwise(about)}
    for one in series:
        name, known = one["series"], [point["median"] for point in one["points"]]
        known = [median for median in known if median is not None]
        ends = [metric.text(known[0]), metric.text(known[-1]), metric.change(known[0], known[-1])] if known else ["-"] * 3  # fmt: skip
        rows.append([name, str(len(one["points"])), *ends])
        for run, was, now in (step.values() for step in one["steps"]):
            text = f"{name}: {metric.change(was, now)} since {run} ({metric.text(was)} -> {metric.text(now)})"
            if commits[run] and commits[run] != earlier[run]:
                text += f", commit {earlier[run] or 'unknown'} -> {commits[run]}"
            changes.append(text)
        ended = (change.values() for change in one["outcome_changes"])
        changes += [f"{name}: {was} -> {now} since {run}" for run, was, now in ended]
    heads = ("series", "runs", "first", "last", "change")
    return [
        Table.of(heads, rows, title=f"{metric.title} over {len(about)} runs"),
        Lines("", changes or ["no step: no series changed its level"]),
        Lines("", [_OF_TIMES] if metric.unit == "ns" else [], "dim"),
    ]
