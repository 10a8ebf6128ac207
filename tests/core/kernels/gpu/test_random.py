"""The Triton kernel of `uniform` against the tensor version, run by Triton's interpreter, so that no GPU is needed."""

from __future__ import annotations

import importlib.util

import pytest
from launch import BUILD, interpreted, triton

FEW = "cases = 1, 9\n"
ALL = "cases = 1, 9, 1500\n"
COMPARE = """
import torch
from situs.core.random import shared_hash, uniform
from situs.core.kernels.gpu.random import draw_uniform

for dtype, ids in ((torch.int64, [0, 1, 5, 10**12, -3]), (torch.int32, [4, -9])):
    ids = torch.tensor(ids, dtype=dtype)
    for count in cases:
        for seed, epoch, stream in ((0, 0, ""), (-7, 3, "mp3.context"), (2**70, 10**9, "ü")):
            drawn = draw_uniform(ids, shared_hash(seed, epoch, stream), count)
            assert torch.equal(drawn, uniform(seed, epoch, ids, stream, (count,))), (dtype, count, seed)
strided = torch.arange(8)[::2]
assert torch.equal(draw_uniform(strided, 5, 3)[1], draw_uniform(torch.tensor([2]), 5, 3)[0])
print("same numbers")
"""


COMPILE = (
    BUILD
    + """
from situs.core.kernels.gpu.random import _uniform

for ids in ("*i64", "*i32"):
    types = {"ids": ids, "numbers": "*fp32", "shared": "i64", "count": "i32"}
    assert "xor" in build(_uniform, types, {"size": 1024})
print("built")
"""
)


pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this torch comes without Triton")


def test_the_kernel_gives_the_numbers_of_the_tensor_version():
    assert interpreted(FEW + COMPARE) == "same numbers"


@pytest.mark.slow
def test_the_kernel_gives_the_numbers_of_the_tensor_version_in_all_cases():
    assert triton(ALL + COMPARE, TRITON_INTERPRET="1") == "same numbers"


@pytest.mark.slow
def test_the_kernel_compiles_for_a_gpu_that_is_not_here(tmp_path):
    """The interpreter runs what the compiler refuses, such as two types of one variable."""
    assert triton(COMPILE, TRITON_CACHE_DIR=str(tmp_path)) == "built"
