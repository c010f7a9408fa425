"""Turn Ctrl-C, SIGTERM and SIGHUP into an exception, which a ``put_off`` block delays to its end."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from weighin.errors import Interrupted

STOPPED: Final = "stopped; nothing is left running"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EndedBySignal(KeyboardInterrupt):
    """A signal stopped weighin outside of a run, which raises ``Interrupted``. (After a KeyboardInterrupt inside
    ``exec``, which dataclasses call, Python ends by SIGINT even if it was caught; not after a subclass.)
    """


@dataclass(slots=True)
class _State:
    wanted: bool = False
    raised: bool = False
    put_off: bool = False
    error: type[BaseException] | None = None  # None outside of ``stoppable``


_state = _State()  # global, because a process has one handler for each signal


@contextmanager
def stoppable(error: type[BaseException] = Interrupted) -> Iterator[None]:
    """In the ``with`` block, raise ``error`` at the first signal, and ignore later ones. Blocks may be
    nested. A signal that this process ignores stays ignored: SIGHUP under nohup, SIGINT in the background.
    """
    outer, _state.error = _state.error, error
    if outer is None:
        # ``ignore`` may have been called since the last block.
        _state.wanted = _state.raised = False
    before = {each: signal.getsignal(each) for each in _SIGNALS}
    for each, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(each, _take)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        _state.error = outer
        if outer is None:
            _state.wanted = _state.raised = _state.put_off = False


@contextmanager
def put_off() -> Iterator[None]:
    """If a signal arrives in the ``with`` block, raise its exception only at the end of the block."""
    before, _state.put_off = _state.put_off, True
    try:
        yield
    finally:
        _state.put_off = before
    if not before and not _state.raised:
        check()


@contextmanager
def allowed() -> Iterator[None]:
    """In the ``with`` block, raise a signal's exception immediately, even inside ``put_off``."""
    before, _state.put_off = _state.put_off, False
    try:
        check()
        yield
    finally:
        _state.put_off = before


def ignore() -> None:
    """Ignore all signals from now on, because the results are complete."""
    _state.raised = True


def check() -> None:
    """Raise the exception of a signal that has arrived, even if other code has already caught it."""
    if _state.wanted:
        _state.raised = True
        raise (_state.error or Interrupted)(STOPPED)


def _take(*_: object) -> None:
    _state.wanted = True
    if not _state.put_off and not _state.raised:
        check()
