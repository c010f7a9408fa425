"""Turn typed arguments into the settings of a run. A typed option without an effect is an error."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weighin.cli import _console
from weighin.errors import ConfigError
from weighin.files import parse_json

if TYPE_CHECKING:
    from weighin.formats.pretrained_library import FolderChoice, Selection
    from weighin.settings.definition import Settings

DEFAULT_MODEL = "gpt2-small"

_BESIDE_ALL = {"trust", "json_file", "wait"}
_BESIDE_RESUME = _BESIDE_ALL | {"resume", "address"}
_BESIDE_SUITE = _BESIDE_ALL | {
    "suite", "kwargs", "checkpoint", "key", "strip_prefix", "seed", "folder", "mounts",
    "engine", "jobs", "address", "labels", "shard", "storage", "trust_remote_code", "variant",
    "model_class", "revision", "adapter",
    "checkpoint_dtype", "phases",  # options of `weighin predict`
}  # fmt: skip
_OF_SUITE = (
    "operation", "ram_high", "isolation", "device", "dtype", "cache", "passes", "repeats", "timeout_s",
    "steady",
)  # fmt: skip
"""Options that are also keys of a suite (YAML file), under the same name."""
_BESIDE_KEYS = (
    "seed", "checkpoint", "key", "strip_prefix", "variant", "model_class", "revision",
    "trust_remote_code", "adapter", "storage",
)  # fmt: skip
"""Options that are settings under the same name, but no keys of a suite."""
_LISTS = {name: name for name in ("ram", "vram", "ranks", "disk", "disk_latency")} | {"uses": "use"}
"""Maps each suite key whose value is a list to the option that takes a comma-separated list."""


def read(context: click.Context) -> dict[str, Any]:
    """Return the values of a verb's parameters by name; the command line overrides pyproject.toml.

    Raises:
        ConfigError: a typed option has no effect, such as --ram beside --suite.
    """
    names = [parameter.name or "" for parameter in context.command.params]
    typed = {name for name in names if is_typed(context, name)}
    _refuse_ineffective(context, typed)
    return context.params | _contradicted(typed, context.params)


def refuse(context: click.Context, names: Iterable[str], reason: str, repair: str) -> None:
    """Raise ConfigError if the user typed a parameter in ``names``: none of them has an effect, for
    the given reason.
    """
    ignored = [
        one.opts[0] if isinstance(one, click.Option) else one.name.upper()
        for one in context.command.params
        if one.name in names and is_typed(context, one.name)
    ]
    if ignored:
        raise ConfigError(f"{reason}: {', '.join(ignored)} would be ignored", repair)


def is_typed(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def _refuse_ineffective(context: click.Context, typed: set[str]) -> None:
    if "resume" in typed:
        ignored, reason = typed - _BESIDE_RESUME, "a resumed run keeps its settings"
        repair = "leave these options out, or start a new run without --resume"
    elif "check" in typed:
        ignored, reason = typed - _BESIDE_ALL - {"check"}, "--check predicts what a run measured"
        repair = "leave these options out, or predict without --check"
    elif "suite" in typed:
        ignored, reason = typed - (_BESIDE_SUITE - {"trust"}), "a suite sets all models and limits"
        repair = "write these settings into the suite file, or leave --suite out"
    else:
        ignored, reason = {"trust"}, "code that you name yourself runs without --trust"
        repair = "leave --trust out: only --resume, and --check of weighin predict, use it"
    refuse(context, ignored, reason, repair)


def _contradicted(typed: set[str], params: dict[str, Any]) -> dict[str, Any]:
    """Return empty values for parameters whose pyproject.toml value the command line contradicts.

    If the command line names a model, the model in pyproject.toml does not count, nor do that
    model's arguments and checkpoint. If the command line has an option that a suite sets, such as
    --ram, the suite in pyproject.toml does not count.
    """
    empty: dict[str, Any] = {}
    if typed & {"model", "model_option"}:
        empty = {"model_option": None, "kwargs": "{}", "checkpoint": None}
        empty |= dict.fromkeys(
            ("key", "strip_prefix", "variant", "model_class", "revision", "adapter"), ""
        )
    if typed - _BESIDE_SUITE:
        empty["suite"] = None
    return {name: value for name, value in empty.items() if name in params and name not in typed}


def one_model(typed: dict[str, Any]) -> str:
    """Return the model that the user gave as an argument or with --model, or else the default."""
    argument, option = typed["model"], typed["model_option"]
    if argument and option and argument != option:
        repair = "give one of the two models, or list both models in a suite file: --suite FILE"
        if Path(argument).exists():
            repair = (
                f"to load {option} with your own weights: --model {option} --checkpoint {argument}"
            )
        raise ConfigError(
            f"two models are given in place of one: {argument!r} and {option!r}", repair
        )
    return argument or option or DEFAULT_MODEL


def noted_model(typed: dict[str, Any]) -> str:
    """Return the model as ``one_model`` does; if the user gave no model or suite, print a note.

    Only the verbs that do not name the model in their output call it.
    """
    if not (typed["model"] or typed["model_option"] or typed.get("suite")):
        _console.note(f"no model given: {DEFAULT_MODEL}")
    return one_model(typed)


def pipeline(typed: dict[str, Any]) -> Path | None:
    """Return the folder of a diffusers pipeline that the user typed in place of a model.

    Return None for anything else, for a pipeline without weights, and with --suite.
    """
    from weighin.formats import pipeline as pipelines
    from weighin.formats.pretrained_folder import path_of

    name = typed["model"] or typed["model_option"]
    if not name or typed.get("suite") or (typed["model"] and typed["model_option"]):
        return None
    path = path_of(Path(name), typed.get("revision") or "")
    return path if pipelines.is_pipeline(path) and pipelines.read(path).models else None


def names(texts: Iterable[str]) -> list[str]:
    """Split each text at its commas, and return all names: for ["a,b", "c"], ["a", "b", "c"]."""
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]


def selection(typed: dict[str, Any]) -> "Selection":
    from weighin.formats.pretrained_library import Selection

    return Selection(typed["key"], typed["strip_prefix"])


def choice(typed: dict[str, Any]) -> "FolderChoice":
    """Return the options that choose the weights and the class in a Hugging Face folder."""
    from weighin.formats.pretrained_library import FolderChoice

    names = ("variant", "model_class", "revision", "trust_remote_code", "adapter")
    return FolderChoice(**{name: typed[name] for name in names if name in typed})


def settings(typed: dict[str, Any], model: str, **more: Any) -> "Settings":
    """Return the settings of the suite that --suite names, or of ``model`` and the typed options.

    The typed options that may stand beside --suite, and ``more``, are added.
    """
    from weighin.settings.definition import check_suite, read_suite
    from weighin.suite import registry

    if typed.get("suite"):
        found = read_suite(registry.suite_file(typed["suite"]))
    else:
        content: dict[str, Any] = {"models": [model]}
        content |= {key: typed[key] for key in _OF_SUITE if key in typed}
        content |= {key: names([typed[name]]) for key, name in _LISTS.items() if name in typed}
        optional = {
            "strategies": names(typed["strategies"]),
            "format": names([typed["fmt"] or ""]),
            "environment": environment(typed.get("env", ())),
        }
        found = check_suite(content | {key: value for key, value in optional.items() if value})
    return found.model_copy(update=beside(typed) | more)


def beside(typed: dict[str, Any]) -> dict[str, Any]:
    """Return the typed options that are settings, but no keys of a suite."""
    found = {name: typed[name] for name in _BESIDE_KEYS if name in typed}
    found["kwargs"] = json_object(typed["kwargs"])
    if "mounts" in typed:
        found["mounts"] = tuple(map(str, typed["mounts"]))
    return found


def json_object(text: str) -> dict[str, Any]:
    """Parse the text of --kwargs.

    Raises:
        ConfigError: the text is not a JSON object.
    """
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ConfigError(
            f"--kwargs is not JSON: {error}", """write --kwargs '{"width": 64}'"""
        ) from None
    if not isinstance(value, dict):
        raise ConfigError("--kwargs is not a JSON object", """write --kwargs '{"width": 64}'""")
    return value


def environment(texts: Iterable[str]) -> dict[str, str]:
    """Parse the texts "NAME=VALUE" of --env.

    Raises:
        ConfigError: a text has no name or no "=".
    """
    variables = {}
    for text in texts:
        name, divided, value = text.partition("=")
        if not divided or not name:
            raise ConfigError(
                f"--env: {text!r} sets nothing", "write --env NAME=VALUE", option="--env"
            )
        variables[name] = value
    return variables


def share(text: str) -> float:
    """Return the number in the text of --within: 0.01 for "1%" or "0.01".

    Raises:
        ConfigError: the text is not a number, or not between 0% and ``COARSEST``.
    """
    from weighin.records.floor import COARSEST

    try:
        within = float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise ConfigError(
            f"--within: cannot read {text!r} as a share",
            "write a percentage, such as --within 1%",
            option="--within",
        ) from None
    if not 0 < within <= COARSEST:
        raise ConfigError(
            f"--within {within * 100:g}% is not between 0% and {COARSEST:.0%}",
            "write a percentage in this range, such as --within 1%",
            option="--within",
        )
    return within
