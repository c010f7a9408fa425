"""Define the function that replaces ``job.reset_buffers`` in the code that ``recommend`` prints.

In weighin, ``job.reset_buffers`` builds the model again without writing any weight. The code of
``job.reset_buffers`` (``weighin.construction.skeleton``) is too long for a snippet that a user
pastes into a program. The function in this module moves each parameter to the meta device as soon
as the constructor of the model registers it. The function has no annotations, so that the printed
code is short.
"""

import torch


def reset_buffers(model, build_model, device, dtype):  # type: ignore[no-untyped-def]
    """Give each non-persistent buffer the value that the model's constructor computes."""
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
                kind = dtype if dtype and buffer.is_floating_point() else buffer.dtype
                module._buffers[name] = buffer.to(device, kind)
