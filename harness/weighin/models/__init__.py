"""Define the models that weighin includes, and build models of transformers, diffusers and timm."""
