"""ε: against the closed form of the Gaussian mechanism, and the noise that a target asks for."""

from __future__ import annotations

import importlib
import math

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from situs.errors import SitusError
from situs.train.private import DpConfig, Spent, epsilon_of, noise_for


def exact(noise: float, steps: int, delta: float) -> float:
    """Of the Gaussian mechanism without sampling, composed: Balle and Wang 2018, theorem 8."""
    mu = math.sqrt(steps) / noise

    def off(epsilon: float) -> float:
        low = math.exp(epsilon) * norm.cdf(-epsilon / mu - mu / 2)
        return float(norm.cdf(-epsilon / mu + mu / 2) - low - delta)

    return brentq(off, 0, 100)


def test_epsilon_is_that_of_the_gaussian_mechanism_where_every_sample_is_taken() -> None:
    pytest.importorskip("opacus")
    for noise, steps in ((2.0, 1), (4.0, 10), (1.0, 3)):
        assert epsilon_of(noise, 1.0, steps, 1e-5) == pytest.approx(exact(noise, steps, 1e-5), abs=0.03)
    assert epsilon_of(1.0, 0.01, 0, 1e-5) == 0
    assert epsilon_of(1.0, 0.01, 100, 1e-5) < epsilon_of(1.0, 0.02, 100, 1e-5) < epsilon_of(0.8, 0.02, 100, 1e-5)


def test_the_noise_for_an_epsilon_spends_that_and_little_less() -> None:
    pytest.importorskip("opacus")
    for epsilon in (0.5, 50.0):  # more and less noise than 1, and an ε whose grid would take minutes
        assert 0.985 * epsilon < epsilon_of(noise_for(epsilon, 0.01, 500, 1e-5), 0.01, 500, 1e-5) <= epsilon


def test_without_the_extra_one_sentence_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", gone)
    with pytest.raises(SitusError, match=r"pip install 'situs\[dp\]'"):
        epsilon_of(1.0, 0.01, 10, 1e-5)


def test_one_of_epsilon_and_noise_turns_it_on_and_both_are_refused() -> None:
    assert not DpConfig().on and DpConfig(epsilon=8).on and DpConfig(noise=1.0).on
    with pytest.raises(SitusError, match="give only one"):
        DpConfig(epsilon=8, noise=1.0)
    for settings in ({"clip": 2.0}, {"delta": 1e-6}):
        with pytest.raises(SitusError, match="is a setting of DP-SGD, which is off; set epsilon or noise"):
            DpConfig(**settings)
        assert DpConfig(noise=1.0, **settings).on
    assert "ε = 8 at δ = 1e-05 after 100 steps" in str(Spent(8.0, 1e-5, 1.1, 1.0, 100))
    assert "not known here" in str(Spent(None, 1e-5, 1.1, 1.0, 100))
