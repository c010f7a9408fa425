"""What a layout of checkpoints is: how it is made, what is right, and who refuses it with which words."""

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

VERBS: Final = (
    "inspect", "streaming", "transformers", "baseline", "predict", "recommend", "convert", "load",
)  # fmt: skip
"""What is tried: verbs of the command line, the strategies of ``bench``, and the loader as a library."""

State = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Made:
    """A checkpoint on the disk.

    Attributes:
        path: what a user would give to weighin.
        truth: the right tensors by name; None if the model of the folder, loaded with its library's
            ``from_pretrained``, has them.
        is_folder: whether ``load_pretrained`` loads it, and not ``load_streaming``. It does where
            ``truth`` is None.
    """

    path: Path
    truth: State | None = None
    is_folder: bool = False


Maker = Callable[[Path], Made]
"""Writes a checkpoint into an empty folder."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One way in which checkpoints lie on people's disks.

    Attributes:
        name: what it is, in the words of the page.
        group: the part of the page.
        make: writes it.
        refused: by verb, a regular expression that the refusal's text contains: what it is, and the next
            step. Verbs that are not named must be right.
        options: keys of a suite that every verb of the command line gets, and ``load`` as keyword arguments.
        packages: what ``make`` and the verbs import, beside torch and transformers.
        notes: by verb, a regular expression for what a right answer must say on standard error.
    """

    name: str
    group: str
    make: Maker
    refused: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = (self.refused.keys() | self.notes.keys()) - set(VERBS)
        assert not unknown, f"{self.name}: no verbs: {unknown}"


def refused(words: str, verbs: Iterable[str] = VERBS) -> dict[str, str]:
    """Return ``refused`` of a layout that all of ``verbs`` refuse in the same words."""
    return dict.fromkeys(verbs, words)


def all_but(*verbs: str) -> tuple[str, ...]:
    return tuple(verb for verb in VERBS if verb not in verbs)


NO_FOLDER: Final = {"transformers": "transformers loads Hugging Face folders only"}
"""``refused`` of a file: from_pretrained takes folders."""


def every() -> list[Layout]:
    """Return the layouts of all modules beside this one that have ``LAYOUTS``, in their order."""
    found: list[Layout] = []
    for module in sorted(one.name for one in pkgutil.iter_modules([str(Path(__file__).parent)])):
        if not module.startswith(("test_", "__")):
            found += getattr(importlib.import_module(module), "LAYOUTS", [])
    names = [one.name for one in found]
    assert len(names) == len(set(names)), "two layouts have one name"
    return found
