"""The import of transformers for a model of its own is a phase before the load; other models have none."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from factories import make_result

from weighin.cell import ModelSpec
from weighin.errors import ConfigError
from weighin.formats.pretrained_folder import BUILDER
from weighin.records.metrics import phases_of_load
from weighin.result import IMPORT_TRANSFORMERS
from weighin.worker.warmup import import_model_package


def names(model: ModelSpec) -> list[str]:
    found = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        found.append(name)
        yield

    import_model_package(model, phase)
    return found


def test_the_class_of_a_model_of_transformers_is_imported_in_its_phase() -> None:
    model = ModelSpec("m", BUILDER, {"architecture": "LlamaForCausalLM", "config": {}})
    assert names(model) == [IMPORT_TRANSFORMERS]


def test_any_other_model_has_no_such_phase() -> None:
    assert names(ModelSpec("m", "weighin.models.gpt2:gpt2", {})) == []


def test_an_unknown_class_is_named_before_the_load() -> None:
    model = ModelSpec("m", BUILDER, {"architecture": "NoSuchModel", "config": {}})
    with pytest.raises(ConfigError, match="has no model class 'NoSuchModel'"):
        names(model)


def test_the_phase_is_no_part_of_the_load() -> None:
    result = make_result()
    before = [phase.name for phase in result.phases]
    own = replace(result.phases[0], name=IMPORT_TRANSFORMERS)
    index = before.index("import") + 1
    phases = (*result.phases[:index], own, *result.phases[index:])
    changed = replace(result, phases=phases)
    assert [name for name, _ in phases_of_load(changed)] == [
        name for name, _ in phases_of_load(result)
    ]
