"""The user's choice of TF32 comes back, whatever happens."""

from __future__ import annotations

import pytest
import torch

from situs.core.precision import full_float32


def test_full_float32_is_for_the_block_alone():
    matmul = torch.backends.cuda.matmul
    held = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        with pytest.raises(ZeroDivisionError), full_float32():
            _ = 1 / (matmul.fp32_precision != "ieee")
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = held
