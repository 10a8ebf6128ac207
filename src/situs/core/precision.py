"""The precision of float32 products on a GPU."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def full_float32() -> Generator[None]:
    """Full float32 precision: by default a GPU rounds convolutions to TF32's 10 bits, and matrix products too where a
    training has allowed it."""
    backends: Any = torch.backends
    matmul, convolution = backends.cuda.matmul, backends.cudnn.conv
    before = matmul.fp32_precision, convolution.fp32_precision
    try:
        matmul.fp32_precision = convolution.fp32_precision = "ieee"
        yield
    finally:
        matmul.fp32_precision, convolution.fp32_precision = before
