"""What a guard assumes of an upload, and when re-identified images are more than chance."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from builders import small_vit
from scipy.stats import binom

from situs.audit.attacks import create_attack
from situs.audit.captured import Captured
from situs.audit.deadline import Deadline
from situs.audit.defences import NoDefence, Noise, Step, create_defence
from situs.audit.one_step import Memory, OneStep, Reidentified, assumptions, tail
from situs.audit.oracle import Oracle
from situs.audit.reference import Match
from situs.gate import Limit

UPLOAD = Captured("the step", {"weight": torch.full((2, 3), 6.0), "bias": torch.full((2,), 8.0)}, "gradient")


@pytest.mark.parametrize("hits", range(6))
def test_tail_is_the_share_of_all_throws_with_as_many_hits(hits: int) -> None:
    looks = [Reidentified(0, 2, 0.5), Reidentified(hits, 3, 0.2)]
    chances = [look.chance for look in looks for _ in range(look.count)]
    wanted = 0.0
    for throw in product((0, 1), repeat=len(chances)):
        odds = [p if hit else 1 - p for hit, p in zip(throw, chances, strict=True)]
        wanted += torch.tensor(odds, dtype=torch.float64).prod().item() if sum(throw) >= hits else 0.0
    assert tail(looks) == pytest.approx(wanted)


def test_a_measured_upload_is_one_assumption_in_units_of_the_gradient_and_proves() -> None:
    match = Match({}, factor=2.0, sigma=0.5, quiet=False, resolved=True)
    [one] = assumptions(UPLOAD, match, create_defence("noise=9"), Step(4, local_steps=3))
    assert one.proves and one.defence == Noise(0.25) and one.step == Step(4)
    assert torch.equal(one.upload.gradients["weight"], torch.full((2, 3), 3.0))
    [quiet] = assumptions(UPLOAD, match._replace(quiet=True), create_defence("noise=9"), Step(4))
    assert quiet.defence == NoDefence()


def test_what_was_not_measured_proves_nothing_and_is_tried_as_stated_without_and_with_less_noise() -> None:
    stated = create_defence("no-pe-gradient+noise=3")
    match = Match({}, 1.0, 1.0, False, True, "tensors are scaled by different factors", {"weight": 3.0, "bias": 4.0})
    tried = assumptions(UPLOAD, match, stated, Step(2))
    assert not any(one.proves for one in tried)
    defences = [stated, NoDefence(), Noise(3.0), Noise(1.0), Noise(0.3), Noise(0.1), Noise(0.03)]
    assert [one.defence for one in tried] == defences * 2
    assert torch.equal(tried[0].upload.gradients["bias"], torch.full((2,), 8.0))
    assert torch.equal(tried[-1].upload.gradients["bias"], torch.full((2,), 2.0))  # without its factor
    assert len(assumptions(UPLOAD, None, NoDefence(), Step(2))) == 1


@pytest.mark.parametrize(("images", "batch"), [(4, 2), (3, 3)])
def test_all_images_of_accumulated_batches_are_given(images: int, batch: int) -> None:
    """Three images make no two batches, and this assumption is then refused."""
    first, none = assumptions(UPLOAD, None, create_defence("accumulate=2"), Step(images))
    assert first.step.batch == batch and none.step.batch == images


def test_a_gallery_that_is_too_small_or_that_finds_its_images_is_remarked() -> None:
    memory = Memory()
    assert memory.remarks() == []
    memory.note("patchembed", Reidentified(0, 1, 0.5))
    assert [remark.kind for remark in memory.remarks()] == ["few"]
    for _ in range(20):
        memory.note("patchembed", Reidentified(0, 1, 0.1))
    assert memory.remarks() == []
    for _ in range(12):
        memory.note("patchembed", Reidentified(1, 1, 0.1))
    assert [remark.kind for remark in memory.remarks()] == ["gap"]


@pytest.mark.parametrize("bound", [False, True])
def test_images_found_again_far_more_often_than_by_chance_are_above_whatever_is_limited(bound: bool) -> None:
    """In one look, at a thousandth of the chance that a gate takes; a bound finds nothing itself."""
    torch.manual_seed(0)
    backbone, images, memory = small_vit(8), torch.randn(12, 3, 8, 8), Memory()
    memory.keep(torch.rand(32, 3, 8, 8))
    normalisation = ((0.5,) * 3, (0.5,) * 3)
    reference = memory.reference(images, normalisation, backbone)
    assert len(reference.gallery) == 44
    attack = Oracle() if bound else create_attack("patchembed")
    tried = assumptions(UPLOAD, None, NoDefence(), Step(12))
    limit = Limit("psnr", 20.0)
    given = ({"original": reference}, normalisation, NoDefence(), limit, Deadline(), memory)
    step = OneStep(backbone, [attack], tried, *given)
    [case] = step.parts[0][1]
    found = []
    for hits in range(13):
        scores = {"psnr": [5.0] * 12, "reidentified": [1.0] * hits + [0.0] * (12 - hits)}
        finding = case.finding("done", range(12), scores=scores)
        above = [one for one in step._compared(finding).exposures if one.above]
        rare = not bound and float(binom.sf(hits - 1, 12, 12 / 44)) < 1e-6
        expected = [("reidentified", hits / 12, f"{hits} of 12 among 44")] if rare else []
        assert [(one.metric.name, one.value, one.among) for one in above] == expected
        assert step.enough(finding) is rare
        found += [hits] * rare
    assert bool(found) is not bound
