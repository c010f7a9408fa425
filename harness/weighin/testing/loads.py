"""Measure one load for a test: a run of one measurement (cell) in a temporary folder."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from weighin.errors import HarnessError, Interrupted
from weighin.plan import start as plans
from weighin.plan.task import Progress
from weighin.result import Result
from weighin.run import runner
from weighin.settings.reading import check_suite
from weighin.uses import FORWARD

PATIENCE_S = 600.0
"""How many seconds a load waits for other runs to end; xdist runs tests in parallel."""


def measure_load(
    strategy: str,
    *,
    model: str = "gpt2-small",
    ram: str | None = None,
    isolation: str = "auto",
    timeout_s: float = 600.0,
    device: str = "cpu",
    dtype: str = "float32",
    cache: str = "cold",
    format: str | None = None,  # noqa: A002 (the same name as in suites and on the command line)
    checkpoint: str | Path | None = None,
    kwargs: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    variant: str = "",
    model_class: str = "",
    revision: str = "",
    use: str = FORWARD,
    say: Callable[[str], None] = lambda _: None,
) -> Result:
    """Measure one load as ``weighin bench`` does; ``Weighin.measure`` documents the options.

    ``say`` gets each line that a long preparation prints, such as the pull of a Docker image.

    Raises:
        HarnessError: the load cannot be measured here, or an argument is invalid.
    """
    suite: dict[str, Any] = {
        "models": [model],
        "strategies": [{"name": strategy, "options": options or {}}],
        "ram": [ram or "none"],
        "isolation": isolation,
        "device": device,
        "dtype": dtype,
        "cache": cache,
        "timeout_s": timeout_s,
        "uses": use,
        "checkpoint": checkpoint or None,
        "kwargs": kwargs or {},
        "variant": variant,
        "model_class": model_class,
        "revision": revision,
        "trust_remote_code": trust_remote_code,
    }
    if format:
        suite["format"] = [format]
    with tempfile.TemporaryDirectory(prefix="weighin-test-") as folder:
        task, _ = plans.start(check_suite(suite), Path(folder) / "run")
        try:
            (result,) = runner.run(replace(task, patience_s=PATIENCE_S), Progress(building=say))
        except Interrupted:
            raise KeyboardInterrupt from None
    if result.outcome == "measurement_failed":
        raise HarnessError(f"{strategy} could not be measured: {result.message}")
    return result
