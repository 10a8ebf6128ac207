"""The objects of an image: boxes, classes, masks, and which of them are crowds.

A batch holds them as tensors [B, M, …], padded to the most objects of an image, and their masks eight to a byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from situs.config import Checked
from situs.data.batch import VOID
from situs.errors import SitusError

_BITS = 8


@dataclass(frozen=True)
class ObjectConfig(Checked):
    """Settings of data with objects (detection)."""

    classes: tuple[str, ...] = ()
    """Names of the classes, in the order of their numbers. Default: the categories of the training split, ordered by
    id. Categories of other splits are matched by name."""

    def check(self) -> None:
        if len({*self.classes}) < len(self.classes):
            raise SitusError(field="classes", value=self.classes, allowed="names that differ")


@dataclass(frozen=True)
class Objects:
    """The objects of one image. sides: height and width of the image without padding, from the top left corner on.

    boxes: [m, 4] left, top, right, bottom in pixels. classes: [m] int64 from 0 on. crowd: [m] bool, regions of many
    objects that were not annotated one by one. masks: [m, H, W] bool.
    """

    boxes: Tensor
    classes: Tensor
    crowd: Tensor
    masks: Tensor
    sides: tuple[int, int]


def pack_masks(masks: Tensor) -> Tensor:
    """Masks [..., M, H, W] bool, eight to a byte: [..., ⌈M / 8⌉, H, W] uint8; mask m is bit m % 8 of byte m // 8."""
    *first, count, height, width = masks.shape
    packed = masks.new_zeros(*first, -(-count // _BITS), height, width, dtype=torch.uint8)
    for bit in range(_BITS):
        part = masks[..., bit::_BITS, :, :]
        packed[..., : part.shape[-3], :, :] |= part.to(torch.uint8) << bit
    return packed


def unpack_masks(packed: Tensor, which: Tensor) -> Tensor:
    """The masks of numbers `which` [m] of one image [⌈M / 8⌉, H, W]: [m, H, W] bool."""
    return (packed[which // _BITS] >> (which % _BITS).to(torch.uint8).view(-1, 1, 1)) & 1 > 0


def extents(packed: Tensor, count: int) -> Tensor:
    """The boxes around `count` masks of each image [B, ⌈M / 8⌉, H, W]: [B, M, 4] float32, from the first pixel of each
    to just past the last; empty around an empty mask."""
    sides = []
    for dim in (-2, -1):  # the columns, then the rows that have a pixel
        bits = [((packed >> bit) & 1).amax(dim) for bit in range(_BITS)]
        occupied = torch.stack(bits, dim=2).flatten(1, 2)[:, :count]
        length = occupied.shape[-1]
        first, last = occupied.argmax(-1), length - occupied.flip(-1).argmax(-1)
        sides.append((first, torch.where(occupied.amax(-1) > 0, last, first)))
    (left, right), (top, bottom) = sides
    return torch.stack([left, top, right, bottom], dim=-1).float()


def objects_of(targets: Mapping[str, Tensor], *, crowd: bool = False) -> list[Objects]:
    """The objects of each image of a batch, without padding; with `crowd` the crowds too."""
    classes, crowds = targets["classes"], targets["crowd"]
    selected = (classes != VOID) & (True if crowd else ~crowds)
    images = []
    for number, (height, width) in enumerate(targets["sides"].tolist()):
        which = selected[number].nonzero()[:, 0]
        boxes, masks = targets["boxes"][number, which], unpack_masks(targets["masks"][number], which)
        images.append(Objects(boxes, classes[number, which], crowds[number, which], masks, (height, width)))
    return images
