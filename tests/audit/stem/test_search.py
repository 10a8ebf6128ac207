"""Layer and table are found by what they do, wherever they stand; what only looks like them is not taken."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from situs.audit import adapt
from situs.audit.client import victim_gradients
from situs.audit.stem import require_stem, table_rows


class Odd(nn.Module):
    """A table [1, D, h, w] behind a matrix [K, D], the class token last, and a second table that is not added."""

    def __init__(self, kind: str = "planes") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.decoy = nn.Parameter(torch.randn(1, 4, 24))
        self.into = nn.Parameter(0.1 * torch.randn(48, 24))
        shape = (1, 24, 2, 2) if kind == "planes" else (6, 24)
        self.places, self.last = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(1, 1, 24))
        self.block = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.0, batch_first=True)
        self.out = nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        cells = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        tokens = cells @ self.into
        tokens = tokens + (self.places.flatten(2).mT if self.kind == "planes" else self.places[1:5])
        if self.kind == "scaled":
            tokens = tokens * self.decoy
        tokens = torch.cat([tokens, self.last.expand(len(x), -1, -1)], dim=1)
        return self.out(self.block(tokens)[:, -1]) + self.decoy.mean()


def test_a_table_of_planes_and_a_turned_weight() -> None:
    stem = require_stem(adapt(Odd(), 8))
    assert (stem.weight, stem.table, stem.bias) == ("model.into", "model.places", None)
    assert (stem.layout, stem.channels, stem.first, stem.count) == ("turned", -3, 0, 4)
    table = torch.arange(96.0).view(1, 24, 2, 2)
    assert torch.equal(table_rows(table, stem)[1], table[0, :, 0, 1])


def test_the_patches_rows_may_stand_in_the_middle() -> None:
    backbone = adapt(Odd("rows"), 8)
    stem = require_stem(backbone)
    assert (stem.table, stem.first, stem.count) == ("model.places", 1, 4)
    upload = victim_gradients(backbone, torch.randn(1, 3, 8, 8), torch.tensor([1]))
    rows = upload["model.places"]
    assert torch.equal(table_rows(rows, stem), rows[1:5])
    assert not rows[[0, 5]].any()


def test_one_name_narrows_the_search() -> None:
    stem = adapt(Odd(), 8, table="decoy").stem
    assert "among model.decoy there is no position table" in str(stem)
    assert require_stem(adapt(Odd(), 8, weight="into")).table == "model.places"


class Nothing(nn.Module):
    """Sees no pixel by a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x.flatten(1)[:, :5]


def test_reasons() -> None:
    assert "no layer was found" in str(adapt(Nothing(), 8).stem)
    frozen: Any = Odd()
    frozen.places.requires_grad_(False)
    assert "no position table" in str(adapt(frozen, 8).stem)
    assert "is frozen" in str(adapt(frozen, 8, table="places").stem)


def test_finding_touches_nothing() -> None:
    module = Odd()
    module.out.weight.requires_grad_(False)
    before = {name: (p.clone(), p.requires_grad) for name, p in module.named_parameters()}
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    adapt(module, 8)
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, p in module.named_parameters():
        assert p.grad is None and torch.equal(p, before[name][0]) and p.requires_grad is before[name][1]
