"""List cases that are known to be difficult, by the behaviour that they require."""

from cases import Case
from checkpoints import Checkpoint
from modules import Leaf, Node, Recipe, Touch, Tree
from tensors import DTYPES, Role, TensorRecipe

APART = Checkpoint(storage="apart")


def _case(
    root: Node | str, how: Checkpoint = APART, *touches: str, dtype: str | None = None
) -> Case:
    node = Leaf(root, 3) if isinstance(root, str) else root
    return Case(Recipe(node, tuple(Touch(kind, 0, 1) for kind in touches)), how, dtype)


def _tensors(*recipes: TensorRecipe) -> Leaf:
    return Leaf("Tensors", tensors=recipes)


def _one(layout: str, shape: tuple[int, ...] = (2, 3), dtype: str = "float32") -> Leaf:
    roles: tuple[Role, ...] = ("parameter", "buffer", "temporary", "plain")
    return _tensors(*(TensorRecipe(role, shape, dtype, layout, offset=9) for role in roles))


_TWO = Tree("plain", (("a", Leaf("Linear", 3)), ("b", Leaf("Linear", 3))))
_NESTED = Tree(
    "dict",
    (
        ("with space", Tree("list", (("", Leaf("Linear", 2)), ("", Leaf("Rotary", 2))))),
        ("a/b", Tree("plain", (("é", Leaf("LayerNorm", 2)), ("0", Leaf("Conv2d", 1))))),
    ),
)
_NORM = Tree("plain", (("norm", Leaf("BatchNorm1d", 3)), ("last", Leaf("Linear", 3))))

KNOWN: dict[str, Case] = {
    "nested modules with unusual names": _case(_NESTED),
    "tied parameters stay one object": _case(_TWO, Checkpoint(), "tie"),
    "tied names with different values: the last one wins": _case(_TWO, APART, "tie"),
    "two parameters over one memory": _case(_TWO, APART, "tie memory"),
    "views at offsets of a flat tensor": _case("FlatViews"),
    "views at offsets, other dtype": _case("FlatViews", APART, dtype="bfloat16"),
    "transposed": _case(_one("transposed")),
    "channels last": _case("Conv2d channels last"),
    "sliced with gaps": _case(_one("gaps")),
    "at an offset of its storage": _case(_one("offset")),
    "views of one tensor that overlap": _case(_one("flat")),
    "expanded: torch refuses": _case(_one("expanded")),
    "no elements": _case(_one("gaps", (0, 2))),
    "no dimensions": _case(_one("contiguous", ())),
    **{f"dtype {dtype}": _case(_one("contiguous", dtype=dtype)) for dtype in DTYPES},
    "larger than a huge page": _case("Large"),
    "larger than a huge page, converted": _case("Large", APART, dtype="float16"),
    "None as a buffer, shared buffers, a view of a parameter": _case("SharedBuffers"),
    "constant buffer that no checkpoint holds": _case("ConstantBuffer"),
    "buffer computed from a parameter": _case("ComputedBuffer"),
    "random buffers": _case("RandomBuffer"),
    "position tables": _case("Rotary", APART, dtype="bfloat16"),
    "buffer that is a view of a parameter": _case("Linear", APART, "view as temporary"),
    "_load_from_state_dict renames a key": _case("RenamesOldKey"),
    "_load_from_state_dict computes": _case("ComputesOnLoad"),
    "_load_from_state_dict fills by itself": _case("FillsItself"),
    "load pre-hook transforms, splits and drops keys": _case("TransformsOnLoad"),
    "load pre-hook strips a prefix": _case(_TWO, Checkpoint(damage="prefixed"), "strip prefix"),
    "load post-hook computes from loaded weights": _case("ComputesAfterLoad"),
    "load post-hook forgives a missing key": _case("ForgivesMissing"),
    "state dict hook drops a key: torch refuses": _case("DropsOnSave"),
    "state dict hook detaches": _case("DetachesOnSave"),
    "_apply is overridden": _case("KeepsDtype", APART, dtype="bfloat16"),
    "extra state that is a tensor": _case("ExtraTensor"),
    "extra states that share memory": _case(
        Tree("plain", tuple((f"c{at}", Leaf("ExtraTensor", 1)) for at in range(11))), Checkpoint(storage="one storage"),
    ),
    "extra state that is a dict": _case("ExtraDict"),
    "extra state of a module with two names": _case(Tree("plain", (("a", Leaf("ExtraDict", 3)),)), Checkpoint(), "same module again"),
    **{
        kind: _case(kind)
        for kind in (
            "weight_norm", "weight_norm old", "orthogonal", "spectral_norm", "spectral_norm old",
            "LazyLinear", "LazyBatchNorm1d", "LSTM", "GRU", "RNNCell", "MultiheadAttention",
            "TransformerEncoder", "ParameterList", "ParameterDict", "Quantised", "Deepcopied",
        )
    },
    "LSTM, other dtype": _case("LSTM", APART, dtype="float64"),
    "batch norm of an old checkpoint": _case(_NORM, Checkpoint(damage="old batch norm")),
    "weight shared with a foreign model": _case("Foreign"),
    "weight shared with a foreign model, other dtype": _case("Foreign", APART, dtype="float64"),
    "constructor reads an item": _case("ReadsItem"),
    "constructor reads a list": _case("ReadsList"),
    "constructor runs a forward pass": _case("ForwardInConstructor"),
    "constructor factorises": _case("Factorised"),
    "constructor copies a parameter": _case("CopiesParameter"),
    "constructor changes weight.data in place": _case("InPlaceOnData"),
    "frozen parameters": _case(_TWO, APART, "freeze"),
    "parameter of a subclass, with attributes, in a list": _case("Marked"),
    "parameter in a plain list": _case(_TWO, APART, "keep", "keep detached", "keep a copy"),
    "gradient hooks": _case(_TWO, APART, "gradient hook", "accumulated gradient hook"),
    "evaluation mode": _case(_NORM, APART, "evaluate"),
    "same module twice": _case("same module twice"),
    "checkpoint of another dtype": _case(_TWO, Checkpoint(dtype="bfloat16")),
    "values pass through the model's dtype": _case("half precision", Checkpoint(dtype="float64"), dtype="float32"),
    "integers for a floating-point weight": _case(_TWO, Checkpoint(damage="type")),
    "not a number and infinities": _case(_TWO, Checkpoint(specials=True)),
    "saved with gaps": _case(_TWO, Checkpoint(storage="gaps")),
    "saved expanded": _case(_TWO, Checkpoint(storage="expanded")),
    "saved as views of one storage": _case(_TWO, Checkpoint(storage="one storage")),
    "empty state dict: torch refuses": _case(_TWO, Checkpoint(damage="empty")),
    "missing key: torch refuses": _case(_TWO, Checkpoint(damage="missing")),
    "unexpected key: torch refuses": _case(_TWO, Checkpoint(damage="unexpected")),
    "other shape: torch refuses": _case(_TWO, Checkpoint(damage="misshapen")),
    "prefixed keys: torch refuses": _case(_TWO, Checkpoint(damage="prefixed")),
    "cold": _case("TransformerEncoder", Checkpoint(cold=True)),
    "a load hook has written before torch refuses": _case(Tree("plain", (("a", Leaf("ComputesOnLoad", 2)), ("b", Leaf("DropsOnSave", 2))))),
}  # fmt: skip
