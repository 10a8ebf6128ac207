"""When a kernel of our own takes over, and how a compiled step sees it."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)
_TRITON = find_spec("triton") is not None


def takes_kernels(x: Tensor) -> bool:
    """Whether what is done with `x` is compiled, in half precision, and there are kernels for it."""
    # Not `is_exporting`, which torch 2.11 answers with True in every compiled function.
    return torch.compiler.is_dynamo_compiling() and x.dtype in _HALF and has_kernels(x.device)


def has_kernels(device: torch.device) -> bool:
    """Whether there are kernels for it."""
    return device.type == "cuda" and _TRITON


def runs_kernels(tensor: Tensor) -> bool:
    """Whether kernels outside of a compiled graph serve here; in one the tensor operations do, and are fused there."""
    return tensor.device.type == "cuda" and not torch.compiler.is_compiling() and _can_run_triton()


@functools.cache
def _can_run_triton() -> bool:
    """Triton comes with torch's CUDA builds on Linux, and builds its launcher with the system's C compiler."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return compiler is not None and _TRITON


def has_hooks(module: Any) -> bool:
    """Whether something listens to it, and so must be told what goes in and comes out."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function an operator that a compiled step holds as it is. torch does not type what it makes of it."""
    return torch.library.custom_op(f"situs::{name}", mutates_args=())
