"""The paper's own rule for column keys (Eq. 6), and the restricted keys for which it is right.

Eq. 6 permutes q, k and v on both sides with one key of all D channels. Between q and k stand the heads: a key that
carries channels from one head to another changes every head's products, so the rule is wrong for multi-head attention
under an arbitrary key (SPEC §6). The published code draws its keys from a subset, one order of channels shared by all
heads and an order of the heads; those keys it does obey.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lgamma, log

import torch
from torch import Tensor

from situs.backbones.layout import Group, Member
from situs.errors import SitusError
from situs.locks.groups import moving, residual_only


def paper_rule(groups: Sequence[Group]) -> tuple[Group, ...]:
    """The residual group with the attention's inner axes added to it: the two-sided keying of Eq. 6.

    groups: of a model with one residual key, as many key heads as query heads, and no tables of heads.
    """
    residual = residual_only(groups)
    if len(residual) != 1:
        raise SitusError(f"the paper's rule knows one residual key; this model has {len(residual)}")
    width = residual[0].size
    inner: list[Member] = []
    for group in (group for group in groups if group.kind == "heads"):
        for member in group.members:
            if group.size * member.inner != width or member.outer != 1:
                raise SitusError(f"the paper's rule says nothing of {member.tensor}, whose heads are not D wide")
            inner.append(replace(member, inner=1))
    return (replace(residual[0], members=(*residual[0].members, *inner)),)


def official_key(heads: int, width: int, generator: torch.Generator | None = None) -> Tensor:
    """A key [heads * width] as the published code draws it: channels alike in every head, then the order of heads."""
    channels, order = moving(width, generator), moving(heads, generator)
    return (order[:, None] * width + channels).flatten()


def official_bits(heads: int, width: int) -> float:
    """log2 of how many such keys there are: h! d! (2^325 for ViT-B, where all D! are 2^6259)."""
    return (lgamma(heads + 1) + lgamma(width + 1)) / log(2)
