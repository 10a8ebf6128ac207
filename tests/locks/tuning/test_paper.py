"""The paper's rule for column keys: wrong for an arbitrary key, right for the few of the published code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from zoo import inputs, make

from situs.backbones import create_backbone
from situs.errors import SitusError
from situs.locks.equivariance.experiment import Experiment
from situs.locks.equivariance.sample import sample_of
from situs.locks.tuning.paper import measure_rule, official_bits, official_key, paper_rule
from situs.models.inference import evaluating

EXACT = 1e-10


def random(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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


def test_both_keys_of_the_paper_are_measured() -> None:
    anyone, published = measure_rule(make("vit"))
    assert (anyone.holds, published.holds) == (False, True)
    assert anyone.error > 1e-3 and published.error < EXACT and "2^" in published.why
    assert "RoPE" in measure_rule(make("eva"))[1].why
    assert measure_rule(make("swin")) == []


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


@pytest.mark.shared_data
@pytest.mark.slow
def test_the_rule_on_a_pretrained_vit(shared_data: Path) -> None:
    weights = shared_data / "weights" / "vit_small_patch14_dinov2_fp16.safetensors"
    backbone = create_backbone("vit_small_patch14_dinov2", img_size=56, weights=str(weights))
    anyone, published = measure_rule(backbone, tokens=6)
    assert anyone.error > 0.05 and published.holds
