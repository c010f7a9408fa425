"""The parameters that several verbs share, and the settings that the user typed.

A verb's settings come from four sources, of which a later one overrides the earlier ones: the verb's
own defaults, ``[tool.weighin]`` in pyproject.toml, the suite, and the command line.
"""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from weighin.cli import _pyproject
from weighin.cli._verb import WHAT, WRITE, Option, parameters
from weighin.errors import ConfigError

if TYPE_CHECKING:
    from weighin.settings.definition import Settings


def settings(verb: str, **usual: str) -> list[click.Parameter]:
    """Return the options of ``verb``; ``usual`` are its own defaults, for the help."""
    from weighin.settings import definition

    found: list[click.Parameter] = []
    for key, field, written in definition.options(verb):
        name, is_flag = key.rpartition(".")[2], field.annotation is bool
        shown, default = usual.get(name, ""), field.default
        if isinstance(default, list):
            shown = shown or ",".join("none" if one is None else str(one) for one in default)
        elif isinstance(default, str | int | float) and not is_flag:
            shown = shown or str(default)  # else the description says what holds
        only = definition.TEXTS.get(verb, {}).get(key, "")
        more = " Repeatable." if written.is_repeatable and name != "strategies" else ""
        more += f" [default: {shown}]" if shown else ""
        found.append(
            Option(
                [*definition.names_of(key, written), name],
                written.group,
                f"{only or field.description}{more}",
                key=key,
                default=None,
                is_flag=is_flag,
                multiple=written.is_repeatable,
                metavar=None if is_flag else written.metavar.removesuffix("S" if only else ""),
            )
        )
    text = "Set any other key of a suite: `weighin help suite` lists them. Repeatable."
    names = ["--set", "assigned"]
    return [*found, Option(names, WHAT, text, multiple=True, metavar="KEY=VALUE")]


MODEL: Final = parameters(
    {"[MODEL]": "What to load: see --model. If a model has your folder's name, write ./NAME. Default: gpt2-small."}
)[0]  # fmt: skip
COMMAND: Final = click.Argument(
    ["command"],
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="-- COMMAND ...",
    help="The command with its arguments. For a line of shell code: -- sh -c 'LINE'.",
)
SUITE: Final = parameters(
    {"--suite NAME": "A YAML file of settings: its path, or a name of `weighin list suites`. Options beside it override its keys."},
    WHAT,
)[0]  # fmt: skip
JSON: Final = Option(
    ["--json"],
    WRITE,
    "Write the result as JSON to this file; with -, print it in place of the tables.",
    metavar="FILE",
)
MARKDOWN: Final = parameters({"--markdown FILE": "Write the result as Markdown to this file."})


def run(default: str) -> list[click.Parameter]:
    """Return where a run is written, and which run is resumed; ``default`` is a new run's name."""
    first, *others = parameters(
        {
            "--out FOLDER": f"The run's new folder. Default: results/{default}.",
            "--resume FOLDER": "Go on with the stopped run in this folder.",
            "--trust": "Run the commands, builders and strategies that another person's run names. Read them first.",
        },
        WRITE,
    )
    return [first, JSON, *others]


