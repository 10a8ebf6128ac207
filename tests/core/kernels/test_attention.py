"""Attention over few keys: its formulas against autograd, and when the kernels take over."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from situs.core.kernels import attention
from situs.core.kernels.attention import attend_packed, fits_kernel

WIDE = torch.float64


def by_hand(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """One head after the other, [B, S, H * d] all."""
    parts = []
    for own, key, value in zip(*(x.chunk(heads, dim=-1) for x in (q, k, v)), strict=True):
        parts.append(((own @ key.mT) / own.shape[-1] ** 0.5).softmax(-1) @ value)
    return torch.cat(parts, dim=-1)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The kernels' way for all; how many keys each call had."""
    seen: list[int] = []

    def always(_: Tensor, __: int, keys: int, ___: int) -> bool:
        seen.append(keys)
        return True

    monkeypatch.setattr(attention, "fits_kernel", always)
    return seen


@pytest.mark.parametrize("kernel", [False, True])
def test_tokens_attend_to_themselves(kernel: bool, request: pytest.FixtureRequest) -> None:
    if kernel:
        request.getfixturevalue("taken")
    qkv = torch.randn(2, 7, 3 * 8, dtype=WIDE, requires_grad=True)
    assert torch.allclose(attend_packed(qkv, None, 2), by_hand(*qkv.chunk(3, dim=-1), 2), rtol=0, atol=1e-14)
    assert torch.autograd.gradcheck(lambda x: attend_packed(x, None, 2), (qkv,))


@pytest.mark.parametrize("kernel", [False, True])
def test_tokens_attend_to_a_context(kernel: bool, request: pytest.FixtureRequest) -> None:
    if kernel:
        request.getfixturevalue("taken")
    q = torch.randn(2, 5, 8, dtype=WIDE, requires_grad=True)
    kv = torch.randn(2, 3, 16, dtype=WIDE, requires_grad=True)
    assert torch.allclose(attend_packed(q, kv, 2), by_hand(q, *kv.chunk(2, dim=-1), 2), rtol=0, atol=1e-14)
    assert torch.autograd.gradcheck(lambda q, kv: attend_packed(q, kv, 2), (q, kv))


