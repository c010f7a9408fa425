"""Define the command ``weighin``: list the verbs, import and run one verb, and print an error in two lines."""

import gc
import os
import signal
import sys
from importlib import import_module
from io import TextIOWrapper
from typing import Final, NoReturn

import click

from weighin import __version__, child_process
from weighin.cli import _console, _pyproject
from weighin.cli._verb import Verbs
from weighin.errors import HarnessError, Interrupted, explain
from weighin.run import interrupts

_PANELS: Final = {
    "Before a run": ("doctor", "list"),
    "Measure": ("bench", "run", "floor", "bisect"),
    "Read and compare": ("report", "compare", "check", "history"),
    "Choose": ("recommend", "predict"),
    "Checkpoints": ("inspect", "convert", "cache"),
}
_MODULES: Final = ("before", "measure", "results", "choose", "checkpoints")  # one for each panel


def _load(name: str) -> click.Command:
    pairs = zip(_MODULES, _PANELS.values(), strict=True)
    module = import_module(f"weighin.cli.{next(one for one, verbs in pairs if name in verbs)}")
    verb: click.Command = module.list_ if name == "list" else getattr(module, name)
    return verb


def keys_of_a_suite() -> list[tuple[str, str]]:
    from weighin.settings.definition import COMMANDS, KEYS, MODELS, Settings

    keys = {*KEYS[MODELS], *KEYS[COMMANDS]}
    named = {one.alias or name: one for name, one in Settings.model_fields.items()}
    return [(key, one.description or "") for key, one in named.items() if key in keys]


def figures() -> list[tuple[str, str]]:
    from weighin.show.report import explained_figures

    return [
        (f"{name}, {unit}" if unit else name, f"{meaning} ({accuracy})")
        for name, unit, meaning, accuracy in explained_figures()
    ]


@click.command(
    "weighin",
    cls=Verbs,
    panels=_PANELS,
    load=_load,
    codes=True,
    topics={"suite": keys_of_a_suite, "figures": figures},
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},  # every verb inherits these options
)
@click.version_option(__version__, message="%(prog)s %(version)s", prog_name="weighin")
@click.pass_context
def app(context: click.Context) -> None:
    """Measure the memory and time of loading a PyTorch checkpoint, and choose a way to load it."""
    assert isinstance(context.command, Verbs)
    _pyproject.read(context, context.command.commands)


def main() -> NoReturn:
    """Run the command line and exit; print a HarnessError or OSError as two lines."""
    child_process.is_program = True
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it leaves no child to wait for
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # the terminal's encoding may lack a character
            stream.reconfigure(errors="replace")
    try:
        # `except Exception` does not catch EndedBySignal; a run turns it into Interrupted.
        with interrupts.stoppable(interrupts.EndedBySignal):
            code = app(standalone_mode=False, prog_name="weighin", color=_console.colour())
        sys.exit(code or 0)
    except (HarnessError, OSError) as error:
        if isinstance(error, OSError):
            try:
                sys.stdout.flush()
            except OSError:  # discard what cannot be written: Python would try again at its exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            error = explain(error)
        _console.fail(error)
        sys.exit(error.exit_code)
    except (click.Abort, interrupts.EndedBySignal):  # Ctrl-C; click raises Abort at a question
        sys.exit(Interrupted.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    finally:
        gc.freeze()  # Python then collects no garbage at exit, and ends 0.01 s sooner
