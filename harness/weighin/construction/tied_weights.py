"""Find the tied weights of a model, and tie them again after a load."""

import torch


def tied_names(model: torch.nn.Module) -> list[list[str]]:
    """Return, for each tied parameter or persistent buffer, the list of its two or more names."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf not in module._non_persistent_buffers_set:
                groups.setdefault(id(buffer), []).append(f"{prefix}.{leaf}" if prefix else leaf)
    return [names for names in groups.values() if len(names) > 1]


def retie(model: torch.nn.Module, groups: list[list[str]]) -> None:
    """Make the names of each group share the tensor of the group's first name again.

    Call ``retie`` after ``to_empty`` from the meta device or ``load_state_dict(assign=True)``,
    which silently untie weights.
    """
    for first, *others in groups:
        owner, _, attribute = first.rpartition(".")
        tensor = getattr(model.get_submodule(owner), attribute)
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, tensor)


def assign(
    model: torch.nn.Module, state: dict[str, torch.Tensor], device: torch.device | str
) -> None:
    """Make a state dict's tensors the model's tensors, on ``device`` and in the model's dtypes.

    Tied weights stay tied. ``assign`` replaces each tensor in ``state`` by the converted tensor, so that
    the original tensor is freed before the next one is converted.
    """
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    for name, tensor in state.items():
        kind = dtypes.get(name, tensor.dtype)
        state[name] = tensor.to(device, kind)  # copies only if device or dtype differs
    tied = tied_names(model)
    share_missing(state, tied)
    model.load_state_dict(state, assign=True)
    retie(model, tied)


def share_missing(state: dict[str, torch.Tensor], groups: list[list[str]]) -> None:
    """Add the missing names of tied weights to a state dict; each group has the names of one tensor.

    Formats that cannot store shared tensors, such as safetensors, store only one name of each group.
    """
    for names in groups:
        present = [name for name in names if name in state]
        state |= {name: state[present[0]] for name in names if present and name not in state}
