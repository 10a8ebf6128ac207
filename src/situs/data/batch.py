"""What a loader hands to a method, whatever the modality."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

VOID = -1
"""What stands in a target where there is no value: a pixel of no class, a label that nobody knows, padding. Left out of
losses and scores."""


class Batch(NamedTuple):
    """One batch on the device.

    inputs: [B, …], as the backbone's `embed` takes them: normalised images [B, C, H, W], padded
    sequences [B, N], of pairs of sentences [B, 2, N].
    ids: [B] int64. An id names a draw: the sample's row in the data set, and in its high bits the copy under repeated
    augmentation (`situs.data.sampler.sample_of` gives the row).
    targets: what is to be learned of each sample, [B, …] by name: "label" [B], or soft [B, K]; where a sample has any
    number of the classes "labels" [B, K], 1, 0 or -1 for unknown, or soft, with NaN for unknown; "mask" [B, H, W], the
    class of each pixel or -1; of objects "boxes", "classes", "crowd", "masks" and "sides" (`situs.data.objects`). Never
    written to.
    mask: [B, N] bool, False where a token is padding; None where none is.
    """

    inputs: Tensor
    ids: Tensor
    targets: Mapping[str, Tensor] = {}
    mask: Tensor | None = None

    def part(self, span: slice) -> Batch:
        """The samples of a span, all that belongs to them."""
        mask = None if self.mask is None else self.mask[span]
        targets = {name: target[span] for name, target in self.targets.items()}
        return Batch(self.inputs[span], self.ids[span], targets, mask)
