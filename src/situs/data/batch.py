"""What a loader hands to a method."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """One batch on the device: images [B, C, H, W] normalised float, ids [B] int64, labels None, [B] or soft [B, K].

    An id names a draw: the sample's row in the data set, and in its high bits the copy under repeated augmentation
    (`situs.data.sampler.sample_of` gives the row).
    """

    images: Tensor
    ids: Tensor
    labels: Tensor | None = None
