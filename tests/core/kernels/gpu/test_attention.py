"""The Triton kernels of attention over few keys, run by Triton's interpreter, so that no GPU is needed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from launch import BUILD, interpreted, triton

FEW = "cases = (1, 3, 17, 1, 16),\n"
ALL = """
cases = (2, 70, 50, 2, 16), (1, 5, 17, 3, 32), (2, 64, 64, 1, 64), (1, 1, 1, 1, 128), (1, 130, 70, 2, 16)
"""
COMPARE = """
import torch
from torch.nn import functional as F
from situs.core.kernels.gpu.attention import launch_backward, launch_forward

torch.manual_seed(0)
for batch, queries, keys, heads, width in cases:
    for walks in (False, True):
        # Views of packed tensors, as the products give them; what is written starts as NaN.
        q, given = torch.randn(batch, queries, 4, heads, width).unbind(2)[1:3]
        k, v = torch.randn(batch, keys, 2, heads, width).unbind(2)
        q, k = 4 * q, 4 * k  # logits up to about 100
        out = torch.full((batch, queries, heads, width), torch.nan)
        sums = torch.full((batch * heads, queries), torch.nan) if walks else None
        to = tuple(torch.full((batch, count, heads, width), torch.nan) for count in (queries, keys, keys))
        launch_forward(q, k, v, out, sums)
        launch_backward(given, (q, k, v), out, sums, to)
        exact = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
        mixed = F.scaled_dot_product_attention(*exact)
        wanted = [mixed, *torch.autograd.grad(mixed, exact, given.double().transpose(1, 2))]
        for made, right in zip((out, *to), wanted, strict=True):
            error = (made.double() - right.transpose(1, 2)).norm() / (1 + right.norm())
            assert error < 2e-5, (queries, keys, heads, width, walks, float(error))
print("same numbers")
"""

COMPILE = (
    BUILD
    + """
from situs.core.kernels.gpu.attention import _backward, _few_backward, _few_forward, _forward

tensors = {"grad", "q", "k", "v", "out", "dq", "dk", "dv"}
for kernel, more in ((_few_forward, {}), (_few_backward, {}), (_forward, {}), (_backward, {"blocks": 2})):
    constants = {**more, "m": 64, "n": 32, "d": 32}
    names = [name for name in kernel.arg_names if name not in constants]
    types = {name: "*bf16" if name in tensors else "fp32" if "scale" in name else "i32" for name in names}
    types |= {"sums": "*fp32"} if "sums" in types else {}
    assert "mma" in build(kernel, types, constants)
print("built")
"""
)

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this torch comes without Triton")


def test_the_kernels_give_the_numbers_of_float64() -> None:
    assert interpreted(FEW + COMPARE) == "same numbers"


@pytest.mark.slow
def test_the_kernels_give_the_numbers_of_float64_in_all_cases() -> None:
    assert triton(ALL + COMPARE, TRITON_INTERPRET="1") == "same numbers"


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    assert triton(COMPILE, TRITON_CACHE_DIR=str(tmp_path)) == "built"
