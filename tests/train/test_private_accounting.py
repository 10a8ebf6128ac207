"""ε: against the closed form of the Gaussian mechanism, and the noise that a target asks for."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from situs.errors import SitusError
from situs.progress import notes_to
from situs.train import private
from situs.train.private import KEY_FILE, DpConfig, Ledger, Private, Spent, epsilon_of, noise_for


def exact(noise: float, steps: int, delta: float) -> float:
    """Of the Gaussian mechanism without sampling, composed: Balle and Wang 2018, theorem 8."""
    mu = math.sqrt(steps) / noise

    def off(epsilon: float) -> float:
        low = math.exp(epsilon) * norm.cdf(-epsilon / mu - mu / 2)
        return float(norm.cdf(-epsilon / mu + mu / 2) - low - delta)

    return brentq(off, 0, 100)


@pytest.mark.parametrize(
    ("spends", "epsilon", "least"),
    [
        (lambda noise: 40.0 / noise, 1.0, 40.0),
        (lambda noise: 0.02 / noise, 1.0, 0.02),
        (lambda noise: 1.5 / noise, 1.0, 1.5),
        (lambda noise: 1.0 / noise, 1.0, 1.0),
        (lambda noise: 1.0 / noise, 1.5, 1 / 1.5),
        (lambda noise: 7400.0 / noise, 1.0, 7400.0),  # 1.5 ** 22 is below the limit, and above this
        (lambda noise: 2.0 if noise < 1.7 else 0.5, 1.0, 1.7),  # no noise spends nearly as much as allowed
    ],
)
def test_the_least_noise_is_found_on_either_side_of_1(
    spends: Callable[[float], float], epsilon: float, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[float] = []

    def known(noise: float, *_: Any) -> float:
        assert len(tried) < 60, "the search does not end"
        tried.append(noise)
        return spends(noise)

    monkeypatch.setattr(private, "epsilon_of", known)
    noise = noise_for(epsilon, 0.01, 500, 1e-5)
    assert spends(noise) <= epsilon and least <= noise * (1 + 1e-12) <= 1.0102 * least
    assert spends(noise) > 0.99 * epsilon or noise < 1.0002 * least


def test_an_epsilon_that_no_noise_reaches_is_refused_and_the_most_noise_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(private, "epsilon_of", lambda noise, *_: 1.5 / noise)
    monkeypatch.setattr(private, "MOST_NOISE", 1.5)
    assert 1.5 <= noise_for(1.0, 0.01, 500, 1e-5) < 1.52
    with pytest.raises(SitusError, match=r"^epsilon=0\.9: even with a noise multiplier of 2, ε is above this limit"):
        noise_for(0.9, 0.01, 500, 1e-5)


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


@pytest.mark.parametrize(
    ("total", "per_epoch", "logged"),
    [(7, 3, [1, 3, 6, 7]), (6, 3, [1, 3, 6]), (3, 1, [1, 2, 3]), (1, 1, [1]), (4, 9, [1, 4])],
)
def test_epsilon_is_logged_once_at_the_first_step_each_epoch_and_the_last(
    total: int, per_epoch: int, logged: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("situs.train.private.epsilon_of", lambda *given: given)
    ledger, seen = Ledger(1.5, 0.25, 1e-5), list[dict[str, Any]]()
    for step in range(1, total + 1):
        state: Any = SimpleNamespace(step=step, total=total, log=seen.append)
        ledger.after_step(state)
        if step % per_epoch == 0:
            ledger.after_epoch(state)
    assert [each["epsilon"] for each in seen] == [(1.5, 0.25, step, 1e-5) for step in logged]
    assert all((each["noise_multiplier"], each["sampling_rate"]) == (1.5, 0.25) for each in seen)


@pytest.mark.parametrize(("resumed", "kept", "told"), [(False, False, False), (True, True, False), (True, False, True)])
def test_a_secret_that_was_lost_is_told(
    resumed: bool, kept: bool, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Private, "plan", lambda *_: (1.5, 0.25, "what is spent"))
    if kept:
        (tmp_path / KEY_FILE).write_bytes(bytes(range(32)))
    run: Any = SimpleNamespace(path=tmp_path, resumed=resumed, start=None)
    loader: Any = SimpleNamespace(global_batch=8)
    method: Any = None
    private, notes = Private(DpConfig(noise=1.5, clip=2.0)), list[str]()
    with notes_to(notes.append):
        stepper: Any
        stepper, ledger = private.open(run, method, loader, 5)
    lost = "the file with the secret seed of the noise (dp.secret) is missing, so the run continues with a new seed"
    assert notes == [lost] * told + ["what is spent"]
    assert ledger == Ledger(1.5, 0.25, 1e-5) and private.secret is not None
    assert (private.secret.value == bytes(range(32))) == kept and (tmp_path / KEY_FILE).stat().st_size == 32
    mechanism = stepper.keywords["mechanism"]
    assert (mechanism.noise, mechanism.clip, mechanism.batch) == (1.5, 2.0, 8)


@pytest.mark.parametrize(("before", "total", "same"), [(5, 5, True), (5, 6, False), (1, 5, False)])
def test_a_run_whose_noise_was_set_for_its_length_keeps_it(
    before: int, total: int, same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Private, "plan", lambda *_: (1.5, 0.25, "what is spent"))
    run: Any = SimpleNamespace(path=tmp_path, resumed=True, start=SimpleNamespace(state={"total_steps": before}))
    parts: tuple[Any, Any] = (None, SimpleNamespace(global_batch=8))
    with notes_to(lambda _: None):
        Private(DpConfig(noise=1.5)).open(run, *parts, total)  # a noise of its own is for any length
        if same:
            Private(DpConfig(epsilon=3.0)).open(run, *parts, total)
        else:
            steps = "1 step" if before == 1 else f"{before} steps"
            said = rf"^dp\.epsilon=3: the noise was set for {steps}, so the run cannot have {total} steps$"
            with pytest.raises(SitusError, match=said):
                Private(DpConfig(epsilon=3.0)).open(run, *parts, total)
