"""Folders of timm: ``config.json`` with ``architecture``, and one file of weights."""

import json
from pathlib import Path
from typing import Any, Final

from layouts import NO_FOLDER, Layout, Made, Maker, all_but, refused
from small import Change, config

GROUP: Final = "Folders of timm"
PACKAGES: Final = ("timm",)


def _saved(architecture: str, *changes: Change, safe: bool = True, **arguments: Any) -> Maker:
    def make(folder: Path) -> Made:
        import timm

        model = timm.create_model(architecture, **arguments)
        timm.models.save_for_hf(model, folder, model_args=arguments, safe_serialization=safe)
        for change in changes:
            change(folder)
        return Made(folder)

    return make


def _flat_config(folder: Path) -> None:
    """Write config.json as timm did before it had ``pretrained_cfg``."""
    now = json.loads((folder / "config.json").read_text())
    flat = now["pretrained_cfg"] | {"num_classes": 5, "architecture": now["architecture"]}
    (folder / "config.json").write_text(json.dumps(flat))


_RIGHT: Final[dict[str, Maker]] = {
    "a residual network": _saved("resnet10t", num_classes=5),
    "a residual network in .bin": _saved("resnet10t", safe=False),
    "a vision transformer of small images": _saved("vit_tiny_patch16_224", img_size=32),
    "four channels": _saved("convnext_atto", in_chans=4),
    "rotary positions": _saved("eva02_tiny_patch14_224", img_size=28),
    "config.json of timm before pretrained_cfg": _saved("resnet10t", _flat_config, num_classes=5),
}
_REFUSED: Final = {
    "another number of classes than in the file": (_saved("resnet10t", config(num_classes=7), num_classes=5), r"lacks weights of this .*: fc.bias, fc.weight"),
    "an architecture that timm does not have": (_saved("resnet10t", config(architecture="resnet_of_tomorrow")), "has no model 'resnet_of_tomorrow'"),
}  # fmt: skip

LAYOUTS: Final = [
    *(Layout(name, GROUP, make, NO_FOLDER, packages=PACKAGES) for name, make in _RIGHT.items()),
    *(
        Layout(name, GROUP, make, refused(words, all_but("inspect")), packages=PACKAGES)
        for name, (make, words) in _REFUSED.items()
    ),
]
