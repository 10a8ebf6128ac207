"""An MLP whose GELU belongs to the product before it: against autograd of what torch does one after the other."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from situs.core.kernels import gpu
from situs.core.kernels import mlp as module
from situs.core.kernels.mlp import bias_gelu, bias_gelu_backward, mlp

SHAPES = [((2, 3, 64), 128), ((1, 64), 256), ((3, 150, 64), 384), ((131, 64), 40), ((2, 70, 320), 1280)]
CASES: list[Any] = [("cpu", *each) for each in SHAPES[:4]]  # the last has many tiles, and takes a CPU long
CASES += [pytest.param("cuda", *each, marks=pytest.mark.gpu) for each in SHAPES]


def given(shape: tuple[int, ...], hidden: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """x, the first weight and bias, the second weight; parameters in float32 at least."""
    torch.manual_seed(0)
    wide, width = torch.promote_types(dtype, torch.float32), shape[-1]
    x = torch.randn(shape, device=device, dtype=dtype)
    rest = (torch.randn(hidden, width) / width**0.5, torch.randn(hidden), torch.randn(width, hidden) / hidden**0.5)
    return [part.to(device, wide if number else dtype).requires_grad_() for number, part in enumerate((x, *rest))]


def plain(x: Tensor, weight1: Tensor, bias: Tensor, weight2: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, weight1, bias)), weight2)


@pytest.mark.parametrize(("shape", "hidden"), SHAPES[:2])
def test_it_is_the_mlp_and_so_are_its_gradients(shape: tuple[int, ...], hidden: int) -> None:
    values = given(shape, hidden, torch.float64, "cpu")
    made, right = mlp(*values), plain(*values)
    assert torch.allclose(made, right, rtol=0, atol=1e-5)  # GELU itself is computed in float32
    grad = torch.randn_like(made)
    for own, exact in zip(*(torch.autograd.grad(each, values, grad) for each in (made, right)), strict=True):
        assert own.dtype == exact.dtype and torch.allclose(own, exact, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(mlp(*values), made)


def test_without_gradients_nothing_is_kept_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, forward = [], module._forward
    monkeypatch.setattr(module, "_forward", lambda *given, keep: asked.append(keep) or forward(*given, keep=keep))
    values = given((2, 8), 16, torch.float64, "cpu")
    mlp(*values)
    with torch.no_grad():
        mlp(*values)
    assert asked == [True, False]


def test_it_takes_rows_that_lie_apart_a_gradient_that_is_one_number_and_no_rows() -> None:
    x, *rest = given((4, 3, 8), 16, torch.float64, "cpu")
    for count in (4, 0):
        values = [x.detach()[:count].transpose(0, 1).requires_grad_(), *rest]
        made, right = (torch.autograd.grad(each(*values).sum(), values) for each in (mlp, plain))
        assert all(torch.allclose(own, exact, rtol=1e-5, atol=1e-5) for own, exact in zip(made, right, strict=True))


@pytest.mark.thin(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("device", "shape", "hidden"), CASES)
def test_half_precision_is_as_near_as_torchs(
    device: str, shape: tuple[int, ...], hidden: int, dtype: torch.dtype
) -> None:
    if (device, dtype) == ("cpu", torch.float16) and math.prod(shape) > 2**14:
        shape = (40, shape[-1])  # torch's own takes seconds there
    values = given(shape, hidden, dtype, device)
    exact = [value.detach().to(dtype).double().requires_grad_() for value in values]
    made, right = mlp(*values), plain(*exact)
    with torch.autocast(device, dtype):
        peer = plain(*values)
    grad = torch.randn_like(made)
    found, peers, wanted = (
        [each.detach(), *torch.autograd.grad(each, on, grad.to(each))]
        for each, on in ((made, values), (peer, values), (right, exact))
    )
    with torch.no_grad():
        found.append(mlp(*values))
    for own, other, true in zip(found, [*peers, peers[0]], [*wanted, wanted[0]], strict=True):
        assert far(own, true) <= 1.2 * far(other, true) + 5e-4


def far(made: Tensor, exact: Tensor) -> float:
    return float((made.double() - exact).norm() / exact.norm())


class OnGpu(Tensor):
    """Says that it lies there."""

    is_cuda = True


def test_the_kernel_is_asked_for_whole_tiles_that_begin_where_it_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_has_kernel", lambda _: True)
    rows, weight = torch.empty(5, 64).bfloat16(), torch.empty(256, 64).bfloat16()
    there, odd = rows.as_subclass(OnGpu), torch.empty(256 * 64 + 4).bfloat16()[4:]
    assert module._fits_kernel(there, weight) and module._fits_kernel(there[:1], weight[:128])
    others = [
        (rows, weight),
        (there[:0], weight),
        (there.float(), weight),
        (there, weight[:192]),
        (there, weight[:, 32:]),
    ]
    others += [(odd[:320].view(5, 64).as_subclass(OnGpu), weight), (there, odd.view(256, 64))]
    assert not any(module._fits_kernel(*other) for other in others)
    monkeypatch.setattr(module, "_has_kernel", lambda _: False)
    assert not module._fits_kernel(there, weight)


def test_on_a_gpu_the_kernels_get_rows_and_their_results_are_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the kernels that compute with torch."""
    calls: list[str] = []

    def on_cpu(name: str, function: Any) -> Any:
        def call(*inputs: Any) -> Any:
            assert all(x.is_contiguous() for x in inputs if isinstance(x, Tensor)) and inputs[0].dim() == 2
            calls.append(name)
            with monkeypatch.context() as patch:
                patch.setattr(Tensor, "is_cuda", False)
                patch.setattr(module, "_fits_kernel", lambda *_: False)
                return function(*inputs)

        return call

    names = {
        "gelu": {"forward": bias_gelu, "backward": bias_gelu_backward},
        "mlp": {"forward": module._forward, "backward": module._backward},
    }
    values = given((4, 3, 8), 16, torch.float32, "cpu")
    values[0] = values[0].detach().transpose(0, 1).requires_grad_()  # its rows lie apart
    right = plain(*values)
    grad = torch.randn(right.shape[::-1]).permute(2, 1, 0)
    wanted = torch.autograd.grad(right, values, grad)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    for file, functions in names.items():
        stand_ins = {way: on_cpu(f"{file} {way}", function) for way, function in functions.items()}
        monkeypatch.setattr(gpu, file, SimpleNamespace(**stand_ins), raising=False)
    for fits, file in ((False, "gelu"), (True, "mlp")):
        monkeypatch.setattr(module, "_fits_kernel", lambda *_, fits=fits: fits)
        calls.clear()
        out = mlp(*values)
        results = [out, *torch.autograd.grad(out, values, grad)]
        assert calls == [f"{file} forward", f"{file} backward"]
        for result, exact in zip(results, (right, *wanted), strict=True):
            assert result.shape == exact.shape and torch.allclose(result, exact, rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            assert torch.equal(mlp(*values), out)


@pytest.mark.parametrize(
    ("triton", "capability", "hip", "has"),
    [("3.6.0", 9, None, True), ("3.8.1", 9, None, True), ("3.5.9", 9, None, False), ("3.9.0", 9, None, False),
     ("3.7.0", 8, None, False), ("3.7.0", 10, None, False), ("3.7.0", 9, "7.0", False), ("new", 9, None, False)],
)  # fmt: skip
def test_it_is_for_hopper_and_the_tritons_that_were_tried(
    triton: str, capability: int, hip: str | None, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "version", lambda _: triton)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (capability, 0))
    assert module._has_kernel.__wrapped__(torch.device("cuda")) is has


@pytest.mark.parametrize("keep", [False, True])
def test_the_compiler_is_told_the_truth_of_it(keep: bool) -> None:
    x, weight1, bias, weight2 = (value.detach().bfloat16() for value in given((2, 3, 8), 16, torch.float32, "cpu"))
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(module._forward, (x, weight1, bias, keep), test_utils=tests)
    torch.library.opcheck(module._backward, (x, weight2, F.linear(x, weight1), bias), test_utils=tests)
