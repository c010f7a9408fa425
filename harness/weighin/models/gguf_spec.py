"""Describe the model in a GGUF file by the configuration that transformers makes of the file's
metadata.

transformers needs torch to make the configuration, and weighin's own process must not import torch.
``spec_of`` therefore starts a child process, ``python -m weighin.models.gguf_spec FILE``. The child
sends one event: ``answer`` with the fields architecture and config, or ``error`` with message and
repair.
"""

import json
import sys
from pathlib import Path
from typing import Any

from weighin import child_process, install
from weighin.cell import ModelSpec
from weighin.child_process import Parent, end_with_parent
from weighin.errors import CheckpointError, ConfigError
from weighin.formats.gguf import architecture, check_decoded, files, read
from weighin.formats.pretrained_folder import BUILDER
from weighin.models.without_torchvision import imported_again
from weighin.text import one_line


def spec_of(file: Path) -> ModelSpec:
    """Return the ``ModelSpec`` of a GGUF file, like that of a Hugging Face folder.

    Raises:
        CheckpointError: the file is damaged or one of several parts, transformers does not know the
            model's architecture, or a package is missing.
    """
    _check(file)
    command = child_process.module("weighin.models.gguf_spec", str(file))
    answer, why = child_process.ask(command, child_process.environment())
    if not answer:
        raise _unknown(file, why)
    if answer.pop("event") == "error":
        raise CheckpointError(f"{file}: {answer['message']}", answer["repair"])
    return ModelSpec(file.stem, BUILDER, answer)


def described(file: Path) -> dict[str, Any]:
    """Return the builder's arguments for ``spec_of``; this function imports transformers.

    Raises:
        CheckpointError: for the same reasons as ``spec_of``.
        ConfigError: a package is missing, or transformers cannot be imported.
    """
    _check(file)
    try:
        import accelerate  # noqa: F401 (from_pretrained needs it)
        import gguf  # noqa: F401
        import transformers
    except ImportError as error:
        message = f"a model in a GGUF file needs the package {error.name}, which is not installed"
        raise ConfigError(message, install.command("gguf", "hf")) from None
    try:
        try:
            config = _config(transformers, file)
        except ImportError as error:
            config = _config(imported_again("transformers", error), file)
        architecture = _class_of(config)
    except (AttributeError, LookupError, NotImplementedError, TypeError, ValueError) as error:
        raise _unknown(file, f"{type(error).__name__}: {error}") from error
    content = json.loads(config.to_json_string(use_diff=False))
    content |= {"architectures": [architecture], "dtype": _own_dtype(file)}
    return {"architecture": architecture, "config": content}


def _check(file: Path) -> None:
    check_decoded(read(file))
    if len(parts := files(file)) > 1:
        raise CheckpointError(
            f"{file}: one of {len(parts)} parts of a model; transformers reads only whole GGUF"
            " files",
            f"join the parts with llama.cpp: llama-gguf-split --merge {parts[0]} JOINED.gguf",
        )


def _unknown(file: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{file}: transformers has no configuration for the architecture {architecture(file)!r}:"
        f" {one_line(why)}",
        f"list its tensors: weighin inspect {file}; write their values: weighin convert {file} FOLDER",
    )


def main() -> None:
    """Send the parent process the description of the GGUF file that the argument names."""
    end_with_parent()
    parent = Parent()
    try:
        answer = described(Path(sys.argv[1]))
    except ConfigError as error:
        parent.send("error", message=error.message, repair=error.repair)
        return
    parent.send("answer", **answer)


def _config(transformers: Any, file: Path) -> Any:
    return transformers.AutoConfig.from_pretrained(
        file.parent, gguf_file=file.name, local_files_only=True
    )


def _class_of(config: Any) -> str:
    """Return the class that a configuration names, or an ``AutoModel``'s, if possible for text."""
    from transformers.models.auto import modeling_auto

    if config.architectures:
        return str(config.architectures[0])
    for names in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_MAPPING_NAMES,
    ):
        if found := names.get(config.model_type):
            return found if isinstance(found, str) else str(found[0])
    raise ValueError(f"no AutoModel has a class for {config.model_type}")


def _own_dtype(file: Path) -> str:
    """Return the dtype that ``from_pretrained`` gives the model if the caller gives no dtype."""
    try:
        from transformers.integrations.gguf.reader import GgufHeader
        from transformers.integrations.gguf.utils import is_gguf_arch_supported
    except ImportError:  # before transformers 5.20, every model got torch's default dtype
        return "float32"
    if not is_gguf_arch_supported(architecture(file)):
        return "float32"
    dtype = GgufHeader.from_file(str(file)).dtype
    return str(dtype or "torch.float32").removeprefix("torch.")


if __name__ == "__main__":
    main()
