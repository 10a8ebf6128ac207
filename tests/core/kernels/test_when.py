"""Kernels of our own are for compiled half precision on a GPU, and for nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from situs.core.kernels import when
from situs.core.kernels.when import has_kernels, takes_kernels


def told(x: Tensor) -> Tensor:
    return x + 1 if takes_kernels(x) else x


@pytest.mark.parametrize(
    ("dtype", "compiles", "there", "taken"),
    [
        (torch.bfloat16, True, True, True),
        (torch.float16, True, True, True),
        (torch.float32, True, True, False),
        (torch.bfloat16, False, True, False),
        (torch.bfloat16, True, False, False),
    ],
)
def test_when(dtype: torch.dtype, compiles: bool, there: bool, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(when, "has_kernels", lambda _: there)
    torch.compiler.reset()
    call = torch.compile(told, backend="eager", fullgraph=True) if compiles else told
    assert bool(call(torch.zeros(1, dtype=dtype))) == taken


def test_a_cpu_has_none() -> None:
    assert not has_kernels(torch.device("cpu"))
    assert has_kernels(torch.device("cuda")) == when._TRITON
