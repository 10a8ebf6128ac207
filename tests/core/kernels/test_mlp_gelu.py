"""The GELU of a compiled step is GELU, alone and with a bias, and so are its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from situs.core.kernels.mlp import CompiledGelu, bias_gelu, normal

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WIDE = torch.linspace(-12, 12, 100_001, dtype=torch.float64)


def test_no_further_from_gelu_than_torch_is_in_float32() -> None:
    exact = F.gelu(WIDE)
    z = WIDE.float()
    ours, torchs = (z * normal(z)[0]).double(), F.gelu(z).double()
    assert (ours - exact).abs().max() <= (torchs - exact).abs().max()


def compiled(module: nn.Module) -> nn.Module:
    torch.compiler.reset()
    return torch.compile(module, backend="aot_eager")  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch 2.11 does so itself, where it compiles one
def test_compiled_half_precision_is_right(dtype: torch.dtype, device: str) -> None:
    x = WIDE.to(device, dtype).requires_grad_()
    grad = torch.linspace(-2, 2, len(WIDE)).to(x)
    y = compiled(CompiledGelu())(x) if device == "cpu" else torch.compile(CompiledGelu())(x)
    y.backward(grad)
    z = x.detach().double().requires_grad_()
    exact = F.gelu(z)
    exact.backward(grad.double())
    assert y.dtype == dtype
    # Half a unit in the last place is the rounding itself.
    step = torch.finfo(dtype).eps
    assert ((y.double() - exact).abs() <= 0.51 * step * exact.abs() + 1e-6).all()
    assert x.grad is not None
    assert z.grad is not None
    assert ((x.grad.double() - z.grad).abs() <= 0.51 * step * z.grad.abs() + 1e-6).all()


@pytest.mark.parametrize(("dtype", "taken"), [(torch.bfloat16, True), (torch.float16, True), (torch.float32, False)])
def test_what_the_compiler_is_given(dtype: torch.dtype, taken: bool) -> None:
    names: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch.compiler.reset()
    torch.compile(CompiledGelu(), backend=backend)(torch.randn(4, dtype=dtype, requires_grad=True))
    assert taken == any("autograd_function" in name for name in names)
    assert taken != any("gelu" in name for name in names)


def test_elsewhere_it_is_torchs_own() -> None:
    ours, own = CompiledGelu(), nn.GELU()
    for x in (WIDE.float(), WIDE.bfloat16()):
        assert torch.equal(ours(x), own(x))
    assert torch.equal(compiled(ours)(WIDE.float()), own(WIDE.float()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("count", "width"), [(3, 7), (37, 96), (50, 1536)])
def test_with_a_bias(count: int, width: int, dtype: torch.dtype, device: str) -> None:
    h = (3 * torch.randn(2, count, width)).to(device, dtype)
    h[0, 0, :5] = torch.tensor([50.0, -50.0, 0.0, 1e-4, 300.0])
    h, bias = h.requires_grad_(), torch.randn(width, device=device, requires_grad=True)
    grad = torch.randn(2, count, width).to(h)
    y = bias_gelu(h, bias)
    y.backward(grad)
    z, b = h.detach().double().requires_grad_(), bias.detach().double().requires_grad_()
    exact = F.gelu(z + b)
    exact.backward(grad.double())
    step = 0.51 * torch.finfo(dtype).eps  # half a unit in the last place is the rounding itself
    for value, truth in ((y, exact), (h.grad, z.grad)):
        assert value is not None
        assert truth is not None
        assert value.dtype == dtype
        assert ((value.double() - truth).abs() <= step * truth.abs() + 1e-6).all()
    assert bias.grad is not None
    assert b.grad is not None
    assert bias.grad.dtype == torch.float32
    assert ((bias.grad.double() - b.grad).abs() <= 1e-6 * count).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch looks at gradients it does not need
def test_it_is_an_operator_as_torch_wants_it(device: str) -> None:
    """Its shapes, strides and gradients are those that the compiler is told."""
    h = torch.randn(4, 6, 8, device=device, dtype=torch.bfloat16).transpose(0, 1).requires_grad_()
    bias = torch.randn(8, device=device, requires_grad=True)
    torch.library.opcheck(bias_gelu, (h, bias), test_utils=("test_schema", "test_aot_dispatch_dynamic"))


@pytest.mark.gpu
def test_equal_inputs_give_equal_bits_on_a_gpu() -> None:
    h = torch.randn(12_800, 384, device="cuda", dtype=torch.bfloat16).requires_grad_()
    bias = torch.randn(384, device="cuda", requires_grad=True)
    first, again = (torch.autograd.grad(bias_gelu(h, bias).float().square().sum(), (h, bias)) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_not_finite_stays_so(device: str) -> None:
    h = torch.tensor([[torch.nan, torch.inf, 1.0]], device=device, dtype=torch.bfloat16, requires_grad=True)
    y = bias_gelu(h, torch.zeros(3, device=device))
    y.sum().backward()
    assert h.grad is not None
    assert y.isfinite().tolist() == [[False, False, True]]
    assert h.grad[0, 2].isfinite()
    assert not h.grad[0, 0].isfinite()


def test_nothing_in_nothing_out() -> None:
    h = torch.zeros(0, 4, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.zeros(4, requires_grad=True)
    bias_gelu(h, bias).sum().backward()
    assert bias.grad is not None
    assert torch.equal(bias.grad, torch.zeros(4))
