"""How the commands of a run are started and watched."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Self

GRACE_S: Final = 10.0
"""The time from SIGTERM to SIGKILL for a command that is stopped."""


@dataclass(frozen=True, slots=True)
class CommandSettings:
    """The settings that all commands of a run share.

    Attributes:
        folder: the working folder.
        cold: the files and folders whose page cache is dropped before each start.
        marks: regular expressions; a line of the output that contains one is a mark.
        stacks: whether the stacks of Python processes are read when the command uses most memory.
        ready: a regular expression; a line of the output that contains it tells that a server is ready.
        ready_url: an address that answers when a server is ready.
        grace_s: the time from SIGTERM to SIGKILL for a command that is stopped, in seconds.
        in_search: whether the run searches for the smallest limit: its commands read nothing from
            standard input, and only the output of the one without a limit is shown.
        image: the image of a container; empty for weighin's own.
        mounts: the paths that a container sees read-only, beside the working folder.
        own: the ``cold`` and ``marks`` of single commands, by their labels, in place of the shared ones.
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
        own = self.own.get(label, {})
        return replace(
            self,
            own={},
            cold=own.get("cold", self.cold),
            marks=own.get("marks", self.marks),
        )

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
