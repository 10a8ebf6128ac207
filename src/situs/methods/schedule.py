"""Schedules that count whole epochs, as the published codes do."""

from __future__ import annotations

from situs.errors import SitusError


def epoch_share(epochs: int, epoch: int, progress: float) -> float:
    """epoch / epochs, the share of a run of `epochs` done when this epoch began.

    A step of epoch e lies in [e, e + 1] / epochs of its run: where `progress` (0: not known) does not, the run has
    another length than the config says, which would bend the schedule in silence.
    """
    if epoch >= epochs or (progress > 0 and not epoch - 1e-6 <= progress * epochs <= epoch + 1 + 1e-6):
        raise SitusError(
            field="method.epochs",
            value=epochs,
            allowed=f"the run's own number; its epoch {epoch} is {progress:.4f} through the run",
        )
    return epoch / epochs
