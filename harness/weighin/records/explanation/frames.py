"""Read the frames of a ``Stack``: "function (path/of/file.py:14)", and tell programs from libraries."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

_FRAME: Final = re.compile(r"(?P<function>.*) \((?P<path>.*):(?P<line>\d+)\)")
_INSTALLED: Final = re.compile(
    r"(?:.*/)?(?:site-packages|dist-packages|lib(?:64)?/python\d(?:\.\d+)?t?)/(?P<inside>.*)"
)
_INNER: Final = re.compile(
    r"(?:\.?<locals>)?\.?<(?:module|lambda|listcomp|genexpr|dictcomp|setcomp)>"
)
_GENERIC: Final = ("__init__.py", "__main__.py")


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a stack; ``line`` counts from 1."""

    function: str
    path: str
    line: int

    @classmethod
    def read(cls, text: str) -> Self | None:
        """Return the frame of a text of ``Stack.frames``; None if the text has another form."""
        match = _FRAME.fullmatch(text)
        return cls(match["function"], match["path"], int(match["line"])) if match else None

    @property
    def is_library(self) -> bool:
        """Whether the code belongs to Python or to an installed package."""
        return self.path.startswith("<frozen") or bool(_INSTALLED.fullmatch(self.path))

    @property
    def name(self) -> str:
        """The function, with its class: "Server.answer"; empty in the body of a module.

        The name of a comprehension or a lambda is that of the function around it, if it is known.
        """
        return _INNER.sub("", self.function).replace(".<locals>", "")

    @property
    def short_name(self) -> str:
        """The function's name without its class."""
        return self.name.rpartition(".")[2]

    @property
    def place(self) -> str:
        """The file and line, short: "script.py:14", for a library with the package's folders."""
        inside = _INSTALLED.fullmatch(self.path)
        parts = (inside["inside"] if inside else self.path).split("/")
        kept = len(parts) if inside else 2 if parts[-1] in _GENERIC else 1
        return f"{'/'.join(parts[-kept:])}:{self.line}"


def read_all(texts: Iterable[str]) -> tuple[Frame, ...]:
    """Return the frames of a stack that have the usual form, the innermost first."""
    return tuple(frame for text in texts if (frame := Frame.read(text)))


def own(frames: Iterable[Frame]) -> Frame | None:
    """Return the innermost frame of the program itself; None if all frames are of libraries."""
    return next((frame for frame in frames if not frame.is_library), None)
