"""Define the tensors of the diffusion transformer FLUX.1-dev (Black Forest Labs, 2024).

The parameters have the names and shapes of the class FluxTransformer2DModel of diffusers. The model
only holds tensors, and has no forward pass.
"""

from torch import nn

from weighin.models.parts import named


def _linears(inputs: int, outputs: int, *names: str) -> dict[str, nn.Module]:
    return {name: nn.Linear(inputs, outputs) for name in names}


def _norms(head_dim: int, *names: str) -> dict[str, nn.Module]:
    return {name: nn.RMSNorm(head_dim) for name in names}


def _embedder(inputs: int, dim: int) -> nn.Module:
    return named(linear_1=nn.Linear(inputs, dim), linear_2=nn.Linear(dim, dim))


def _modulation(dim: int, vectors: int) -> nn.Module:
    """Return the layer that computes scales, shifts and gates from the embedded diffusion time."""
    return named(linear=nn.Linear(dim, vectors * dim))


def _feed_forward(dim: int) -> nn.Module:
    first = named(proj=nn.Linear(dim, 4 * dim))
    return named(net=nn.ModuleList([first, nn.Identity(), nn.Linear(4 * dim, dim)]))


def _double_block(dim: int, head_dim: int) -> nn.Module:
    """Return a block in which image and text have their own weights and attend to each other."""
    own = _linears(dim, dim, "to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
    norms = _norms(head_dim, "norm_q", "norm_k", "norm_added_q", "norm_added_k")
    out = nn.ModuleList([nn.Linear(dim, dim)])
    return named(
        norm1=_modulation(dim, 6),
        norm1_context=_modulation(dim, 6),
        attn=named(**norms, **own, to_out=out, to_add_out=nn.Linear(dim, dim)),
        ff=_feed_forward(dim),
        ff_context=_feed_forward(dim),
    )


def _single_block(dim: int, head_dim: int) -> nn.Module:
    """Return a block that takes image and text as one sequence, and runs attention beside MLP."""
    own = _linears(dim, dim, "to_q", "to_k", "to_v")
    return named(
        norm=_modulation(dim, 3),
        proj_mlp=nn.Linear(dim, 4 * dim),
        proj_out=nn.Linear(5 * dim, dim),
        attn=named(**_norms(head_dim, "norm_q", "norm_k"), **own),
    )


def flux(
    *, n_heads: int, head_dim: int, n_double: int, n_single: int, channels: int = 64,
    text_dim: int = 4096, pooled_dim: int = 768, time_dim: int = 256, dtype: str = "",
) -> nn.Module:  # fmt: skip
    """Return the model in evaluation mode, in torch's default dtype.

    The function ignores ``dtype``, the dtype of the published file, which weighin itself reads.
    """
    del dtype
    dim = n_heads * head_dim
    times = {name: _embedder(time_dim, dim) for name in ("timestep_embedder", "guidance_embedder")}
    return named(
        time_text_embed=named(**times, text_embedder=_embedder(pooled_dim, dim)),
        context_embedder=nn.Linear(text_dim, dim),
        x_embedder=nn.Linear(channels, dim),
        transformer_blocks=nn.ModuleList(_double_block(dim, head_dim) for _ in range(n_double)),
        single_transformer_blocks=nn.ModuleList(
            _single_block(dim, head_dim) for _ in range(n_single)
        ),
        norm_out=_modulation(dim, 2),
        proj_out=nn.Linear(dim, channels),
    ).eval()
