"""Tied weights are found by identity, and tied again after what unties them."""

import torch
from torch import nn

from weighin.stream.tensors import retie, tied_names


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[1].weight = self.blocks[0].weight


GROUPS = [["embedding.weight", "head.weight"], ["blocks.0.weight", "blocks.1.weight"]]


def test_names_that_share_a_parameter() -> None:
    assert tied_names(Tied()) == GROUPS


def test_equal_values_are_not_tied() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].load_state_dict(model[0].state_dict())
    assert tied_names(model) == []


def test_a_module_used_twice_is_tied_whole() -> None:
    layer = nn.Linear(2, 2)
    assert tied_names(nn.Sequential(layer, layer)) == [
        ["0.weight", "1.weight"],
        ["0.bias", "1.bias"],
    ]


def test_three_names_are_one_group() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    model[1].weight = model[2].weight = model[0].weight
    assert tied_names(model) == [["0.weight", "1.weight", "2.weight"]]


def test_assigning_a_state_dict_unties_and_retie_mends_it() -> None:
    model, state = Tied(), {k: v.clone() for k, v in Tied().state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert tied_names(model) == []
    retie(model, GROUPS)
    assert tied_names(model) == GROUPS
    assert torch.equal(model.head.weight, state["embedding.weight"])


def test_retie_of_a_parameter_at_the_top() -> None:
    class Top(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.ones(2))
            self.b = nn.Parameter(torch.zeros(2))

    model = Top()
    retie(model, [["a", "b"]])
    assert model.b is model.a


def test_nothing_to_tie_changes_nothing() -> None:
    model = nn.Linear(2, 2)
    retie(model, tied_names(model))
    assert tied_names(model) == []
