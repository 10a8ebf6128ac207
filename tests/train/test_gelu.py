"""A compiled step's GELU is GELU, and only half precision takes it."""

from __future__ import annotations

import pytest
import timm
import timm.layers.mlp
import torch
from torch import nn
from torch.nn import functional as F

from situs.backbones.timm.mlp import Mlp
from situs.train.gelu import CompiledGelu, use_compiled_gelu

WIDE = torch.linspace(-12, 12, 100_001, dtype=torch.float64)


def compiled(module: nn.Module) -> nn.Module:
    torch.compiler.reset()
    return torch.compile(module, backend="aot_eager")  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
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


def test_only_exact_gelus_are_replaced() -> None:
    class Own(nn.GELU):
        pass

    heard = nn.GELU()
    heard.register_forward_hook(lambda *_: None)
    kinds = nn.Sequential(nn.GELU(approximate="tanh"), Own(), heard, nn.GELU())
    model = nn.Sequential(nn.Linear(2, 2), nn.GELU(), kinds)
    before = model.state_dict().keys()
    use_compiled_gelu(model)
    inner = model[2]
    assert isinstance(inner, nn.Sequential)
    assert [type(part) for part in (model[1], *inner)] == [CompiledGelu, nn.GELU, Own, nn.GELU, CompiledGelu]
    assert model.state_dict().keys() == before


def test_an_mlp_of_timm_adds_the_bias_in_its_gelu() -> None:
    model = timm.create_model("test_vit")
    before = model.state_dict().keys()
    use_compiled_gelu(model)
    mlps = [part for part in model.modules() if isinstance(part, timm.layers.mlp.Mlp)]
    assert mlps
    assert all(type(part) is Mlp and type(part.act) is CompiledGelu for part in mlps)
    assert model.state_dict().keys() == before
