"""The import of the class of a model of transformers, before the load."""

from dataclasses import replace

import pytest
from factories import make_result

from weighin.errors import ConfigError
from weighin.records.metrics import phases_of_load
from weighin.result import IMPORT_TRANSFORMERS
from weighin.stream.pretrained_folder import BUILDER
from weighin.stream.pretrained_library import module_of


def test_an_unknown_class_is_named_before_the_load() -> None:
    with pytest.raises(ConfigError, match="has no model class 'NoSuchModel'"):
        module_of(BUILDER).import_class({"architecture": "NoSuchModel", "config": {}})


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
