"""What an attacker knows of the numbers he is sent, against the errors that they really have."""

from __future__ import annotations

import pytest
import torch

from situs.audit.attacks.base import Knowledge, spoiled, steps_off
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
