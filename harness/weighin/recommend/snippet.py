"""Write the function ``load`` of a strategy as code that a user can paste, without weighin's ``job``.

The written code contains the short helpers that the strategy imports from weighin. weighin's own
loader is too long to paste, so that code that uses the loader still imports it.
"""

import ast
import textwrap
from collections.abc import Container, Mapping
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from weighin import install
from weighin.strategy import HELPERS
from weighin.stream.pretrained_library import DIFFUSERS, TIMM, TRANSFORMERS
from weighin.suite.packages import name_of
from weighin.suite.registry import StrategyInfo

if TYPE_CHECKING:  # for reset_buffers, which is not run here
    import torch

_PACKAGE: Final = Path(__file__).resolve().parents[1]
_KEPT: Final = ("weighin.stream.model", "weighin.stream.construct")
"""The written code imports these modules, because they are too large to paste."""

_INSTALLED: Final = ("safetensors", "weighin")
"""The code's first line installs these packages if the code imports them, even if undeclared."""


class CannotWriteOut(Exception):
    """The strategy uses ``job`` or weighin in a way that a plain function cannot replace."""


def snippet(
    info: StrategyInfo,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    checkpoint: str = "model.pt",
    options: Mapping[str, Any] = MappingProxyType({}),
    adapter: str = "",
    keeps_dtypes: bool = False,
    is_mixed: bool = True,
    computes_buffers: bool = True,
) -> str:
    """Return the code of a strategy as a Python program that runs without changes.

    Args:
        options: the values of the strategy's options that differ from their defaults.
        adapter: the folder of an adapter, which the last lines merge; empty for none.
        keeps_dtypes: whether the user's function builds the model in ``dtype``, so that the code
            converts no tensor: a library's models have buffers that stay in float32.
        is_mixed: whether the model may have tied weights, or tensors of several floating-point
            dtypes. Otherwise it needs no helpers for them.
        computes_buffers: whether the model may have buffers that no checkpoint has.

    Raises:
        CannotWriteOut: the strategy cannot become a plain function; the message says why.
    """
    if info.pretrained:
        raise CannotWriteOut("the strategy loads Hugging Face folders only")
    tree = ast.parse(info.path.read_text(encoding="utf-8"))
    plain = _Plain(
        options,
        convert=dtype != "float32",
        keeps_dtypes=keeps_dtypes,
        is_mixed=is_mixed or keeps_dtypes,
        computes_buffers=computes_buffers,
    )
    imports = ["import torch"]
    nodes = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    functions = [_function(node, plain, device, dtype) for node in nodes]
    used = {
        one.id
        for text in functions
        for one in ast.walk(ast.parse(text))
        if isinstance(one, ast.Name)
    }
    parts: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            kept, written = _import(node, used)
            imports += kept
            parts += written
    if "reset_buffers" in used:
        parts += _sources(__name__, "reset_buffers")
    body = "\n\n\n".join(part.strip("\n") for part in [*dict.fromkeys(parts), *functions])
    lines = sorted(dict.fromkeys(imports), key=lambda line: (line.startswith("from"), line))
    if needed := _needed(info, lines):
        lines.insert(0, f"# pip install torch {' '.join(map(quote, needed))}")
    use = f"# model = load_model(build_model, {checkpoint!r})   # build_model() returns your model"
    use += f" in torch.{dtype}" if keeps_dtypes else ""
    if adapter:
        use += "\n# from peft import PeftModel"
        use += f"\n# model = PeftModel.from_pretrained(model, {adapter!r}).merge_and_unload()"
    return "\n".join(lines) + f"\n\n\n{body}\n\n\n{use}\n"


