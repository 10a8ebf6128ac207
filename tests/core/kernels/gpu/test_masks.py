"""The Triton kernel against the tensor version, run by Triton's interpreter, so that no GPU is needed."""

from __future__ import annotations

import importlib.util

import pytest
from launch import BUILD, interpreted, triton

FEW = "ids, cases = [7], [('paper', (2, 3), 0.9), ('official', (4, 5), 0.3)]\n"
ALL = """
ids = [0, 7, 10**12, -3]
cases = [("paper", (14, 14), 0.27), ("paper", (3, 4), 0.9), ("paper", (1, 5), 0.6), ("official", (14, 14), 0.27),
         ("official", (4, 5), 1.0)]
"""
COMPARE = """
import torch
from situs.core import masking
from situs.core.random import shared_hash, uniform

for rule, grid, ratio in cases:
    noise = uniform(0, 0, torch.arange(len(ids)), "kernel", masking.block_noise_shape(grid, ratio, rule=rule))
    target = masking._target(grid, ratio, rule)
    mask = masking._in_one_kernel(noise, grid, target, rule)
    assert torch.equal(mask, masking.block_mask(noise, grid, ratio, rule=rule)), (rule, grid, ratio)
    assert mask.any()
    hashed = masking._in_one_kernel(torch.tensor(ids), grid, target, rule, shared_hash(-5, 3, "kernel"))
    right = masking.draw_block_mask(-5, 3, torch.tensor(ids), "kernel", grid, ratio, rule=rule)
    assert torch.equal(hashed, right), (rule, grid)
print("same masks")
"""


COMPILE = (
    BUILD
    + """
from situs.core.kernels.gpu.masks import _sample

numbers = dict.fromkeys(("rounds", "target", "height", "width"), "i32")
for hashed in (False, True):
    for official in (False, True):
        types = {"source": "*i64" if hashed else "*fp32", "mask": "*i1", "stride": "i32", "shared": "i64"} | numbers
        fixed = {"log_aspect": 1.2, "min_area": 8, "max_area": 75, "attempts": 10, "official": official}
        assert "st.global" in build(_sample, types, fixed | {"hashed": hashed, "size": 256})
print("built")
"""
)


pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this torch comes without Triton")


def test_the_kernel_gives_the_masks_of_the_tensor_version():
    assert interpreted(FEW + COMPARE) == "same masks"


@pytest.mark.slow
def test_the_kernel_gives_the_masks_of_the_tensor_version_in_all_cases():
    assert triton(ALL + COMPARE, TRITON_INTERPRET="1") == "same masks"


@pytest.mark.slow
def test_the_kernel_compiles_for_a_gpu_that_is_not_here(tmp_path):
    """The interpreter runs what the compiler refuses, such as two types of one variable."""
    assert triton(COMPILE, TRITON_CACHE_DIR=str(tmp_path)) == "built"
