"""What an attacker knows of the numbers he is sent, against the errors that they really have."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from situs.audit.attacks.base import Knowledge, Recovery, certificate_of, joined, known_numbers, spoiled, steps_off
from situs.audit.client import rounded
from situs.audit.defences import Noise, Step, create_defence


@pytest.mark.parametrize("kind", ["normal", "heavy", "uniform"])
def test_what_int8_rounds_off_is_known_without_the_truth(kind: str) -> None:
    chance = torch.Generator().manual_seed(0)
    numbers = torch.randn(40_000, generator=chance, dtype=torch.float64)
    if kind == "heavy":  # most are rounded to 0
        numbers = numbers.sign() * torch.rand(40_000, generator=chance, dtype=torch.float64).log()
        numbers[0] = 500.0
    if kind == "uniform":
        numbers = torch.rand(40_000, generator=chance, dtype=torch.float64) - 0.5
    sent = rounded(numbers, torch.int8)
    real = float((sent - numbers).square().mean().sqrt())
    assert steps_off(sent) == pytest.approx(real, rel=0.1)
    known = Knowledge(Noise(real), Step(dtype=torch.int8))
    assert known.even({}, ()) and known.noise_on(sent) == pytest.approx(2**0.5 * real, rel=0.1)
    assert steps_off(torch.zeros(3)) == 0.0


def test_one_step_of_adam_is_undone_as_far_as_it_is_said() -> None:
    g = torch.randn(20_000, generator=torch.Generator().manual_seed(0)) * 10 ** torch.linspace(-9, -2, 20_000)
    known = Knowledge(step=Step(adam=True))
    found = known.read({"w": g / (g.abs() + 1e-8)})["w"]
    off = (found - g).double().square() / known.variance(found)
    assert 0.05 < float(off.mean()) < 3
    assert float((found - g).norm() / g.norm()) < 0.1
    assert known.read({"w": g})["w"] is not g
    several = Knowledge(step=Step(adam=True, local_steps=2))
    assert several.read({"w": g})["w"] is g and several.variance(g) is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none", None),
        ("bf16+noise=1e-30", "rounding to bfloat16 is not random noise"),  # far below what is rounded off
        ("bf16", "rounding to bfloat16 is not random noise"),
        ("fp16", "rounding to float16 is not random noise"),
        ("autocast", "rounding to bfloat16 is not random noise"),
        ("int8+noise=1", "rounding to int8 is not random noise"),
        ("bf16+noise=1", None),  # the control tells what of it is noise
    ],
)
def test_what_rounding_alone_hides_proves_nothing(name: str, said: str | None) -> None:
    defence = create_defence(name)
    step = defence.step(Step())
    known = Knowledge(defence, step)
    sent = {"w": torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)}
    found = spoiled(known, known.noise_beyond_rounding([sent]))
    assert found is None if said is None else said in str(found)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_noise_counts_from_the_size_of_what_is_rounded_off(kind: torch.dtype) -> None:
    exact = torch.randn(200, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sent = {"w": exact.to(kind), "other": 1e3 * exact.to(kind)}
    off = float((sent["w"].double() - exact).square().mean().sqrt())

    def counted(sigma: float, names: tuple[str, ...] | None = ("w",)) -> float:
        return Knowledge(Noise(sigma), Step(dtype=kind)).noise_beyond_rounding([sent], names)

    assert counted(off / 2) == 0.0 and counted(2 * off) == 2 * off
    assert counted(2 * off, None) == 0.0  # a gradient beside it is rounded by more
    assert not Knowledge(Noise(off / 2)).even(sent, ("w",)) and Knowledge(Noise(2 * off)).even(sent, ("w",))
    small = 1e-6 * exact  # where fp16 has few digits left
    sent = {"w": small.to(kind)}
    off = float((sent["w"].double() - small).square().mean().sqrt())
    assert counted(off / 2) == 0.0 and counted(2 * off) == 2 * off


@pytest.mark.parametrize(
    ("fact", "proves"),
    [
        ({"fits": True}, True),
        ({"fits": None}, False),
        ({}, False),
        ({"fits": True, "rank": 48, "unknowns": 48}, True),
        ({"fits": True, "rank": 47, "unknowns": 48}, False),
        ({"fits": True, "sharp": True}, True),
        ({"fits": True, "sharp": False}, False),
        ({"fits": True, "sharp": False, "rank": 9, "unknowns": 8}, False),
        ({"fits": True, "hidden": 1}, True),
        ({"fits": True, "hidden": 2}, False),
        ({"fits": True, "unseen": 3}, False),
    ],
)
def test_an_image_is_proved_where_equations_fit_and_leave_nothing_open(fact: dict[str, Any], proves: bool) -> None:
    """One patch without a place has the one that is left."""
    found = certificate_of(fact)
    everything = found.holds and found.unique and found.order_known and not found.unseen
    assert everything is proves
    assert found.unseen == fact.get("unseen", 0) and (found.residual, found.expected, found.verdict) == (None, None, "")


def test_residuals_and_the_verdict_are_those_of_the_facts() -> None:
    found = certificate_of({"residual": 0.25, "expected_residual": 0.5, "verdict": "it is dark", "rank": 2})
    assert (found.residual, found.expected, found.verdict, found.holds) == (0.25, 0.5, "it is dark", False)
    assert found.unique and certificate_of({"residual": 0.0}).residual == 0.0


def test_recoveries_of_successive_uploads_are_one() -> None:
    parts = [
        Recovery(torch.full((n, 1, 2, 2), float(n)), [{"rank": n}] * n, partial=partial)
        for n, partial in ((1, None), (2, "one of two"), (3, "none of three"))
    ]
    assert joined(parts[:1]) is parts[0]
    whole = joined(parts)
    assert whole.images[:, 0, 0, 0].tolist() == [1, 2, 2, 3, 3, 3] and whole.partial == "one of two"
    assert [fact["rank"] for fact in whole.facts] == [1, 2, 2, 3, 3, 3]
    assert [part.residual for part in whole.certificates] == [None] * 6


def test_numbers_that_overflowed_are_unknown_and_others_are_exact() -> None:
    largest = torch.finfo(torch.float16).max
    sent = torch.tensor([1.5, largest, -largest, math.inf, -math.inf, math.nan, 65472.0, 0.0], dtype=torch.float16)
    found = known_numbers(sent)
    assert found.dtype == torch.float64
    assert found.isnan().tolist() == [False, True, True, True, True, True, False, False]
    assert found[[0, 6, 7]].tolist() == [1.5, 65472.0, 0.0]


@pytest.mark.parametrize(
    ("sent", "autocast", "kind"),
    [
        (torch.float32, False, torch.float32),
        (torch.float32, True, torch.bfloat16),
        (torch.float16, True, torch.bfloat16),
        (torch.bfloat16, True, torch.bfloat16),
        (torch.float16, False, torch.float16),
    ],
)
def test_the_coarser_of_upload_and_computation_is_in_the_numbers(
    sent: torch.dtype, autocast: bool, kind: torch.dtype
) -> None:
    known = Knowledge(step=Step(autocast=autocast))
    assert known.type_of(torch.zeros(2, dtype=sent)) == kind
    assert known.forward == (torch.finfo(torch.bfloat16).eps if autocast else None)


def test_what_adam_and_dropout_hide_proves_nothing() -> None:
    said = [str(spoiled(Knowledge(step=step), 1.0)) for step in (Step(adam=True), Step(adam=True, local_steps=3))]
    assert "the gradient of one step can be recovered only up to rounding" in said[0]
    assert "the gradients of 3 steps cannot be recovered" in said[1]
    assert "dropout (0.1)" in str(spoiled(Knowledge(step=Step(dropout=0.1)), 1.0))
    kept = create_defence("topk=0.1")
    assert kept.caveat and kept.caveat in str(spoiled(Knowledge(kept), 0.0))


def test_numbers_that_were_not_sent_are_unknown_to_the_equations() -> None:
    sent = {"w": torch.tensor([0.0, 2.0, 0.0])}
    assert Knowledge().without_lost(sent)["w"] is sent["w"]
    known = Knowledge(create_defence("topk=0.1")).without_lost(sent)["w"]
    assert known.isnan().tolist() == [True, False, True] and known[1] == 2
    assert not sent["w"].isnan().any()


def test_a_zero_may_be_another_number_under_noise_and_even_steps() -> None:
    steps = (Step(), Step(dtype=torch.int8), Step(dtype=torch.bfloat16))
    assert [Knowledge(step=step).blurs for step in steps] == [False, True, False]
    assert Knowledge(Noise(1e-9)).blurs and not Knowledge(Noise(0.0)).blurs
    assert Knowledge(Noise(0.5)).noise_on(torch.ones(9)) == 0.5
