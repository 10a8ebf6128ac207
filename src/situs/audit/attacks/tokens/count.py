"""How far linear equations go: ranks of the first block's gradients and the dimensions that they leave open.

N patches and p prefix tokens an image, B images, n = B (N + p) tokens, D channels, K values a patch. A token at place i
is E x + base_i with x in the span S_x of the patches, k = min(K, BN) wide. All ranks follow from those numbers and from
r_PE, the rank of the base vectors modulo E S_x: in float32 they cannot be read off the gradients, whose weakest
directions drown in rounding.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from situs.audit.attacks.patchembed.equations import svd
from situs.audit.attacks.spans import Norm
from situs.audit.attacks.tokens.block import Block


class Counts(NamedTuple):
    """Ranks by layer (x: the patch embedding's), r_PE as `table`, and the numbers of open directions.

    informs: whether the span of queries, keys and values is there and says more than the weights do. second: whether
    those of the attention's last and the MLP's first layer are there. structural: combinations of
    tokens whose places add up to one place pass every linear test. general: unknowns beyond the equations. work:
    products of one step of a search at all places. times: as in `count`.
    """

    x: int
    qkv: int
    proj: int
    fc1: int
    fc2: int
    table: int
    informs: bool
    second: bool
    full: str
    structural: int
    general: int
    work: float
    times: int = 1

    @property
    def open(self) -> int:
        """f, the predicted dimension of what each place leaves open."""
        return max(self.structural, self.general, 0)

    @property
    def reason(self) -> str:
        """Why so many directions are open: one sentence; "" where none are."""
        if not self.open:
            return ""
        if self.structural >= self.general:
            return (
                f"{self.open} directions of each token are open to linear equations: the positions span "
                f"{self.table} directions beside the pixels, and sums of other tokens at the same place pass as one"
            )
        return f"{self.open} directions of each token are open: there are so many more unknowns than linear equations"


def count(block: Block, batch: int, sent: Collection[str] | None = None, times: int = 1) -> Counts:
    """The ranks and open directions of a batch. sent: names of the gradients that are; None for all.

    times: weights that the gradients were taken at, one after the other (local steps): a layer's inputs differ between
    them, and so do all of their places, so that no sum of others passes for a token. The patches stay the same.
    """
    layers = block.layers
    patches_sent = sent is None or block.stem.weight in sent
    first_sent = sent is None or all(name in sent for name in layers.qkv)
    second = sent is None or all(name in sent for name in (layers.proj, *layers.fc1))
    places, prefix = block.places, len(block.prefix)
    dim, values = block.weight.shape
    width, hidden = block.into.shape[0], block.late(block.base[:1]).shape[-1]
    tokens = batch * (places + prefix)
    k = min(values, batch * places) if patches_sent else min(values, dim)
    table = table_rank(block, k)
    scaled = block.norm0 is not None  # one more unknown, and its bias one more direction
    added = scaled and block.norm0 is not None and block.norm0.biased
    distinct = times * (batch * places + prefix)
    weights_alone = times * (k + table + prefix + block.norm1.biased + added)
    bound, fed = _space(block.norm1, dim), times * tokens
    qkv = min(distinct, weights_alone, bound)
    proj, fc1, fc2 = min(fed, width), min(fed, _space(block.norm2, dim)), min(fed, hidden)
    informs = first_sent and qkv < min(weights_alone, bound)
    first = _equations(block.norm1, dim, qkv) if informs else 0
    general = k + scaled - first + (proj - _equations(block.norm2, dim, fc1) if second else 0)
    full = f"{fed} tokens are not fewer than {dim} channels, so that every input fits" if fed >= dim else ""
    if not full and not patches_sent and values >= dim:
        full = (
            f"the gradient of {block.stem.weight} is not sent, and {values} values a patch are not fewer than {dim} "
            f"channels: every token then fits every place, and {values - dim} directions of its pixels are in none"
        )
    ranks = (k, qkv, proj, fc1, fc2, table)
    structural = tokens - table - prefix
    free = max(structural, general, 0)
    work = float(places * free * hidden * (4 * fc2 + free))
    return Counts(*ranks, informs, second, full, structural, general, work, times)


def table_rank(block: Block, k: int, rows: Tensor | None = None) -> int:
    """r_PE: the rank of the base vectors, or of some of them [·, D], modulo what k directions of patches make."""
    dim, values = block.weight.shape
    whole = block.enter(block.base)
    rows = whole if rows is None else block.enter(rows)
    if k == values:
        inside = svd(block.enter(block.weight.T).T)[0]
        rows = rows - (rows @ inside) @ inside.T
    return min(_rank(rows, whole), dim - k if dim > k else 0)


def _rank(rows: Tensor, whole: Tensor) -> int:
    values = svd(rows)[1]
    size = float(torch.linalg.matrix_norm(whole, 2))
    return int((values > 1e-6 * size).sum())


def _space(norm: Norm, dim: int) -> int:
    """The dimension of what the norm can give."""
    return dim - norm.centred + (norm.centred and norm.biased)


def _equations(norm: Norm, dim: int, rank: int) -> int:
    """Equations on a token that the span behind a norm gives, less the unknown scale."""
    return max(dim - rank - (norm.centred or norm.biased), 0)
