"""Tests whose subject is what other programs of this machine may disturb."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

TIMES = 3

EVICTED = "the kernel drops cached pages whenever another program needs memory"
BUSY = "other work of this machine makes a disk slower, and never faster"
READ_LATE = "on a busy machine, a script may run on before its stack is read"
KILLED_ELSEWHERE = "without a cgroup, a kill for lack of memory may be that of any other program"


def tried_again(reason: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Let a test fail only if it fails three times, because of a ``reason`` that no test can rule out."""

    def decorate(test: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(test)
        def trying(*arguments: _P.args, **named: _P.kwargs) -> _T:
            for _ in range(TIMES - 1):
                try:
                    return test(*arguments, **named)
                except AssertionError as error:
                    print(f"tried again, as {reason}: {error}")
            return test(*arguments, **named)

        return trying

    return decorate
