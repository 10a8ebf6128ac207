"""Run folders that were harmed on the disk: refused in one sentence, or the same weights; never others in silence."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from corrupt import KINDS, tally


def summary(found: Counter[tuple[str, str]]) -> Counter[str]:
    return Counter({end: sum(n for (_, e), n in found.items() if e == end) for end in ("refused", "same", "older")})


def test_harmed_runs_are_refused_or_end_as_they_would_have(tmp_path: Path) -> None:
    found = tally(tmp_path, len(KINDS), seed=0)
    ends = summary(found)
    assert ends.total() == len(KINDS)
    assert ends["refused"] >= 3
    assert ends["older"] >= 3
    assert found["both", "refused"] == found["checkpoints", "refused"] == 1


@pytest.mark.slow
def test_many_harmed_runs(tmp_path: Path) -> None:
    found = tally(tmp_path, 40 * len(KINDS), seed=1)
    ends = summary(found)
    print(dict(ends), dict(found))
    assert ends.total() == 40 * len(KINDS) >= 400
    assert found["both", "refused"] == found["checkpoints", "refused"] == 40
    assert not found["both", "older"]
    assert ends["refused"] > 100
    assert ends["older"] > 100
