"""Load a model with transformers, merge an adapter with peft if one is given, and save it.

The programs of configs/suites/converting-files.yaml that stand beside ``weighin convert``. The saved
folder is removed at the end. ::

    .venv/bin/python benchmarks/saving_converted.py FOLDER [--gguf FILE] [--adapter FOLDER] [--dtype bfloat16]
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", help="the GGUF file in the folder")
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    settings = {"dtype": getattr(torch, options.dtype)}
    if options.gguf:
        settings["gguf_file"] = options.gguf
    elif method := _quantised(options.folder):
        settings["quantization_config"] = _dequantising(method)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.folder, **settings)
    if options.adapter:
        import peft

        model = peft.PeftModel.from_pretrained(model, options.adapter).merge_and_unload()
    with tempfile.TemporaryDirectory(dir=options.folder.parent) as target:
        if options.gguf:  # save_pretrained refuses a model whose weights came from GGUF
            save_model(model, str(Path(target, "model.safetensors")))
        else:
            model.save_pretrained(target)


def _quantised(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return str(config.get("quantization_config", {}).get("quant_method", ""))


def _dequantising(method: str) -> object:
    """Return the configuration with which ``from_pretrained`` dequantises codes of a method."""
    kinds = {"fp8": transformers.FineGrainedFP8Config, "mxfp4": transformers.Mxfp4Config}
    return kinds[method](dequantize=True)


if __name__ == "__main__":
    main()
