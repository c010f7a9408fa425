"""Tied weights: which names of a module share one parameter, and how to make them share again."""

import torch


def tied_names(model: torch.nn.Module) -> list[list[str]]:
    """Return the groups of names that share one parameter; groups of one are left out."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def retie(model: torch.nn.Module, groups: list[list[str]]) -> None:
    """Make the names of each group share the parameter of its first name again.

    ``to_empty`` from the meta device and ``load_state_dict(assign=True)`` both untie silently.
    """
    for first, *others in groups:
        parameter = model.get_parameter(first)
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, parameter)


def share_missing(state: dict[str, torch.Tensor], groups: list[list[str]]) -> None:
    """Give the names of each group that a state dict leaves out the tensor of one that it has.

    Formats without sharing, such as safetensors, keep only one name of each group.
    """
    for names in groups:
        present = [name for name in names if name in state]
        state |= {name: state[present[0]] for name in names if present and name not in state}
