"""Give the tensors of a GGUF file the keys and values of the model that transformers makes of it.

llama.cpp renames a model's tensors, and for some architectures reorders or changes their values.
transformers has a table of the names and the code that undoes the changes, for one tensor after the
other; this module applies both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import torch

from weighin import formats
from weighin.checkpoint.reader import Computed, read_whole
from weighin.errors import CheckpointError
from weighin.formats import gguf
from weighin.formats.base import Slices, TensorSlice
from weighin.formats.misfit import first_names
from weighin.models.gguf_spec import spec_of
from weighin.models.pretrained import from_config
from weighin.models.skeleton import build_skeleton


def read_gguf_with_model_keys(path: Path) -> Slices:
    """Return the tensors of a GGUF file under the names of the model's state dict, in its order.

    Raises:
        CheckpointError: transformers does not know the architecture, converts it in another way, or the
            file does not hold the values of a tensor of the model.
    """
    file = gguf.file_of(path)
    model: Any = build_skeleton(from_config, spec_of(file).kwargs)
    architecture = gguf.architecture(file)
    reading = _Reading.of(model, file, architecture)
    sources: dict[str, list[TensorSlice]] = {}
    for where in formats.read(file)[1]:
        if target := reading.target(where.name):
            sources.setdefault(target, []).append(where)
    wanted = model.state_dict(keep_vars=True)
    tied = {id(wanted[name]): name for name in sources if name in wanted}
    origins = {
        name: name if name in sources else tied.get(id(tensor)) for name, tensor in wanted.items()
    }
    if missing := sorted(name for name, origin in origins.items() if origin is None):
        raise CheckpointError(
            f"{file}: transformers finds no tensor for {first_names(missing)} in this file",
            "leave --keys out to write the tensors under the file's own names",
        )
    return Slices(
        _computed(name, tuple(wanted[name].shape), origin, sources[origin], reading)
        for name, origin in origins.items()
        if origin
    )


@dataclass(frozen=True, slots=True)
class _Reading:
    """The names that transformers gives a file's tensors, and its code that undoes llama.cpp's changes."""

    names: Mapping[str, str]
    processor: Any

    @classmethod
    def of(cls, model: Any, file: Path, architecture: str) -> "_Reading":
        module: Any = import_module("transformers.modeling_gguf_pytorch_utils")

        if architecture not in module.GGUF_SUPPORTED_ARCHITECTURES and _has_code_of_its_own(
            architecture
        ):
            raise CheckpointError(
                f"{file}: transformers converts the architecture {architecture!r} only while it loads",
                "leave --keys out, or save the loaded model: model.save_pretrained(FOLDER)",
            )
        kind = module.TENSOR_PROCESSORS.get(architecture, module.TensorProcessor)
        processor = kind(config=module.load_gguf_checkpoint(file)["config"])
        return cls(module.get_gguf_hf_weights_map(model, processor), processor)

    def target(self, name: str) -> str | None:
        return self.names.get(name) or self.names.get(name.removesuffix(".weight"))

    def values(
        self, sources: Sequence[TensorSlice], target: str, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """Return the values of one tensor of the model."""
        made: dict[str, torch.Tensor] = {}
        for where in sources:
            result = self.processor.process(
                weights=read_whole(where, torch.float32).numpy(),
                name=where.name,
                tensor_key_mapping=self.names,
                parsed_parameters={"tensors": made},
            )
            if (name := self.names.get(result.name)) is not None:
                made[name] = torch.from_numpy(result.weights).contiguous()
        if target not in made or made[target].shape != shape:
            found = tuple(made[target].shape) if target in made else "nothing"
            raise CheckpointError(
                f"{sources[0].file}: transformers makes {found} of {sources[0].name!r}, and {target!r} of"
                f" the model is {shape}",
                "leave --keys out to write the tensors under the file's own names",
            )
        return made[target]


def _has_code_of_its_own(architecture: str) -> bool:
    try:
        from transformers.integrations.gguf.utils import is_gguf_arch_supported
    except ImportError:  # before transformers 5.20
        return False
    return bool(is_gguf_arch_supported(architecture))


def _computed(
    name: str,
    shape: tuple[int, ...],
    origin: str,
    sources: Sequence[TensorSlice],
    reading: _Reading,
) -> Computed:
    first = sources[0]
    # transformers computes with norms and with the states of Mamba, in float32.
    moves_only = len(first.shape) > 1 and "ssm_a" not in first.name
    return Computed(
        name=name,
        shape=shape,
        stride=tuple(prod(shape[dim + 1 :]) for dim in range(len(shape))),
        dtype_name=first.dtype_name if moves_only else "float32",
        file=first.file,
        offset=first.offset,
        storage_offset=first.storage_offset,
        storage_bytes=first.storage_bytes,
        compute=partial(reading.values, sources, origin, shape),
    )