def is_typed(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def refuse(context: click.Context, names: Iterable[str], reason: str, repair: str) -> None:
    """Raise ConfigError if the user typed a parameter in ``names``: none of them has an effect."""
    ignored = [
        one.opts[0] if isinstance(one, click.Option) else str(one.name).upper()
        for one in context.command.params
        if one.name in names and is_typed(context, one.name)
    ]
    if ignored:
        raise ConfigError(f"{reason}: {', '.join(ignored)} would be ignored", repair)


def check(context: click.Context) -> None:
    """Raise ConfigError for an option without an effect beside --resume."""
    kept = {"resume", "trust", "json"}
    if assigned(context).keys() <= {"address", "wait"}:
        kept.add("assigned")
    repair = "leave these options out, or start a new run without --resume"
    ignored = {str(one.name) for one in context.command.params} - kept
    refuse(context, ignored, "a resumed run keeps its settings", repair)


def read(context: click.Context, defaults: Mapping[str, Any] = MappingProxyType({})) -> "Settings":
    """Return a verb's settings; those without an effect are refused if typed, else left out."""
    from weighin.settings import definition

    verb, suite = context.command.name or "", context.params.get("suite")
    is_of_commands = verb == "run" or context.params.get("command") is not None
    kind = definition.COMMANDS if is_of_commands else definition.MODELS
    used = definition.used_by(verb, kind)
    unused = {*definition.KEYS[kind]} - used
    of_file = {key: one for key, one in _pyproject.settings_of(context).items() if key in used}
    start = {} if suite else {**defaults}
    typed = _typed(context)
    of_command = {key: typed.pop(key) for key in [*typed] if key.startswith("commands.")}
    if is_of_commands:
        reason = "weighin measures a command, and loads no model"
        refuse(context, ("model",), reason, "leave the model out, or -- and the command after it")
        own = {key.partition(".")[2]: value for key, value in of_command.items()}
        typed |= _commands(context, own)
        if verb == "floor":  # a time-out of loads would end the command
            of_file.pop("timeout_s", None)
    else:
        reason = "weighin loads a model, and runs no command"
        repair = "add the command after --; for a variable of a load: --set environment.NAME=VALUE"
        refuse(context, [key.partition(".")[2] for key in of_command], reason, repair)
        if model := one_model(context):
            typed["models"] = [model]
        if not suite:
            start["models"] = ["gpt2-small"]
    if without := [definition.typed_as(key, verb) for key in typed if key in unused]:
        repair = f"leave {without[0]} out"
        raise ConfigError(f"{without[0]}: it has no effect on weighin {verb}", repair)

    def place(path: str) -> str:
        key, dot, inner = path.partition(".")
        return f"{of_file[key][0]}{dot}{inner}"

    sources: list[tuple[definition.Place, Mapping[str, Any]]] = [(str, start)]
    sources.append((place, {key: value for key, (_, value) in of_file.items()}))
    if suite:
        from weighin.suite.registry import suite_file

        content = definition.read_suite_file(path := suite_file(suite), kind)
        content = {key: one for key, one in content.items() if key not in unused}
        sources[0] = definition.in_file(path), start
        sources.append((definition.in_file(path), content))
    sources.append((lambda path: definition.typed_as(path, verb), typed))
    return definition.merge(sources, kind)


def _commands(context: click.Context, about: dict[str, Any]) -> dict[str, Any]:
    """Return the setting of the typed command; empty if a suite names the commands."""
    from weighin.plan.start import label_of

    if words := [*context.params.get("command", ())]:
        return {"commands": [{"name": label_of(words), "command": words, **about}]}
    if not context.params.get("suite"):
        why = "no command was given"
        raise ConfigError(why, "write the command after --: weighin run --ram 4g -- python x.py")
    reason = "each command of a suite has settings of its own"
    refuse(context, about, reason, "set them in the suite file, or leave --suite out")
    return {}


def _typed(context: click.Context) -> dict[str, Any]:
    """Return the typed settings, and what was said of the command, also in pyproject.toml."""
    typed = assigned(context)
    for each in context.command.params:
        key, name = getattr(each, "key", ""), str(each.name)
        value: Any = context.params.get(name)
        is_of_command = "." in key and value
        if not key or not (is_of_command or is_typed(context, name)):
            continue
        if isinstance(each, click.Option) and each.multiple:
            is_pairs = "=" in (each.metavar or "")
            value = dict(pairs(each.opts[0], value)) if is_pairs else list(value)
        typed[key] = ",".join(value) if name == "strategies" else value
    return typed


def pairs(name: str, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the key and the value of each text "KEY=VALUE"; raise ConfigError if it has none."""
    for text in texts:
        key, divided, value = text.partition("=")
        if not (key and divided):
            raise ConfigError(f"{name}: {text!r} sets nothing", f"write {name} KEY=VALUE")
        yield key, value


def assigned(context: click.Context) -> dict[str, Any]:
    """Return the settings of --set: ``seed=3``, or YAML after a bracket and in ``kwargs.width=64``."""
    found: dict[str, Any] = {}
    for name, text in pairs("--set", context.params.get("assigned", ())):
        key, dot, inner = name.partition(".")
        value: Any = text
        if text[:1] in ("[", "{") or key == "kwargs":
            from weighin.settings.yaml_file import parse  # only if it is needed

            value = parse(text, f"--set {key}")
        elif key == "models":
            value = names(text)
        if dot:
            outer = found.get(key)
            value = (outer if isinstance(outer, dict) else {}) | {inner: value}
        found[key] = value
    return found


def one_model(context: click.Context) -> str:
    """Return the model that the user typed as an argument or with --model; empty if they typed none."""
    typed = [context.params[name] for name in ("model", "models") if is_typed(context, name)]
    models = [*dict.fromkeys(str(model) for model in typed if model)]
    if len(models) > 1:
        raise ConfigError(
            f"two models are given in place of one: {models[0]!r} and {models[1]!r}",
            "give one of the two models, or list both models in a suite file (--suite FILE); if one"
            " is a file of weights for the other: --checkpoint FILE",
        )
    return models[0] if models else ""


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
