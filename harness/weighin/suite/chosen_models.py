"""Find the models of a run, their checkpoints and their dtypes, for every verb that takes a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from weighin.cell import ModelSpec
from weighin.errors import ConfigError
from weighin.settings.definition import DTYPES, Settings
from weighin.stream import formats
from weighin.stream.foreign import remembering
from weighin.stream.hugging_face_folder import adapter_note, folder_library, folder_of, own_dtype
from weighin.stream.pretrained_library import Selection
from weighin.suite import registry, user_code


@dataclass(frozen=True, slots=True)
class ChosenModels:
    """The models that a run measures; the user's own weights are ``checkpoint``, or ``checkpoints`` by title.

    ``dtypes`` has the dtype of each model's loads by title. Builders are imported from ``python_path``.
    """

    specs: tuple[ModelSpec, ...]
    checkpoint: Path | None
    selection: Selection
    dtypes: Mapping[str, str]
    python_path: tuple[str, ...]
    notes: tuple[str, ...] = ()
    checkpoints: Mapping[str, Path] = field(default_factory=dict)

    @property
    def own_format(self) -> str | None:
        return formats.loaded_as(self.checkpoint, self.selection)

    @property
    def own_formats(self) -> Mapping[str, str]:
        """The format in which each user's checkpoint is loaded, by the model's title."""
        places = {s.title: self.checkpoints.get(s.title, self.checkpoint) for s in self.specs}
        loaded = {title: formats.loaded_as(path, self.selection) for title, path in places.items()}
        return {title: fmt for title, fmt in loaded.items() if fmt}


@remembering()
def choose(settings: Settings) -> ChosenModels:
    """Return the models of a run, with the checkpoint that a model's path or --checkpoint names."""
    choice, selection = settings.choice, _selection(settings)
    specs: list[ModelSpec] = []
    several: dict[str, Path] = {}
    dtypes: dict[str, str] = {}
    for entry in settings.models:
        kwargs = entry.kwargs | settings.kwargs or None
        how = replace(choice, adapter=entry.adapter or choice.adapter)
        spec, weights = registry.model_and_checkpoint(entry.source, kwargs, selection, how)
        if entry.name and entry.name != entry.source:
            spec = replace(spec, name=entry.name)
        specs.append(spec)
        title, asked = spec.title, entry.dtype or settings.dtype
        dtypes[title] = dtype = own_dtype(spec) if asked == "auto" else asked
        if dtype not in DTYPES.values():
            raise ConfigError(
                f"{title} has the dtype {dtype}, but weighin cannot load a model in this dtype",
                "choose another dtype for the loaded model: --dtype float32, bfloat16 or float16",
            )
        if entry.checkpoint and weights is None:
            weights = registry.weights_of(Path(entry.checkpoint))
        if weights:
            several[title] = weights
    own = registry.weights_of(settings.checkpoint) if settings.checkpoint else None
    if len(specs) == 1:
        own = own or several.get(specs[0].title)
    if own:  # --checkpoint overrides those of the suite
        several = {}
    if selection and own is None:
        what = "models of the suite have checkpoints of their own" if several else "none is given"
        raise ConfigError(
            f"key and strip_prefix select weights in one checkpoint, but {what}",
            "add --checkpoint PATH (in a suite, the model's checkpoint: PATH), or leave key and strip_prefix out",
        )
    python_path: tuple[str, ...] = ()
    # A folder on the path may hide any module.
    if not all(user_code.is_ours(spec.builder) for spec in specs):
        python_path = user_code.import_path([model.source for model in settings.models])
    notes: list[str] = []
    named = {spec.kwargs["architecture"] for spec in specs if folder_library(spec)}
    taken = named.pop() if len(named) == 1 else ""
    for weights in [own] if own else several.values():
        formats.detect(weights)  # raises an error for a file that is no checkpoint
        if any(map(folder_library, specs)):
            notes += filter(None, [adapter_note(folder_of(weights))])
            notes += registry.notes_on(weights, choice, taken)
    said = tuple(dict.fromkeys(notes))
    return ChosenModels(tuple(specs), own, selection, dtypes, python_path, said, several)


def _selection(settings: Settings) -> Selection:
    """Return the part of the checkpoint that --key and strip_prefix select, or else the models."""
    first, *others = [Selection(entry.key, entry.strip_prefix) for entry in settings.models]
    if not settings.selection and any(other != first for other in others):
        raise ConfigError(
            "key or strip_prefix differ between the models of the suite, but one run reads one part of"
            " one checkpoint",
            "give all models the same key and strip_prefix, or write a suite file for each model",
        )
    return settings.selection or first
