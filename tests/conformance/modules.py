"""Describe modules as recipes: plain data from which the same module is built any number of times."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from constructing import CONSTRUCTING, SubclassedParameter
from hooked import HOOKED
from hypothesis import strategies as st
from standard import STANDARD
from tensors import NAMES, TensorRecipe, Tensors, tensor_recipes
from torch import nn


@dataclass(frozen=True)
class Leaf:
    """A module with tensors: one of STANDARD, CONSTRUCTING or HOOKED, or "Foreign" or "Tensors"."""

    kind: str
    size: int = 2
    tensors: tuple[TensorRecipe, ...] = ()


@dataclass(frozen=True)
class Tree:
    """A module that contains modules, with their names; a list ignores the names."""

    kind: str
    children: tuple[tuple[str, "Node"], ...]


Node = Leaf | Tree


@dataclass(frozen=True)
class Touch:
    """A change at the end of the constructor to two parameters, given by their numbers."""

    kind: str
    first: int = 0
    second: int = 1


@dataclass(frozen=True)
class Recipe:
    """A model: its modules, and the changes that its constructor makes to them at its end."""

    root: Node
    touches: tuple[Touch, ...] = ()

    def prepare(self) -> tuple[Callable[[], nn.Module], nn.Module]:
        """Return a function that builds the model, and a foreign model with which it shares weights."""
        sizes = [leaf.size for _, leaf in leaves(self.root) if leaf.kind == "Foreign"]
        foreign = nn.ModuleList(nn.Linear(size, 3) for size in sizes)

        def build() -> nn.Module:
            model = _build(self.root, iter(foreign))
            for touch in self.touches:
                _touch(model, touch)
            return model

        return build, foreign


class Foreign(nn.Module):
    """Shares a weight, and the memory of another, with an existing model."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.weight = other.weight
        self.register_buffer(
            "column", other.get_parameter("weight").detach()[:, 0], persistent=False
        )
        self.bias = nn.Parameter(other.get_parameter("bias").detach())


class Plain(nn.Module):
    """A module whose children may have any names."""


def leaves(node: Node, path: str = "") -> Iterator[tuple[str, Leaf]]:
    """Yield the leaves with their paths, in the order of construction."""
    if isinstance(node, Leaf):
        yield path, node
    else:
        for name, child in named_children(node):
            yield from leaves(child, f"{path}.{name}" if path else name)


def named_children(tree: Tree) -> Iterator[tuple[str, Node]]:
    """Yield a tree's children with their names in the module."""
    for number, (name, child) in enumerate(tree.children):
        yield (name if tree.kind in {"plain", "dict"} else str(number)), child


def _build(node: Node, foreign: Iterator[nn.Module]) -> nn.Module:
    if isinstance(node, Leaf):
        return _build_leaf(node, foreign)
    children = [(name, _build(child, foreign)) for name, child in named_children(node)]
    if node.kind == "list":
        return nn.ModuleList(child for _, child in children)
    if node.kind == "dict":
        return nn.ModuleDict(dict(children))
    module: nn.Module = nn.Sequential() if node.kind == "sequential" else Plain()
    for name, child in children:
        module.add_module(name, child)
    return module


def _build_leaf(leaf: Leaf, foreign: Iterator[nn.Module]) -> nn.Module:
    if leaf.kind == "Foreign":
        return Foreign(next(foreign))
    if leaf.kind == "Tensors":
        return Tensors(leaf.tensors)
    if leaf.kind in STANDARD:
        return STANDARD[leaf.kind][0](leaf.size)
    return {**CONSTRUCTING, **HOOKED}[leaf.kind](leaf.size)


Slot = tuple[nn.Module, str, Any]
"""A module, the name of a parameter in it, and the parameter."""


def _slots(model: nn.Module) -> list[Slot]:
    return [
        (module, leaf, parameter)
        for module in model.modules()
        for leaf, parameter in module._parameters.items()
        if parameter is not None and not nn.parameter.is_lazy(parameter)
    ]


def _touch(model: nn.Module, touch: Touch) -> None:
    slots = _slots(model)
    if slots:
        first = slots[touch.first % len(slots)]
        alike = [slot for slot in slots if _alike(slot[2], first[2])]
        TOUCHES[touch.kind](model, first, alike[touch.second % len(alike)])


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def _replace(slot: Slot, data: torch.Tensor, kind: type[nn.Parameter] = nn.Parameter) -> None:
    setattr(slot[0], slot[1], kind(data.detach(), requires_grad=slot[2].requires_grad))


def _keep(model: Any, value: Any) -> None:
    model.kept = [*getattr(model, "kept", []), value]


def _buffer(model: nn.Module, value: torch.Tensor, *, persistent: bool) -> None:
    model.register_buffer(f"buffer{len(model._buffers)}", value, persistent)


