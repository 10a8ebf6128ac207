"""The patch-embedding attack: the pixels are the solution of one linear system.

A patch embedding E = X W^T + b followed by an added table has ∂l/∂W = G^T X with G = ∂l/∂E, and ∂l/∂E is also the
gradient of the table's patch rows. Both are in the upload, so X is solved for: attention, labels and loss do not
matter. Exact for one image as long as the N patches are no more than the rank of G, at most D. Local steps on one image
sum both sides over the steps and leave the equation as it is. Who knows how images are normalised also knows that a
pixel is one of 256 values: `bytes` ends the error that is left where the equations bear that out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from situs.audit.attack import Attack, Fact, Knowledge, Recovery, stack
from situs.audit.bytes import read_bytes
from situs.audit.stem import find_stem, flat_weight, require_stem, table_rows, to_images
from situs.audit.threat import Gradients, known_gradient
from situs.audit.watch import Watch
from situs.backbones.base import Backbone


class Solution(NamedTuple):
    """patches [B, N, K]; rank [B] and condition [B] (infinite below rank N) of G; residual [B], relative."""

    patches: Tensor
    rank: Tensor
    condition: Tensor
    residual: Tensor


def solve_pixels(weight: Tensor, table: Tensor, sent: torch.dtype = torch.float32, sigma: float = 0.0) -> Solution:
    """X of ∂l/∂W = G^T X in float64, for a batch of systems, by ridge regression on whitened equations.

    weight: ∂l/∂W, [B, D, K]. table: G, [B, N, D]. sent: the type they came in, whose rounding errs in proportion to
    each number; sigma: deviation of noise that was added to each. Equation d then errs with a variance that the
    attacker knows, normalised pixels have a variance near 1, and dividing each equation by its deviation makes the
    ridge 1.
    Directions of G below what noise alone reaches, 1 + √(D/N) after the division, are no part of the rank. Where
    there are more patches than rank, the solution of least norm comes out.
    """
    weight, table = weight.double(), table.double()
    n, d = table.shape[-2:]
    white, right = whiten(weight, table, sent, sigma)
    patches, values = _ridge(white, right)
    rank = (values > (1 + (d / n) ** 0.5) ** 2).sum(dim=-1)
    plain = torch.linalg.eigvalsh(_smaller_square(table))
    condition = torch.where(rank == n, (plain[:, -1] / plain[:, 0].clamp(min=0)).sqrt(), torch.inf)
    left = (table.mT @ patches - weight).flatten(1).norm(dim=1)
    return Solution(patches, rank, condition, left / weight.flatten(1).norm(dim=1).clamp(min=1e-300))


def whiten(
    weight: Tensor, table: Tensor, sent: torch.dtype = torch.float32, sigma: float = 0.0
) -> tuple[Tensor, Tensor]:
    """G [B, N, D] and ∂l/∂W [B, D, K] in float64, each equation divided by its deviation, as in `solve_pixels`."""
    weight, table = weight.double(), table.double()
    step = torch.finfo(sent)
    relative = weight.square().mean(dim=-1) + table.square().sum(dim=-2)
    absolute = sigma**2 + (step.smallest_normal * step.eps) ** 2 / 12  # below its normal numbers a type errs evenly
    variance = (step.eps / 2) ** 2 * relative + (1 + table.shape[-2]) * absolute
    scale = torch.where(variance > 0, variance, torch.inf).rsqrt()
    return table * scale.unsqueeze(-2), weight * scale.unsqueeze(-1)


def _smaller_square(table: Tensor) -> Tensor:
    """G G^T or G^T G, whichever is smaller; table: G, [B, N, D]."""
    return table @ table.mT if table.shape[-2] <= table.shape[-1] else table.mT @ table


def _ridge(table: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """X [B, N, K] of G^T X = right with ridge 1, and the squared singular values of G, [B, min(N, D)].

    By eigenvectors of the smaller square: a device finds those of many images at once, and singular vectors one by one.
    Squares lose half of the digits, which solving twice more for what is left brings back.
    """
    wide = table.shape[-2] <= table.shape[-1]
    square = _smaller_square(table)
    values, vectors = torch.linalg.eigh(square)
    lost = 4 * torch.finfo(values.dtype).eps * values.shape[-1] * values[:, -1:]
    inverse = vectors @ ((values.clamp(min=0) + lost.clamp(min=1)).reciprocal().unsqueeze(-1) * vectors.mT)
    given = table @ right if wide else right
    found = inverse @ given
    for _ in range(2):
        found = found + inverse @ (given - square @ found - found)
    patches = found if wide else table @ found
    return patches, values


def _said(fact: dict[str, Fact], eps: float) -> str | None:
    """Why a solution that ought to be exact may not be: G is singular up to the rounding of what was sent."""
    if fact.get("bytes"):
        return None
    if fact["rank"] != fact["unknowns"]:
        return "for some images rounding and noise leave G fewer directions than there are patches"
    if isinstance(fact["condition"], float) and fact["condition"] * eps > 0.1:
        return (
            f"for some images G is nearly singular (condition above {0.1 / eps:.0e}): weak directions drown in rounding"
        )
    return None


class PatchEmbedding(Attack):
    """∂l/∂W_patch = G^T X, solved for X."""

    name: ClassVar[str] = "patchembed"
    about: ClassVar[str] = "one linear solve with the gradients of the patch embedding and of the position table"
    closed_form: ClassVar[bool] = True

    def applies(self, backbone: Backbone) -> str | None:
        found = find_stem(backbone)
        return found if isinstance(found, str) else None

    def reads(self, backbone: Backbone) -> tuple[str, ...]:
        stem = require_stem(backbone)
        return stem.weight, stem.table

    def caveat(self, backbone: Backbone, batch: int) -> str | None:
        if batch > 1:
            return (
                f"a batch of {batch}: the rows of the table's gradient are sums over the images, and no linear system "
                "takes them apart; the one solution stands for every image of the batch"
            )
        if backbone.num_tokens > backbone.dim:
            return (
                f"{backbone.num_tokens} patches are more than {backbone.dim} channels: the system is under-determined, "
                "and of all its solutions the one of least norm is shown, unless just one consists of bytes"
            )
        return None

    def recover(
        self,
        backbone: Backbone,
        uploads: Sequence[Gradients],
        known: Knowledge | None = None,
        watch: Watch | None = None,  # noqa: ARG002  (one solve, no time to stop in)
    ) -> Recovery:
        known = Knowledge() if known is None else known
        stem = require_stem(backbone)
        table = stack([{stem.table: table_rows(upload[stem.table], stem)} for upload in uploads], stem.table)
        trained = known.trained(backbone)
        for index, upload in enumerate(uploads):
            extra = known_gradient(trained, upload, known.seed, known.epoch)
            if extra is not None:
                table[index] -= extra.double()
        sent = uploads[0][stem.table].dtype
        weight = flat_weight(stack(uploads, stem.weight), stem)
        sigma = known.defence.noise_level(known.batch)
        found = solve_pixels(weight, table, sent, sigma)
        facts: list[dict[str, Fact]] = [
            {
                "rank": int(rank),
                "unknowns": backbone.num_tokens,
                "condition": float(condition) if condition.isfinite() else None,
                "residual": float(residual),
            }
            for rank, condition, residual in zip(found.rank, found.condition, found.residual, strict=True)
        ]
        patches = found.patches
        if known.normalisation is not None and known.batch == 1:
            white, right = whiten(weight, table, sent, sigma)
            patches, read = read_bytes(white, right, patches, found.rank, known.normalisation)
            for fact, share in zip(facts, read.double().mean(dim=1).tolist(), strict=True):
                fact.update(bytes=share == 1, bytes_share=share)
        if self.caveat(backbone, known.batch) is None:
            for fact in facts:
                fact["verdict"] = _said(fact, torch.finfo(sent).eps)
        return Recovery(to_images(patches, backbone, stem).float(), facts)
