"""Ladders of settings and the tables of what they cost, by laws and by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import small_vit

from situs.audit.cases import TestSet
from situs.audit.client import victim_gradients
from situs.audit.defences import Clip, NoDefence, Noise, Step
from situs.audit.sweep.ladder import (
    A_DECADE,
    STRONG,
    TOKEN_LADDERS,
    WEAK,
    Cost,
    Remedies,
    Remedy,
    Scale,
    Trial,
    _promised,
    by_strength,
    cost_table,
    curve_ladder,
    exposures_by_metric,
    ladders,
    remedy_table,
    scale_of,
    verdict,
)
from situs.backbones.base import Backbone
from situs.errors import SitusError
from situs.gate import Limit
from situs.locks.veil import parse_veil


@pytest.fixture(scope="module")
def victim() -> Backbone:
    torch.manual_seed(0)
    return small_vit(8, depth=2, width=24, heads=2, num_classes=3, patch_size=4).eval()


def images(count: int) -> TestSet:
    pixels = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    pixels *= torch.arange(1, count + 1).view(-1, 1, 1, 1) / count
    return TestSet(pixels, torch.arange(count) % 3, ((0.5,) * 3, (0.5,) * 3))


@pytest.mark.parametrize(("count", "looked_at"), [(1, 1), (2, 2), (3, 3), (4, 4), (9, 4)])
def test_the_size_of_gradients_is_the_middle_ones_of_a_few_images(count: int, looked_at: int, victim: Backbone) -> None:
    """Alone and without what the step does to them."""
    test = images(count)
    norms, numbers = [], 0
    for number in range(looked_at):
        sent = victim_gradients(victim, test.pixels[number : number + 1], test.labels[number : number + 1])
        norms.append(math.sqrt(sum(float(g.double().square().sum()) for g in sent.values())))
        numbers = sum(g.numel() for g in sent.values())
    scale = scale_of(victim, test, Step(2, dtype=torch.int8, local_steps=3))
    assert scale.norm == pytest.approx(sorted(norms)[looked_at // 2])
    assert scale.rms == pytest.approx(scale.norm / numbers**0.5)


def test_a_search_climbs_by_quarters_of_a_decade_of_the_gradients_own_size(victim: Backbone) -> None:
    """DP-SGD's noise on the sum makes the same deviations on a number of the mean."""
    test, batch = images(6), 3
    scale, by = scale_of(victim, test, Step(batch)), ladders(victim, test, Step(batch))
    assert [*by] == ["noise", "clip", "batch", "withhold", "precision"]
    for name in ("noise", "clip"):
        deviations = [rung.defence.noise_level(batch) / scale.rms for rung in by[name]]
        assert deviations[0] == pytest.approx(10.0**WEAK, rel=1e-2)
        assert deviations[-1] == pytest.approx(10.0**STRONG, rel=1e-2) and len(deviations) == 13 * A_DECADE + 1
        ratios = [after / before for before, after in itertools.pairwise(deviations)]
        assert ratios == pytest.approx([10 ** (1 / A_DECADE)] * len(ratios), rel=2e-2)
        assert all(rung.step == Step(batch) and rung.label == rung.defence.label for rung in by[name])
    assert {rung.defence.norm for rung in by["clip"]} == {float(f"{scale.norm:.3g}")}
    assert [(rung.label, rung.step.batch) for rung in by["batch"]] == [("batch 4", 4)]
    sizes = {count: [rung.step.batch for rung in ladders(victim, images(count), Step()).get("batch", [])]
             for count in (1, 4, 7, 8)}  # fmt: skip
    assert sizes == {1: [1], 4: [1, 2, 4], 7: [1, 2, 4], 8: [1, 2, 4, 8]}
    assert "batch" not in ladders(victim, images(3), Step(3))
    withheld = [rung.defence for rung in by["withhold"]]
    assert [type(each).__name__ for each in withheld] == ["NoPositionGradient", "Withhold", "Withhold", "Withhold"]
    assert [each.depth for each in withheld[1:]] == [0, 1, 2]
    assert [(rung.label, rung.defence == NoDefence()) for rung in by["precision"]] == [
        ("fp32", True), ("fp16", False), ("bf16", False), ("int8", False),
    ]  # fmt: skip


def test_settings_of_a_curve_are_in_units_of_the_gradient() -> None:
    scale = Scale(rms=2.345e-4, norm=7.777)
    noise, clip = (curve_ladder(name, scale, Step(2)) for name in ("noise", "clip"))
    assert noise.rungs[0].defence == NoDefence() and noise.rungs[0].label == "0"
    for rung in noise.rungs[1:]:
        assert rung.defence.noise_level(2) == pytest.approx(float(rung.label) * scale.rms, rel=5e-3)
    assert [rung.defence.norm for rung in clip.rungs] == [7.78] * len(clip.rungs)
    assert all(rung.defence.multiplier == float(rung.label) for rung in clip.rungs)
    assert "0.00023" in noise.about and "C = 7.78" in clip.about
    for ladder in (noise, clip):
        strengths = [rung.defence.noise_level(2) for rung in ladder.rungs]
        assert strengths == sorted(strengths) and strengths[0] == 0
    steps = curve_ladder("fedavg", scale, Step())
    assert [rung.defence.step(Step()).local_steps for rung in steps.rungs] == [int(rung.label) for rung in steps.rungs]
    assert [rung.label for rung in curve_ladder("precision", scale, Step()).rungs][:2] == ["fp32", "fp16"]
    assert curve_ladder("dropout", scale, Step()).rungs[1].label == "0.01"
    with pytest.raises(SitusError, match="curve 'nope'"):
        curve_ladder("nope", scale, Step())