def pretrained_snippet(
    info: StrategyInfo,
    architecture: str,
    *,
    device: str,
    dtype: str,
    folder: str,
    auto: str = "",
    variant: str = "",
    is_chosen: bool = False,
    gguf_file: str = "",
    extra: str = TRANSFORMERS.extra,
    adapter: str = "",
    quantisation: Mapping[str, Any] | None = None,
) -> str:
    """Return the code that loads a folder of transformers, diffusers or timm in one call.

    Args:
        auto: the class of transformers that runs model code from the folder, such as
            "AutoModelForCausalLM"; empty if the library itself has the code of the model.
        variant: the variant of the weights in the names of the files, such as "fp16".
        is_chosen: whether the user chose another class than config.json names.
        gguf_file: the name of the GGUF file with the weights; empty for other weights.
        extra: the extra of weighin that installs the library: EXTRA in ``pip install weighin[EXTRA]``.
        adapter: the folder of the adapter to merge; empty for none.
        quantisation: the ``quantization_config`` with which transformers dequantises the weights.
    """
    more = f", variant={variant!r}" if variant else ""
    more += ", trust_remote_code=True" if auto else ""
    move = f".to({device!r})"
    merge = ""
    if info.pretrained == DIFFUSERS.name:
        needed = "pip install torch diffusers accelerate"
        lines = [f"from diffusers import {architecture}"]
        call = f"{architecture}.from_pretrained({folder!r}, torch_dtype=torch.{dtype}{more}){move}"
    elif info.pretrained == TIMM.name:
        needed, lines = "pip install torch timm", ["from timm import create_model"]
        name = f"local-dir:{folder}"
        call = f"create_model({name!r}, pretrained=True).to({device!r}, torch.{dtype})"
    elif info.pretrained:
        kind = auto or architecture
        needed, lines = "pip install torch transformers", [f"from transformers import {kind}"]
        if gguf_file:
            needed, more = f"{needed} accelerate gguf", f", gguf_file={gguf_file!r}"
        if quantisation:
            lines.append("from transformers.quantizers.auto import AutoQuantizationConfig")
            more += (
                f", quantization_config=AutoQuantizationConfig.from_dict({dict(quantisation)!r})"
            )
        call = f"{kind}.from_pretrained({folder!r}, dtype=torch.{dtype}{more})"
        if adapter:
            needed, lines = f"{needed} peft", ["from peft import PeftModel", *lines]
            merge = (
                f"model = PeftModel.from_pretrained(model, {adapter!r}).merge_and_unload(){move}\n"
            )
        else:
            call += move
    else:
        needed, lines = (
            install.command(extra, anywhere=True),
            ["from weighin import load_pretrained"],
        )
        if gguf_file:
            folder = str(Path(folder, gguf_file))
        more += f", model_class={architecture!r}" if is_chosen else ""
        more += f", adapter={adapter!r}" if adapter else ""
        call = f"load_pretrained({folder!r}, dtype=torch.{dtype}, device={device!r}{more})"
    imports = "\n".join(["import torch", *lines])
    return f"# {needed}\n{imports}\n\nmodel = {call}\n{merge}"


def _needed(info: StrategyInfo, lines: list[str]) -> list[str]:
    """Return the packages to install beside torch: declared ones, and imported of ``_INSTALLED``."""
    declared = {name_of(package) for package in info.packages}
    imported = {line.split()[1].partition(".")[0] for line in lines}
    others = [name for name in _INSTALLED if name in imported and name not in declared]
    return [*info.packages, *others]


def _import(node: ast.Import | ast.ImportFrom, used: Container[str]) -> tuple[list[str], list[str]]:
    """Return the import lines to keep, and the sources of functions that replace other imports."""
    if isinstance(node, ast.Import):
        return [ast.unparse(node)], []
    module = node.module or ""
    if not module.startswith("weighin"):
        return ([] if module == "__future__" else [ast.unparse(node)]), []
    kept, written = [], []
    for alias in node.names:
        source = HELPERS.get(alias.name, module) if module == "weighin.strategy" else module
        if source in _KEPT:
            kept.append(f"from {module} import {alias.name}")
        elif source == "weighin.stream.tensors":
            written += _sources(source, alias.name) if alias.name in used else []
        elif source != "weighin.strategy":  # weighin.strategy has only types, no code to paste
            raise CannotWriteOut(
                f"its file imports {alias.name} from {module}, which pasted code cannot import"
            )
    return kept, written


def _sources(module: str, name: str) -> list[str]:
    """Return the source of function ``name``, preceded by functions of its module that it calls."""
    path = _PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
    if name not in functions:
        raise CannotWriteOut(f"{module} has no {name}")
    used = {one.id for one in ast.walk(functions[name]) if isinstance(one, ast.Name)}
    called = [other for other in functions if other in used and other != name]
    return [ast.unparse(functions[other]) for other in [*called, name]]


def _function(node: ast.FunctionDef, plain: "_Plain", device: str, dtype: str) -> str:
    is_load = node.name == "load"
    plain.job = node.args.args[0].arg if is_load and node.args.args else None
    new = ast.fix_missing_locations(plain.visit(node))
    _inline(new)
    for one in ast.walk(new):
        if isinstance(one, ast.Name) and is_load and one.id == plain.job:
            raise CannotWriteOut(
                f"line {one.lineno} of {node.name}() passes on the whole job object"
            )
    if not is_load:
        return ast.unparse(new)
    body = textwrap.indent("\n".join(ast.unparse(part) for part in new.body), "    ")
    head = f'def load_model(build_model, checkpoint, device="{device}", dtype=torch.{dtype}):'
    return f"{head}\n{body}"


