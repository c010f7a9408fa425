"""Write the result of ``weighin check`` as GitHub annotations, as JUnit XML and as JSON."""

from collections.abc import Iterator
from typing import Any, Final
from xml.etree import ElementTree as ET

from weighin.gate.lines import FAILING, GateResult, Line, LineVerdict
from weighin.gate.tables import phase_lines, summary
from weighin.text import one_line

_LEVELS: Final = dict.fromkeys(FAILING, "error") | {
    LineVerdict.CHANGED: "warning",
    LineVerdict.IMPROVED: "notice",
    LineVerdict.NEW: "notice",
}


def describe(line: Line) -> str:
    """Return a line as text: the metric, the earlier and the new figure, the limit, the grown phase."""
    metric = line.metric
    if metric is None or line.was is None or line.now is None or line.allowed is None:
        return one_line(line.text)
    words = f"{line.what}: {metric.text(line.was)} -> {metric.text(line.now)}, {metric.change(line.was, line.now)}"
    words += f"; limit {metric.text(line.allowed)}"
    if line.grown and line.fails:
        words += (
            f"; grew in phase {one_line(line.grown.phase)} by"
            f" {metric.change(0, line.grown.step).lstrip('+')}"
        )
    return words


def annotations(judgement: GateResult, file: str | None = None) -> Iterator[str]:
    """Yield GitHub workflow commands, which GitHub shows as annotations of the baseline ``file``.

    https://docs.github.com/actions/reference/workflow-commands-for-github-actions
    """
    for line in judgement.lines:
        if level := _LEVELS.get(line.verdict):
            title = _property(f"{line.verdict}: {line.series}")
            place = f"file={_property(file)}," if file else ""
            yield f"::{level} {place}title={title}::{_data(describe(line))}"


def junit(judgement: GateResult) -> str:
    """Return JUnit XML, which Jenkins, GitLab and GitHub's test reporters read (junit-10.xsd).

    Each line of the check becomes a test case, whose class is the name of the measurement. The text
    of a failed test case lists the measurement's phases, if the phases explain the metric.
    """
    suite = ET.Element(
        "testsuite",
        name="weighin check",
        tests=str(len(judgement.lines)),
        failures=str(len(judgement.failed)),
        errors="0",
        skipped="0",
        time="0",
    )
    for line in judgement.lines:
        case = ET.SubElement(
            suite, "testcase", classname=one_line(line.series), name=one_line(line.what), time="0"
        )
        if line.fails:
            failure = ET.SubElement(
                case, "failure", type=line.verdict.replace(" ", "_"), message=describe(line)
            )
            failure.text = "\n".join(phase_lines(line)) if line.phases else describe(line)
        elif line.verdict is not LineVerdict.SAME:
            ET.SubElement(case, "system-out").text = f"{line.verdict}: {describe(line)}"
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def as_json(judgement: GateResult) -> dict[str, Any]:
    """Return the result of the check as data for ``--json``."""
    lines = [
        {
            "verdict": line.verdict,
            "failed": line.fails,
            "series": line.series,
            "metric": line.metric.name if line.metric else None,
            "unit": line.metric.unit if line.metric else None,
            "what": line.what,
            "text": line.text,
            "baseline": line.was,
            "now": line.now,
            "allowed": line.allowed,
            "grew_in": line.grown.phase if line.grown else None,
            "phases": [
                {"phase": each.phase, "baseline": each.was, "now": each.now} for each in line.phases
            ],
        }
        for line in judgement.lines
    ]
    return {
        "passed": not judgement.failed,
        "summary": summary(judgement),
        "notes": list(judgement.notes),
        "lines": lines,
    }


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
