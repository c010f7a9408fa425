"""Give the tensors of a file the names that they have in a model of transformers."""

from typing import Any


class ModelNames:
    """transformers' tables for one model; they give a file's tensor its name and conversion."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        mapping = get_model_conversion_mapping(model)
        self._renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        self._converters = [one for one in mapping if isinstance(one, WeightConverter)]
        self.by_pattern = {
            pattern: one for one in self._converters for pattern in one.source_patterns
        }
        self.wanted, self._prefix = model.state_dict(keep_vars=True), model.base_model_prefix

    def of(self, name: str) -> tuple[str, str | None]:
        """Return the model's name for a file's tensor, and its conversion's pattern or None."""
        from transformers.core_model_loading import rename_source_key

        new: tuple[str, str | None]
        new = rename_source_key(name, self._renamings, self._converters, self._prefix, self.wanted)
        if new[0] not in self.wanted and name in self.wanted:
            new = rename_source_key(name, [], [], self._prefix, self.wanted)
        return new
