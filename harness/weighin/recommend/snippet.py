"""Write a strategy's function ``load`` as code that a user can paste, without weighin's ``job``.

The code contains the short helpers that the strategy imports from weighin. weighin's own loader is
too long to paste, so that code that uses the loader imports it.
"""

import ast
import textwrap
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from weighin import install
from weighin.strategy import HELPERS
from weighin.stream.pretrained_library import DIFFUSERS, TIMM, TRANSFORMERS
from weighin.suite.registry import StrategyInfo, name_of

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
        builder="build_model()"
        if keeps_dtypes or dtype == "float32"
        else "build_model().to(dtype)",
        keeps_dtypes=keeps_dtypes,
        is_mixed=is_mixed or keeps_dtypes,
        computes_buffers=computes_buffers,
    )
    nodes = [plain.function(node) for node in tree.body if isinstance(node, ast.FunctionDef)]
    used = {one.id for node in nodes for one in ast.walk(node) if isinstance(one, ast.Name)}
    imports, helpers = {"import torch"}, dict[str, None]()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("weighin"):
            for name in (alias.name for alias in node.names):
                module = HELPERS.get(name, node.module or "")
                if module in _KEPT:
                    imports.add(f"from {node.module} import {name}")
                elif module == "weighin.strategy":  # a type, which no code needs
                    continue
                elif module != "weighin.stream.tensors":
                    raise CannotWriteOut(
                        f"its file imports {name} from {module}, which pasted code cannot import"
                    )
                elif name in used:
                    helpers |= dict.fromkeys(_sources(module, name))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imports.add(ast.unparse(node))
    imports.discard("from __future__ import annotations")
    if "reset_buffers" in used:
        helpers |= dict.fromkeys(_sources(__name__, "reset_buffers"))
    lines = sorted(imports, key=lambda line: (line.startswith("from"), line))
    declared = {name_of(package) for package in info.packages}
    imported = {line.split()[1].partition(".")[0] for line in lines} - declared
    if needed := [*info.packages, *(name for name in _INSTALLED if name in imported)]:
        lines.insert(0, f"# pip install torch {' '.join(map(quote, needed))}")
    head = f'def load_model(build_model, checkpoint, device="{device}", dtype=torch.{dtype}):'
    functions = [
        "\n".join([head, *(textwrap.indent(ast.unparse(part), "    ") for part in node.body)])
        if node.name == "load"
        else ast.unparse(node)
        for node in nodes
    ]
    use = f"# model = load_model(build_model, {checkpoint!r})   # build_model() returns your model"
    use += f" in torch.{dtype}" if keeps_dtypes else ""
    if adapter:
        use += "\n# from peft import PeftModel"
        use += f"\n# model = PeftModel.from_pretrained(model, {adapter!r}).merge_and_unload()"
    return "\n\n\n".join(["\n".join(lines), *helpers, *functions, f"{use}\n"])


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
    kind = auto or architecture
    more = f", variant={variant!r}" if variant else ""
    more += ", trust_remote_code=True" if auto else ""
    needed, move, merge = f"pip install torch {info.pretrained}", f".to({device!r})", ""
    if info.pretrained == DIFFUSERS.name:
        needed += " accelerate"
        lines = [f"from diffusers import {architecture}"]
        call = f"{architecture}.from_pretrained({folder!r}, torch_dtype=torch.{dtype}{more}){move}"
    elif info.pretrained == TIMM.name:
        lines = ["from timm import create_model"]
        call = f"create_model({f'local-dir:{folder}'!r}, pretrained=True).to({device!r}, torch.{dtype})"
    elif info.pretrained:
        lines = [f"from transformers import {kind}"]
        if gguf_file:
            needed, more = f"{needed} accelerate gguf", f", gguf_file={gguf_file!r}"
        if quantisation:
            lines.append("from transformers.quantizers.auto import AutoQuantizationConfig")
            config = f"AutoQuantizationConfig.from_dict({dict(quantisation)!r})"
            more += f", quantization_config={config}"
        if adapter:
            needed, lines = f"{needed} peft", ["from peft import PeftModel", *lines]
            merged = f"PeftModel.from_pretrained(model, {adapter!r}).merge_and_unload()"
            move, merge = "", f"model = {merged}{move}\n"
        call = f"{kind}.from_pretrained({folder!r}, dtype=torch.{dtype}{more}){move}"
    else:
        needed = install.command(extra, anywhere=True)
        lines = ["from weighin import load_pretrained"]
        folder = str(Path(folder, gguf_file))
        more += f", model_class={architecture!r}" if is_chosen else ""
        more += f", adapter={adapter!r}" if adapter else ""
        call = f"load_pretrained({folder!r}, dtype=torch.{dtype}, device={device!r}{more})"
    return "\n".join([f"# {needed}", "import torch", *lines, "", f"model = {call}", merge])


