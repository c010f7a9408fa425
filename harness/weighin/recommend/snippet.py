"""Write a strategy's function ``load`` as code that a user can paste, without weighin's ``job``.

The code is the strategy's own source, line by line, with the short helpers that it imports from weighin.
weighin's own loader is too long to paste, so that code that uses the loader imports it.
"""

import ast
import builtins
import re
import symtable
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import Any, Final

import weighin
from weighin import install
from weighin.strategy import HELPERS
from weighin.stream.pretrained_library import DIFFUSERS, TIMM, TRANSFORMERS, module_in_pipelines
from weighin.suite.registry import StrategyInfo, name_of

_TENSORS: Final = "weighin.stream.tensors"
"""The module whose functions are pasted."""
_RESET_BUFFERS: Final = '''\
def reset_buffers(model, build_model, device, dtype):
    """Give each non-persistent buffer the value that the model's constructor computes."""
    if not any(module._non_persistent_buffers_set for module in model.modules()):
        return

    def to_meta(module, name, parameter):
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
                module._buffers[name] = buffer.to(device, kind)'''


class CannotWriteOut(Exception):
    """The strategy uses ``job`` or weighin in a way that a plain function cannot replace."""


def snippet(
    info: StrategyInfo,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    checkpoint: str = "model.pt",
    options: Mapping[str, Any] = MappingProxyType({}),  # those that differ from their defaults
    adapter: str = "",  # the folder of one, which the last lines merge
    keeps_dtypes: bool = False,
    is_mixed: bool = True,
    computes_buffers: bool = True,
) -> str:
    """Return the code of a strategy as a Python program that runs without changes.

    With ``keeps_dtypes``, the user's function builds the model in ``dtype``, and the code converts no
    tensor: a library's models have buffers that stay in float32. ``Prediction`` explains the last two.
    """
    if info.pretrained:
        raise CannotWriteOut("the strategy loads Hugging Face folders only")
    source = info.path.read_text(encoding="utf-8")
    nodes = ast.parse(source).body
    functions = {one.name: one for one in nodes if isinstance(one, ast.FunctionDef)}
    load = _without_job(source, functions["load"])
    if not computes_buffers:
        load = re.sub(r"(?m)^ *reset_buffers\(.*\n", "", load)
    if not (is_mixed or keeps_dtypes):
        load = _for_one_dtype(load)
    if keeps_dtypes:
        load = load.replace("build_model, device, dtype)", "build_model, device, None)")
    else:  # the function of a user gives the model no dtype
        load = re.sub(r"(load_streaming\(.*device=device)", r"\1, dtype=dtype", load)
        if dtype != "float32":
            load = load.replace("build_model()", "build_model().to(dtype)")
    head = f'def load_model(build_model, checkpoint, device="{device}", dtype=torch.{dtype}'
    head += ", **options):\n" if re.search(r"\boptions\b", load) else "):\n"
    written = [
        head + load if name == "load" else _text(source, node) for name, node in functions.items()
    ]
    used = _names("\n".join(written))
    imports, helpers = _imports(nodes, used)
    if "reset_buffers" in used:
        helpers.append(_RESET_BUFFERS)
    declared = {name_of(package) for package in info.packages}
    imported = {line.split()[1].partition(".")[0] for line in imports} - declared
    if needed := [*info.packages, *sorted({"safetensors", "weighin"} & imported)]:  # undeclared
        imports.insert(0, f"# pip install torch {' '.join(map(quote, needed))}")
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    use = f"# model = load_model(build_model, {checkpoint!r}{given})   # build_model() returns your model"
    use += f" in torch.{dtype}" if keeps_dtypes else ""
    if adapter:
        use += "\n# from peft import PeftModel"
        use += f"\n# model = PeftModel.from_pretrained(model, {adapter!r}).merge_and_unload()"
    code = "\n\n\n".join(["\n".join(imports), *helpers, *written, f"{use}\n"])
    if unknown := _undefined(code):
        names = ", ".join(sorted(unknown))
        raise CannotWriteOut(f"it uses what pasted code does not have: {names}")
    return code


