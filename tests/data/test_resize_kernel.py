"""The Triton kernels that resize crops of many sizes against torch's own resizing, run by Triton's interpreter, so that
no GPU is needed."""

from __future__ import annotations

import importlib.util

import pytest
from launch import BUILD, interpreted, triton

FEW = "cases = (2, (4, 5), [(9, 6), (2, 7)]),\n"
ALL = """
cases = (
    (3, (6, 8), [(9, 13), (4, 3), (6, 8), (1, 5), (2, 17)]),
    (1, (5, 3), [(5, 3), (17, 10)]),
)
"""
COMPARE = """
import torch
from torch.nn import functional as F
from situs.data import resize

torch.manual_seed(0)
resize.has_kernels = lambda device: True
for channels, size, sides in cases:
    crops = [torch.randint(0, 256, (channels, *side), dtype=torch.uint8) for side in sides]
    crops[1] = (crops[1] > 127).to(torch.uint8) * 255  # overshoots between the two directions
    for mode in ("bicubic", "bilinear"):
        wanted = [F.interpolate(crop[None], size, mode=mode, antialias=True)[0] for crop in crops]
        packed = resize.resize_packed(*resize.pack(crops), size, mode)
        assert packed.is_contiguous() and torch.equal(packed, torch.stack(wanted))
print("same bytes")
"""

COMPILE = (
    BUILD
    + """
from situs.data import resize_kernel

table = {"table": "*i64", "first": "*i32", "weights": "*i32", "bits": "*i32"}
for radius in (1, 2):
    types = table | dict.fromkeys(("count", "taps", "height", "width"), "i32")
    code = build(resize_kernel._weigh, types, {"radius": radius, "s": 256}, enable_fp_fusion=False)
    assert "f64" in code and "fma.rn.f64" not in code
for channels in (1, 3):
    shape = {"channels": channels, "rows": resize_kernel.ROWS, "s": 256}
    types = {"base": "*u8", **table, "out": "*u8", "taps": "i32", "width": "i32"}
    build(resize_kernel._across, types, shape)
    types = {"wide": "*u8", **table, "out": "*u8"} | dict.fromkeys(("count", "taps", "height", "width"), "i32")
    build(resize_kernel._down, types, shape)
print("built")
"""
)

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this torch comes without Triton")


def test_the_kernels_give_torchs_bytes():
    assert interpreted(FEW + COMPARE) == "same bytes"


@pytest.mark.slow
def test_the_kernels_give_torchs_bytes_in_all_cases():
    assert triton(ALL + COMPARE, TRITON_INTERPRET="1") == "same bytes"


@pytest.mark.slow
def test_the_compiler_takes_the_kernels():
    assert triton(COMPILE) == "built"
