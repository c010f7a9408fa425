"""Verify a loaded model: its tensors with their values, buffers, ties, and the forward pass."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod

import torch

from weighin.checkpoint.checksum import checksum
from weighin.checkpoint.manifest import Manifest, TensorEntry
from weighin.stream.slices import ITEM_BYTES, dtype_name
from weighin.stream.tensors import named_tensors as tensors_by_name
from weighin.stream.tensors import tensors_in
from weighin.text import first_names
from weighin.worker.loading import Inputs


class WrongWeights(Exception):
    """The model that a strategy loaded, or the checkpoint that it saved, is not as expected."""


def named_tensors(model: torch.nn.Module, wanted: Iterable[str] = ()) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer by each of its names, and the scales of bitsandbytes if they are ``wanted``."""
    tensors = tensors_by_name(model)
    if others := set(wanted) - tensors.keys():
        state = model.state_dict()
        tensors |= {name: state[name] for name in others if torch.is_tensor(state.get(name))}
    return tensors


def touch(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Read every byte of every tensor, or of this process's shard of it, and return the checksums."""
    once = {identity(tensor): _local(tensor) for tensor in tensors.values()}
    threads = torch.get_num_threads()
    # One thread for each tensor: torch's own threads would synchronise after every 4 MiB.
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            checksums = dict(zip(once, pool.map(checksum, once.values()), strict=True))
    finally:
        torch.set_num_threads(threads)
    return {name: checksums[identity(tensor)] for name, tensor in tensors.items()}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that is equal for two tensors only if they view the same memory in the same way."""
    tensor = _local(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def check_structure(
    tensors: dict[str, torch.Tensor], manifest: Manifest, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise WrongWeights for a wrong name, device, shape, dtype or tie, or a tensor on the meta device."""
    expected = {entry.name: entry for entry in manifest.tensors}
    complain("missing from the model", expected.keys() - tensors.keys())
    complain("not in the checkpoint", tensors.keys() - expected.keys())
    check_places(tensors, device)
    shapes = [n for n, tensor in tensors.items() if tuple(tensor.shape) != expected[n].shape]
    complain("of another shape than in the checkpoint", shapes)
    kinds = {name: wanted_dtype(entry, dtype) for name, entry in expected.items()}
    for kind in sorted({*kinds.values()}):
        others = [n for n in kinds if kinds[n] == kind != dtype_name(tensors[n].dtype)]
        complain(f"not of dtype {kind}", others)
    ties = {name: entry.shared_with for name, entry in expected.items() if entry.shared_with}
    untied = [n for n in ties if identity(tensors[n]) != identity(tensors[ties[n]])]
    complain("no longer tied to the tensor that they share", untied)


def check_places(tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Raise WrongWeights for a tensor on the meta device, which has no values, or on a wrong device."""
    complain(
        "left on the meta device, without values", [n for n, t in tensors.items() if t.is_meta]
    )
    complain(f"not on {device}", [n for n, t in tensors.items() if t.device.type != device.type])


def check_parameters(
    model: torch.nn.Module,
    checksums: Mapping[str, str],
    manifests: Sequence[Manifest],
    dtype: torch.dtype,
) -> None:
    """Raise WrongWeights if the parameters, of whatever names, are not all those of the checkpoint.

    Each must have the values of a tensor in one of ``manifests``: as this release of the library makes them, or as the
    files have them. Together, they must be as large as the parameters of the first manifest.
    """
    entries = [entry for one in manifests for entry in one.tensors]
    right = {entry.checksums[wanted_dtype(entry, dtype)] for entry in entries}
    loaded = dict(model.named_parameters())
    complain(
        "with values that the checkpoint lacks", [n for n in loaded if checksums[n] not in right]
    )
    size = sum(one.nbytes for one in loaded.values())
    wanted = sum(
        prod(entry.shape) * ITEM_BYTES[wanted_dtype(entry, dtype)]
        for entry in manifests[0].tensors
        if entry.kind == "parameter" and entry.shared_with is None
    )
    if size != wanted:
        raise WrongWeights(
            f"the model's parameters have {size} bytes, the checkpoint's have {wanted}"
        )


def check_values(checksums: dict[str, str], manifest: Manifest, dtype: torch.dtype) -> None:
    """Raise WrongWeights if a tensor's checksum differs from the checkpoint's. Of a tensor that ``from_pretrained``
    changes after reading it, the values in the file and the changed values both count as correct.
    """
    wrong = []
    for entry in manifest.tensors:
        kind = wanted_dtype(entry, dtype)
        right = (entry.checksums[kind], (entry.file_checksums or {}).get(kind))
        if checksums[entry.name] not in right:
            wrong.append(entry.name)
    complain("with other values than in the checkpoint", wrong)


def check_forward(model: torch.nn.Module, inputs: Inputs) -> None:
    """Run one forward pass; raise WrongWeights if the output has a value that is not finite."""
    model.eval()
    with torch.inference_mode():
        output = model(*inputs.positional, **inputs.keywords)
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors_in(output)):
        raise WrongWeights("the forward pass returns values that are not finite")


def complain(what: str, names: Iterable[str]) -> None:
    """Raise WrongWeights with the text ``what`` and the tensors' ``names``, if there are names."""
    if faulty := sorted(names):
        count = f"{len(faulty)} tensor{'s' * (len(faulty) > 1)}"
        raise WrongWeights(f"{count} {what}: {first_names(faulty)}")


def wanted_dtype(entry: TensorEntry, dtype: torch.dtype) -> str:
    """Return a tensor's dtype after a correct load: ``dtype`` if it is floating-point, else its own."""
    return dtype_name(dtype) if dtype_name(dtype) in entry.checksums else entry.dtype
