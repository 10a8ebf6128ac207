"""The Triton kernels of `bias_gelu` against float64, run by Triton's interpreter, so that no GPU is needed."""

from __future__ import annotations

import importlib.util

import pytest
from launch import BUILD, interpreted, triton

TYPES = """
import torch
half, brain = torch.float16, torch.bfloat16
"""
FEW = f"""{TYPES}
programs = 1  # so that each has several steps, and the last is not full
cases = (9, 600, half), (3, 7, brain)
"""
ALL = f"""{TYPES}
programs = 10
cases = (1, 96, half), (37, 96, brain), (5, 1536, half), (9, 3072, brain), (130, 7, torch.float32)
"""
COMPARE = """
import torch
from torch.nn import functional as F
from situs.core.kernels.gpu import gelu as gelu_kernel

def near(value, exact, relative, absolute):
    assert ((value.double() - exact).abs() <= relative * exact.abs() + absolute).all()

gelu_kernel.PROGRAMS = programs
torch.manual_seed(0)
for count, width, dtype in cases:
    h, grad, bias = 3 * torch.randn(count, width), torch.randn(count, width), torch.randn(width)
    h[0, :6], bias[:6] = torch.tensor([50.0, -50.0, 0.0, -0.0, 1e-4, 300.0]), 0.0
    h, grad = h.to(dtype), grad.to(dtype)
    y, (dh, db) = gelu_kernel.forward(h, bias), gelu_kernel.backward(grad, h, bias)
    z, b = h.double().requires_grad_(), bias.double().requires_grad_()
    exact = F.gelu(z + b)
    exact.backward(grad.double())
    assert (y.dtype, dh.dtype, db.dtype) == (dtype, dtype, torch.float32)
    # Rounding is half a unit in the last place, but the interpreter cuts bf16 off, which is up to a whole one.
    unit = torch.finfo(dtype).eps * (1.01 if dtype is brain else 0.51)
    near(y, exact, unit, 5e-7)
    near(dh, z.grad, unit, 5e-7)
    near(db, b.grad, 0, 5e-7 * count)  # of what was not rounded

odd = torch.tensor([[torch.nan, torch.inf, -torch.inf, 1.0]], dtype=half)
made = (gelu_kernel.forward(odd, torch.zeros(4)), *gelu_kernel.backward(torch.ones_like(odd), odd, torch.zeros(4)))
assert all(value.isfinite().flatten().tolist() == [False, False, False, True] for value in made)
print("same function")
"""


COMPILE = (
    BUILD
    + """
from situs.core.kernels.gpu import gelu as gelu_kernel

for half in ("*bf16", "*fp16"):
    for bias in ("*fp32", half):
        types = {"h": half, "bias": bias, "y": half, "count": "i32", "width": "i32"}
        code = build(gelu_kernel._forward, types, {"rows": 8, "columns": 512, "ptx": True})
        assert "rcp.approx.ftz.f32" in code and "ex2.approx" in code and "div" not in code
        types = {"grad": half, "h": half, "bias": bias, "out": half, "sums": "*fp32"}
        types |= dict.fromkeys(("count", "width", "chunk"), "i32")
        code = build(gelu_kernel._backward, types, {"rows": 4, "columns": 512, "ptx": True})
        assert "st.global" in code and "atom" not in code
print("built")
"""
)


pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this torch comes without Triton")


def test_the_kernels_are_gelu_of_the_sum_and_its_gradients():
    assert interpreted(FEW + COMPARE) == "same function"


@pytest.mark.slow
def test_the_kernels_are_gelu_of_the_sum_and_its_gradients_in_all_cases():
    assert triton(ALL + COMPARE, TRITON_INTERPRET="1") == "same function"


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu_that_is_not_here(tmp_path):
    """The interpreter runs what the compiler refuses, and takes no instructions of a GPU."""
    assert triton(COMPILE, TRITON_CACHE_DIR=str(tmp_path)) == "built"
