"""The ceiling is operations over time, and of the arithmetic that was asked for."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from situs.bench import ceiling


def test_the_rate_is_operations_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    products, kinds = itertools.count(), set()
    spent = 0.0

    def multiply(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        nonlocal spent
        spent += 0.01
        kinds.add(a.dtype)
        next(products)
        return out

    monkeypatch.setattr(ceiling, "SIDES", {"cpu": 16})
    monkeypatch.setattr(torch, "mm", multiply)
    monkeypatch.setattr(time, "perf_counter", lambda: spent)
    assert ceiling.measure_ceiling(torch.device("cpu"), "bf16", 0.8) == pytest.approx(2 * 16**3 / 0.01)
    assert kinds == {torch.bfloat16}
    assert next(products) >= 160  # as long a warm-up as the measurement


def test_it_measures() -> None:
    assert ceiling.measure_ceiling(torch.device("cpu"), "fp32", 0.02) > 1e6
