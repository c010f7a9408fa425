"""Folders of timm: ``config.json`` with ``architecture``, and one file of weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from layouts import NO_FOLDER, Layout, Made, all_but, refused

GROUP: Final = "Folders of timm"
PACKAGES: Final = ("timm",)


def _saved(architecture: str, *, safe: bool = True, **arguments: Any) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        import timm

        model = timm.create_model(architecture, **arguments)
        timm.models.save_for_hf(model, folder, model_args=arguments, safe_serialization=safe)
        return Made(folder)

    return make


def _legacy(folder: Path) -> Made:
    """Write config.json as timm did before it had ``pretrained_cfg``."""
    made = _saved("resnet10t", num_classes=5)(folder)
    config = json.loads((folder / "config.json").read_text())
    flat = config.pop("pretrained_cfg") | {"num_classes": 5, "architecture": config["architecture"]}
    (folder / "config.json").write_text(json.dumps(flat))
    return made


def _another_number_of_classes(folder: Path) -> Made:
    made = _saved("resnet10t", num_classes=5)(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_classes": 7}))
    return made


def _unknown(folder: Path) -> Made:
    made = _saved("resnet10t")(folder)
    config = json.loads((folder / "config.json").read_text()) | {
        "architecture": "resnet_of_tomorrow"
    }
    (folder / "config.json").write_text(json.dumps(config))
    return made


_RIGHT: Final[dict[str, Callable[[Path], Made]]] = {
    "a residual network": _saved("resnet10t", num_classes=5),
    "a residual network in .bin": _saved("resnet10t", safe=False),
    "a vision transformer of small images": _saved("vit_tiny_patch16_224", img_size=32),
    "four channels": _saved("convnext_atto", in_chans=4),
    "rotary positions": _saved("eva02_tiny_patch14_224", img_size=28),
    "config.json of timm before pretrained_cfg": _legacy,
}

LAYOUTS: Final = [
    *(Layout(name, GROUP, make, NO_FOLDER, packages=PACKAGES) for name, make in _RIGHT.items()),
    Layout(
        "another number of classes than in the file", GROUP, _another_number_of_classes,
        refused("has no values for fc.bias, fc.weight", all_but("inspect")), packages=PACKAGES,
    ),
    Layout(
        "an architecture that timm does not have", GROUP, _unknown,
        refused("has no model 'resnet_of_tomorrow'", all_but("inspect")), packages=PACKAGES,
    ),
]  # fmt: skip
