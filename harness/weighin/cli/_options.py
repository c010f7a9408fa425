"""Options of the command line: those that are settings (``weighin.settings.definition`` defines them),
and others that several verbs share.

A verb's settings come from four sources, of which a later one overrides the earlier ones: the verb's
own defaults, ``[tool.weighin]`` in pyproject.toml, the suite, and the command line.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, get_origin

import click
from click.core import ParameterSource

from weighin.cli import _console, _pyproject
from weighin.errors import ConfigError

if TYPE_CHECKING:
    from weighin.settings.definition import Settings, Strict, SuiteCommand

PATH = click.Path(path_type=Path)
DEFAULT_MODEL: Final = "gpt2-small"
_BESIDE_RESUME: Final = ("resume", "trust", "json_file")
_SET_BESIDE_RESUME: Final = ("address", "wait")
_OF_COMMAND: Final = "command."
Decorator = Callable[[Any], Any]


class Option(click.Option):
    """An option in one of the groups of a verb's help.

    ``key`` is the setting that it sets, or "command.KEY" for a key of a command; empty if none.
    ``usual`` is the setting's default, which the help shows unless pyproject.toml has another one.
    """

    def __init__(
        self,
        *arguments: Any,
        group: str = "Options",
        key: str = "",
        usual: str = "",
        **attributes: Any,
    ) -> None:
        super().__init__(*arguments, **attributes)
        self.group = group
        self.key = key
        self._usual = usual

    def get_help_extra(self, ctx: click.Context) -> Any:
        extra = super().get_help_extra(ctx)
        shown = ctx.lookup_default(self.name or "") or self._usual
        if self.key and shown:
            extra["default"] = shown if isinstance(shown, str) else ",".join(shown)
        return extra


def option(*names: str, **attributes: Any) -> Decorator:
    return click.option(*names, cls=Option, **attributes)


def settings(verb: str, **usual: str) -> Decorator:
    """Return a decorator that adds every setting which is an option of ``verb``, and ``--set``.

    ``usual`` are defaults of the verb, which the help shows in place of the settings' own.
    """
    from weighin.settings import definition

    parts: dict[type[Strict], str] = dict.fromkeys(
        (definition.Measure, definition.Load, definition.Model, definition.Command), ""
    )
    found = []
    for part, start in (parts | {definition.SuiteCommand: _OF_COMMAND}).items():
        for name, field in part.model_fields.items():
            written, is_flag = definition.option_of(field), field.annotation is bool
            if not written or verb not in written.verbs.split():
                continue
            values = field.default if isinstance(field.default, list) else [field.default]
            has_none = isinstance(field.default, list)
            texts = ["none" if has_none and one is None else str(one or "") for one in values]
            is_said = field.default_factory or is_flag or field.is_required()
            is_said = is_said or get_origin(field.annotation) is dict  # the text says its default
            more = " Repeatable." if written.is_repeatable and name != "strategies" else ""
            found.append(
                option(
                    *definition.names_of(name, written),
                    name,
                    key=start + name,
                    group=written.group,
                    default=None,
                    is_flag=is_flag,
                    multiple=written.is_repeatable,
                    metavar=None if is_flag else written.metavar,
                    shell_complete=_completed(name) if name in ("models", "strategies") else None,
                    usual=usual.get(name) or ("" if is_said else ",".join(filter(None, texts))),
                    help=f"{field.description}{more}",
                )
            )
    found.append(
        option(
            "--set",
            "assigned",
            multiple=True,
            metavar="KEY=VALUE",
            group=definition.WHAT,
            help="Set any other key of a suite: `weighin help suite` lists them. Repeatable.",
        )
    )

    def decorate(function: Any) -> Any:
        for each in reversed(found):
            function = each(function)
        return function

    return decorate


def _completed(kind: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Return a function with which click completes the last name of a comma-separated list."""

    def complete(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
        from weighin.suite import registry

        known = {
            "strategies": lambda: [*registry.strategies(), "all"],
            "models": registry.models,
            "suites": registry.suites,
        }[kind]()
        before, comma, last = incomplete.rpartition(",")
        return [before + comma + name for name in known if name.startswith(last)]

    return complete


model = click.argument(
    "model",
    required=False,
    shell_complete=_completed("models"),
    help="The model, as --model. ./NAME is always a path. Default: gpt2-small.",
)
command = click.argument(
    "command",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="-- COMMAND ...",
    help="The command with its arguments. For a line of shell code: -- sh -c 'LINE'.",
)
suite = option(
    "--suite",
    metavar="NAME",
    group="What to load",
    shell_complete=_completed("suites"),
    help="A YAML file of settings: its path, or a name of `weighin list suites`. Options beside it override its keys.",
)
resume = option(
    "--resume",
    type=PATH,
    metavar="FOLDER",
    group="Where to write",
    help="Go on with the stopped run in this folder.",
)
trust = option(
    "--trust",
    is_flag=True,
    group="Where to write",
    help="Run the commands, builders and strategies that another person's run names. Read them first.",
)
markdown = option(
    "--markdown", type=PATH, metavar="FILE", help="Write the result as Markdown to this file."
)
json = option(
    "--json",
    "json_file",
    metavar="FILE",
    group="Where to write",
    help="Write the result as JSON to this file; with -, print it in place of the tables.",
)


def out(default: str) -> Decorator:
    return option(
        "--out",
        "folder",
        type=PATH,
        metavar="FOLDER",
        group="Where to write",
        help=f"The run's new folder. Default: results/{default}.",
    )


def is_typed(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


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


def check(context: click.Context) -> None:
    """Raise ConfigError for an option without an effect beside --resume, or without it."""
    names = {one.name for one in context.command.params if one.name}
    if names & {"resume"} and is_typed(context, "resume"):
        others = assigned(context).keys() - {*_SET_BESIDE_RESUME}
        ignored = names - {*_BESIDE_RESUME} - ({"assigned"} if not others else set())
        reason = "a resumed run keeps its settings"
        repair = "leave these options out, or start a new run without --resume"
    else:
        ignored, reason = {"trust"}, "code that you name yourself runs without --trust"
        repair = "leave --trust out: only --resume uses it"
    refuse(context, ignored, reason, repair)


def read(
    context: click.Context,
    *,
    model: str = "",
    strategies: Iterable[str] = (),
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> "Settings":
    """Return a verb's settings, of models or of the typed commands, from all four sources.

    ``defaults`` are the verb's own where no suite is named. ``model`` and ``strategies`` stand in place
    of the typed ones. Settings without an effect on the verb are refused where they are typed, and left
    out where a suite or pyproject.toml has them for other verbs.

    Raises:
        ConfigError: a key or a value is invalid, or it has no effect.
    """
    from weighin.settings import definition

    verb = context.command.name or ""
    of_file, typed, of_command = _written(context)
    words, named = context.params.get("command"), context.params.get("suite")
    is_of_commands = verb == "run" or words is not None
    kind = definition.COMMANDS if is_of_commands else definition.MODELS
    if is_of_commands:
        reason = "weighin measures a command, and loads no model"
        refuse(context, ("model",), reason, "leave the model out, or -- and the command after it")
        if words:
            typed["commands"] = [_command(list(words), of_command)]
        elif not named:
            raise ConfigError(
                "no command was given",
                "write the command after --: weighin run --ram 4g -- python x.py",
            )
        else:
            reason = "the suite says of each of its commands"
            refuse(context, of_command, reason, "write it into the suite file, or type the command")
    else:
        reason = "weighin loads a model, and runs no command"
        repair = "add the command after --; for a variable of a load: --set environment.NAME=VALUE"
        refuse(context, of_command, reason, repair)
        if chosen := model or one_model(context):
            typed["models"] = [chosen]
    if strategies:
        typed["strategies"] = [*strategies]
    used = definition.used_by(verb, kind)
    unused = definition.Settings.keys(kind).keys() - used
    for key in typed:
        if key in unused:
            name = definition.typed_as(key, verb)
            raise ConfigError(f"{name}: it has no effect on weighin {verb}", f"leave {name} out")
    of_file = {key: value for key, value in of_file.items() if key in used}
    if verb == "floor" and is_of_commands:  # a time-out of loads would end the command
        of_file.pop("timeout_s", None)
    start = {} if named else {**defaults}
    if not (is_of_commands or named):
        start["models"] = [DEFAULT_MODEL]
    place = partial(_pyproject.place_of, context)
    sources: list[definition.Source] = [("", start), (place, of_file)]
    if named:
        from weighin.suite.registry import suite_file

        file = suite_file(named)
        content = definition.read_suite_file(file, kind)
        content = {key: value for key, value in content.items() if key not in unused}
        sources.append((f"{file}: ", content))
    sources.append((lambda key: definition.typed_as(key, verb), typed))
    return definition.merge(sources, kind)


def _written(context: click.Context) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the settings of pyproject.toml, the typed ones, and those of a command."""
    of_file, typed = dict(_pyproject.keys_of(context)), assigned(context)
    of_command: dict[str, Any] = {}
    for each in context.command.params:
        if not isinstance(each, Option) or not each.key:
            continue
        name = each.name or ""
        source, value = context.get_parameter_source(name), _value(each, context.params[name])
        if each.key.startswith(_OF_COMMAND):
            of_command |= {name: value} if value else {}
        elif source is ParameterSource.DEFAULT_MAP:
            of_file[name] = value
        elif source is ParameterSource.COMMANDLINE:
            if name in typed:
                raise ConfigError(
                    f"{each.opts[0]} and --set {name} set the same", "leave one of them out"
                )
            typed[name] = value
    return of_file, typed, of_command


def _command(words: list[str], about: dict[str, Any]) -> "SuiteCommand":
    """Return the typed command, not validated: it may set any variable, and have any name."""
    from weighin.plan.start import label_of
    from weighin.settings.definition import SuiteCommand

    name = about.pop("name", "") or label_of(words)
    return SuiteCommand.model_construct(name=name, command=words, **about)


def _value(each: Option, value: Any) -> Any:
    """Return an option's value as a setting: names and values of NAME=VALUE, a list, or the value."""
    if each.multiple and each.metavar and "=" in each.metavar:
        return dict(pairs(each.opts[0], value))
    if each.multiple:
        return ",".join(value) if each.key == "strategies" else list(value)
    return value


def pairs(name: str, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the key and the value of each text "KEY=VALUE"; raise ConfigError if it has none."""
    for text in texts:
        key, divided, value = text.partition("=")
        if not (key and divided):
            raise ConfigError(f"{name}: {text!r} sets nothing", f"write {name} KEY=VALUE")
        yield key, value


def assigned(context: click.Context) -> dict[str, Any]:
    """Return the settings of --set: ``seed=3``, ``kwargs.width=64``, ``ram=[8g, none]``.

    A value that begins with a bracket, and an argument of a model's builder, are YAML.
    """
    found: dict[str, Any] = {}
    for name, text in pairs("--set", context.params.get("assigned", ())):
        key, dot, inner = name.partition(".")
        value: Any = text
        if text[:1] in ("[", "{") or key == "kwargs":
            from weighin.settings.yaml_file import parse  # only if it is needed

            value = parse(text, f"--set {key}")
        elif key == "models":
            value = names([text])
        if key == "kwargs" and "." in inner:
            raise ConfigError(
                f"--set {name}: an argument has no parts",
                f"write --set kwargs.{inner.partition('.')[0]}='{{...}}'",
            )
        if dot:
            outer = found.get(key)
            value = (outer if isinstance(outer, dict) else {}) | {inner: value}
        found[key] = value
    return found


def one_model(context: click.Context) -> str:
    """Return the model that the user typed as an argument or with --model; empty if they typed none."""
    typed = [
        context.params.get(name) if is_typed(context, name) else None
        for name in ("model", "models")
    ]
    argument, named = typed
    if argument and named and argument != named:
        repair = "give one of the two models, or list both models in a suite file: --suite FILE"
        if Path(argument).exists():
            weights = f"--model {named} --checkpoint {argument}"
            repair = f"to load {named} with your own weights: {weights}"
        raise ConfigError(
            f"two models are given in place of one: {argument!r} and {named!r}", repair
        )
    return argument or named or ""


def note_default(context: click.Context) -> None:
    """Print a note if the user gave no model or suite: for verbs whose output does not name it."""
    given = [context.params.get("models"), context.params.get("suite")]
    if not (one_model(context) or any(given) or "models" in assigned(context)):
        _console.note(f"no model given: {DEFAULT_MODEL}")


def pipeline(context: click.Context) -> Path | None:
    """Return the folder of a diffusers pipeline that the user gave in place of a model.

    Return None for anything else, for a pipeline without weights, and for the models of a suite.
    """
    from weighin.stream import pipeline as pipelines
    from weighin.stream.pretrained_folder import path_of

    of_file = None if context.params.get("suite") else context.params.get("models")
    if not (name := one_model(context) or of_file):
        return None
    path = path_of(Path(name), str(assigned(context).get("revision", "")))
    return path if pipelines.is_pipeline(path) and pipelines.read(path).models else None


def parts_of(context: click.Context, path: Path) -> dict[str, Path]:
    """Return the folders of a pipeline's parts by name; refuse --use, which needs one model."""
    from weighin.stream import pipeline as pipelines

    repair = "give the folder of one part"
    refuse(context, ("uses",), "--use needs one model, not a pipeline", repair)
    return {part.name: part.path for part in pipelines.read(path).models}


def names(texts: Iterable[str]) -> list[str]:
    """Split each text at its commas, and return all names: for ["a,b", "c"], ["a", "b", "c"]."""
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]
