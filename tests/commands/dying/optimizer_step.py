"""Train one step with AdamW: the first step makes two more tensors for each weight."""

import torch  # TAKEN: import
from torch import nn

torch.set_num_threads(1)
model = nn.Sequential(*(nn.utils.skip_init(nn.Linear, 2048, 2048, bias=False) for _ in range(8)))
with torch.no_grad():
    for parameter in model.parameters():
        parameter.fill_(0.01)  # TAKEN
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)  # TAKEN: none
loss = model(torch.ones(1, 2048)).square().mean()
loss.backward()  # TAKEN
optimizer.step()  # TAKEN
print(loss.item())
