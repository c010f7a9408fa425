"""Name a part of a program with ``weighin.phase``, so that ``weighin run`` measures the part's peaks.

Any program may import this module. Outside of ``weighin run``, the module imports almost nothing.
"""

import os
from collections.abc import Callable
from contextlib import ContextDecorator
from functools import wraps
from typing import Any, Final, TypeVar

VARIABLE: Final = "WEIGHIN_PHASES"  # the path of the socket to which a program reports
_COROUTINE: Final = 0x80  # a flag of code objects: inspect.CO_COROUTINE
_Function = TypeVar("_Function", bound=Callable[..., Any])

_reporter = None
if _path := os.environ.get(VARIABLE):
    from weighin.phase_reporter import Reporter

    _reporter = Reporter(_path)


class phase(ContextDecorator):  # noqa: N801 (programs use it as a function)
    """Measure the body of a ``with`` statement, or each call of a function, as a phase.

    ::

        with weighin.phase("read"):
            state = torch.load(path)

        @weighin.phase("build")
        def build(): ...

    Under ``weighin run``, the record has the exact peak of the phase. Elsewhere, a phase does
    nothing, also in a strategy, which uses ``job.phase`` instead. A phase never raises an error and
    never changes what the program does. If weighin does not answer within 2 s, the process reports
    no further phases.

    Phases may be nested, and phases of several threads may overlap. The peak of a phase includes
    all memory of the process during the phase. The main process is the first process that begins a
    phase. Its phases also have the peaks of the whole command; phases of other processes have only
    the peaks of their process. If a process forks in a phase, the phase ends only in the process
    that began it. As a decorator, ``phase`` measures functions and coroutine functions, but not the
    body of a generator function.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun: list[tuple[int, int]] = []

    def __enter__(self) -> None:
        if _reporter:
            self._begun.append(_reporter.begin(self._name))

    def __exit__(self, *_: object) -> None:
        if _reporter and self._begun:
            _reporter.end(self._begun.pop())

    def __call__(self, function: _Function) -> _Function:
        if not getattr(getattr(function, "__code__", None), "co_flags", 0) & _COROUTINE:
            return super().__call__(function)

        @wraps(function)
        async def measured(*arguments: Any, **keywords: Any) -> Any:
            with phase(self._name):
                return await function(*arguments, **keywords)

        return measured  # type: ignore[return-value]

    def _recreate_cm(self) -> "phase":
        return phase(self._name)
