"""What was typed for ``weighin bench`` and ``floor``, read strictly: nothing given is silently ignored."""

import json
from typing import Any

import typer

from weighin.errors import ConfigError

DEFAULT_MODEL = "gpt2-small"

_BESIDE_SUITE = {"suite", "kwargs", "checkpoint", "seed", "folder", "base_image"}
_BESIDE_SUITE |= {"checkpoint_dtype", "phases", "as_json"}  # of predict


def refuse_ignored(context: typer.Context) -> None:
    """Raise ConfigError where an option was typed beside --resume, --check or --suite, which rule."""
    sources = {one: context.get_parameter_source(one.name or "") for one in context.command.params}
    typed = [one for one, source in sources.items() if source and source.name == "COMMANDLINE"]
    names = {one.name for one in typed}
    if "resume" in names:
        what, kept = "a run goes on as it was planned", {"resume", "trust", "as_json"}
        repair = "leave them out, or start a new run"
    elif "check" in names:
        what, kept = "a run says what was measured", {"check", "trust", "as_json"}
        repair = "leave them out, or predict without --check"
    elif "suite" in names:
        what, kept = "a suite says it all", _BESIDE_SUITE
        repair = "write them into the suite, or leave --suite out"
    elif "trust" in names:
        what, kept = "what you name yourself needs no trust", set[str]()
        repair = "leave it out; it goes with --resume, and with --check of predict"
        typed = [one for one in typed if one.name == "trust"]
    else:
        return
    ignored = [
        one.opts[0] if one.param_type_name == "option" else (one.name or "").upper()
        for one in typed
        if one.name not in kept
    ]
    if ignored:
        raise ConfigError(f"{what}: {', '.join(ignored)} would be ignored", repair)


def one_model(argument: str | None, option: str | None) -> str:
    """Return the model that was named, as an argument or with --model."""
    if argument and option and argument != option:
        raise ConfigError(
            f"two models: {argument!r} and {option!r}", "give one, or a --suite with both"
        )
    return argument or option or DEFAULT_MODEL


def names(texts: list[str]) -> list[str]:
    """Return the names in texts that may each hold several, divided by commas."""
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]


def json_object(text: str) -> dict[str, Any]:
    """Return the object that --kwargs holds."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"--kwargs is not JSON: {error}", """write --kwargs '{"width": 64}'"""
        ) from None
    if not isinstance(value, dict):
        raise ConfigError("--kwargs is not a JSON object", """write --kwargs '{"width": 64}'""")
    return value


def share(text: str) -> float:
    """Return the share that --within names: "1%" is 0.01."""
    try:
        return float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise ConfigError(
            f"--within: cannot read {text!r} as a share", "write a percentage, such as --within 1%"
        ) from None
