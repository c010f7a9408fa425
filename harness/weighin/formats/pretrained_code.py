"""Find the Python code in a Hugging Face folder that defines the folder's model, without running it.

``config.json`` names this code in ``auto_map``: {"AutoModelForCausalLM":
"modeling_x.XForCausalLM"}. A ``ModelSpec`` has the folder's path and a digest of its Python files.
A measured process compares the digest, and refuses code that changed after the run was planned.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from weighin.errors import ConfigError
from weighin.text import one_line

AUTO_MAP: Final = "auto_map"
CODE_IS_REFUSED: Final = (
    "read the code; if you trust it, add --trust-remote-code to run it (bench, floor, predict, recommend,"
    " convert; in Python: trust_remote_code=True)"
)
"""The repair for a model that needs the folder's code, if --trust-remote-code is not given."""
CODE_KEYS: Final = ("folder", "sha256")
"""The keys of the argument ``code`` of a ``ModelSpec``: the folder of the code, and its digest."""

_SHOWN: Final = 80
_AUTO_MODEL: Final = "AutoModel"
_REFERENCE: Final = re.compile(r"(\w+)\.\w+")
_OTHER_REPOSITORY: Final = "--"  # "owner/name--modeling_x.XForCausalLM"


def describe_code(folder: Path) -> dict[str, str]:
    """Return the argument ``code`` of a ``ModelSpec``: a path, and a digest of its Python files."""
    folder = folder.absolute()
    return {"folder": str(folder), "sha256": digest(folder)}


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if path.is_file())


def digest(folder: Path) -> str:
    """Return a digest of the names and contents of the folder's Python files."""
    import hashlib  # hashlib loads OpenSSL, 4 MiB, which few workers need

    whole = hashlib.sha256()
    for path in files(folder):
        name = path.relative_to(folder).as_posix()
        whole.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


def check_unchanged(code: Mapping[str, str]) -> Path:
    """Return the code's folder; raise ConfigError if the code changed after the run was planned."""
    folder = Path(code["folder"])
    if digest(folder) != code["sha256"]:
        raise ConfigError(
            f"{folder}: the model's code was changed after this run was planned",
            "start a new run: this run can be resumed only with the code of its plan",
        )
    return folder


def auto_class(config: Mapping[str, Any], architecture: str) -> str:
    """Return the auto class of transformers that loads the model, such as "AutoModelForCausalLM".

    Raises:
        ConfigError: ``auto_map`` names no code for the class ``architecture``.
    """
    named = config[AUTO_MAP] if isinstance(config[AUTO_MAP], dict) else {}
    models: dict[str, str] = {
        auto: reference
        for auto, reference in named.items()
        if auto.startswith(_AUTO_MODEL) and isinstance(reference, str)
    }
    for auto, reference in models.items():
        if reference.rpartition(".")[2] == architecture:
            return auto
    raise ConfigError(
        f"config.json names no code of the class {architecture!r} in '{AUTO_MAP}'",
        f"correct '{AUTO_MAP}' or 'architectures' in config.json",
    )


def reference_in(folder: Path, config: Mapping[str, Any], auto: str) -> str:
    """Return the entry of ``auto_map`` ("modeling_x.XForCausalLM") for the auto class ``auto``.

    Raises:
        ConfigError: the entry is malformed, or the folder lacks the class's file, which may be in
            another repository.
    """
    reference = str(config[AUTO_MAP][auto])
    repository, divided, inside = reference.rpartition(_OTHER_REPOSITORY)
    named = _REFERENCE.fullmatch(inside)
    if named is None:
        raise ConfigError(
            f"{folder}: {one_line(inside, _SHOWN)!r} in '{AUTO_MAP}' is not module.class",
            f"correct '{AUTO_MAP}' in config.json",
        )
    if not (folder / f"{named[1]}.py").is_file():
        where = f", but in the repository {repository}" if divided else ""
        raise ConfigError(
            f"{folder}: the code {inside} of the model is not in this folder{where}",
            f"add {named[1]}.py and the modules that it imports to the folder: weighin uses no"
            " network",
        )
    return inside
