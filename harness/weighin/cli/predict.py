"""The command line's ``weighin predict``: what loads would need, or how predictions met a run."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weighin.cli import _arguments, _options
from weighin.cli._shared import err, out

if TYPE_CHECKING:
    from weighin.suite.config import Suite
    from weighin.suite.matrix import Planned

PREDICT_EXAMPLES = (
    "Examples:\n\n"
    "weighin predict gpt2-xl\n\n"
    "weighin predict llama-70b --device cuda --dtype bf16 -s streaming\n\n"
    "weighin predict --suite configs/suites/notebook.yaml --json\n\n"
    "weighin predict --check results/20261120T093000-gpt2-xl-8GiB"
)


def predict(
    context: typer.Context,
    model: _options.ModelArgument = None,
    model_option: _options.Model = None,
    kwargs: _options.Kwargs = "{}",
    checkpoint: Annotated[
        Path | None, typer.Option(help="Your own weights: only their structure is read.")
    ] = None,
    strategies: _options.Strategies = None,
    device: _options.Device = "cpu",
    dtype: _options.Dtype = "float32",
    checkpoint_dtype: Annotated[
        str, typer.Option(help="What they are in the checkpoint, where it is not your own.")
    ] = "float32",
    fmt: _options.Format = None,
    suite: Annotated[
        Path | None, typer.Option(help="A YAML matrix instead of the options above.")
    ] = None,
    check: Annotated[
        Path | None, typer.Option(help="A run's folder: predict its cells, and compare.")
    ] = None,
    trust: _options.Trust = False,
    phases: Annotated[bool, typer.Option("--phases", help="The peaks of each phase, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All of it, for programs.")] = False,
) -> None:
    """Say what loads would need, by running them without values: no GPU, no weights, any size."""
    from weighin.predict import check as checking
    from weighin.predict import client, tables

    _arguments.refuse_ignored(context)
    if check is not None:
        with err.status("predicting the cells of the run"):
            checked = checking.check(check, trusted=trust)
        if as_json:
            print(json.dumps(checking.as_json(checked)))
        else:
            out.print(tables.check_table(checked))
        return
    asked = {
        "models": [_arguments.one_model(model, model_option)],
        "device": device,
        "dtype": dtype,
        "strategies": _arguments.names(strategies or []),
        "format": _arguments.names([fmt]) if fmt else [],
    }
    planned = _plan(_suite(suite, asked), _arguments.json_object(kwargs))
    stored = client.dtype_name(checkpoint_dtype)
    with err.status("importing torch") as status:
        found = client.predict(
            planned,
            checkpoint=checkpoint,
            checkpoint_dtype=stored,
            report=lambda done, name: status.update(f"{name}: {done} of {len(planned)} done"),
        )
    if as_json:
        print(json.dumps(tables.as_json(found)))
        return
    for part in tables.tables(found, phases=phases):
        out.print(part)


def _suite(path: Path | None, asked: dict[str, Any]) -> "Suite":
    from weighin.suite.config import check_suite, read_suite

    given = {key: value for key, value in asked.items() if value}
    return read_suite(path) if path else check_suite(given)


def _plan(suite: "Suite", kwargs: dict[str, Any]) -> "list[Planned]":
    from weighin import formats
    from weighin.suite import registry
    from weighin.suite.matrix import CellMatrix, plan

    return plan(
        CellMatrix(
            models=tuple(registry.model(name, kwargs or None) for name in suite.models),
            strategies=registry.chosen(suite),
            ram_limits=(None,),
            isolation="process",
            device=suite.device,
            dtype=suite.dtype,
            formats=tuple(formats.named(name).NAME for name in suite.format),
        )
    )
