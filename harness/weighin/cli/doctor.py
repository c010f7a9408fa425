"""``weighin doctor``: test what this machine can limit and measure."""

from typing import Any

import click

from weighin.cli import _console, _options
from weighin.cli._verb import Verb

NO_LIMIT_EXIT = 3


@click.command(
    cls=Verb,
    codes=True,
    examples={
        "Test what this machine can limit and measure": "weighin doctor",
        "Print the result as JSON": "weighin doctor --json -",
        "Test each machine of a Ray cluster": "weighin doctor --engine ray --address head:6379",
    },
)
@_options.engine
@_options.json
@click.pass_context
def doctor(context: click.Context, /, **typed: Any) -> None:
    """Test which limits this machine can enforce, and which figures it can measure.

    For each isolation (docker, cgroup, process), a test process allocates more memory than its
    limit, to test that the kernel enforces the limit. `weighin doctor` also removes what killed
    runs of weighin left, such as containers. The exit code is 3 if no isolation enforces a limit.

    With --engine ray, `weighin doctor` tests each node of the Ray cluster instead. The exit code is
    then 3 if a node cannot measure.
    """
    from weighin import doctor as of_machine
    from weighin.fleet import engine

    if settings := engine.settings(typed["engine"], typed["address"], typed["labels"]):
        from weighin.fleet.cluster import connected

        with connected(settings["address"], settings["labels"]) as cluster:
            nodes = cluster.examine()
        tables = [of_machine.table(node) for node in nodes]
        document: dict[str, Any] = {"nodes": [node.as_json() for node in nodes]}
        is_fit = all(node.about["can_measure"] for node in nodes)
    else:
        examination = of_machine.examine(_console.note)
        tables, document = [of_machine.table(examination)], examination.as_json()
        is_fit = examination.holds_a_limit
    _console.deliver(typed["json_file"], document, lambda: _console.show(*tables))
    if not is_fit:
        context.exit(NO_LIMIT_EXIT)
