"""YAML files -> what they describe. Errors name the file, the key and the nearest right one."""

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from harness.cell import ModelSpec
from harness.errors import ConfigError
from harness.units import parse_bytes

DEFAULT_STRATEGIES = (
    "baseline",
    "sequential",
    "meta_copy",
    "mmap_assign",
    "per_param",
    "streaming",
)


def _as_list(value: object) -> object:
    return value if isinstance(value, list) else [value]


def _as_limit(value: object) -> object:
    """Read one RAM limit: a size as text, bytes as a number, or "none" for no limit."""
    if isinstance(value, str):
        return None if value.lower() == "none" else parse_bytes(value)
    return value


_Kind = TypeVar("_Kind", bound=BaseModel)
_Limit = Annotated[int | None, BeforeValidator(_as_limit)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _ModelFile(_Strict):
    name: str
    builder: str = Field(pattern=r"^[\w.]+:\w+$")
    kwargs: dict[str, Any] = {}
    description: str = ""


class SuiteStrategy(_Strict):
    """One strategy of a suite, with its options."""

    name: str
    options: dict[str, Any] = {}


def _as_strategies(value: object) -> object:
    items = value if isinstance(value, list) else [value]
    return [{"name": item} if isinstance(item, str) else item for item in items]


class Suite(_Strict):
    """A matrix of cells: every model x limit x strategy, ``repeats`` times."""

    models: Annotated[list[str], BeforeValidator(_as_list)]
    strategies: Annotated[list[SuiteStrategy], BeforeValidator(_as_strategies)] = Field(
        default_factory=lambda: [SuiteStrategy(name=name) for name in DEFAULT_STRATEGIES]
    )
    ram: Annotated[list[_Limit], BeforeValidator(_as_list)] = [None]
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    isolation: Literal["auto", "docker", "cgroup", "process"] = "auto"
    cache: Literal["cold", "warm"] = "cold"
    repeats: int = Field(1, ge=1)
    timeout_s: float = Field(600, gt=0)
    description: str = ""


def read_model(path: Path) -> ModelSpec:
    """Read a model's YAML file.

    Raises:
        ConfigError: unreadable, not YAML, or a wrong key or value; names it.
    """
    model = _validate(_ModelFile, _read(path), str(path))
    return ModelSpec(model.name, model.builder, model.kwargs)


def read_suite(path: Path) -> Suite:
    """Read a suite's YAML file; raises ConfigError as ``read_model`` does."""
    return _validate(Suite, _read(path), str(path))


def check_suite(options: dict[str, Any]) -> Suite:
    """Return the options of a command line as a suite; raises ConfigError with the option's name."""
    return _validate(Suite, options, "the command line")


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a mapping of keys to values")
    return content


def _validate(kind: type[_Kind], content: dict[str, Any], place: str) -> _Kind:
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{place}: {key}: {first['msg']}", _nearest(str(first["loc"][-1]), kind)
        ) from None


def _nearest(key: str, kind: type[BaseModel]) -> str:
    near = get_close_matches(key, kind.model_fields, n=1)
    hint = f"did you mean {near[0]!r}? " if near and near[0] != key else ""
    return f"{hint}known keys: {', '.join(kind.model_fields)}"
