"""The ceiling is operations over time, and of the arithmetic that was asked for."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from situs.bench import clock


def test_the_rate_is_operations_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    products, kinds = itertools.count(), set()
    spent = 0.0

    def multiply(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        nonlocal spent
        spent += 0.01
        kinds.add(a.dtype)
        next(products)
        return out

    monkeypatch.setattr(clock, "SIDES", {"cpu": 16})
    monkeypatch.setattr(torch, "mm", multiply)
    monkeypatch.setattr(time, "perf_counter", lambda: spent)
    assert clock.measure_ceiling(torch.device("cpu"), "bf16", 0.8) == pytest.approx(2 * 16**3 / 0.01)
    assert kinds == {torch.bfloat16}
    assert next(products) >= 160  # as long a warm-up as the measurement


def test_a_product_longer_than_the_time_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU one in fp16 takes ten seconds: 17 of them were minutes."""
    products, spent = itertools.count(), 0.0

    def multiply(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        nonlocal spent
        spent += 9.0
        next(products)
        return out

    monkeypatch.setattr(torch, "mm", multiply)
    monkeypatch.setattr(time, "perf_counter", lambda: spent)
    assert clock.measure_ceiling(torch.device("cpu"), "fp16") == pytest.approx(2 * 768**3 / 9.0)
    assert next(products) == 2


def test_it_measures() -> None:
    assert clock.measure_ceiling(torch.device("cpu"), "fp32", 0.02) > 1e6
