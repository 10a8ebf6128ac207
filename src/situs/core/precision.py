"""How exactly a GPU multiplies float32."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def full_float32() -> Generator[None]:
    """float32 with all its digits: a GPU rounds what it convolves to TF32's 10 bits unless told not to, and what it
    multiplies where a training lets it."""
    backends: Any = torch.backends
    matmul, convolution = backends.cuda.matmul, backends.cudnn.conv
    held = matmul.fp32_precision, convolution.fp32_precision
    try:
        matmul.fp32_precision = convolution.fp32_precision = "ieee"
        yield
    finally:
        matmul.fp32_precision, convolution.fp32_precision = held
