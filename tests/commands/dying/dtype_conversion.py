"""Convert a bfloat16 state dict to float32, which needs twice its size beside it."""

import sys

import torch  # TAKEN: import

state: dict[str, torch.Tensor] = torch.load(sys.argv[1])  # TAKEN: a whole file
converted = {}
for name, tensor in state.items():
    converted[name] = tensor.float()  # TAKEN
print(sum(tensor.nbytes for tensor in converted.values()))
