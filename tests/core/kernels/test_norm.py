"""The stream plus a branch and its LayerNorm: against autograd of what torch does one after the other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from situs.core.kernels import gpu, norm
from situs.core.kernels.norm import add_norm, norm_fits

EPS = 1e-3
CASES = [(bias, scale, keys) for bias in (False, True) for scale in (False, True) for keys in (0, 2)]


def plain(
    z: Tensor, branch: Tensor, bias: Tensor | None, scale: Tensor | None, weight: Tensor, shift: Tensor, keys: int
) -> tuple[Tensor, Tensor, Tensor]:
    added = branch if bias is None else branch + bias.to(branch)
    total = z + (added if scale is None else added * scale.to(added).view(-1, 1, 1))
    normed = F.layer_norm(total, total.shape[-1:], weight.to(total), shift.to(total), EPS)
    return total, normed, normed[:, :keys]


def inputs(shape: tuple[int, int, int], bias: bool, scale: bool, **kind: Any) -> list[Any]:
    """z, branch, bias, scale, weight, shift."""
    batch, _, width = shape
    half = {**kind, "dtype": kind.get("dtype", torch.bfloat16)}
    wide = {**kind, "dtype": torch.promote_types(half["dtype"], torch.float32)}
    z, branch = (torch.randn(shape, **half).requires_grad_() for _ in range(2))
    rest = [torch.randn(width, **wide).requires_grad_() for _ in range(3)]
    drawn = torch.randint(2, (batch,), device=kind.get("device")).to(wide["dtype"]) / 0.9 if scale else None
    return [z, branch, rest[0] if bias else None, drawn, *rest[1:]]


def trained(given: list[Any]) -> list[Tensor]:
    return [x for x in given if x is not None and x.requires_grad]


@pytest.mark.thin(2)
@pytest.mark.parametrize(("bias", "scale", "keys"), CASES)
def test_it_is_the_sum_and_its_norm_and_so_are_its_gradients(bias: bool, scale: bool, keys: int) -> None:
    given = inputs((2, 3, 4), bias, scale, dtype=torch.float64)
    made, right = add_norm(*given, EPS, keys), plain(*given, keys)
    assert [x.shape for x in made] == [(2, 3, 4), (2, 3, 4), (2, keys, 4)]
    assert all(torch.allclose(a, b, rtol=0, atol=1e-13) for a, b in zip(made, right, strict=True))
    leaves = trained(given)

    def call(*values: Tensor) -> tuple[Tensor, ...]:
        left = iter(values)
        return add_norm(*(next(left) if x is not None and x.requires_grad else x for x in given), EPS, keys)

    assert torch.autograd.gradcheck(call, leaves)


@pytest.mark.parametrize("used", [0, 1, 2])
def test_what_is_not_used_has_no_gradient(used: int) -> None:
    given = inputs((2, 3, 4), bias=True, scale=True, dtype=torch.float64)
    leaves = trained(given)
    grads = [
        torch.autograd.grad(made[used].square().sum(), leaves, materialize_grads=True)
        for made in (add_norm(*given, EPS, 2), plain(*given, 2))
    ]
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize(("bias", "scale", "keys"), [CASES[0], CASES[-1]])
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch looks at gradients it does not need
def test_the_compiler_is_told_the_truth_of_it(bias: bool, scale: bool, keys: int) -> None:
    given = inputs((2, 3, 8), bias, scale)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(norm._forward, (*given, EPS, keys), test_utils=tests)
    made = [None if x is None else x.detach() for x in (*norm._forward(*given, EPS, keys), given[3], given[4])]
    total, normed, first, *rest = made
    torch.library.opcheck(norm._backward, (total, normed, first, total, *rest, keys, bias), test_utils=tests[::2])


@pytest.mark.parametrize("scale", [False, True])
def test_it_compiles_in_one_graph(scale: bool) -> None:
    torch.compiler.reset()
    given = inputs((2, 3, 8), bias=True, scale=scale)
    leaves = trained(given)
    grads = []
    for call in (add_norm, torch.compile(add_norm, fullgraph=True, backend="aot_eager")):
        total, normed, first = call(*given, EPS, 2)
        grads.append(torch.autograd.grad((total * normed).sum() + first.square().sum(), leaves))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert [x.dtype for x in grads[0]] == [x.dtype for x in leaves]


@pytest.mark.parametrize(("bias", "scale", "keys"), [CASES[0], CASES[-1]])
def test_on_a_gpu_the_kernels_get_everything_and_their_results_are_returned(
    bias: bool, scale: bool, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins for the kernels: the operators of a CPU, and each is called once."""
    values = inputs((2, 3, 4), bias, scale, dtype=torch.float64)
    grads = [torch.randn(2, count, 4, dtype=torch.float64) for count in (3, 3, keys)]
    calls: list[str] = []

    def on_cpu(way: str, function: Any) -> Any:
        def call(*rest: Any) -> Any:
            assert all(x is None or x.is_contiguous() for x in rest[:3])
            calls.append(way)
            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "is_cuda", False)
                return function(*rest)

        return call

    results = []
    for on_gpu in (False, True):
        if on_gpu:
            kernels = {way: on_cpu(way, getattr(norm, f"_{way}")) for way in ("forward", "backward")}
            monkeypatch.setattr(gpu, "norm", SimpleNamespace(**kernels), raising=False)
            monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        out = add_norm(*values, EPS, keys)
        results.append([*out, *torch.autograd.grad(out, trained(values), grads)])
    assert calls == ["forward", "backward"]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_how_wide() -> None:
    assert [norm_fits(width) for width in (48, 768, 2048, 2049)] == [True, True, True, False]


def test_nothing_in_nothing_out() -> None:
    given = inputs((0, 3, 4), bias=True, scale=False)
    add_norm(*given, EPS, 1)[1].sum().backward()
    assert torch.equal(given[2].grad, torch.zeros(4))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4, 197, 768), (8, 65, 384)])
@pytest.mark.parametrize(("bias", "scale", "keys"), [(True, False, 0), (True, True, 50), (False, False, 50)])
def test_on_a_gpu_it_is_as_near_to_float64_as_torch_is(
    shape: tuple[int, int, int], bias: bool, scale: bool, keys: int
) -> None:
    given = inputs(shape, bias, scale, device="cuda")
    wanted = [torch.randn(size, device="cuda").bfloat16() for size in (shape, shape, (shape[0], keys, shape[2]))]
    results = []
    for call, wide in ((plain, True), (plain, False), (add_norm, False), (add_norm, False)):
        values = [x if x is None or not wide else x.detach().double().requires_grad_(x.requires_grad) for x in given]
        made = call(*values, *(() if call is plain else (EPS,)), keys)
        leaves = trained(values)
        grads = torch.autograd.grad(made, leaves, [x.to(y) for x, y in zip(wanted, made, strict=True)])
        results.append([*made, *grads])
    right, torchs, ours, again = results
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    for exact, one, other in zip(right, torchs, ours, strict=True):
        far, farther = ((x.double() - exact).norm() for x in (other, one))
        assert far <= 1.5 * farther + 1e-6
