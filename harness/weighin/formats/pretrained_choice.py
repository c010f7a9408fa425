"""Define what a user chooses to load from a Hugging Face folder, such as a variant of the weights."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class FolderChoice:
    """A user's choices in a Hugging Face folder, mostly named like arguments of ``from_pretrained``.

    Attributes:
        variant: the variant of the weights: "fp16" for ``model.fp16.safetensors``.
        model_class: the class of transformers to load, "BertModel" or "AutoModelForCausalLM"; empty for
            the class that ``config.json`` names.
        revision: the revision of a model in the Hub's cache: a branch, a tag or a commit.
        trust_remote_code: whether Python code in the folder may run.
        adapter: a folder with an adapter of LoRA to merge into the model; empty for none.
    """

    variant: str = ""
    model_class: str = ""
    revision: str = ""
    trust_remote_code: bool = False
    adapter: str = ""

    @property
    def options(self) -> tuple[str, ...]:
        """The choices as options of the command line, without --trust-remote-code."""
        values = {
            "variant": self.variant,
            "class": self.model_class,
            "revision": self.revision,
            "adapter": self.adapter,
        }
        return tuple(f"--{name}={value}" for name, value in values.items() if value)


AS_SAVED: Final = FolderChoice()
