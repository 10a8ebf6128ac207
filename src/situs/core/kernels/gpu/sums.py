# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN202 (a kernel's arguments are Triton's to type)
"""What the programs of a kernel have summed up, together: in a fixed order, so that equal inputs give equal bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from situs.core.kernels.gpu.random import on_device_of

COLUMNS = 32
"""Of a program."""


@triton.jit(do_not_specialize=["count"])
def _add(sums, out, count, width, rows: tl.constexpr, columns: tl.constexpr):
    column, row = tl.program_id(0) * columns + tl.arange(0, columns)[None, :], tl.arange(0, rows)[:, None]
    total = tl.zeros((rows, columns), tl.float32)
    for step in tl.range(0, count, rows):
        at = row + step
        total += tl.load(sums + at * width + column, mask=(at < count) & (column < width), other=0.0)
    tl.store(out + column, tl.sum(total, 0)[None, :], mask=column < width)


def add(sums: Tensor) -> Tensor:
    """sums: contiguous float32 [programs, ...] -> [...]; torch's own takes four times as long for so few."""
    out, count = torch.empty_like(sums[0]), len(sums)
    rows, warps = (32, 4) if count <= 256 else (128, 8)  # few turns, each of which waits for memory
    with on_device_of(sums):
        grid = (triton.cdiv(out.numel(), COLUMNS),)
        _add[grid](sums, out, count, out.numel(), rows=rows, columns=COLUMNS, num_warps=warps)
    return out


def multiprocessors(tensor: Tensor) -> int:
    """Of the GPU that has it."""
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 4
