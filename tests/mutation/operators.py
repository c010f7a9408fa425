"""All small changes of a module that its tests should notice, each as a change of the text."""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_COMPARISONS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr,
}  # fmt: skip
_CALLS: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
_ALIASES: Final = ("Literal", "TypeVar", "Callable", "Union")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of a module: the lines ``first`` to ``last`` (from 1) become ``text``."""

    module: str
    first: int
    last: int
    text: str
    kind: str

    def of(self, source: str) -> str:
        lines = source.splitlines(keepends=True)
        lines[self.first - 1 : self.last] = [self.text]
        return "".join(lines)

    def shown(self, source: str) -> str:
        before = source.splitlines()[self.first - 1 : self.last]
        changes = [
            *(f"-{line}" for line in before),
            *(f"+{line}" for line in self.text.splitlines()),
        ]
        return "\n".join([str(self), *changes])

    def __str__(self) -> str:
        return f"{self.module}:{self.first} {self.kind}"


def mutants(module: str, source: str) -> Iterator[Mutant]:
    """Yield every mutant of a module, in the order of its lines."""
    lines = source.splitlines(keepends=True)
    for node in _code(ast.parse(source)):
        for old, new, kind in _changes(node):
            assert isinstance(old, ast.expr | ast.stmt) and old.end_lineno and old.end_col_offset
            before = lines[old.lineno - 1].encode()[: old.col_offset].decode()
            after = lines[old.end_lineno - 1].encode()[old.end_col_offset :].decode()
            text = f"({ast.unparse(new)})" if isinstance(new, ast.expr) else ast.unparse(new)
            yield Mutant(module, old.lineno, old.end_lineno, f"{before}{text}{after}", kind)


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run: no annotation, decorator, type alias, assertion or text."""
    for field, value in ast.iter_fields(tree):
        if field not in ("annotation", "returns", "decorator_list", "bases"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not _is_left_out(child):
                    yield child
                    yield from _code(child)


def _is_left_out(node: ast.AST) -> bool:
    match node:
        case ast.JoinedStr() | ast.Assert() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Subscript(value=ast.Name(id=name)):
            return name in _ALIASES
        case ast.If(test=ast.Name(id=name)):
            return name == "TYPE_CHECKING"
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return name.endswith("_S")  # a time to wait: tests do not wait for it
    return False


def _changes(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST, str]]:
    """Yield each change of one node: the node to replace, its replacement, and the kind."""
    yield from _other_values(node)
    yield from _other_ways(node)


def _other_values(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST, str]]:
    match node:
        case ast.Compare(ops=[first, *rest]) if type(first) in _COMPARISONS:
            yield node, _with(node, ops=[_COMPARISONS[type(first)](), *rest]), "comparison"
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in _ARITHMETIC:
            yield node, _with(node, op=_ARITHMETIC[type(op)]()), "arithmetic"
        case ast.BoolOp(op=op):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield node, _with(node, op=other), "boolean"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, operand, "boolean"
        case ast.Constant(value=bool(value)):
            yield node, ast.Constant(not value), "constant"
        case ast.Constant(value=int(value) | float(value)):
            yield node, ast.Constant(value + 1), "constant"
            if value > 1:
                yield node, ast.Constant(value - 1), "constant"
        case ast.Call(func=ast.Name(id=name)) if name in _CALLS:
            yield node, _with(node, func=ast.Name(_CALLS[name])), "call"


def _other_ways(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST, str]]:
    match node:
        case ast.IfExp(body=body, orelse=orelse):
            yield node, body, "choice"
            yield node, orelse, "choice"
        case ast.If(test=ast.Name() | ast.Call() | ast.Attribute() as test):
            yield test, ast.UnaryOp(ast.Not(), test), "condition"
        case ast.Return(value=ast.expr() as one) if ast.unparse(one) != "None":
            yield node, ast.Return(ast.Constant(None)), "return"
        case (
            ast.Tuple(elts=[_, _, *_] as parts, ctx=ast.Load())
            | ast.List(elts=[_, _, *_] as parts, ctx=ast.Load())
        ):
            for at in range(len(parts)):
                yield node, _with(node, elts=parts[:at] + parts[at + 1 :]), "element"
        case ast.Dict(keys=[_, _, *_] as keys, values=values):
            for at in range(len(keys)):
                rest = keys[:at] + keys[at + 1 :], values[:at] + values[at + 1 :]
                yield node, ast.Dict(*rest), "element"
        case ast.Expr() | ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break():
            yield node, ast.Pass(), "deletion"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, ast.Pass(), "deletion"


def _with(node: ast.AST, **fields: object) -> ast.AST:
    """Return a copy of a node with other fields."""
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed
