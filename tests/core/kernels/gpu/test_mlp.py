"""Hopper's product with GELU: that it compiles, without a GPU; and on one that equal inputs give equal bits. What it
computes is held in `test_mlp`, on a GPU alone: Gluon has no interpreter."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from launch import triton

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from situs.core.kernels.gpu.mlp import DEPTH, TILE, _gemm

def tiles(*block):
    return f"tensordesc<bf16[{block[0]}, {block[1]}],{gl.NVMMASharedLayout.get_default_for([*block], gl.bfloat16)!r}>"

names, square = _gemm.arg_names, tiles(TILE, TILE)
for kind, stages in ((0, 5), (1, 5), (2, 4)):
    flat = kind == 2
    types = {"x": tiles(TILE, DEPTH), "w": tiles(*((DEPTH, TILE) if flat else (TILE, DEPTH))), "bias": "*fp32"}
    types |= {"out": square, "h": square, "sums": "*fp32", "across": "i32", "down": "i32"}
    constants = {"steps": 12, "stages": stages, "flat": flat, "kind": kind}
    signature = {name: types.get(name, "constexpr") for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(_gemm, signature, places, {})
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert "wgmma" in built.asm["ptx"] and built.metadata.shared <= 227 * 1024
print("built")
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this torch comes without Triton")
def test_the_compiler_takes_the_kernel() -> None:
    assert triton(COMPILE) == "built"


@pytest.mark.gpu
def test_a_hopper_gpu_takes_it_and_gives_the_same_bits_again() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel is for Hopper")
    from situs.core.kernels.gpu.mlp import backward, forward

    torch.manual_seed(0)
    half = {"device": "cuda", "dtype": torch.bfloat16}
    x, weight1, weight2 = (torch.randn(*shape, **half) / 28 for shape in ((985, 768), (3072, 768), (768, 3072)))
    bias = torch.randn(3072, device="cuda")
    first, again = (forward(x, weight1, bias, keep=True) for _ in range(2))
    back, once_more = (backward(x, weight2, first[1], bias) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip((*first, *back), (*again, *once_more), strict=True))
    alone, nothing = forward(x, weight1, bias, keep=False)
    assert nothing.numel() == 0 and torch.allclose(alone, first[0], rtol=0.02, atol=0.02)  # of a product not rounded
