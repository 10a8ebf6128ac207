"""A user's own module: closed forms where its stem is what the names say, matching always, reasons and mistakes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from outcomes import reason
from torch import Tensor, nn
from transformers.utils import ModelOutput

from situs.audit import Knowledge, MaskedJigsaw, Matching, MatchingConfig, NoPositionGradient, PatchEmbedding, adapt
from situs.audit.adapter import grid_of
from situs.audit.cases import TestSet
from situs.audit.client import victim_gradients
from situs.audit.deadline import Deadline
from situs.audit.defences import NoDefence
from situs.audit.gradients import attack_gradients
from situs.audit.stem import require_stem, table_rows
from situs.errors import SitusError


class Own(nn.Module):
    """A small transformer with nothing of ours or timm's. flat: a matrix over patches; planes: channel by channel."""

    def __init__(self, kind: str = "convolution", norm: bool = False, chans: int = 3) -> None:
        super().__init__()
        self.kind, self.side = kind, 4
        values = self.side * self.side * chans
        self.patches = nn.Conv2d(chans, 24, 4, 4) if kind == "convolution" else nn.Linear(values, 24)
        self.norm = nn.LayerNorm(24) if norm else nn.Identity()
        self.cls, self.places = nn.Parameter(torch.randn(1, 1, 24)), nn.Parameter(torch.randn(1, 5, 24))
        self.block = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.0, batch_first=True, activation="gelu")
        self.out = nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "convolution":
            tokens = self.patches(x).flatten(2).transpose(1, 2)
        else:
            cells = x.unfold(2, 4, 4).unfold(3, 4, 4)  # [B, C, h, w, 4, 4]
            order = (0, 2, 3, 4, 5, 1) if self.kind == "pixels" else (0, 2, 3, 1, 4, 5)
            tokens = self.patches(cells.permute(order).flatten(3).flatten(1, 2))
        tokens = torch.cat([self.cls.expand(len(x), -1, -1), self.norm(tokens)], dim=1) + self.places
        return self.out(self.block(tokens)[:, 0])


def module(*args: Any, **fields: Any) -> Own:
    torch.manual_seed(0)
    return Own(*args, **fields)


NO_TABLE = "a position table that is simply added"
"""Why a model has no stem whose position table is simply added."""

X = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["convolution", "pixels", "planes"])
def test_named_stems_leak_every_pixel(kind: str) -> None:
    backbone = adapt(module(kind), 8, weight="patches.weight", table="places")
    stem = require_stem(backbone)
    assert (stem.weight, stem.bias, stem.table) == ("model.patches.weight", "model.patches.bias", "model.places")
    assert (stem.first, stem.count, stem.layout) == (1, 4, "unfolded" if kind == "convolution" else "matrix")
    assert (backbone.grid, backbone.dim, backbone.num_prefix, backbone.input.patch) == ((2, 2), 24, 1, (4, 4))
    assert require_stem(adapt(module(kind), 8)) == stem  # nobody need name them
    upload = victim_gradients(backbone, X, torch.tensor([2]))
    found = PatchEmbedding().recover(backbone, [upload], Knowledge(), Deadline())
    assert found.facts[0]["fits"] is True
    assert float((found.images - X).norm() / X.norm()) < 1e-2


def test_overlapping_patches_have_neither_a_grid_nor_a_size() -> None:
    own = module()
    own.patches, own.places = nn.Conv2d(3, 24, 4, 2), nn.Parameter(torch.randn(1, 10, 24))
    backbone = adapt(own, 8)
    assert require_stem(backbone).count == 9
    assert (backbone.grid, backbone.input.patch) == ((0, 0), None)


def test_gradients_are_those_of_the_module_itself() -> None:
    own = module()
    upload = victim_gradients(adapt(own, 8), X, torch.tensor([2]))
    nn.functional.cross_entropy(own(X), torch.tensor([2])).backward()
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(upload[f"model.{name}"], parameter.grad, rtol=1e-4, atol=1e-6)


def test_matching_needs_no_names() -> None:
    fixed = module(norm=True)
    backbone = adapt(fixed, 8)
    assert NO_TABLE in str(reason(PatchEmbedding(), backbone))
    upload = victim_gradients(backbone, X, torch.tensor([2]))
    found = Matching(MatchingConfig(iterations=3)).recover(backbone, [upload], Knowledge(), Deadline())
    assert found.images.shape == X.shape
    assert found.labels is not None and found.labels.tolist() == [[2]]


