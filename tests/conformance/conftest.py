"""Ignore torch's warnings about randomly drawn modules, and report the refusals after the tests."""

from typing import Any

import pytest
from cases import REFUSED

_WARNINGS = (
    "Lazy modules are a new feature under heavy development",
    "`torch.nn.utils.weight_norm` is deprecated",
    "Casting complex values to real discards the imaginary part",
    "Initializing zero-element tensors is a no-op",
    "LSTM with projections is not supported with oneDNN",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "conformance" in item.path.parts:
            for message in _WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{message}"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the counts of a process of xdist to the process that started it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["refused"] = dict(REFUSED)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the counts of a process of xdist."""
    REFUSED.update(getattr(node, "workeroutput", {}).get("refused", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if REFUSED:
        terminalreporter.section("checkpoints that torch loads")
        for why, count in REFUSED.most_common():
            terminalreporter.line(f"{count:,} {f'refused: {why}' if why else 'compared'}")