def test_settings_of_tokens_are_the_weakest_first() -> None:
    for texts in TOKEN_LADDERS.values():
        veils = [parse_veil(text) for text in texts]
        assert sorted([*reversed(veils), parse_veil("none")], key=by_strength) == [parse_veil("none"), *veils]


@pytest.mark.parametrize(
    ("defence", "step", "said"),
    [
        (NoDefence(), Step(), "none"),
        (Noise(1.0), Step(), "no ε: gradients are not bounded"),
        (Clip(1.0, 1.0), Step(local_steps=2), "no ε: after 2 local steps, C does not bound the effect of a sample"),
        (Clip(1.0, 0.29), Step(), "no useful ε: the noise is only 0.29 · C"),
        (Clip(1.0, 0.3), Step(10), "3 of 0.1 in 20"),
        (Clip(1.0, 2.0), Step(200), "1 of 2 in 1"),
    ],
)
def test_a_guarantee_is_for_the_steps_of_the_training(
    defence: Any, step: Step, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr("situs.audit.sweep.ladder.epsilon_of", lambda *given: asked.append(given) or 1.2345)
    epsilon, promise = _promised(defence, step, 100, 2)
    if " in " in said:
        assert asked == [(defence.multiplier, step.batch / 100, int(said.rpartition(" in ")[2]), 1e-5)]
        assert epsilon == 1.2345 and promise == f"ε = 1.23 (n = 100, batch {step.batch}, 2 epochs, δ = 1e-05)"
    else:
        assert (epsilon, promise, asked) == (None, said, [])


def test_a_guarantee_that_cannot_be_computed_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> float:
        raise SitusError("too small")

    monkeypatch.setattr("situs.audit.sweep.ladder.epsilon_of", refused)
    assert _promised(Clip(1.0, 1.0), Step(), 100, 2) == (None, "not computed: too small")


def trial(setting: str, answer: Any, worst: float | None, metric: str = "psnr", images: int = 8) -> Trial:
    return Trial(setting, answer, worst, "matching", "why", images, metric=metric)


FOUND = Remedy(
    "noise",
    "noise σ=1",
    "",
    trial("noise σ=1", "passed", 12.0),
    trial("noise σ=1", "passed", 14.24),
    trial("noise σ=0.1", "above", 31.06),
    Cost(0.12345, 0.98765, None, "none"),
)
NOTHING = Remedy("batch", None, "none passed", tried=(trial("batch 2", "above", 40.0), trial("batch 4", "above", 25.0)))
UNTRIED = Remedy("precision", None, "nothing applied", tried=(trial("int8", "inconclusive", None),))


def search(*remedies: Remedy, **more: Any) -> Remedies:
    return Remedies("m", Limit("psnr", 20.0), remedies, 4, 6, ("matching", "tokens"), **more)


def test_tables_have_what_was_tried_on_both_sides_and_what_it_costs() -> None:
    found = search(FOUND, NOTHING, UNTRIED, replace(FOUND, named="other", cost=None))
    assert remedy_table(found)[1][:3] == [
        ["noise", "noise σ=1", "passed, psnr 14.2 by matching", "above, psnr 31.1 by matching", ""],
        ["batch", None, None, None, "none passed"],
        ["precision", None, None, None, "nothing applied"],
    ]
    assert cost_table(found)[1] == [["noise σ=1", "0.123", "98.8 %", "none"], ["other", None, None, None]]
    assert (UNTRIED.tried[0].exposed, UNTRIED.tried[0].cell) == ("not attacked", "inconclusive")
    assert exposures_by_metric(search(FOUND, NOTHING, UNTRIED)) == {
        "psnr": {"batch, batch 4": (25.0, False), "noise σ=1": (14.24, True)}
    }
    seen = replace(FOUND, unseen=None, named=None)
    assert exposures_by_metric(search(seen)) == {"psnr": {"noise, noise σ=1": (12.0, False)}}
    assert [*exposures_by_metric(search(FOUND, NOTHING))["psnr"]] == ["batch, batch 4", "noise σ=1"]


def test_the_sentence_names_settings_and_what_no_setting_was_found_for() -> None:
    assert verdict(search(NOTHING)).startswith("No tested setting passes the gate psnr=20")
    stopped = search(NOTHING, stopped="Ctrl-C")
    assert verdict(stopped) == (
        "The search was stopped by Ctrl-C before a setting was found, so there is no result for any defence."
    )
    assert stopped.summary().notes == () and search(NOTHING).summary().notes == ()
    found = search(FOUND, NOTHING, replace(UNTRIED, cut=True), stopped="Ctrl-C")
    assert verdict(found) == (
        "These settings pass the gate psnr=20: noise σ=1. Each setting was tested on 8 images that the search did not "
        "use. The attacks were matching, tokens; another attack may recover more. Defences for which the search "
        "found no setting that passes: batch."
    )
    assert found.summary().notes[0] == "Stopped by Ctrl-C." and len(found.summary().notes) == 2
    assert len(found.summary().tables) == 2 and len(search(NOTHING).summary().tables) == 1
    assert search().summary().tables == ()
    fewer = replace(FOUND, named="clip", unseen=None)
    assert "noise σ=1; clip. Each setting was tested on 6 images or more that" in verdict(search(FOUND, fewer))
    numbers = found.numbers()
    assert (numbers["searched"], numbers["held_out"], numbers["stopped"]) == (4, 6, "Ctrl-C")
    assert numbers["defences"][0]["unseen"]["said"] == "why" and numbers["defences"][1]["named"] is None
