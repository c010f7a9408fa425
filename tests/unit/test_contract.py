"""results/README.md names every field that a record can hold."""

from dataclasses import fields
from pathlib import Path

import pytest

from weighin import cell, result
from weighin.records.run_folder import Plan
from weighin.settings.definition import COMMANDS, KEYS, MODELS, Settings

CONTRACT = (Path(__file__).parents[2] / "results" / "README.md").read_text()
TYPES = (
    cell.Cell, cell.Job, cell.ModelSpec, result.Sample, result.Memory, result.Phase, result.Peaks,
    result.Faults, result.Pressure, result.Cost, result.Result, result.Written, result.Use, Plan,
    result.Ran, result.Process, result.OpenFile, result.Kill, result.Mark, result.Stack, result.Track,
)  # fmt: skip


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
def test_every_field_is_in_the_contract(kind: type) -> None:
    section = f"{kind.__name__.lower()}."
    missing = [
        field.name
        for field in fields(kind)
        if f"`{field.name}`" not in CONTRACT and f"`{section}{field.name}`" not in CONTRACT
    ]
    assert missing == []


def test_every_setting_of_a_plan_is_in_the_contract() -> None:
    of_suites = {*KEYS[MODELS], *KEYS[COMMANDS]}
    others = [key for key in Settings.model_fields if key not in of_suites]
    assert [key for key in others if f"`{key}`" not in CONTRACT] == []


def test_every_outcome_is_in_the_contract() -> None:
    assert [o for o in result.Outcome if f"| `{o}` |" not in CONTRACT] == []


def test_the_contract_is_of_this_schema() -> None:
    assert f"This is schema **{result.SCHEMA}**" in CONTRACT