class Fork(Own):
    """Which way it goes depends on the pixels: nothing that can be mapped over searches."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if float(x.detach().mean()) > -100 else -x)


def test_what_cannot_be_mapped_is_searched_in_turn() -> None:
    torch.manual_seed(0)
    mapped, forked = adapt(module(), 8), adapt(Fork(), 8)
    forked.load_state_dict(mapped.state_dict())
    sent = [victim_gradients(mapped, X * size, torch.tensor([2])) for size in (1.0, 0.5)]
    search = MatchingConfig(iterations=2, signed=False)
    one, other = (Matching(search).recover(each, sent, Knowledge(), Deadline()) for each in (mapped, forked))
    assert float((one.images - other.images).abs().median()) < 1e-4


def test_names_are_measured_and_not_believed() -> None:
    hidden = adapt(module(norm=True), 8, weight="patches.weight", table="places")
    assert "not simply added to the output of a linear patch embedding" in str(reason(PatchEmbedding(), hidden))
    other = adapt(module(), 8, weight="out.weight", table="places")
    assert "model.places is not simply added" in str(reason(PatchEmbedding(), other))
    frozen = module()
    frozen.places.requires_grad_(False)
    assert "model.places is frozen" in str(
        reason(PatchEmbedding(), adapt(frozen, 8, weight="patches.weight", table="places"))
    )


@pytest.mark.parametrize("scale", [1e-8, 1e8])
def test_how_large_the_gradients_are_tells_nothing_of_a_stem(scale: float) -> None:
    """A head whose logits are tiny or huge: what is equal is so in proportion."""
    behind, normed = module(), module(norm=True)
    for each in (behind, normed):
        each.out.weight.data.mul_(scale)
    assert require_stem(adapt(behind, 8)) == require_stem(adapt(module(), 8))
    assert NO_TABLE in str(reason(PatchEmbedding(), adapt(normed, 8)))


def test_an_audit_of_it_with_the_defences() -> None:
    backbone = adapt(module(), 8, weight="patches.weight", table="places")
    found = attack_gradients(
        backbone,
        TestSet(X.clamp(-1, 1), torch.tensor([2]), ((0.5,) * 3, (0.5,) * 3)),
        [PatchEmbedding()],
        [NoDefence(), NoPositionGradient(), MaskedJigsaw()],
    )
    plain, withheld, jigsaw = found.pairs
    assert plain.exact == 1
    assert "model.places is not sent" in str(withheld.why("refused"))
    assert "runs only as a whole" in str(jigsaw.why("refused"))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"weight": "patches.weight", "table": "place"}, "table=place"),
        ({"weight": "patch.weight", "table": "places"}, "weight=patch.weight"),
        ({"img_size": 12}, "does not take images"),
        ({"in_chans": 1}, "does not take images"),
    ],
)
def test_mistakes(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(SitusError, match=said):
        adapt(module(), **{"img_size": 8, **fields})


def test_what_gives_no_logits_is_refused() -> None:
    with pytest.raises(SitusError, match=r"logits of shape \[1, classes\]"):
        adapt(nn.Conv2d(3, 4, 3), 8)
    with pytest.raises(SitusError, match="runs only as a whole"):
        adapt(module(), 8).embed(X)


class Wrapped(nn.Module):
    """Another module behind a function of it and of the image."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.inner, self.given = module(), forward

    def forward(self, x: Tensor) -> Any:
        return self.given(self.inner, x)


def test_logits_are_taken_out_of_a_dictionary_as_transformers_gives_it() -> None:
    backbone = adapt(Wrapped(lambda inner, x: ModelOutput(hidden_states=x, logits=inner(x))), 8)
    assert torch.equal(backbone(X), backbone.model.inner(X))
    sent = victim_gradients(backbone, X, torch.tensor([3]))
    assert (PatchEmbedding().recover(backbone, [sent], Knowledge(), Deadline()).images - X).norm() < 1e-3 * X.norm()


def test_a_module_that_writes_into_its_input_changes_no_image() -> None:
    """Else the audit would hold what came back against what the module made of the image."""
    backbone, x = adapt(Wrapped(lambda inner, x: inner(x.mul_(0.25))), 8), X.clone()
    sent = victim_gradients(backbone, x, torch.tensor([3]))
    assert torch.equal(x, X)
    assert (PatchEmbedding().recover(backbone, [sent], Knowledge(), Deadline()).images - X).norm() < 1e-3 * X.norm()


