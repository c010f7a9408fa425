"""Read a YAML file without validation and without pydantic, which would slow ``weighin list``."""

from pathlib import Path
from typing import Any

import yaml

from weighin.errors import ConfigError
from weighin.files import MIB, bounded, read_bytes
from weighin.text import one_line


class _Loader(yaml.SafeLoader):
    """Refuses a mapping with a key twice, of which YAML would keep the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names: set[tuple[str, str]] = set()
        for key, _ in node.value:
            name = (key.tag, str(key.value))
            if name in names and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {one_line(str(key.value))} is there twice",
                    problem_mark=key.start_mark,
                )
            names.add(name)
        return super().construct_mapping(node, deep)


def read_mapping(path: Path) -> dict[str, Any]:
    """Return a YAML file's top-level mapping; raise ConfigError that names the file and, for wrong YAML, the line."""
    try:
        content = parse(read_bytes(path, MIB).decode(), str(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: not a mapping of keys to values")
    return content


def parse(text: str, place: str) -> Any:
    """Return the value of a YAML text; raise ConfigError that names its ``place``."""
    try:
        return bounded(yaml.load(text, _Loader))  # noqa: S506 (a safe one)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = one_line(getattr(error, "problem", None) or str(error))
        raise ConfigError(f"{place}{line}: not YAML: {problem}") from None
    except RecursionError:
        raise ConfigError(f"{place}: too many nested values") from None
    # A number or a date that Python does not accept, or more than ``bounded`` accepts.
    except ValueError as error:
        raise ConfigError(f"{place}: {one_line(str(error))}") from None
