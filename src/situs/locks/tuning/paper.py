"""The paper's own rule for column keys (Eq. 6), and the restricted keys for which it is right.

Eq. 6 permutes q, k and v on both sides with one key of all D channels. Between q and k stand the heads: a key that
carries channels from one head to another changes every head's products, so the rule is wrong for multi-head attention
under an arbitrary key (SPEC §6). The published code draws its keys from a subset, one order of channels shared by all
heads and an order of the heads; those keys it does obey. `measure_rule` shows both on a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lgamma, log

import torch
from torch import Tensor

from situs.backbones.base import Backbone
from situs.backbones.layout import Group, Member
from situs.errors import SitusError
from situs.locks.equivariance.experiment import Experiment
from situs.locks.equivariance.findings import TOLERANCES
from situs.locks.equivariance.sample import sample_of
from situs.locks.groups import moving, residual_only
from situs.models.inference import evaluating


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


@dataclass(frozen=True)
class RuleCheck:
    """The paper's rule on one model, in float64. key: how it was drawn. error: relative. why: the reason, in words."""

    key: str
    holds: bool
    error: float
    why: str


def measure_rule(backbone: Backbone, *, tokens: int = 32, seed: int = 0) -> list[RuleCheck]:
    """The rule with an arbitrary key and with one as the published code draws it; none where it says nothing."""
    groups = backbone.groups()
    try:
        rule = paper_rule(groups)
    except SitusError:  # Swin, grouped queries, relative bias
        return []
    generator, limit = torch.Generator().manual_seed(seed), TOLERANCES[torch.float64]
    size, name = rule[0].size, rule[0].name
    heads = next((group.size for group in groups if group.kind == "heads"), 1)
    official = {name: official_key(heads, size // heads, generator)}
    with evaluating(backbone):
        experiment = Experiment(backbone, sample_of(backbone, None, tokens, generator), torch.float64, 1)
        anyone = experiment.column_forward(rule, {name: moving(size, generator)}, rule)
        published = max(experiment.column(rule, official).values())
    why = "right for one head" if anyone <= limit else "such a key carries channels from one head to another"
    found = [RuleCheck("any key", anyone <= limit, anyone, why)]
    rotary = not any(group.kind == "query" for group in groups)
    blame = "RoPE turns the channels that it permutes" if rotary else "it does not move the norms of queries and keys"
    bits = f"its keys are 2^{official_bits(heads, size // heads):.0f} of 2^{official_bits(1, size):.0f}"
    return [
        *found,
        RuleCheck("a key of the published code", published <= limit, published, bits if published <= limit else blame),
    ]
