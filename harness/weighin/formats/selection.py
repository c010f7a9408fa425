"""Select a model's weights in a checkpoint that holds other data too, or adds a prefix to the names."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Selection:
    """The part of a checkpoint that is the model's state dict.

    Attributes:
        key: the key of the state dict in nested dicts, such as "model" or "state.model"; empty if
            the checkpoint itself is the state dict. In a format without nested dicts, the key "model"
            selects the names that begin with "model.".
        strip_prefix: the prefix to remove from each name, such as "module."; empty for none.
    """

    key: str = ""
    strip_prefix: str = ""

    def __bool__(self) -> bool:
        """Tell whether the selection leaves out a part of the checkpoint, or renames its tensors."""
        return bool(self.key or self.strip_prefix)

    @property
    def options(self) -> tuple[str, ...]:
        key = (f"--key={self.key}",) if self.key else ()
        return (*key, f"--strip-prefix={self.strip_prefix}") if self.strip_prefix else key


WHOLE: Final = Selection()
