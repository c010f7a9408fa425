"""List the libraries whose folders weighin reads (code: ``models.pretrained*``), and a user's choices in a folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
"""The usual suffixes of checkpoint files."""
PIPELINE: Final = "model_index.json"
"""The file of a pipeline of diffusers that names its parts, each of which is a model in a folder of its own."""


@dataclass(frozen=True, slots=True)
class Library:
    """A library whose folders have a ``config.json`` and weights."""

    name: str  # of the package, and of the strategy that loads by its own function
    extra: str
    builder: str
    class_key: str  # of config.json
    weights: tuple[str, ...]  # and indexes of shards, in the order in which the library looks
    fixed_dtype: str | None = None  # of every model; None if the folder says it

    def class_in(self, config: Mapping[str, Any]) -> str | None:
        named = config.get(self.class_key)
        if isinstance(named, list):
            named = named[0] if named else None
        return named if isinstance(named, str) and named else None


_BUILDERS: Final = "weighin.models.pretrained"
TRANSFORMERS: Final = Library(
    "transformers", "hf", f"{_BUILDERS}:from_config", "architectures",
    ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"),
)  # fmt: skip
DIFFUSERS: Final = Library(
    "diffusers", "diffusers", f"{_BUILDERS}_diffusers:from_config", "_class_name",
    (
        "diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model.safetensors",
        "diffusion_pytorch_model.bin", "diffusion_pytorch_model.bin.index.json",
    ), "float32",
)  # fmt: skip
TIMM: Final = Library(
    "timm", "timm", f"{_BUILDERS}_timm:from_config", "architecture",
    ("model.safetensors", "pytorch_model.bin"), "float32",
)  # fmt: skip
LIBRARIES: Final = (TRANSFORMERS, DIFFUSERS, TIMM)
"""A folder belongs to the first of these libraries whose ``class_key`` its ``config.json`` has."""


def library_in(config: Mapping[str, Any]) -> Library:
    """Return the library of a folder by its ``config.json``; transformers if that names no class."""
    return next((each for each in LIBRARIES if each.class_in(config)), TRANSFORMERS)


def library_of(builder: str) -> Library | None:
    """Return the library whose models a builder builds; None for any other builder."""
    return next((each for each in LIBRARIES if each.builder == builder), None)


def module_of(builder: str) -> Any:
    return import_module(builder.partition(":")[0])


@dataclass(frozen=True, slots=True)
class FolderChoice:
    """A user's choices in a Hugging Face folder, as for ``load_pretrained``; empty for none."""

    variant: str = ""
    model_class: str = ""
    revision: str = ""
    trust_remote_code: bool = False
    adapter: str = ""

    @property
    def options(self) -> tuple[str, ...]:
        values = {
            "--set variant": self.variant,
            "--set model_class": self.model_class,
            "--set revision": self.revision,
            "--adapter": self.adapter,
        }
        return tuple(f"{name}={value}" for name, value in values.items() if value)


AS_SAVED: Final = FolderChoice()


@dataclass(frozen=True, slots=True)
class Selection:
    """The part of a checkpoint that is the model's state dict: below ``key``, such as "state.model"."""

    key: str = ""  # of nested dicts, or of names that begin with it
    strip_prefix: str = ""  # which each name loses, such as "module."

    def __bool__(self) -> bool:
        return bool(self.key or self.strip_prefix)

    @property
    def options(self) -> tuple[str, ...]:
        key = (f"--key={self.key}",) if self.key else ()
        prefix = ("--set", f"strip_prefix={self.strip_prefix}") if self.strip_prefix else ()
        return (*key, *prefix)


WHOLE: Final = Selection()

ADAPTER: Final = "adapter_config.json"
ARGUMENT: Final = "adapter"
"""The argument of a model's builder that names the folder of an adapter to merge."""


def module_in_pipelines(name: str) -> str:
    """Return the module of diffusers' pipelines that defines a model class of transformers; "" if none does."""
    import re  # as are the others, to save a worker's memory
    from importlib.util import find_spec
    from pathlib import Path

    spec = find_spec(DIFFUSERS.name)
    root = Path(spec.origin or "").parent if spec else Path("missing")
    definition = re.compile(rf"^class {re.escape(name)}\(", re.MULTILINE)
    for file in sorted((root / "pipelines").rglob("*.py")):
        if definition.search(file.read_text(encoding="utf-8")):
            return ".".join(file.relative_to(root.parent).with_suffix("").parts)
    return ""
