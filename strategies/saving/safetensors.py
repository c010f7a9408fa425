"""Write one safetensors file with safetensors.torch.save_model.

Expected peak: no copy of the weights. A tied weight is written once. The file contains no pickle.
"""

from safetensors.torch import save_model

from weighin.strategy import Save

FORMATS = ("safetensors",)
DEVICES = ("cpu", "cuda")
OPTIONS = ()


def save(job: Save) -> None:
    with job.phase("write"):
        save_model(job.model, str(job.target / "model.safetensors"))
