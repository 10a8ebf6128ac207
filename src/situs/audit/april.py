"""APRIL's closed form (Lu et al., CVPR 2022, arXiv 2112.14087): tokens from the first attention's own weights.

For a first block that is attention alone, without a norm before it and a residual around it, A = ∂l/∂z = ∂l/∂E_pos and
A^T z = Wq^T ∂Wq + Wk^T ∂Wk + Wv^T ∂Wv. Solve for z, then x = E⁺(z - E_pos - bias). Unique when the tokens are no more
than the channels, and the pixels of a patch no more than the channels. On a standard block (norm first, residual
around) the equation does not hold: the residual of the solve says so, and the verdict repeats it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from situs.audit.attack import Attack, Knowledge, Recovery, stack
from situs.audit.patchembed import solve_pixels
from situs.audit.stem import Stem, find_stem, flat_weight, require_stem, table_rows, to_images
from situs.audit.threat import Gradients
from situs.audit.watch import Watch
from situs.backbones.base import Backbone

CONSISTENT = 1e-3
"""A relative residual below this says that the equations hold; standard blocks leave .1 and more (measured)."""

_FIRST_QKV = re.compile(r"\.(blocks|layers?)\.0\.(.*\.)?(qkv|query|key|value|[qkv]_proj)\.weight$")


class Tokens(NamedTuple):
    """z [B, S, D]: what entered the attention; rank [B], condition [B] and residual [B] of the solve."""

    z: Tensor
    rank: Tensor
    condition: Tensor
    residual: Tensor


def solve_tokens(
    table: Tensor,
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    sent: torch.dtype = torch.float32,
    sigma: float = 0.0,
) -> Tokens:
    """z of A^T z = Σ W^T ∂W. table: A, [B, S, D]. weights: [·, D] each. gradients: [B, ·, D] each."""
    right = sum((w.double().T @ g.double() for w, g in zip(weights, gradients, strict=True)), torch.zeros(()))
    return Tokens(*solve_pixels(right, table, sent, sigma))


class April(Attack):
    """The closed form with the block-0 equation; exact on the paper's variant, honest on all others."""

    name: ClassVar[str] = "april"
    about: ClassVar[str] = "APRIL: tokens from the gradients of the first attention, pixels by a pseudo-inverse"
    closed_form: ClassVar[bool] = True

    def applies(self, backbone: Backbone) -> str | None:
        stem = find_stem(backbone)
        if isinstance(stem, str):
            return stem
        if not _first_attention(backbone):
            return "its first block has no query, key and value weights by a name this attack knows"
        if stem.first != backbone.num_prefix:
            return "some of its prefix tokens (registers) have no row in the table, so A lacks their rows"
        return None

    def reads(self, backbone: Backbone) -> tuple[str, ...]:
        return require_stem(backbone).table, *_first_attention(backbone)

    def caveat(self, backbone: Backbone, batch: int) -> str | None:
        if batch > 1:
            return f"a batch of {batch}: the rows of ∂l/∂E_pos are sums over the images"
        tokens = backbone.num_tokens + backbone.num_prefix
        if tokens > backbone.dim:
            return f"{tokens} tokens are more than {backbone.dim} channels: the tokens are not unique"
        if backbone.patch_values > backbone.dim:
            return f"a patch has {backbone.patch_values} pixels and a token {backbone.dim} channels: E⁺ loses the rest"
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
        own = {name: p.detach() for name, p in backbone.named_parameters()}
        names = _first_attention(backbone)
        rows = [{stem.table: table_rows(upload[stem.table], stem, prefix=True)} for upload in uploads]
        table = stack(rows, stem.table)
        sent, sigma = uploads[0][stem.table].dtype, known.defence.noise_level(known.batch)
        found = solve_tokens(table, [own[n] for n in names], [stack(uploads, n) for n in names], sent, sigma)
        images = to_images(_pixels(found.z[:, stem.first :], own, stem), backbone, stem)
        facts = [_facts(*each, unknowns=table.shape[1]) for each in zip(*found[1:], strict=True)]
        return Recovery(images.float(), list(facts))


def _pixels(z: Tensor, own: dict[str, Tensor], stem: Stem) -> Tensor:
    """x = E⁺(z - E_pos - bias): tokens [B, N, D] -> patches [B, N, K]."""
    tokens = z - table_rows(own[stem.table], stem).double()
    if stem.bias is not None:
        tokens = tokens - own[stem.bias].double()
    return tokens @ torch.linalg.pinv(flat_weight(own[stem.weight], stem).double()).T


def _facts(rank: Tensor, condition: Tensor, residual: Tensor, unknowns: int) -> dict[str, float | int | str | None]:
    if int(rank) < unknowns:
        said = "not unique: there are more tokens than independent equations"
    elif float(residual) < CONSISTENT:
        said = "exact: the block-0 equation holds"
    else:
        said = "not exact: the norm and the residual of block 0 break the equation"
    size = float(condition) if condition.isfinite() else None
    return {
        "rank": int(rank),
        "unknowns": unknowns,
        "condition": size,
        "residual": float(residual),
        "verdict": said,
    }


def _first_attention(backbone: Backbone) -> tuple[str, ...]:
    """The weights that make queries, keys and values in block 0: one fused, or three."""
    found = [name for name, _ in backbone.named_parameters() if _FIRST_QKV.search(name)]
    return tuple(found) if len(found) in (1, 3) else ()
