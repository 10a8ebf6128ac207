"""Damaged images, shards and batches: each is read or named; none hangs, crashes, or is lost without a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from warm import warm

CORRUPT = Path(__file__).with_name("corrupt.py")


def corrupted(seed: int, count: int) -> dict[str, Any]:
    status, printed, complaints = warm(CORRUPT, seed, count, timeout=900)
    assert status == 0, f"ended by {status} at: {complaints[-300:]}"
    return json.loads(printed)


def check(found: dict[str, Any], count: int) -> None:
    assert found["wrong"] == []
    assert {word for each in found["outcomes"].values() for word in each} <= {"read", "named"}
    assert sum(sum(each.values()) for each in found["outcomes"].values()) == count
    assert sum(each.get("named", 0) for each in found["outcomes"].values()) > count / 3  # the damage was real


def test_a_few_damaged_files() -> None:
    check(corrupted(0, 17), 17)


@pytest.mark.slow
def test_many_damaged_files() -> None:
    found = corrupted(22, 800)
    check(found, 800)
    print(json.dumps(found, indent=2))
