"""Start and end the verbs that measure, ``bench`` and ``floor``."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from weighin.cli import _console

if TYPE_CHECKING:
    from weighin.record import Result


def enter_scope(isolation: str) -> None:
    """Run this command again in a systemd scope if a user other than root needs it for limits."""
    from weighin.isolation import delegation, select

    if select.wants_cgroup(isolation) and delegation.helps():
        delegation.enter(sys.argv[1:])


def end(context: click.Context, results: Sequence["Result"]) -> None:
    """Print each strategy that failed or loaded wrong weights, and exit with the exit code."""
    from weighin import exit_codes

    for text in exit_codes.broken(results):
        _console.error(text)
    if code := exit_codes.of_results(results):
        context.exit(code)
