"""Define the settings of a run of commands, as plan.json stores them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Self

GRACE_S: Final = 10.0
"""The time from SIGTERM to SIGKILL for a command that weighin stops, in seconds."""


@dataclass(frozen=True, slots=True)
class CommandSettings:
    """The settings that all commands of a run share.

    Attributes:
        folder: the working folder.
        cold: the files and folders whose page cache is dropped before each start.
        marks: regular expressions; weighin records the time of each line of output that matches one.
        stacks: whether py-spy reads the stacks of Python processes when the command uses most memory.
        ready: a regular expression; a server is ready when a line of its output matches.
        ready_url: a URL; a server is ready when it answers there with an HTTP status below 500.
        grace_s: the seconds from SIGTERM to SIGKILL for a command that weighin stops.
        in_search: whether the run searches for the smallest limit. The commands of a search get an
            empty standard input, and weighin hides the output of commands with a limit.
        image: the Docker image of a container; empty for weighin's image.
        mounts: the paths that a container mounts read-only, beside the working folder.
        own: by label, the ``cold`` and ``marks`` of single commands, which replace the shared ones.
    """

    folder: str
    cold: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    stacks: bool = True
    ready: str = ""
    ready_url: str = ""
    grace_s: float = GRACE_S
    in_search: bool = False
    image: str = ""
    mounts: tuple[str, ...] = ()
    own: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)

    def of(self, label: str) -> Self:
        """Return the settings of the command that has the label ``label``."""
        own: Mapping[str, Any] = self.own.get(label, {})
        return replace(self, own={}, **own)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        names = ("cold", "marks", "mounts")
        lists = {name: tuple(found[name]) for name in names if name in found}
        own = {
            label: {name: tuple(texts) for name, texts in lists_of_one.items()}
            for label, lists_of_one in found.get("own", {}).items()
        }
        return cls(**{**found, **lists, "own": own})
