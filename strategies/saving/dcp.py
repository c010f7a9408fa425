"""Write a folder with torch.distributed.checkpoint.save, in one process.

Expected peak: no copy of the weights. torch syncs the files itself.
"""

from torch.distributed.checkpoint.state_dict_saver import save as save_state

from weighin.strategy import Save

FORMATS = ("dcp",)
DEVICES = ("cpu", "cuda")
OPTIONS = ()


def save(job: Save) -> None:
    with job.phase("write"):
        save_state(job.model.state_dict(), checkpoint_id=job.target)
