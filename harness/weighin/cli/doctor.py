"""``weighin doctor``: test what this machine can limit and measure."""

from typing import Any

import click

from weighin.cli import _console, _options
from weighin.cli._verb import verb


@verb(
    _options.JSON,
    codes=True,
    examples={
        "Test what this machine can limit and measure": "weighin doctor",
        "Print the result as JSON": "weighin doctor --json -",
    },
)
def doctor(context: click.Context, typed: dict[str, Any]) -> None:
    """Test which limits this machine can enforce, and which figures it can measure.

    For each isolation (docker, cgroup, process), a test process allocates more memory than its
    limit, to test that the kernel enforces the limit. `weighin doctor` also cleans up after runs of
    weighin that were killed: it removes their containers, cgroups and processes. The exit code is 3
    if no isolation enforces a limit.
    """
    from weighin import doctor as of_machine

    document = of_machine.as_json(found := of_machine.examine())
    _console.deliver(typed["json"], document, of_machine.table(found))
    if not document["holds_a_limit"]:
        context.exit(3)  # no isolation holds a limit
