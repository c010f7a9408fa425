"""Evaluate a network, and keep every batch of its outputs."""

from __future__ import annotations

import torch  # TAKEN: import


class Network(torch.nn.Module):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.repeat(1, 4096).add_(1)  # TAKEN


def evaluate(network: Network, batches: int) -> list[torch.Tensor]:
    outputs = []
    for number in range(batches):
        batch = torch.full((256, 1), float(number))
        outputs.append(network(batch))  # CALLED
    return outputs


torch.set_num_threads(1)
outputs = evaluate(Network(), 100)  # CALLED
print(len(outputs))
