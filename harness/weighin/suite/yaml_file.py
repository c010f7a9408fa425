"""Read a YAML file without validation, because importing pydantic would slow ``weighin list``."""

from pathlib import Path
from typing import Any

import yaml

from weighin.errors import ConfigError


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the top-level mapping of a YAML file; raise ConfigError with the file and the line."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ConfigError(f"{path}{line}: not YAML: {problem}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: not a mapping of keys to values")
    return content