@pytest.mark.parametrize("keys", [3, 65])
def test_on_a_gpu_the_kernels_fill_what_is_returned(
    keys: int, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins for the kernels, by torch. With more keys than a tile, sums go from the forward to the backward."""

    def one_pass(*inputs: Tensor) -> Tensor:
        return by_hand(*(x.flatten(2) for x in inputs), 2).view(inputs[0].shape)

    def launch_forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor | None) -> None:
        out.copy_(one_pass(q, k, v))
        assert (sums is None) == (keys == 3)
        if sums is not None:
            assert sums.shape == (2 * 2, 5)
            sums.fill_(7.0)

    def launch_backward(upstream: Tensor, qkv: Any, out: Tensor, sums: Tensor | None, to: Any) -> None:
        assert torch.equal(upstream.flatten(2), grad) and torch.allclose(out.flatten(2), right)
        parts = zip(qkv, (q, *kv.chunk(2, dim=-1)), strict=True)
        assert all(torch.equal(x.flatten(2), right_part) for x, right_part in parts)
        assert sums is None if keys == 3 else sums.eq(7).all()
        for space, value in zip(to, (wanted[0], *wanted[1].chunk(2, dim=-1)), strict=True):
            space.copy_(value.view(space.shape))

    q = torch.randn(2, 5, 8, dtype=WIDE, requires_grad=True)
    kv = torch.randn(2, keys, 16, dtype=WIDE, requires_grad=True)
    right = by_hand(q, *kv.chunk(2, dim=-1), 2)
    grad = torch.randn_like(right)
    wanted = torch.autograd.grad(right, (q, kv), grad)
    kernels = SimpleNamespace(launch_forward=launch_forward, launch_backward=launch_backward)
    monkeypatch.setitem(sys.modules, "situs.core.kernels.gpu.attention", kernels)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    out = attend_packed(q, kv, 2)
    assert torch.allclose(out, right, rtol=0, atol=1e-14)
    for value, exact in zip(torch.autograd.grad(out, (q, kv), grad), wanted, strict=True):
        assert torch.allclose(value, exact, rtol=0, atol=1e-13)
    assert taken == [keys]


def test_the_compiler_is_told_the_truth_of_them() -> None:
    qkv, q, kv = (torch.randn(2, count, width, requires_grad=True) for count, width in ((4, 24), (4, 8), (3, 16)))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(attention._forward, (qkv, None, 2), test_utils=tests)
    torch.library.opcheck(attention._forward, (q, kv, 2), test_utils=tests)


def test_when_the_kernel_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(queries: int = 197, keys: int = 50, width: int = 64) -> bool:
        return fits_kernel(torch.empty(1, dtype=torch.bfloat16), queries, keys, width)

    assert not asked()  # not compiled
    monkeypatch.setattr(attention, "takes_kernels", lambda _: True)
    assert asked()
    assert asked(keys=128)
    assert not asked(keys=129)
    assert asked(keys=197, width=32)  # MAE's decoder: its queries are held
    assert asked(256, 256, 32)
    assert not asked(257, 256, 32)
    assert not asked(keys=257, width=32)
    assert asked(128, 256)
    assert not asked(129, 256)
    assert not asked(width=48)
    assert not asked(width=128)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("queries", "keys", "width"),
    [
        (197, 50, 64),
        (50, 50, 64),
        (65, 17, 32),
        (9, 1, 16),
        (65, 65, 64),
        (197, 99, 64),
        (197, 197, 32),
        (200, 256, 16),
    ],
)
def test_compiled_on_a_gpu_it_is_as_near_to_float64_as_torch_is(
    queries: int, keys: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()
    q = torch.randn(3, queries, 2 * width, device="cuda", dtype=dtype, requires_grad=True)
    kv = torch.randn(3, keys, 4 * width, device="cuda", dtype=dtype, requires_grad=True)
    given = torch.randn_like(q)
    exact = [x.detach().double().requires_grad_() for x in (q, kv)]
    right = attend_packed(*exact, 2)
    wanted = [right, *torch.autograd.grad(right, exact, given.double())]
    from situs.core.kernels.gpu import attention as attention_kernel

    launched, far = [], []
    for name in ("launch_forward", "launch_backward"):
        launch = getattr(attention_kernel, name)
        monkeypatch.setattr(attention_kernel, name, lambda *given, do=launch: (launched.append(do), do(*given))[1])
    for call in (attend_packed, torch.compile(attend_packed, fullgraph=True)):
        assert not launched
        mixed = call(q, kv, 2)
        made = [mixed, *torch.autograd.grad(mixed, (q, kv), given)]
        far.append([float((a.double() - b).norm() / (1 + b.norm())) for a, b in zip(made, wanted, strict=True)])
    assert len(launched) == 2
    assert all(ours <= 1.5 * torchs + 1e-6 for torchs, ours in zip(*far, strict=True)), far


@pytest.mark.gpu
@pytest.mark.parametrize(("count", "width"), [(50, 64), (65, 64), (197, 32)])
def test_so_are_tokens_that_attend_to_themselves(count: int, width: int) -> None:
    torch.compiler.reset()
    qkv = torch.randn(3, count, 6 * width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    exact = qkv.detach().double().requires_grad_()
    given = torch.randn(3, count, 2 * width, device="cuda", dtype=torch.bfloat16)
    (wanted,) = torch.autograd.grad(attend_packed(exact, None, 2), exact, given.double())
    errors = []
    for call in (attend_packed, torch.compile(attend_packed, fullgraph=True)):
        (made,) = torch.autograd.grad(call(qkv, None, 2), qkv, given)
        errors.append(float((made.double() - wanted).norm() / wanted.norm()))
    assert errors[1] <= 1.5 * errors[0]
