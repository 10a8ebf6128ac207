"""Kernels of our own are for compiled half precision on a GPU, and for nothing else."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from situs.core.kernels import when
from situs.core.kernels.when import has_hooks, has_kernels, runs_kernels, takes_kernels


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


@pytest.mark.parametrize(
    ("variable", "programs", "triton", "runs"),
    [
        ("icc", {}, True, True),
        (None, {"gcc"}, True, True),
        (None, {"clang"}, True, True),
        (None, {"gcc", "clang"}, False, False),
        (None, {"tcc"}, True, False),
    ],
)
def test_triton_needs_one_compiler(
    variable: str | None, programs: set[str], triton: bool, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    if variable is not None:
        monkeypatch.setenv("CC", variable)
    monkeypatch.setattr(when, "_TRITON", triton)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name in programs else None)
    assert when._can_run_triton.__wrapped__() is runs


@pytest.mark.parametrize(("device", "compiling", "triton", "runs"), [
    ("cuda", False, True, True), ("cpu", False, True, False),
    ("cuda", True, True, False), ("cuda", False, False, False),
])  # fmt: skip
def test_kernels_run_alone_on_a_gpu(
    device: str, compiling: bool, triton: bool, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(when, "_can_run_triton", lambda: triton)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    tensor: Any = SimpleNamespace(device=torch.device(device))
    assert runs_kernels(tensor) is runs


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_every_kind_of_hook_is_seen(kind: str) -> None:
    layer = nn.Linear(1, 1)
    assert not has_hooks(layer)
    hook = getattr(layer, f"register_{kind}_hook")(lambda *_: None)
    assert has_hooks(layer)
    hook.remove()
    assert not has_hooks(layer)
