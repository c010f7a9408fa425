"""The begin and the end of the verbs that measure, ``bench`` and ``floor``."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from weighin.cli import _console

if TYPE_CHECKING:
    from weighin.record import Result


def enter_scope(isolation: str) -> None:
    """Start this command again in a scope in which an ordinary user may limit memory, if he needs one."""
    from weighin.isolation import delegation, select

    if select.wants_cgroup(isolation) and delegation.helps():
        delegation.enter(sys.argv[1:])


def end(context: click.Context, results: Sequence["Result"]) -> None:
    """Name each strategy that is wrong or failed, and exit with the code of these results."""
    from weighin import exit_codes

    for text in exit_codes.broken(results):
        _console.error(text)
    if code := exit_codes.of_results(results):
        context.exit(code)
