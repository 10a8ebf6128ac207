"""The paper's own rule for column keys (Eq. 6): wrong for an arbitrary key, right for the few of the published code.

Eq. 6 permutes q, k and v on both sides with one key of all D channels. Between q and k stand the heads: a key that
carries channels from one head to another changes every head's products. The published code draws its keys from a
subset, one order of channels shared by all heads and an order of the heads; those keys it does obey.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lgamma, log

import pytest
import torch
from torch import Tensor
from zoo import inputs, make

from situs.backbones.layout import Group, Member
from situs.errors import SitusError
from situs.locks.equivariance.experiment import Experiment
from situs.locks.equivariance.sample import sample_of
from situs.locks.groups import non_identity, residual_only
from situs.models.inference import evaluating

EXACT = 1e-10


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
    channels, order = non_identity(width, generator), non_identity(heads, generator)
    return (order[:, None] * width + channels).flatten()


def official_bits(heads: int, width: int) -> float:
    """log2 of how many such keys there are: h! d! (2^325 for ViT-B, where all D! are 2^6259)."""
    return (lgamma(heads + 1) + lgamma(width + 1)) / log(2)


def random(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", ["vit", "deit3", "hf_vit", "bert", "gpt2"])
def test_the_papers_rule_fails_for_an_arbitrary_key_and_holds_for_the_official(name: str) -> None:
    backbone = make(name)
    rule = paper_rule(backbone.groups())
    with evaluating(backbone):
        experiment = Experiment(backbone, sample_of(backbone, inputs(backbone), 32, random()), torch.float64, 1)
        for seed in range(3):
            assert experiment.column(rule, {"residual": torch.randperm(24, generator=random(seed))})["forward"] > 1e-3
            official = experiment.column(rule, {"residual": official_key(3, 8, random(seed))})
            assert max(official.values()) < EXACT


def test_a_key_within_one_head_is_already_too_much_for_the_rule() -> None:
    """Two channels of one head exchanged in that head alone: the rule holds; between two heads: it fails."""
    backbone = make("vit")
    rule = paper_rule(backbone.groups())
    with evaluating(backbone):
        experiment = Experiment(backbone, sample_of(backbone, inputs(backbone), 32, random()), torch.float64, 0)
        within, between = torch.arange(24), torch.arange(24)
        within[[0, 7]] = within[[7, 0]]
        between[[0, 8]] = between[[8, 0]]
        assert experiment.column_forward(rule, {"residual": within}, rule) < EXACT
        assert experiment.column_forward(rule, {"residual": between}, rule) > 1e-4


def test_official_keys_are_few() -> None:
    assert round(official_bits(12, 64)) == 325
    assert round(official_bits(1, 768)) == 6259
    key = official_key(3, 4, random())
    assert sorted(key.tolist()) == list(range(12))
    assert len({tuple((row % 4).tolist()) for row in key.view(3, 4)}) == 1
    assert all(len(set((row // 4).tolist())) == 1 for row in key.view(3, 4))


def test_the_rule_says_nothing_of_other_shapes() -> None:
    for name in ("swin", "llama", "relpos"):
        with pytest.raises(SitusError, match="paper's rule"):
            paper_rule(make(name).groups())


def test_a_key_of_two_heads_of_two_moves_both() -> None:
    for seed in range(20):
        assert official_key(2, 2, random(seed)).tolist() == [3, 2, 1, 0]
