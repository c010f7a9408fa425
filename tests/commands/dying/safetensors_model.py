"""Load a safetensors file into a model. ``load_file`` maps the file: the model alone takes memory."""

import sys

import torch  # TAKEN: import
from safetensors.torch import load_file

layers = torch.nn.ModuleList(  # TAKEN: import
    torch.nn.utils.skip_init(torch.nn.Linear, 2048, 2048, bias=False)  # TAKEN: import
    for _ in range(16)
)
with torch.no_grad():
    for parameter in layers.parameters():
        parameter.fill_(0.02)  # TAKEN
state = load_file(sys.argv[1])  # HELD
layers.load_state_dict({name.removeprefix("layers."): state[name] for name in state})  # TAKEN
print("ready")
