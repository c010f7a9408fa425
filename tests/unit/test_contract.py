"""results/README.md names every field that a record can hold."""

from dataclasses import fields
from pathlib import Path

from weighin import cell, result
from weighin.records.run_folder import Plan
from weighin.settings.definition import COMMANDS, KEYS, MODELS, Settings

CONTRACT = (Path(__file__).parents[2] / "results" / "README.md").read_text()
TYPES: tuple[type, ...] = (
    cell.Cell, cell.Job, cell.ModelSpec, result.Sample, result.Memory, result.Phase, result.Peaks,
    result.Faults, result.Pressure, result.Cost, result.Result, result.Written, result.Use, Plan,
    result.Ran, result.Process, result.OpenFile, result.Kill, result.Mark, result.Stack, result.Track,
)  # fmt: skip


def is_named(*names: str) -> bool:
    return any(f"`{name}`" in CONTRACT for name in names)


def test_the_page_has_every_field_setting_and_outcome_of_this_schema() -> None:
    missing = {
        f"{kind.__name__}.{field.name}"
        for kind in TYPES
        for field in fields(kind)
        if not is_named(field.name, f"{kind.__name__.lower()}.{field.name}")
    }
    of_suites = {*KEYS[MODELS], *KEYS[COMMANDS]}
    missing |= {key for key in Settings.model_fields if key not in of_suites and not is_named(key)}
    missing |= {one.value for one in result.Outcome if f"| `{one}` |" not in CONTRACT}
    assert not missing
    assert f"This is schema **{result.SCHEMA}**" in CONTRACT