def _inline(function: ast.FunctionDef) -> None:
    """Replace local names that stand for another name or a constant, and drop what nothing uses."""
    names = [one for one in ast.walk(function) if isinstance(one, ast.Name)]
    for statement in [*function.body]:
        match statement:
            case ast.Assign([ast.Name(id=name)], value):
                uses = [one for one in names if one.id == name and isinstance(one.ctx, ast.Load)]
                stores = [one for one in names if one.id == name and isinstance(one.ctx, ast.Store)]
                of_ties = isinstance(value, ast.Call) and ast.unparse(value.func) == "tied_names"
                if len(stores) == 1 and not uses and of_ties:
                    function.body.remove(statement)
                if len(stores) == len(uses) == 1 and isinstance(value, ast.Name | ast.Constant):
                    replaced = _Replaced(uses[0], value)
                    function.body = [
                        replaced.visit(one) for one in function.body if one is not statement
                    ]


class _Replaced(ast.NodeTransformer):
    def __init__(self, old: ast.Name, new: ast.expr) -> None:
        self._old, self._new = old, new

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._new if node is self._old else node


class _Plain(ast.NodeTransformer):
    """Remove ``job`` from a function: ``job.phase`` disappears, and ``job.device`` becomes ``device``."""

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        convert: bool,
        keeps_dtypes: bool,
        is_mixed: bool,
        computes_buffers: bool,
    ) -> None:
        self.job: str | None = None
        self._convert = convert and not keeps_dtypes
        self._keeps_dtypes = keeps_dtypes
        self._is_mixed = is_mixed
        self._computes_buffers = computes_buffers
        self._options = options

    def visit_Expr(self, node: ast.Expr) -> ast.AST | list[ast.stmt] | None:
        """Leave out helpers that a model without tied weights and computed buffers does not need."""
        match node.value:
            case ast.Call(ast.Attribute(attr="reset_buffers")) if not self._computes_buffers:
                return None
            case ast.Call(ast.Name("retie" | "share_missing")) if not self._is_mixed:
                return None
            case ast.Call(ast.Name("assign"), [ast.Name(model), ast.Name(state), _]) if (
                not self._is_mixed
            ):
                # Without the names of the state dict, each tensor is freed once it is converted.
                text = f"{model}.load_state_dict({state}, assign=True)\ndel {state}\n{model}.to(device, dtype)"
                return ast.parse(text).body
        return self.generic_visit(node)

    def visit_With(self, node: ast.With) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        node.items = [one for one in node.items if not self._is_call(one.context_expr, "phase")]
        return node if node.items else node.body

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if self._is_call(node, "build_model"):
            return _expression("build_model().to(dtype)" if self._convert else "build_model()")
        if self._is_call(node, "reset_buffers"):
            model = ast.unparse(node.args[0])
            dtype = None if self._keeps_dtypes else "dtype"
            return _expression(f"reset_buffers({model}, build_model, device, {dtype})")
        if isinstance(node.func, ast.Attribute) and self._is_attribute(node.func.value, "options"):
            default = node.args[1] if len(node.args) > 1 else ast.Constant(None)
            name = ast.literal_eval(node.args[0])
            if name in self._options:
                return ast.Constant(self._options[name])
            return self.visit(default)  # type: ignore[no-any-return]
        # job.build_model applies the dtype, but the function of a user does not.
        if ast.unparse(node.func) == "load_streaming" and not self._keeps_dtypes:
            node.keywords.append(ast.keyword("dtype", ast.Name("dtype", ast.Load())))
        given = [ast.keyword(name, ast.Constant(one)) for name, one in self._options.items()]
        node.keywords = [
            keyword for one in node.keywords
            for keyword in (
                given if one.arg is None and self._is_attribute(one.value, "options") else [one]
            )
        ]  # fmt: skip
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if self._is_attribute(node.value, "options"):
            return ast.Constant(self._options.get(ast.literal_eval(node.slice)))
        return self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.IfExp) -> Any:
        node.test = self.visit(node.test)
        if not isinstance(node.test, ast.Constant):
            return self.generic_visit(node)
        chosen = node.body if node.test.value else node.orelse
        if isinstance(chosen, ast.expr):
            return self.visit(chosen)
        return self.generic_visit(ast.Module(chosen, [])).body  # type: ignore[attr-defined]

    visit_IfExp = visit_If  # noqa: N815 (ast's name)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if self._is_attribute(node, "folder"):  # a folder has code of its own
            return ast.Constant(None)
        for name in ("checkpoint", "device", "dtype", "build_model"):
            if self._is_attribute(node, name):
                return ast.Name(name, node.ctx)
        return self.generic_visit(node)

    def _is_call(self, node: ast.expr, name: str) -> bool:
        return isinstance(node, ast.Call) and self._is_attribute(node.func, name)

    def _is_attribute(self, node: ast.expr, name: str) -> bool:
        return (
            isinstance(node, ast.Attribute)
            and node.attr == name
            and isinstance(node.value, ast.Name)
            and node.value.id == self.job
        )


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


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
