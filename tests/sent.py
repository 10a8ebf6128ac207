"""What a server of split learning is sent, made so that the truth is known: pictures, streams, a small model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from builders import small_vit
from torch import Tensor

from situs.audit.split.attackers import SplitFinding
from situs.audit.split.result import SettingResult, SplitAudit, exposures_of
from situs.audit.split.stage import Kept, Stage, View, counted_words, send
from situs.backbones import Backbone
from situs.findings import Remark
from situs.locks.veil import Veil, parse_veil
from situs.models import open_model

CLASSES = 4


def pictures(count: int, side: int = 16, seed: int = 0) -> Tensor:
    """[n, 3, side, side] float64 in [0, 1]: slow waves, so that pictures go on from patch to patch."""
    chance = torch.Generator().manual_seed(seed)

    def drawn(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, 3, 4, 1, 1, generator=chance, dtype=torch.float64)

    y, x = torch.meshgrid(*[torch.linspace(0, 1, side, dtype=torch.float64)] * 2, indexing="ij")
    waves = torch.cos(drawn(-5, 5) * x + drawn(-5, 5) * y + drawn(0, 2 * math.pi)) * drawn(0, 1)
    return (0.5 + waves.sum(dim=2) / 8).clamp(0, 1)


class Streams(NamedTuple):
    """z: [n, 1 + N, D], one fixed row, then content and a vector of the place. fixed: [1, D]. places: [N, D]."""

    z: Tensor
    fixed: Tensor
    places: Tensor


def streams_of(count: int, grid: int = 4, width: int = 24, rank: int = 6, seed: int = 0, sample: int = 0) -> Streams:
    """Content of few directions that goes on over the grid, slow position vectors. sample: other images, one model."""
    model, chance = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(1000 + sample)

    def normal(generator: torch.Generator, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    basis, offset = normal(model, rank, width) * (1 + torch.rand(rank, 1, generator=model)), normal(model, width)
    fixed = 2 * normal(model, 1, width)
    axis = torch.linspace(0, 1, grid, dtype=torch.float64)
    y, x = (each.flatten() for each in torch.meshgrid(axis, axis, indexing="ij"))
    slow = torch.stack([x, y, x * y, x * x - y * y, torch.sin(3 * x), torch.sin(3 * y)], dim=1)  # [N, 6]
    places = slow @ normal(model, slow.shape[1], width)
    weights = normal(chance, count, rank, slow.shape[1])
    content = torch.einsum("nrk,pk->npr", weights, slow - slow.mean(dim=0)) + normal(chance, count, 1, rank)
    tokens = (content + 0.3 * normal(chance, count, len(x), rank)) @ basis + offset + places
    return Streams(torch.cat([fixed.expand(count, 1, width), tokens], dim=1), fixed, places)


def sent(z: Tensor, defence: str = "none", *permute: str, number: int = 0, scale: float = 1.0, prefix: int = 1) -> View:
    """Streams on a square grid as a client sends them."""
    side = math.isqrt(z.shape[1] - prefix)
    return send(
        z, parse_veil(defence, permute), counted_words(5, number), prefix=prefix, grid=(side, side), scale=scale
    )


def classifier(**fields: object) -> Backbone:
    """A ViT in float64 with four classes, 4 × 4 places of 4 × 4 pixels."""
    torch.manual_seed(0)
    shape = {"num_classes": CLASSES, **fields}
    backbone = small_vit(16, width=24, heads=3, model_args=shape).double().eval()
    with torch.no_grad():
        backbone.model.pos_embed.normal_(std=0.3)
        backbone.model.head.weight.normal_(std=0.5)
    return backbone


def stage(private: int = 6, public: int = 60, old: Backbone | None = None, **fields: object) -> Stage:
    """Slow waves before a classifier, labelled by turns."""
    model = open_model(classifier(**fields).model, img_size=16)
    inputs = torch.cat([pictures(public, seed=1), pictures(private, seed=2)]) * 2 - 1
    half = torch.full((3,), 0.5)
    labels = torch.arange(public + private) % CLASSES
    base = None if old is None else open_model(old.model, img_size=16)
    for each in (model, base):
        if each is not None:
            each.backbone.double()
    return Stage(model, inputs, public, half, half, old=base, labels=labels)


def tried(attack: str = "order", **figures: float) -> SplitFinding:
    """An attacker that came to these figures."""
    return SplitFinding(attack, "", figures={name.replace("_", " "): value for name, value in figures.items()})


def not_tried(attack: str, reason: str) -> SplitFinding:
    return SplitFinding(attack, "", "refused", remarks=[Remark("refused", reason)])


def setting(veil: Veil, kept: Kept, *findings: SplitFinding) -> SettingResult:
    """What was found under a veil."""
    return SettingResult(veil, kept, tuple(replace(each, veil=veil, defence=str(veil)) for each in findings))


def split_audit(*settings: SettingResult, samples: int = 3, public: int = 9, **more: Any) -> SplitAudit:
    """An audit of these, beside a guess of 9 dB."""
    blind = {"mean image": {"psnr": 9.0}, **more.pop("blind", {})}
    findings = [
        replace(each, exposures=exposures_of(each.figures, blind, samples)) for one in settings for each in one.findings
    ]
    kept = {str(one.veil): one.kept for one in settings}
    return SplitAudit(findings, more.pop("name", "m"), samples, public, kept, blind, **more)