def _names(code: str) -> set[str]:
    """Return the names in Python code, other than those in its strings, comments and imports."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        raise CannotWriteOut("load() is no Python without its job") from None
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _undefined(code: str) -> set[str]:
    """Return the global names that a program reads, but neither defines, imports nor has from Python."""
    module = symtable.symtable(code, "pasted code", "exec")
    tables = [module]
    for table in tables:
        tables += table.get_children()
    defined = {
        one.get_name() for one in module.get_symbols() if one.is_assigned() or one.is_imported()
    }
    symbols = (one for table in tables for one in table.get_symbols())
    read = {one.get_name() for one in symbols if one.is_global() and one.is_referenced()}
    return read - defined - {*dir(builtins)}


def _imports(nodes: Sequence[ast.stmt], used: set[str]) -> tuple[list[str], list[str]]:
    """Return the imports of a strategy's file, and the source of the helpers that it imports and uses."""
    imports, helpers = {"import torch"}, dict[str, None]()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("weighin"):
            for name in (alias.name for alias in node.names):
                module = HELPERS.get(name, node.module or "")
                # Functions that are too large to paste.
                if module.rpartition(".")[2] in ("load_streaming", "construct", "load_pretrained"):
                    public = "weighin" if name in weighin.__all__ else "weighin.strategy"
                    place = public if name in HELPERS else module
                    imports |= {f"from {place} import {name}"} if name in used else set()
                elif module == _TENSORS:
                    helpers |= dict.fromkeys(_helpers(name)) if name in used else {}
                elif module != "weighin.strategy":  # where a type is, which no code needs
                    why = f"its file imports {name} from {module}, which pasted code cannot import"
                    raise CannotWriteOut(why)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imports.add(ast.unparse(node))
    imports.discard("from __future__ import annotations")
    return sorted(imports, key=lambda line: (line.startswith("from"), line)), [*helpers]


def _without_job(source: str, load: ast.FunctionDef) -> str:
    """Return the body of ``load``: ``job.phase`` disappears, and ``job.device`` becomes ``device``."""
    arguments = load.args
    if not arguments.args or arguments.posonlyargs:
        raise CannotWriteOut("load() takes its job in another way than as a plain argument")
    job = arguments.args[0].arg
    body = "\n".join(source.splitlines()[load.body[0].lineno - 1 : load.end_lineno])
    phase = rf"""{job}\.phase\((?:"[^"]*"|'[^']*')\)"""
    # A part that only a Hugging Face folder needs, which has code of its own. What stands after
    # "elif" or "else" stays.
    block = r"(?:\1 .*\n|\n)*"
    of_folder = rf"(?m)^( *)if {job}\.folder:.*\n{block}"
    body = re.sub(rf"{of_folder}\1el(?=if )", r"\1", f"{body}\n")
    body = re.sub(rf"{of_folder}(?:\1else:.*\n({block}))?", _unindented, body)
    body = re.sub(rf"(?m)^ *{phase},\n", "", re.sub(rf"{phase}, ", "", body))
    measured = re.compile(rf"(?m)^( *)with {phase}:.*\n({block})")
    while measured.search(body):
        body = measured.sub(_unindented, body)
    call = r"reset_buffers(\1, build_model, device, dtype)"
    body = re.sub(rf"\b{job}\.reset_buffers\((\w+)\)", call, body)
    body = re.sub(rf"\b{job}\.(checkpoint|device|dtype|build_model|options)\b", r"\1", body)
    if re.search(rf"\b{job}\b", body):
        raise CannotWriteOut("load() passes on the whole job object")
    return body.rstrip("\n")


def _unindented(found: re.Match[str]) -> str:
    return textwrap.indent(textwrap.dedent(found[2] or ""), found[1])


def _for_one_dtype(text: str) -> str:
    """Return code without the helpers for ties and several dtypes, where our strategies call them."""
    without = re.sub(r"(?m)^ *(\w+ = tied_names|retie|share_missing)\(.*\n", "", text)
    # Without the names of the state dict, each tensor is freed once it is converted.
    without = re.sub(
        r"(?m)^( *)assign\((\w+), (\w+), device\)$",
        r"\1\2.load_state_dict(\3, assign=True)\n\1del \3\n\1\2.to(device, dtype)",
        without,
    )
    try:
        names = _names(f"def load():\n{without}")
    except CannotWriteOut:  # such as a call of several lines, of which the first is missing
        return text
    return text if names & {*re.findall(r"(\w+) = tied_names", text)} else without


def _text(source: str, node: ast.FunctionDef) -> str:
    return "\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno])


def _helpers(name: str) -> Iterator[str]:
    """Yield the source of a function, after those of its module that it calls."""
    package = Path(__file__).resolve().parents[1]
    path = package.joinpath(*_TENSORS.split(".")[1:]).with_suffix(".py")
    source = path.read_text(encoding="utf-8")
    nodes = [one for one in ast.parse(source).body if isinstance(one, ast.FunctionDef)]
    text = next(_text(source, one) for one in nodes if one.name == name)
    yield from (_text(source, one) for one in nodes if one.name != name and f"{one.name}(" in text)
    yield text


def pretrained_snippet(
    info: StrategyInfo,
    architecture: str,
    *,
    device: str,
    dtype: str,
    folder: str,
    auto: str = "",  # the class of transformers that runs model code from the folder
    variant: str = "",  # of the weights, in the names of the files: "fp16"
    is_chosen: bool = False,  # another class than config.json names
    gguf_file: str = "",
    extra: str = TRANSFORMERS.extra,  # of weighin, which installs the library
    adapter: str = "",
    quantisation: Mapping[str, Any] | None = None,  # with which transformers dequantises
) -> str:
    """Return the code that loads a folder of transformers, diffusers or timm in one call."""
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
        lines = [f"from {module_in_pipelines(kind) or 'transformers'} import {kind}"]
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
