"""What all methods stand on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from situs.errors import SitusError
from situs.methods.base import epoch_share


@given(st.integers(1, 1000), st.data())
def test_the_share_of_a_run_is_that_of_its_whole_epochs(epochs: int, data: st.DataObject) -> None:
    steps = data.draw(st.integers(1, 50))
    epoch = data.draw(st.integers(0, epochs - 1))
    step = data.draw(st.integers(0, steps - 1))
    progress = (epoch * steps + step) / (epochs * steps)
    assert epoch_share(epochs, epoch, progress) == epoch / epochs
    assert epoch_share(epochs, epoch, 0.0) == epoch / epochs  # not known


@pytest.mark.parametrize(
    ("epochs", "epoch", "progress"),
    [
        (10, 10, 0.0),  # a run of 10 epochs has no epoch 10
        (10, 10, 1.0),
        (10, 11, 0.0),
        (10, 2, 0.5),  # half through at epoch 2: a run of 4 or 5
        (10, 6, 0.5),
        (100, 3, 3 / 50),
    ],
)
def test_a_run_of_another_length_is_refused(epochs: int, epoch: int, progress: float) -> None:
    with pytest.raises(SitusError, match=f"method.epochs={epochs}: must be the run's own number; its epoch {epoch} "):
        epoch_share(epochs, epoch, progress)