def _sources(module: str, name: str) -> list[str]:
    """Return the source of function ``name``, preceded by functions of its module that it calls."""
    path = _PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
    if name not in functions:
        raise CannotWriteOut(f"{name} of {module} is no function")
    used = {one.id for one in ast.walk(functions[name]) if isinstance(one, ast.Name)}
    called = [other for other in functions if other in used and other != name]
    return [ast.unparse(functions[other]) for other in [*called, name]]


class _Plain(ast.NodeTransformer):
    """Removes ``job`` from a function: ``job.phase`` disappears, and ``job.device`` becomes ``device``.

    It also decides what the options decide, and leaves out the helpers that the model does not need.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        builder: str,
        keeps_dtypes: bool,
        is_mixed: bool,
        computes_buffers: bool,
    ) -> None:
        self._options = options
        self._builder = builder
        self._keeps_dtypes = keeps_dtypes
        self._is_mixed = is_mixed
        self._computes_buffers = computes_buffers
        self._left_out = set[str]()

    def function(self, node: ast.FunctionDef) -> ast.FunctionDef:
        is_load = node.name == "load"
        if is_load and not (node.args.args and not node.args.posonlyargs):
            raise CannotWriteOut("load() takes its job in another way than as a plain argument")
        for one in ast.walk(node):
            if isinstance(one, ast.Name) and is_load and one.id == node.args.args[0].arg:
                one.id = "job"
        self.generic_visit(node)
        for one in ast.walk(ast.fix_missing_locations(node)):
            if isinstance(one, ast.Name) and is_load and one.id == "job":
                raise CannotWriteOut(f"line {one.lineno} of load() passes on the whole job object")
            if isinstance(one, ast.Name) and one.id in self._left_out:
                raise CannotWriteOut(f"line {one.lineno} uses the tied names in a way of its own")
        return node

    def visit_With(self, node: ast.With) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        node.items = [one for one in node.items if "job.phase(" not in ast.unparse(one)]
        return node if node.items else node.body

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        match node:
            case ast.Assign([ast.Name(name)], ast.Call(ast.Name("tied_names"))) if (
                not self._is_mixed
            ):
                self._left_out.add(name)
                return None
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | list[ast.stmt] | None:
        match node.value:
            case ast.Call(ast.Attribute(attr="reset_buffers")) if not self._computes_buffers:
                return None
            case ast.Call(ast.Name("retie" | "share_missing")) if not self._is_mixed:
                return None
            case ast.Call(ast.Name("assign"), [model, ast.Name() as state, _]) if (
                not self._is_mixed
            ):
                # Without the names of the state dict, each tensor is freed once it is converted.
                return ast.parse(
                    f"{ast.unparse(model)}.load_state_dict({ast.unparse(state)}, assign=True)\n"
                    f"del {ast.unparse(state)}\n{ast.unparse(model)}.to(device, dtype)"
                ).body
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        match node:
            case ast.Call(ast.Attribute(ast.Name("job"), "build_model")):
                return _expression(self._builder)
            case ast.Call(ast.Attribute(ast.Name("job"), "reset_buffers"), [model]):
                dtype = None if self._keeps_dtypes else "dtype"
                return _expression(
                    f"reset_buffers({ast.unparse(model)}, build_model, device, {dtype})"
                )
            case ast.Call(
                ast.Attribute(ast.Attribute(ast.Name("job"), "options"), "get"),
                [ast.Constant(str(name)), *default],
            ):
                if name in self._options:
                    return ast.Constant(self._options[name])
                return self.visit(default[0]) if default else ast.Constant(None)
        keywords = []
        for each in node.keywords:
            is_options = each.arg is None and ast.unparse(each.value) == "job.options"
            given = [ast.keyword(name, ast.Constant(one)) for name, one in self._options.items()]
            keywords += given if is_options else [each]
        # job.build_model applies the dtype, but the function of a user does not.
        if ast.unparse(node.func) == "load_streaming" and not self._keeps_dtypes:
            keywords.append(ast.keyword("dtype", _expression("dtype")))
        node.keywords = keywords
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        match node:
            case ast.Subscript(ast.Attribute(ast.Name("job"), "options"), ast.Constant(str(name))):
                return ast.Constant(self._options.get(name))
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
        match node:
            case ast.Attribute(ast.Name("job"), "folder"):  # a folder has code of its own
                return ast.Constant(None)
            case ast.Attribute(
                ast.Name("job"), ("checkpoint" | "device" | "dtype" | "build_model") as name
            ):
                return ast.Name(name, node.ctx)
        return self.generic_visit(node)


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
