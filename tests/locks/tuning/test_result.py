"""What the owner of a locked model reads first, from curves that are made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from situs.locks.tuning.result import Curve, LockTuning, TuningConfig


def told(owner: list[float], thief: list[float], scratch: float) -> LockTuning:
    ways = {"normal": owner, "authorised": owner, "unauthorised": thief, "from scratch": [scratch] * 3}
    curves = {way: Curve([0, 5, 10], [1.0] * 3, values) for way, values in ways.items()}
    return LockTuning(TuningConfig(), "x", curves, 0.5, 0.0, 0.0, things="sentences")


def test_what_the_owner_reads_first() -> None:
    far = told([0.5, 0.8, 0.9], [0.5, 0.6, 0.7], 0.5)
    assert far.withheld == pytest.approx(0.5) and far.caught_up("unauthorised") is None
    assert (
        "the lock withholds 50 % of what" in far.owner_sentence() and "not come within a point" in far.owner_sentence()
    )
    near = told([0.5, 0.8, 0.9], [0.5, 0.891, 0.9], 0.5)
    assert near.withheld == 0 and near.caught_up("unauthorised") == 5
    assert "within a point of the owner after 5 updates" in near.owner_sentence()
    none = told([0.5, 0.5, 0.5], [0.5, 0.4, 0.4], 0.5)
    assert none.withheld is None and "nothing to withhold" in none.owner_sentence()
    little = told([0.5, 0.5, 0.505], [0.5, 0.5, 0.5], 0.5)
    assert "less than a point here, so that there was next to nothing to withhold" in little.owner_sentence()
    assert "100 %" not in little.owner_sentence()
    few = replace(far, config=TuningConfig(test=8))  # 40 points of 8 are three answers
    assert "8 sentences of the test set are too few to tell" in few.owner_sentence()
    assert "withholds 50 %" not in few.owner_sentence()
    ahead = told([0.5, 0.8, 0.9], [0.5, 0.8, 0.95], 0.5)
    assert "withholds 0 %" in ahead.owner_sentence()


def test_a_thief_at_another_rate_may_have_caught_up_before() -> None:
    """The run that counts is the best at its end; that another came near on its way is not kept from the owner."""
    found = told([0.5, 0.8, 0.9], [0.5, 0.7, 0.85], 0.5)
    early = Curve([0, 5, 10], [1.0] * 3, [0.5, 0.895, 0.6], lr=0.1)
    found = replace(found, tries={"unauthorised": [found.curves["unauthorised"], early]})
    assert found.caught_up("unauthorised") == 5 and "after 5 updates" in found.owner_sentence()


def test_the_page_says_how_the_thief_was_favoured() -> None:
    found = told([0.5, 0.8, 0.9], [0.5, 0.7, 0.85], 0.5)
    assert "Dropout is off" in " ".join(found.summary().notes) and "tried the rates" not in str(found.summary().notes)
    rates = replace(found, config=TuningConfig(lr=1e-3, thief_lr=(1e-3, 1e-2)))
    assert "tried the rates 0.001, 0.01; of each way" in " ".join(rates.summary().notes)
