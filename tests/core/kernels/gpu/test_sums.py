"""Sums over programs against torch's, run by Triton's interpreter, so that no GPU is needed."""

from __future__ import annotations

import importlib.util

import pytest
from launch import interpreted

COMPARE = """
import torch
from situs.core.kernels.gpu.sums import add

torch.manual_seed(0)
for shape in ((1, 3), (33, 2, 5), (300, 70)):
    sums = torch.randn(shape)
    torch.testing.assert_close(add(sums), sums.sum(0), rtol=1e-5, atol=1e-5)
print("same sums")
"""

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this torch comes without Triton")


def test_every_program_counts_once():
    assert interpreted(COMPARE) == "same sums"
