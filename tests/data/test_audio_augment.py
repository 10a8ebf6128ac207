"""Each augmentation against the same thing done slowly, one clip at a time."""

from __future__ import annotations

import math

import pytest
import torch

from situs.core.random import normal, uniform
from situs.data.audio import add_noise, gain_at, shift

IDS = torch.arange(400)


def test_a_shift_is_uniform_and_leaves_silence_behind() -> None:
    waves = torch.arange(1.0, 11.0).expand(400, 10)
    numbers = uniform(0, 0, IDS, "shift", ())
    moved = shift(waves, numbers, 3)
    seen = []
    for row, number in zip(moved.tolist(), numbers.tolist(), strict=True):
        by = math.floor(number * 7) - 3
        assert row == [place - by + 1 if 0 <= place - by < 10 else 0 for place in range(10)]
        seen.append(by)
    assert set(seen) == set(range(-3, 4))
    assert torch.equal(shift(waves, numbers, 0), waves)


def test_noise_lies_so_many_decibels_below() -> None:
    waves = 0.1 * normal(0, 0, IDS[:5], "wave", (1000,))
    pieces = 0.03 * normal(0, 0, IDS[:5], "noise", (1000,))
    waves[3], pieces[4] = 0.0, 0.0
    gain = gain_at(waves.double(), pieces.double(), 5.0)
    assert gain[3:].tolist() == [0, 0]
    for wave, piece, each in zip(waves[:3].double(), pieces.double(), gain, strict=False):
        ratio = wave.square().sum() / (each * piece).square().sum()
        assert 10 * math.log10(float(ratio)) == pytest.approx(5.0, abs=1e-9)
    loud = add_noise(waves, pieces, torch.full((5,), 100.0))
    assert float(loud.abs().max()) == 1.0
    torch.testing.assert_close(add_noise(waves, pieces, gain.float())[0], waves[0] + gain[0].float() * pieces[0])
