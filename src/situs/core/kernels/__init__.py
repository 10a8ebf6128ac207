"""Custom kernels: what each replaces, and when. The rest of `core` can be read without them.

In a compiled step, in half precision, on a GPU with Triton (`takes_kernels`); elsewhere torch computes the same:

- `run_joined`: plain pre-norm blocks as a whole, made of the three below; otherwise layer by layer;
- `attend_packed`: `core.attention.attend` over short sequences;
- `add_norm`: a residual sum and the LayerNorm behind it;
- `mlp`, `linear_gelu`, `CompiledGelu`: a product, its bias and GELU; bias and GELU; GELU alone.

Outside of a compiled graph, on a GPU with Triton (`runs_kernels`): `gpu.random` draws what `core.random.uniform` draws
and `gpu.masks` what `core.masking.block_mask` does, to the bit.
"""

from situs.core.kernels.attention import attend_packed
from situs.core.kernels.blocks import Layer, Norm, Parts, run_joined
from situs.core.kernels.mlp import CompiledGelu, linear_gelu
from situs.core.kernels.norm import norm_fits
from situs.core.kernels.when import has_hooks, has_kernels, runs_kernels, takes_kernels

__all__ = [
    "CompiledGelu",
    "Layer",
    "Norm",
    "Parts",
    "attend_packed",
    "has_hooks",
    "has_kernels",
    "linear_gelu",
    "norm_fits",
    "run_joined",
    "runs_kernels",
    "takes_kernels",
]
