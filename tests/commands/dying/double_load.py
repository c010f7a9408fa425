"""Load a checkpoint into a model while the state dict is alive: two copies of the weights."""

import sys

import torch  # TAKEN: import


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2048, 2048) for _ in range(16))


with torch.device("meta"):
    model = Model()
model.to_empty(device="cpu")  # TAKEN: import
state = torch.load(sys.argv[1])  # TAKEN: a whole file
model.load_state_dict(state)  # TAKEN
print("loaded")
