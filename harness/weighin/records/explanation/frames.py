"""Parse the frames of a Python stack, "function (path/of/file.py:14)", and recognise libraries."""

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
    """A frame of a stack; ``line`` is the line number, counted from 1."""

    function: str
    path: str
    line: int

    @classmethod
    def read(cls, text: str) -> Self | None:
        """Parse a text of ``Stack.frames``; return None if the text has another form."""
        match = _FRAME.fullmatch(text)
        return cls(match["function"], match["path"], int(match["line"])) if match else None

    @property
    def is_library(self) -> bool:
        """Whether the code belongs to Python or to an installed package."""
        return self.path.startswith("<frozen") or bool(_INSTALLED.fullmatch(self.path))

    @property
    def name(self) -> str:
        """The function with its class, "Server.answer"; empty in the body of a module.

        A comprehension or a lambda has the name of the function around it, if that name is known.
        """
        return _INNER.sub("", self.function).replace(".<locals>", "")

    @property
    def short_name(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def place(self) -> str:
        """The file's name and line: "script.py:14"; for a library, with the package's folders."""
        inside = _INSTALLED.fullmatch(self.path)
        parts = (inside["inside"] if inside else self.path).split("/")
        kept = len(parts) if inside else 2 if parts[-1] in _GENERIC else 1
        return f"{'/'.join(parts[-kept:])}:{self.line}"


def read_all(texts: Iterable[str]) -> tuple[Frame, ...]:
    """Parse the frames of a stack, the innermost first; leave out texts of another form."""
    return tuple(frame for text in texts if (frame := Frame.read(text)))


def own(frames: Iterable[Frame]) -> Frame | None:
    """Return the innermost frame outside of libraries; None if all frames belong to libraries."""
    return next((frame for frame in frames if not frame.is_library), None)
