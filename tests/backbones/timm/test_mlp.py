"""timm's MLP whose GELU adds the bias: the same function and the same modules, and compiled half precision alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import timm.layers.mlp
import torch
from torch import Tensor, nn

from situs.backbones import create_backbone
from situs.backbones.timm.mlp import Mlp, use_compiled_gelu
from situs.backbones.timm.plain import plain_vit
from situs.core.kernels import CompiledGelu, when


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU has an implementation too, which only tests use."""
    monkeypatch.setattr(when, "has_kernels", lambda _: True)


def made(**settings: Any) -> tuple[nn.Module, nn.Module]:
    """timm's own, and one of the same weights with the pair joined."""
    own = timm.layers.mlp.Mlp(6, 24, **settings)
    joined = copy.deepcopy(own)
    use_compiled_gelu(joined)
    if type(joined.act) is CompiledGelu:  # the activation alone has tests of its own
        joined.act = nn.GELU()
    return own, joined


def run(module: nn.Module, x: Tensor, half: torch.dtype | None, *, compiled: bool = True) -> tuple[bool, list[Tensor]]:
    """Whether the compiler is given the pair as one, and [output, gradient of x, of each parameter]."""
    names: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch.compiler.reset()
    call = torch.compile(module, backend=backend, fullgraph=True) if compiled else module
    x = x.clone().requires_grad_()
    torch.manual_seed(3)
    with torch.autocast("cpu", half, enabled=half is not None):
        y = call(x)
    made = [y, *torch.autograd.grad(y.float().square().sum(), (x, *module.parameters()))]
    return any("bias_gelu" in name for name in names), made


@pytest.mark.thin(2)
@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_compiled_half_precision_is_the_same_function(half: torch.dtype) -> None:
    torch.manual_seed(0)
    own, joined = made(drop=(0.0, 0.25))
    x = torch.randn(5, 7, 6)
    taken, got = run(joined, x, half)
    assert taken
    (_, plain), (_, exact) = (run(own, x, kind, compiled=False) for kind in (half, None))
    for one, other, truth in zip(got, plain, exact, strict=True):
        assert one.dtype == other.dtype
        # No further from float32 than timm's own is, up to the roundings that fall otherwise.
        off = [(value.float() - truth).norm() / truth.norm() for value in (one, other)]
        assert off[0] <= 1.2 * off[1] + torch.finfo(half).eps / 2


@pytest.mark.usefixtures("everywhere")
def test_weights_of_half_precision_need_no_autocast() -> None:
    _, joined = made()
    assert run(joined.bfloat16(), torch.randn(2, 3, 6).bfloat16(), None)[0]


def hooked(module: nn.Module, name: str = "fc1") -> None:
    module.get_submodule(name).register_forward_hook(lambda *_: None)


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("half", "compiled", "serves", "settings", "change"),
    [
        (torch.bfloat16, True, False, {}, None),
        (torch.bfloat16, False, True, {}, None),
        (None, True, True, {}, None),
        (torch.bfloat16, True, True, {"drop": 0.25}, None),
        (torch.bfloat16, True, True, {"norm_layer": nn.LayerNorm}, None),
        (torch.bfloat16, True, True, {}, hooked),
        (torch.bfloat16, True, True, {}, lambda module: hooked(module, "act")),
    ],
    ids=["no kernel", "not compiled", "float32", "dropout", "norm", "hook", "hook on GELU"],
)
def test_elsewhere_it_is_timms_own(
    half: torch.dtype | None,
    compiled: bool,
    serves: bool,
    settings: dict[str, Any],
    change: Callable[[nn.Module], None] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("situs.core.kernels.when.has_kernels", lambda _: serves)
    own, joined = made(**settings)
    if change is not None:
        change(joined)
    x = torch.randn(2, 3, 6)
    taken, got = run(joined, x, half, compiled=compiled)
    assert not taken
    assert all(torch.equal(a, b) for a, b in zip(got, run(own, x, half, compiled=False)[1], strict=True))


def test_the_modules_and_their_names_stay() -> None:
    own, joined = made()
    assert type(joined) is Mlp
    assert type(joined).__name__ == type(own).__name__  # by which layouts know it
    assert [(name, type(part)) for name, part in joined.named_children()] == [
        (name, type(part)) for name, part in own.named_children()
    ]
    assert joined.state_dict().keys() == own.state_dict().keys()
    assert all(torch.equal(joined.state_dict()[name], value) for name, value in own.state_dict().items())
    again = copy.deepcopy(joined)
    with torch.no_grad():
        again.get_parameter("fc1.bias").zero_()
    assert torch.equal(joined.get_parameter("fc1.bias"), own.get_parameter("fc1.bias"))


def test_only_what_is_known_exactly_is_joined() -> None:
    class Own(timm.layers.mlp.Mlp):
        pass

    class Adapted(nn.Linear):
        pass

    heard, adapted = timm.layers.mlp.Mlp(6), timm.layers.mlp.Mlp(6)
    heard.fc1.register_forward_hook(lambda *_: None)
    adapted.fc1 = Adapted(6, 6)
    others = nn.ModuleList(
        [
            *(Own(6), heard, adapted, timm.layers.mlp.GluMlp(6, act_layer=nn.GELU)),
            *(timm.layers.mlp.Mlp(6, act_layer=act) for act in (nn.ReLU, lambda: nn.GELU("tanh"))),
            *(timm.layers.mlp.Mlp(6, bias=False), timm.layers.mlp.Mlp(6, use_conv=True)),
        ]
    )
    before = [type(part) for part in others]
    use_compiled_gelu(others)
    assert [type(part) for part in others] == before


def test_a_plain_vit_stays_one() -> None:
    backbone = create_backbone("test_vit")
    before, groups = plain_vit(backbone), backbone.groups()
    use_compiled_gelu(backbone)
    after = plain_vit(backbone)
    assert any(type(part) is Mlp for part in backbone.modules())
    assert all(torch.equal(after.tensors[name], value) for name, value in before.tensors.items())
    assert backbone.groups() == groups


@pytest.mark.gpu
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_a_compiled_vit_on_a_gpu_is_the_same(half: torch.dtype) -> None:
    """Output and gradients, with drop rates: as near to float32 as those of the model that is left as it is."""
    settings: dict[str, Any] = {"img_size": 32, "patch_size": 4, "embed_dim": 96, "num_heads": 3, "depth": 2}
    own = timm.create_model("vit_tiny_patch16_224", pos_drop_rate=0.1, drop_path_rate=0.1, num_classes=7, **settings)
    own = own.cuda().train()
    joined = copy.deepcopy(own)
    use_compiled_gelu(joined)
    assert sum(type(part) is Mlp for part in joined.modules()) == 2
    x = torch.randn(8, 3, 32, 32, device="cuda")

    def step(model: nn.Module, kind: torch.dtype | None) -> list[Tensor]:
        torch.compiler.reset()
        torch.manual_seed(3)
        with torch.autocast("cuda", kind, enabled=kind is not None):
            y = torch.compile(model)(x)
        return [y, *torch.autograd.grad(y.float().square().mean(), list(model.parameters()))]

    for one, other, truth in zip(step(joined, half), step(own, half), step(own, None), strict=True):
        off = [(value.float() - truth).norm() / truth.norm() for value in (one, other)]
        assert off[0] <= 1.5 * off[1] + torch.finfo(half).eps


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
