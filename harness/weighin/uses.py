"""Name the uses of a loaded model: what a cell does with the model once it is ready.

A cell has one use. A user's own use is a Python file with a function ``use(model)``; it is named after
its file.
"""

from typing import Final

FORWARD: Final = "forward"
NONE: Final = "none"
"""Written in place of a use for a cell that ends when the model is ready."""

TO_DEVICE: Final = "to-device"
SAVE: Final = "save"
FORK: Final = "fork"
USES: Final = {
    FORWARD: "Run forward passes with the model's example inputs (--passes).",
    "write": "Write every weight once, in place.",
    "sgd": "Train one step with SGD without momentum (foreach=False).",
    "adamw": "Train one step with AdamW (foreach=False), which creates its two states.",
    "to-float32": "Convert the model to float32 with model.to(torch.float32).",
    TO_DEVICE: "Move the model from the CPU to the GPU with model.to(device).",
    "deepcopy": "Copy the model with copy.deepcopy.",
    SAVE: "Save the state dict to a new file with torch.save, and remove the file.",
    FORK: "Fork two processes that write every weight.",
}
"""The uses of weighin, each with one line of help."""

TRAINING: Final = ("sgd", "adamw")
"""The uses that need a gradient of every parameter."""

_PHASE: Final = "use: "  # no strategy's phase has a colon in its name


def phase_of(use: str) -> str:
    """Return the name of the phase in which a use runs."""
    return use if use == FORWARD else _PHASE + use


def is_of_use(phase: str) -> bool:
    """Tell whether a phase of this name is the use of a model that was loaded before."""
    return phase == FORWARD or phase.startswith(_PHASE)
