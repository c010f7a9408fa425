"""Import torchvision's models, where its build does not fit torch's, too."""

import torchvision.ops.boxes

if not torchvision.extension._has_ops():
    torchvision.ops.boxes._assert_has_ops = lambda: None

from torchvision import models

__all__ = ["models"]