def _mark(parameter: Any) -> None:
    parameter._no_weight_decay = True
    parameter.partition = {"axis": 0, "scale": torch.ones(2)}


def _share_hook(parameter: torch.Tensor) -> None:
    if parameter.requires_grad:
        parameter.register_hook(lambda gradient: gradient * 2)


def _accumulate_hook(parameter: torch.Tensor) -> None:
    def negate(one: torch.Tensor) -> None:
        assert one.grad is not None
        one.grad = one.grad * -1

    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(negate)


def _strip_prefix(model: nn.Module) -> None:
    def strip(module: nn.Module, state: dict[str, Any], *rest: Any) -> None:
        for key in [key for key in state if key.startswith("module.")]:
            state[key.removeprefix("module.")] = state.pop(key)

    model.register_load_state_dict_pre_hook(strip)


def _scale(parameter: torch.Tensor) -> None:
    if parameter.is_floating_point() and 0 not in parameter.stride():
        parameter.data.copy_(parameter.data.float() * 0.5)


TOUCHES: dict[str, Callable[[nn.Module, Slot, Slot], object]] = {
    "tie": lambda model, one, other: setattr(other[0], other[1], one[2]),
    "tie memory": lambda model, one, other: _replace(other, one[2]),
    "subclass": lambda model, one, other: _replace(one, one[2], SubclassedParameter),
    "freeze": lambda model, one, other: one[2].requires_grad_(False),
    "mark": lambda model, one, other: _mark(one[2]),
    "gradient hook": lambda model, one, other: _share_hook(one[2]),
    "accumulated gradient hook": lambda model, one, other: _accumulate_hook(one[2]),
    "keep": lambda model, one, other: _keep(model, one[2]),
    "keep detached": lambda model, one, other: _keep(model, {"view": one[2].detach()}),
    "keep a copy": lambda model, one, other: _keep(model, one[2].detach().clone()),
    "view as buffer": lambda model, one, other: _buffer(model, one[2].detach(), persistent=True),
    "view as temporary": lambda model, one, other: _buffer(model, one[2].data, persistent=False),
    "computed buffer": lambda model, one, other: _buffer(model, one[2].detach() == 0, persistent=False),
    "evaluate": lambda model, one, other: model.eval(),
    "strip prefix": lambda model, one, other: _strip_prefix(model),
    "scale in place": lambda model, one, other: _scale(one[2]),
    "module of both": lambda model, one, other: model.add_module("both", nn.ParameterList([one[2], other[2]])),
    "same module again": lambda model, one, other: model.add_module("module_again", one[0]) if one[0] is not model else None,
    "bfloat16": lambda model, one, other: one[0].to(torch.bfloat16),
}  # fmt: skip


def _leaf_strategy() -> st.SearchStrategy[Node]:
    small = sorted({*STANDARD, *CONSTRUCTING, *HOOKED, "Foreign"} - {"Large"})
    sizes = st.integers(1, 4)
    return st.one_of(
        st.builds(lambda t: Leaf("Tensors", tensors=tuple(t)), st.lists(tensor_recipes(), min_size=1, max_size=4)),
        st.builds(Leaf, st.sampled_from(small), sizes),
        st.builds(Leaf, st.sampled_from([*small] * 3 + ["Large"]), sizes),
    )  # fmt: skip


def _tree_strategy(children: st.SearchStrategy[Node]) -> st.SearchStrategy[Tree]:
    return st.builds(
        lambda kind, names, nodes: Tree(kind, tuple(zip(names, nodes, strict=False))),
        st.sampled_from(("plain", "list", "dict", "sequential")),
        st.lists(st.sampled_from(NAMES), min_size=3, max_size=3, unique=True),
        st.lists(children, min_size=1, max_size=3),
    )


def _many_strategy(leaf: st.SearchStrategy[Node]) -> st.SearchStrategy[Tree]:
    return st.builds(
        lambda kind, nodes, count: Tree(
            kind, tuple((f"c{n}", nodes[n % len(nodes)]) for n in range(count))
        ),
        st.sampled_from(("plain", "list")),
        st.lists(leaf, min_size=1, max_size=2),
        st.integers(10, 40),
    )


def recipes() -> st.SearchStrategy[Recipe]:
    """Return a hypothesis strategy for a model: one module, or a tree of two or three levels."""
    leaf = _leaf_strategy()
    inner = _tree_strategy(leaf)
    touches = st.builds(
        Touch, st.sampled_from(sorted(TOUCHES)), st.integers(0, 5), st.integers(0, 5)
    )
    return st.builds(
        Recipe,
        st.one_of(leaf, inner, _tree_strategy(st.one_of(leaf, inner)), _many_strategy(leaf)),
        st.lists(touches, max_size=4).map(tuple),
    )
