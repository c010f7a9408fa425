"""Define the function whose source replaces ``job.reset_buffers`` in pasted code.

``job.reset_buffers`` builds the model again without writing any weight
(``weighin.construction.skeleton``), which is too much code to paste. The function in this module instead
drops each parameter as soon as the model's constructor registers it. The function has no
annotations, so that pasted code stays short.
"""

import torch


def reset_buffers(model, build_model, device, dtype):  # type: ignore[no-untyped-def]
    """Give buffers that no checkpoint contains the values that the constructor gives them."""
    if not any(module._non_persistent_buffers_set for module in model.modules()):
        return

    def to_meta(module, name, parameter):  # type: ignore[no-untyped-def]  # noqa: ARG001, RET503
        if parameter is not None:
            return torch.nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    hook = torch.nn.modules.module.register_module_parameter_registration_hook(to_meta)
    try:
        fresh = build_model()
    finally:
        hook.remove()
    for module, other in zip(model.modules(), fresh.modules(), strict=True):
        for name in module._non_persistent_buffers_set:
            if (buffer := other._buffers[name]) is not None:
                kind = dtype if buffer.is_floating_point() else buffer.dtype
                module._buffers[name] = buffer.to(device, kind)
