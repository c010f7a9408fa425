"""Say in one line for each model what a training step makes of each way of loading."""

from collections.abc import Sequence

from weighin.records import after_load
from weighin.records.repeats import grouped
from weighin.report import captions
from weighin.report.after_load import multiple
from weighin.report.rows import series
from weighin.result import Outcome, Result
from weighin.text import markdown as escaped


def markdown_trained(results: Sequence[Result]) -> str:
    """Return the most memory of each strategy until ready, and in one step of AdamW."""
    trained = [one for one in results if one.cell.use == "adamw" and one.outcome is Outcome.OK]
    lines = [
        f"{model}: {'; '.join(map(_step, grouped(ours, lambda one: one.cell.strategy).values()))}"
        for model, ours in grouped(trained, lambda one: one.cell.model.title).items()
    ]
    return "\n".join(
        [
            *(f"* {escaped(line)}" for line in lines),
            "",
            escaped(captions.shared(series(trained), trained)),
        ]
    )


def _step(repeats: Sequence[Result]) -> str:
    before = multiple(repeats, lambda one: one.peaks.anon_sampled_bytes)
    return f"{repeats[0].cell.strategy} {before} → {multiple(repeats, after_load.most_anon_bytes)}"
