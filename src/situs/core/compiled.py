"""When a compiled step takes a kernel of our own (in half precision, on a device that has them), and how it sees it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)
_TRITON = find_spec("triton") is not None


def takes_kernels(x: Tensor) -> bool:
    """Whether what is done with `x` is compiled, and there are kernels for it."""
    # Not `is_exporting`, which torch 2.11 answers with True in every compiled function.
    return torch.compiler.is_dynamo_compiling() and x.dtype in _HALF and serves(x.device)


def serves(device: torch.device) -> bool:
    """Whether there are kernels for it."""
    return device.type == "cuda" and _TRITON


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function an operator that a compiled step holds as it is. torch does not type what it makes of it."""
    return torch.library.custom_op(f"situs::{name}", mutates_args=())
