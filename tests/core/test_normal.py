"""GELU from one exponential is GELU."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from situs.core.normal import normal, slope

WIDE = torch.linspace(-12, 12, 100_001, dtype=torch.float64)


def test_the_normal_distribution() -> None:
    phi, density = normal(WIDE)
    assert torch.allclose(phi, torch.special.ndtr(WIDE), rtol=0, atol=8e-8)
    assert torch.equal(density, torch.exp(-(WIDE**2) / 2))


def test_no_further_from_gelu_than_torch_is_in_float32() -> None:
    exact = F.gelu(WIDE)
    z = WIDE.float()
    ours, torchs = (z * normal(z)[0]).double(), F.gelu(z).double()
    assert (ours - exact).abs().max() <= (torchs - exact).abs().max()


def test_the_slope_is_the_derivative() -> None:
    z = WIDE.clone().requires_grad_()
    F.gelu(z).sum().backward()
    assert z.grad is not None
    assert torch.allclose(slope(WIDE), z.grad, rtol=0, atol=8e-8)
