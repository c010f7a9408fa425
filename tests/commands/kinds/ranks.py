"""One of several ranks: sum their numbers, and let the first one print the sum."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
number = torch.tensor(float(dist.get_rank()))
dist.all_reduce(number)
if dist.get_rank() == 0:
    print(f"{dist.get_world_size()} ranks, sum {number.item()}")
dist.destroy_process_group()