def test_logits_without_a_gradient_are_refused() -> None:
    with pytest.raises(SitusError, match=r"^MODEL .*the logits do not depend on the parameters"):
        adapt(Wrapped(lambda inner, x: inner(x).detach()), 8)


def test_half_precision_is_stepped_in_float32_and_the_module_stays_as_it_was() -> None:
    own = module()
    half = module().bfloat16()
    backbone = adapt(half, 8)
    assert backbone.original_dtype == "bfloat16" and adapt(own, 8).original_dtype is None
    assert next(half.parameters()).dtype == torch.bfloat16
    upload = victim_gradients(backbone, X, torch.tensor([2]))
    found = PatchEmbedding().recover(backbone, [upload], Knowledge(), Deadline())
    assert found.facts[0]["fits"] is True
    assert float((found.images - X).norm() / X.norm()) < 1e-2
    own.load_state_dict(half.state_dict())
    nn.functional.cross_entropy(own(X), torch.tensor([2])).backward()
    torch.testing.assert_close(upload["model.places"], own.places.grad, rtol=1e-4, atol=1e-6)


def test_without_parameters_there_is_no_gradient() -> None:
    with pytest.raises(SitusError, match="Flatten has no parameters"):
        adapt(nn.Flatten(), 8)
    with pytest.raises(SitusError, match="Linear has no parameters to train"):
        adapt(nn.Linear(8, 2).requires_grad_(False), 8)


class Asking(Own):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x * mask)


def test_a_module_that_takes_more_than_images_is_refused() -> None:
    with pytest.raises(SitusError, match=r"TypeError.*'mask'"):
        adapt(Asking(), 8)


def test_a_table_is_withheld_whether_or_not_a_stem_is_found() -> None:
    hidden = adapt(module(norm=True), 8, table="places")
    assert isinstance(hidden.stem, str)
    sent = victim_gradients(hidden, X, torch.tensor([2]), defence=NoPositionGradient())
    assert "model.places" not in sent and "model.cls" in sent
    unknown = adapt(module(norm=True), 8)
    assert "nothing is withheld" in str(NoPositionGradient().refuses(unknown))
    torch.manual_seed(0)
    plain = adapt(nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.GELU(), nn.Linear(32, 6)), 8)
    assert "nothing is withheld" in str(NoPositionGradient().refuses(plain))  # a bias is no table


# --- the search -----------------------------------------------------------------------------------------------------


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
    assert "for model.decoy" in str(stem)
    assert require_stem(adapt(Odd(), 8, weight="into")).table == "model.places"


class Nothing(nn.Module):
    """Sees no pixel by a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x.flatten(1)[:, :5]


def test_reasons() -> None:
    assert "no layer with a weight" in str(adapt(Nothing(), 8).stem)
    frozen: Any = Odd()
    frozen.places.requires_grad_(False)
    assert NO_TABLE in str(adapt(frozen, 8).stem)
    assert "is frozen" in str(adapt(frozen, 8, table="places").stem)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"weight": "patches.weight"}, "; no such table was found for the patch embedding model.patches.weight"),
        ({"table": "places"}, "; no such patch embedding was found for model.places"),
        ({}, "; no such pair was found"),
        ({"weight": "patches.weight", "table": "places"}, "model.places is not simply added to the output of a linear"),
    ],
)
def test_the_reason_names_what_was_looked_for(named: dict[str, str], said: str) -> None:
    assert said in str(adapt(module(norm=True), 8, **named).stem)


@pytest.mark.parametrize(
    ("count", "size", "grid"),
    [
        (4, (8, 8), (2, 2)),
        (8, (8, 16), (2, 4)),
        (8, (16, 8), (4, 2)),
        (12, (24, 8), (6, 2)),
        (1, (5, 7), (1, 1)),
        (5, (5, 7), (5, 1)),
        (7, (5, 7), (1, 7)),
        (3, (8, 8), (0, 0)),
        (16, (12, 8), (4, 4)),
    ],
)
def test_patches_stand_in_the_even_grid_that_makes_them_most_square(
    count: int, size: tuple[int, int], grid: tuple[int, int]
) -> None:
    assert grid_of(count, size) == grid


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
