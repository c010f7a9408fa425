"""Turn what was typed for a run into its models, their checkpoint and their dtype.

Every verb that takes a model uses ``choose``, so that all of them take the same.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weighin import formats
from weighin.cell import ModelSpec
from weighin.errors import ConfigError
from weighin.formats import adapters
from weighin.formats.pretrained_choice import AS_SAVED, FolderChoice
from weighin.formats.pretrained_folder import folder_of, is_folder, own_dtype
from weighin.formats.selection import WHOLE, Selection
from weighin.suite import registry, user_code
from weighin.suite.config import DTYPES, Suite, SuiteModel


@dataclass(frozen=True, slots=True)
class ChosenModels:
    """The models of a run.

    Attributes:
        checkpoint: the user's own weights; None for weights that weighin generates.
        selection: the part of the checkpoint that holds the weights.
        dtype: the dtype of the loads, which is the models' own dtype for "auto".
        python_path: the folders from which to import the models' builders.
        notes: what the user may not expect of the checkpoint, and what lies beside it.
    """

    specs: tuple[ModelSpec, ...]
    checkpoint: Path | None
    selection: Selection
    dtype: str
    python_path: tuple[str, ...]
    notes: tuple[str, ...] = ()


def choose(
    suite: Suite,
    *,
    kwargs: dict[str, Any] | None = None,
    checkpoint: Path | None = None,
    selection: Selection = WHOLE,
    choice: FolderChoice = AS_SAVED,
) -> ChosenModels:
    """Return the models of a suite, with the checkpoint that their names or --checkpoint give.

    ``kwargs`` are arguments of all models, beside their own. ``selection`` is that of --key and
    --strip-prefix, which a model's entry in a suite may have instead. ``choice`` is for all models that
    are Hugging Face folders.

    Raises:
        HarnessError: a model is unknown, two checkpoints or selections are given, or models differ
            in what a run has only once: the checkpoint, the selection and the dtype.
    """
    typed, selection = selection, _selection(suite, selection)
    specs, own = [], checkpoint and registry.weights_of(checkpoint)
    for entry in suite.models:
        spec, weights = registry.model_and_checkpoint(
            entry.source,
            entry.kwargs | (kwargs or {}) or None,
            selection,
            replace(choice, adapter=entry.adapter or choice.adapter),
        )
        if weights and len(suite.models) > 1:
            raise ConfigError(
                f"{entry.source} has a checkpoint of its own, and a run has one checkpoint",
                "measure it in a run of its own, and compare the runs: weighin compare",
            )
        own = _own(entry, spec, weights, checkpoint) or own
        is_named = entry.name and entry.name != entry.source
        specs.append(replace(spec, name=entry.name) if is_named else spec)
    if selection and own is None:
        options, path = ("--key and --strip-prefix", "--checkpoint PATH")
        if not typed:
            options, path = "key and strip_prefix of a model", "checkpoint: PATH"
        raise ConfigError(
            f"{options} select the weights in a checkpoint of your own",
            f"add {path}, or leave them out",
        )
    python_path: tuple[str, ...] = ()
    if not all(user_code.is_ours(spec.builder) for spec in specs):  # a folder may hide any module
        python_path = user_code.import_path(suite.sources)
    for spec in specs:
        user_code.check_builder(spec.builder, spec.kwargs, python_path)
    if own:
        formats.detect(own)  # names a file that is no checkpoint before anything is made
    notes: tuple[str, ...] = ()
    if own and any(map(is_folder, specs)):
        beside = adapters.note(folder_of(own))
        notes = (*([beside] if beside else []), *registry.notes_on(own, choice, selection))
    dtype = _dtype(specs, suite.dtype)
    return ChosenModels(tuple(specs), own, selection, dtype, python_path, notes)


def _selection(suite: Suite, typed: Selection) -> Selection:
    """Return the selection of the suite's models, or else the one that was typed."""
    first, *others = [Selection(entry.key, entry.strip_prefix) for entry in suite.models]
    if any(other != first for other in others):
        raise ConfigError(
            "the models select different weights, and a run has one checkpoint",
            "give all models the same key and strip_prefix, or write a suite for each",
        )
    if first and typed and first != typed:
        raise ConfigError(
            f"two selections: {' '.join(first.options)} in the suite and {' '.join(typed.options)}",
            "leave --key and --strip-prefix out",
        )
    return first or typed


def _own(
    entry: SuiteModel, spec: ModelSpec, weights: Path | None, given: Path | None
) -> Path | None:
    """Return a model's own checkpoint, unless --checkpoint gives other weights of the same folder."""
    if entry.checkpoint and weights is None:
        weights = registry.weights_of(Path(entry.checkpoint))
    if weights is None or given is None:
        return weights
    if is_folder(spec):
        return None
    raise ConfigError(
        f"two checkpoints: {entry.checkpoint or entry.source} and --checkpoint {given}",
        "leave --checkpoint out",
    )


def _dtype(specs: list[ModelSpec], asked: str) -> str:
    """Return the dtype of all loads.

    Raises:
        ConfigError: "auto" differs between the models, or is a dtype that no cell has.
    """
    dtypes = {own_dtype(spec) if asked == "auto" else asked for spec in specs}
    if len(dtypes) > 1:
        raise ConfigError(
            f"the models have different dtypes: {', '.join(sorted(dtypes))}",
            "choose one for all: --dtype bf16",
        )
    dtype = dtypes.pop()
    if dtype not in DTYPES.values():
        raise ConfigError(
            f"{specs[0].title} has the dtype {dtype}, in which weighin measures no load",
            "choose another one for the load: --dtype float32",
        )
    return dtype
