"""Hide from a load what the predicting process has in memory, and a measured process has not.

An ``nn.Module`` on the meta device makes torch import ``torch._dynamo``: 827 Python modules and one
second of processor time. In a measurement, this import is a part of the load. The predicting
process makes the import one time for all its forks, and removes the modules from ``sys.modules``.
When a fork imports ``torch._dynamo``, it gets these modules, and their memory counts from then on.

A measured process creates its CUDA context before the load. After the load, when the model is read,
CUDA loads the kernels for these reads. On an H200, the context took 30 MiB of anonymous memory and
these kernels took 29 MiB; each also took 10 MiB of shared memory.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

import torch

from weighin.predict.ledger import anon_bytes
from weighin.probes.process import memory_of, read_status
from weighin.units import MIB
from weighin.worker.verify import touch

_ROOT: Final = "torch._dynamo"


class Preloaded(MetaPathFinder, Loader):
    """An import finder that runs before all other finders, and returns the hidden modules.

    ``anon_bytes`` and ``file_bytes`` are the memory of the hidden modules and of the file pages that their
    import has mapped. When the modules are imported, ``on_import`` gets ``anon_bytes``.
    """

    def __init__(self) -> None:
        self.anon_bytes = self.file_bytes = 0
        self.on_import: Callable[[int], None] | None = None
        self._hidden: dict[str, ModuleType] = {}
        self._specs: dict[str, ModuleSpec | None] = {}

    def hide(self) -> None:
        """Import torch's largest optional part, and hide the modules that this import has added."""
        before, known = memory_of(read_status()), set(sys.modules)
        import_module(_ROOT)
        after = memory_of(read_status())
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
        """Stop hiding an imported module; after the import of ``torch._dynamo``, hide no module."""
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
        """Yield each hidden module, with the visible parent and attribute that refer to it."""
        for path, module in self._hidden.items():
            parent, _, name = path.rpartition(".")
            if parent in sys.modules and parent not in self._hidden:
                yield sys.modules[parent], name, module


PRELOADED: Final = Preloaded()
"""The hidden modules of this process and its forks."""


def gpu_bytes() -> tuple[int, int]:
    """Create a CUDA context, and load the kernels that read a model; return the anonymous bytes of both."""
    context_bytes = kernels_bytes = 0
    if torch.cuda.is_available():
        before = anon_bytes()
        with suppress(RuntimeError):  # no free memory on the GPU
            weight = torch.zeros(MIB, device="cuda")
            torch.cuda.synchronize()
            context_bytes = anon_bytes() - before
            touch({"weight": weight})
            kernels_bytes = anon_bytes() - before - context_bytes
            del weight
            torch.cuda.empty_cache()
    return context_bytes, kernels_bytes
