"""APRIL's closed form (Lu et al., CVPR 2022, arXiv 2112.14087): tokens from the first attention's own weights.

For a first block that is attention alone, without a norm before it and a residual around it, A = ∂l/∂z = ∂l/∂E_pos and
A^T z = Wq^T ∂Wq + Wk^T ∂Wk + Wv^T ∂Wv. Solve for z, then x = E⁺(z - E_pos - bias). Unique when the tokens are no more
than the channels, and the pixels of a patch no more than the channels. On a standard block (norm first, residual
around) the equation does not hold: the residual of the solve says so, and the verdict repeats it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from situs.audit.attacks.base import FAILED, Attack, Fact, Knowledge, Ready, Recovery, Refused, absent, stack
from situs.audit.attacks.patchembed.attack import facts_of, see_through
from situs.audit.attacks.patchembed.equations import Solution, solve_pixels
from situs.audit.client import victim_gradients
from situs.audit.deadline import Deadline
from situs.audit.defences import Gradients, Step
from situs.audit.stem import Stem, find_stem, flat_weight, noise_for, require_stem, table_rows
from situs.backbones.base import Backbone


def solve_tokens(
    table: Tensor,
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    sent: torch.dtype = torch.float32,
    sigma: float = 0.0,
) -> Solution:
    """z [B, S, D] of A^T z = Σ W^T ∂W. table: A, [B, S, D]. weights: [·, D] each. gradients: [B, ·, D] each.

    Channels of z with a number that is not finite in any ∂W have no equations: they come out as 0.
    """
    pairs = [(w.double(), g.double()) for w, g in zip(weights, gradients, strict=True)]
    right = sum((w.T @ g for w, g in pairs), torch.zeros(()))
    # Rounding and noise on each ∂W come through its W.
    step = torch.finfo(sent).eps / 2
    errs = [(step**2 * g.square().nanmean(dim=-1) + sigma**2) @ w.square() for w, g in pairs]
    return solve_pixels(right.nan_to_num(0.0), table, sent, sigma, torch.stack(errs).sum(dim=0))


def _caveat(backbone: Backbone, batch: int) -> str | None:
    if batch > 1:
        return f"a batch of {batch}: the rows of ∂l/∂E_pos are sums over the images"
    tokens = backbone.num_tokens + backbone.num_prefix
    if tokens > backbone.dim:
        return f"{tokens} tokens are more than {backbone.dim} channels: the tokens are not unique"
    if backbone.patch_values > backbone.dim:
        return f"a patch has {backbone.patch_values} pixels and a token {backbone.dim} channels: E⁺ loses the rest"
    return None


class April(Attack):
    """The closed form with the block-0 equation; exact on the paper's variant, honest on all others."""

    paper: ClassVar[str] = "APRIL (Lu et al., CVPR 2022)"
    difference: ClassVar[str] = "says by its residual where the model's first block breaks the equation"
    name: ClassVar[str] = "april"
    closed_form: ClassVar[bool] = True
    about: ClassVar[str] = "APRIL: tokens from the gradients of the first attention, pixels by a pseudo-inverse"

    def prepare(self, backbone: Backbone, sent: Collection[str], known: Knowledge) -> Ready | Refused:
        stem = find_stem(backbone)
        if isinstance(stem, str):
            return Refused(stem)
        if not _first_attention(backbone):
            return Refused("its first block has no query, key and value weights by a name this attack knows")
        if stem.first != backbone.num_prefix:
            return Refused("some of its prefix tokens (registers) have no row in the table, so A lacks their rows")
        reads = (stem.table, *_first_attention(backbone))
        return absent(sent, reads) or Ready(reads, _caveat(backbone, known.step.batch))

    def recover(
        self,
        backbone: Backbone,
        uploads: Sequence[Gradients],
        known: Knowledge | None = None,
        deadline: Deadline | None = None,  # noqa: ARG002  (one solve, no time to stop in)
    ) -> Recovery:
        known = Knowledge() if known is None else known
        stem = require_stem(backbone)
        own = {name: p.detach() for name, p in backbone.named_parameters()}
        names = _first_attention(backbone)
        rows = [{stem.table: table_rows(upload[stem.table], stem, prefix=True)} for upload in uploads]
        table, gradients = stack(rows, stem.table), [stack(uploads, name) for name in names]
        sent, sigma = known.type_of(uploads[0][stem.table]), known.noise_on(uploads[0][stem.table])
        found = solve_tokens(table, [own[name] for name in names], gradients, sent, sigma)
        there = torch.stack([g.isfinite().all(dim=-2) for g in gradients]).all(dim=0)
        tokens = found.patches[:, stem.first :]
        patches = torch.stack([_pixels(z, own, stem, kept) for z, kept in zip(tokens, there, strict=True)])
        right = known.step.batch == 1 and _holds(backbone)
        facts = [_told(facts_of(found, index, table.shape[1]), right) for index in range(len(uploads))]
        return Recovery(see_through(patches, backbone, stem, known, facts).float(), facts)


def _pixels(z: Tensor, own: dict[str, Tensor], stem: Stem, kept: Tensor) -> Tensor:
    """x = E⁺(z - E_pos - bias) by the channels that were solved for, kept [D]: tokens [N, D] -> patches [N, K]."""
    tokens = z - table_rows(own[stem.table], stem).double()
    if stem.bias is not None:
        tokens = tokens - own[stem.bias].double()
    return tokens[:, kept] @ torch.linalg.pinv(flat_weight(own[stem.weight], stem).double()[kept]).T


def _holds(backbone: Backbone) -> bool:
    """Whether the block-0 equation is one of this model: it is tried on noise, where nothing hides a misfit."""
    like = next(backbone.parameters())
    stem, names = require_stem(backbone), _first_attention(backbone)
    assert backbone.input.shape is not None
    images = noise_for(backbone, 1, backbone.input.channels, *backbone.input.shape)
    labels = torch.zeros(1, dtype=torch.int64, device=like.device)
    tried = victim_gradients(backbone, images, labels, step=Step(dtype=like.dtype))
    own = dict(backbone.named_parameters())
    table = table_rows(tried[stem.table], stem, prefix=True)[None]
    found = solve_tokens(table, [own[n].detach() for n in names], [tried[n][None] for n in names], like.dtype)
    return bool(found.fits)


def _told(fact: dict[str, Fact], right: bool) -> dict[str, Fact]:
    """The facts with their verdict. right: whether the equation is the model's at all, so that noise cannot hide it."""
    fact["fits"] = right and bool(fact["fits"])
    if not right:
        fact["verdict"] = "not exact: the norm and the residual of block 0 break the equation"
    elif not fact["fits"]:
        fact["verdict"] = FAILED
    elif fact["rank"] != fact["unknowns"]:
        fact["verdict"] = "not unique: there are more tokens than independent equations"
    else:
        fact["verdict"] = "exact: the block-0 equation holds"
    return fact


def _first_attention(backbone: Backbone) -> tuple[str, ...]:
    """The weights that make queries, keys and values in block 0: one fused, or three."""
    found = [name for name, role in backbone.roles().items() if role == ("qkv", 1) and name.endswith("weight")]
    return tuple(found) if len(found) in (1, 3) else ()
