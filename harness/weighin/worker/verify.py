"""Is this the right model? Every parameter and buffer, tied weights, and one forward pass."""

from collections.abc import Iterable, Iterator, Mapping

import torch

from weighin.checkpoint.manifest import Manifest, TensorEntry
from weighin.formats.misfit import first_names
from weighin.worker.inputs import Inputs
from weighin.worker.touch import identity


class WrongWeights(Exception):
    """What a strategy returned, or wrote, is not the model that the checkpoint holds."""


def check_structure(
    tensors: dict[str, torch.Tensor], manifest: Manifest, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise WrongWeights where a tensor is missing, on the wrong device or of the wrong kind.

    Reads no values: runs before the touch, which a tensor on the meta device would end.
    """
    expected = {entry.name: entry for entry in manifest.tensors}
    complain("missing from the model", expected.keys() - tensors.keys())
    complain("not in the checkpoint", tensors.keys() - expected.keys())
    left = [name for name, tensor in tensors.items() if tensor.is_meta]
    complain("left on the meta device, without values", left)
    elsewhere = [name for name, t in tensors.items() if t.device.type != device.type]
    complain(f"not on {device}", elsewhere)
    shapes = [n for n, tensor in tensors.items() if tuple(tensor.shape) != expected[n].shape]
    complain("of another shape than in the checkpoint", shapes)
    wanted = {name: wanted_dtype(entry, dtype) for name, entry in expected.items()}
    for kind in sorted(set(wanted.values())):
        others = [n for n, t in tensors.items() if wanted[n] == kind != _name(t.dtype)]
        complain(f"not of dtype {kind}", others)
    untied = [
        entry.name
        for entry in manifest.tensors
        if entry.shared_with
        and identity(tensors[entry.name]) != identity(tensors[entry.shared_with])
    ]
    complain("no longer tied to the tensor that they share", untied)


def check_values(checksums: dict[str, str], manifest: Manifest, dtype: torch.dtype) -> None:
    """Raise WrongWeights where the checksum of a tensor is not the checkpoint's."""
    wrong = [
        entry.name
        for entry in manifest.tensors
        if checksums[entry.name] != entry.checksums[wanted_dtype(entry, dtype)]
    ]
    complain("with other values than in the checkpoint", wrong)


def check_forward(model: torch.nn.Module, inputs: Inputs) -> None:
    """Run the model once; raise WrongWeights where a tensor of its output is not finite.

    ``inputs`` are the builder's example inputs, already on the model's device.
    """
    model.eval()
    with torch.inference_mode():
        output = model(*inputs.positional, **inputs.keywords)
    if not all(bool(torch.isfinite(tensor).all()) for tensor in _tensors(output)):
        raise WrongWeights("the forward pass gives values that are not finite")


def _tensors(output: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of what a model returned: one, or tuples, lists and mappings of them."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping | tuple | list):
        for item in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(item)


def complain(what: str, names: Iterable[str]) -> None:
    """Raise WrongWeights where there are names of which this is to be said."""
    found = sorted(names)
    if found:
        some = first_names(found)
        raise WrongWeights(f"{len(found)} tensor{'s' * (len(found) > 1)} {what}: {some}")


def wanted_dtype(entry: TensorEntry, dtype: torch.dtype) -> str:
    """Return the dtype that this tensor must end as: only floating-point ones are converted."""
    return _name(dtype) if _name(dtype) in entry.checksums else entry.dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
