"""What a user may choose in a Hugging Face folder, beside the folder itself."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class FolderChoice:
    """The choices, with the names and meanings of the arguments of ``from_pretrained``.

    Attributes:
        variant: the variant of the weights: "fp16" for ``model.fp16.safetensors``.
        model_class: the class of transformers to load, "BertModel" or "AutoModelForCausalLM"; empty for
            the class that ``config.json`` names.
        revision: the revision of a model in the Hub's cache: a branch, a tag or a commit.
        trust_remote_code: whether the code that the folder brings may run.
        adapter: a folder with an adapter of LoRA to merge into the model, as the argument of
            ``PeftModel.from_pretrained``; empty for none.
    """

    variant: str = ""
    model_class: str = ""
    revision: str = ""
    trust_remote_code: bool = False
    adapter: str = ""

    @property
    def options(self) -> tuple[str, ...]:
        """The command-line options that make the same choice of files and class."""
        values = {
            "variant": self.variant,
            "class": self.model_class,
            "revision": self.revision,
            "adapter": self.adapter,
        }
        return tuple(f"--{name}={value}" for name, value in values.items() if value)


AS_SAVED: Final = FolderChoice()
