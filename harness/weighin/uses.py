"""Name the uses of a loaded model: what a cell (one measurement) can do with it after the load.

A cell has one use. A user's own use is a Python file with a function ``use(model)``; the name of the
use is the name of the file without ".py".
"""

from typing import Final

FORWARD: Final = "forward"
NONE: Final = "none"
"""Stands in place of a use if the measurement ends when the model is loaded."""

TO_DEVICE: Final = "to-device"
SAVE: Final = "save"
FORK: Final = "fork"
USES: Final = {
    FORWARD: "Run forward passes with the model's example inputs (--passes).",
    "write": "Write every weight once, in place.",
    "sgd": "Train one step with SGD without momentum (foreach=False).",
    "adamw": "Train one step with AdamW (foreach=False), which creates AdamW's two states per weight.",
    "to-float32": "Convert the model to float32 with model.to(torch.float32).",
    TO_DEVICE: "Move the model from the CPU to the GPU with model.to(device).",
    "deepcopy": "Copy the model with copy.deepcopy.",
    SAVE: "Save the state dict to a new file with torch.save, and remove the file.",
    FORK: "Fork two processes that write every weight.",
}
"""Maps the name of each of weighin's own uses to one line of help."""

TRAINING: Final = ("sgd", "adamw")
"""The uses that need the gradient of every parameter."""

_PHASE: Final = "use: "  # the name of a strategy's phase has no colon


def phase_of(use: str) -> str:
    return use if use == FORWARD else _PHASE + use


def is_of_use(phase: str) -> bool:
    return phase == FORWARD or phase.startswith(_PHASE)
