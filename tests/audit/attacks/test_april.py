"""APRIL's closed form is exact on the block of its paper, and says that it is not on a standard block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import small_vit
from outcomes import caveat, reason
from torch import Tensor, nn
from torch.nn import functional as F

from situs.audit import Knowledge, Noise
from situs.audit.attacks.april import April
from situs.audit.client import victim_gradients
from situs.audit.deadline import Deadline
from situs.audit.defences import Step
from situs.backbones import create_backbone
from situs.backbones.base import Backbone, Features, InputSpec, Stream, Taps
from situs.backbones.layout import Names, Role, roles_of
from situs.core.position import Positions


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, z: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(z).chunk(3, dim=-1))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class PaperModel(nn.Module):
    """A first block of attention alone: neither a norm before it nor a residual around it."""

    def __init__(self, dim: int, patch: int, places: int, classes: int) -> None:
        super().__init__()
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, dim, patch, patch)})
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 1 + places, dim))
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, dim))
        self.blocks = nn.ModuleList([nn.ModuleDict({"attn": Attention(dim)})])
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, classes))


class PaperBackbone(Backbone):
    def __init__(self, dim: int = 64, patch: int = 4, side: int = 5) -> None:
        super().__init__(PaperModel(dim, patch, side * side, 7), "april-vit", (side, side), dim, 1, 1)
        self.input = InputSpec((side * patch, side * patch), 3, (patch, patch))

    def embed(self, x: Tensor) -> Tensor:
        return self.model.patch_embed["proj"](x).flatten(2).transpose(1, 2)

    def positions(self, grid: tuple[int, ...] | None = None) -> Positions:
        return Positions(table=self.model.pos_embed[0, 1:])

    def assemble(self, tokens: Tensor, positions: Positions | None, mask: Tensor | None = None) -> Stream:
        assert positions is not None and positions.table is not None
        first = (self.model.cls_token + self.model.pos_embed[:, :1]).expand(tokens.shape[0], -1, -1)
        return Stream(torch.cat([first, tokens + positions.table], dim=1), 1)

    def run_layers(self, stream: Stream, keys: int | None, taps: Taps = ()) -> Tensor:
        return self.model.blocks[0]["attn"](stream.z)

    def block_modules(self) -> list[tuple[nn.Module, ...]]:
        return [(block,) for block in self.model.blocks]

    def roles(self) -> dict[str, Role]:
        return roles_of(self, self.block_modules(), Names(table=("pos_embed",), qkv=("qkv",)))

    def finish(self, stream: Stream) -> Features:
        return Features(stream.z[:, :1], stream.z[:, 1:])

    def head(self, features: Features) -> Tensor:
        return self.model.mlp(torch.cat([features.prefix, features.patches], dim=1)).mean(dim=1)


def relative(found: Tensor, real: Tensor) -> float:
    return float((found.double() - real.double()).norm() / real.double().norm())


def test_exact_on_the_block_of_the_paper() -> None:
    torch.manual_seed(0)
    backbone: Any = PaperBackbone().double()
    x = torch.randn(2, 3, 20, 20, dtype=torch.float64)
    attack = April()
    assert reason(attack, backbone) is None
    assert caveat(attack, backbone) is None
    uploads = [
        victim_gradients(backbone, x[i : i + 1], torch.tensor([i]), step=Step(dtype=torch.float64)) for i in range(2)
    ]
    found = attack.recover(backbone, uploads, Knowledge(), Deadline())
    assert relative(found.images, x) < 1e-5
    assert all(str(fact["verdict"]).startswith("exact") for fact in found.facts)
    assert [fact["fits"] for fact in found.facts] == [True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_overflowed_is_left_out(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    backbone: Any = PaperBackbone()
    x = torch.randn(1, 3, 20, 20)
    upload = victim_gradients(backbone, x, torch.tensor([2]), step=Step(dtype=dtype))
    plain = relative(April().recover(backbone, [upload], Knowledge(), Deadline()).images, x)
    lost = {name: g.clone() for name, g in upload.items()}
    lost["model.blocks.0.attn.qkv.weight"][17, 5] = torch.inf  # channel 5 of every token has no equation
    lost["model.pos_embed"][0, 3, 9] = torch.inf  # and equation 9 is gone
    found = April().recover(backbone, [lost], Knowledge(), Deadline())
    assert relative(found.images, x) < 3 * plain + 1e-3
    assert relative(found.images, x) < 0.3
    assert found.facts[0]["fits"] is True


def test_noise_and_batches_do_not_make_a_wrong_equation_right() -> None:
    torch.manual_seed(0)
    paper: Any = PaperBackbone()
    standard = small_vit(20, depth=1, width=64, num_classes=7)
    for backbone, batch, fits in ((paper, 1, True), (paper, 2, False), (standard.eval(), 1, False)):
        for noise in (Noise(1e-4), Noise(10.0)):
            x, y = torch.randn(batch, 3, 20, 20), torch.arange(batch)
            upload = victim_gradients(backbone, x, y, defence=noise)
            [fact] = April().recover(backbone, [upload], Knowledge(noise, Step(batch)), Deadline()).facts
            assert fact["fits"] is fits
    upload = victim_gradients(paper, x, y, defence=Noise(1e-2))
    assert April().recover(paper, [upload], Knowledge(Noise(1e-5)), Deadline()).facts[0]["fits"] is False


def test_not_exact_on_a_standard_block_and_says_so() -> None:
    torch.manual_seed(0)
    backbone = small_vit(20, width=64, num_classes=7).eval()
    x = torch.randn(1, 3, 20, 20)
    found = April().recover(backbone, [victim_gradients(backbone, x, torch.tensor([1]))], Knowledge(), Deadline())
    assert relative(found.images, x) > 0.3
    assert float(found.facts[0]["residual"] or 0) > 1e-2
    assert str(found.facts[0]["verdict"]).startswith("not exact")


def test_what_it_cannot_do_is_said() -> None:
    registers = create_backbone("vit_small_patch14_reg4_dinov2", img_size=28, model_args={"depth": 1})
    assert "registers" in str(reason(April(), registers))
    wide = create_backbone("vit_tiny_patch16_224", img_size=64, model_args={"depth": 1})
    assert "768" in str(caveat(April(), wide)) and "192" in str(caveat(April(), wide))
    full = small_vit(24, depth=1, width=48, patch_size=4, num_classes=7)  # as many values as channels, and fewer tokens
    assert caveat(April(), full) is None
    even = small_vit(20, depth=1, width=26, heads=2, patch_size=4, num_classes=7)  # as many tokens
    assert "a patch has more values (48) than a token has channels (26)" in str(caveat(April(), even))
    many = create_backbone("vit_tiny_patch16_224", img_size=64, patch_size=4, model_args={"depth": 1})
    assert "257" in str(caveat(April(), many)) and "192" in str(caveat(April(), many))
    assert "sums over the images" in str(caveat(April(), wide, step=Step(2)))
    fixed = create_backbone("vit_tiny_patch16_224", positions="sincos", model_args={"depth": 1})
    assert "fixed or frozen" in str(reason(April(), fixed))
