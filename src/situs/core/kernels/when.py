"""When a custom kernel is used, and how a compiled step calls it."""

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
    """Whether operations on `x` are compiled, in half precision, and have kernels."""
    # Not `is_exporting`, which is True in every compiled function of torch 2.11.
    return torch.compiler.is_dynamo_compiling() and x.dtype in _HALF and has_kernels(x.device)


def has_kernels(device: torch.device) -> bool:
    """Whether there are kernels for a device."""
    return device.type == "cuda" and _TRITON


def runs_kernels(tensor: Tensor) -> bool:
    """Whether kernels are used outside of a compiled graph; inside one, the tensor operations are fused instead."""
    return tensor.device.type == "cuda" and not torch.compiler.is_compiling() and _can_run_triton()


@functools.cache
def _can_run_triton() -> bool:
    """Triton comes with torch's CUDA builds on Linux, and builds its launcher with the system's C compiler."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return compiler is not None and _TRITON


def has_hooks(module: Any) -> bool:
    """Whether a module has forward or backward hooks, so it must be called as a module."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function a custom operator, which a compiled step calls as it is. torch gives it no types."""
    return torch.library.custom_op(f"situs::{name}", mutates_args=())
