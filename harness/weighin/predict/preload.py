"""Import torch's largest optional part once, and hide it from each load until the load imports it.

A module on the meta device makes torch import ``torch._dynamo``: 827 modules, and a second of
processor time. In a worker, this import is a part of the load. Here the forks of one process share
it: the process imports the modules and takes them out of ``sys.modules``. A fork that imports
``torch._dynamo`` gets them back, and counts them from then on.
"""

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from weighin.probes.process import memory_of, read_status
from weighin.result import Memory

_ROOT: Final = "torch._dynamo"


class Preloaded(MetaPathFinder, Loader):
    """Finds the hidden modules, before any other finder.

    Attributes:
        anon_bytes: the anonymous memory of modules that are hidden.
        file_bytes: the resident pages of files that their import has mapped.
        on_import: is called with ``anon_bytes`` when the modules are imported.
    """

    def __init__(self) -> None:
        self.anon_bytes = self.file_bytes = 0
        self.on_import: Callable[[int], None] | None = None
        self._hidden: dict[str, ModuleType] = {}
        self._specs: dict[str, ModuleSpec | None] = {}

    def hide(self) -> None:
        """Import the modules and hide those that were not imported before."""
        before, known = _memory(), set(sys.modules)
        import_module(_ROOT)
        after = _memory()
        self.anon_bytes = after.anon_bytes - before.anon_bytes
        self.file_bytes = after.file_bytes - before.file_bytes
        self._hidden = {name: sys.modules.pop(name) for name in [*sys.modules] if name not in known}
        for parent, name, module in self._attributes():
            if vars(parent).get(name) is module:
                delattr(parent, name)  # torch imports torch._dynamo where this attribute is missing
        sys.meta_path.insert(0, self)

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        if fullname not in self._hidden:
            return None
        self._specs[fullname] = self._hidden[fullname].__spec__
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._hidden[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Show a module that is imported; with ``torch._dynamo``, show all modules."""
        name = module.__name__
        module.__spec__ = self._specs[name]
        del self._hidden[name]
        if name != _ROOT:
            return
        sys.modules.update(self._hidden)
        for parent, attribute, child in self._attributes():
            setattr(parent, attribute, child)
        self._hidden.clear()
        sys.meta_path.remove(self)
        if self.on_import:
            self.on_import(self.anon_bytes)
        self.anon_bytes = self.file_bytes = 0

    def _attributes(self) -> Iterator[tuple[ModuleType, str, ModuleType]]:
        """Yield each hidden module with its parent that is not hidden, and its name there."""
        for path, module in self._hidden.items():
            parent, _, name = path.rpartition(".")
            if parent in sys.modules and parent not in self._hidden:
                yield sys.modules[parent], name, module


PRELOADED: Final = Preloaded()
"""The hidden modules of this process and its forks."""


def _memory() -> Memory:
    return memory_of(read_status())
