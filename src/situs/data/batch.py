"""What a loader hands to a method, whatever the modality."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

VOID = -1
"""The value of a target without one: a pixel of no class, an unknown label, padding. Losses and scores ignore it."""


class Batch(NamedTuple):
    """One batch on the device.

    inputs: [B, …], as the backbone's `embed` takes them: normalised images [B, C, H, W], padded
    sequences [B, N], for pairs of sentences [B, 2, N].
    ids: [B] int64, draw numbers: the sample's row in the data set, and in the high bits the copy under repeated
    augmentation (`situs.data.sampler.sample_of` gives the row).
    targets: what is learned of each sample, [B, …] by name: "label" [B], or soft [B, K]; for multi-label sets "labels"
    [B, K], 1, 0 or -1 for unknown, or soft, with NaN for unknown; "mask" [B, H, W], the class of each pixel or -1; for
    objects "boxes", "classes", "crowd", "masks" and "sides" (`situs.data.objects`). Read only.
    mask: [B, N] bool, False where a token is padding; None where none is.
    """

    inputs: Tensor
    ids: Tensor
    targets: Mapping[str, Tensor] = {}
    mask: Tensor | None = None

    def part(self, span: slice) -> Batch:
        """The samples of a span, with their targets and mask."""
        mask = None if self.mask is None else self.mask[span]
        targets = {name: target[span] for name, target in self.targets.items()}
        return Batch(self.inputs[span], self.ids[span], targets, mask)
