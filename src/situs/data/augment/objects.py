"""Images, the boxes of their objects and their masks, moved by one geometry."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from situs.data.augment import geometry
from situs.data.augment.recipes import AugmentConfig, Noise, as_floats, places_of, recoloured
from situs.data.batch import VOID
from situs.data.objects import extents

_CUT = 1e-3  # pixels beyond the border that rounding may bring


def apply_objects(
    values: Mapping[str, Tensor],
    noise: Noise,
    config: AugmentConfig,
    size: tuple[int, int],
    normalisation: tuple[Tensor, Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """`apply` to images, and to what a batch knows of their objects: [B, C, *size], and the targets of a batch.

    values: "image" [B, C, H, W], "sides" [B, 2] of each, and "boxes", "classes", "crowd" and "masks" as a batch has
    them, in the images' pixels. Masks take the nearest pixel. A box that the border cuts becomes that of what is left
    of its mask, and an object of which no pixel is left is none.
    """
    sides, (mean, std) = values["sides"], normalisation
    crops, flip, affine = places_of(noise, config, size, (sides[:, 0], sides[:, 1]), sides[:, 0])
    told = (crops, flip, size)
    images = geometry.warp(
        as_floats(values["image"]), *told, mean, affine, config.interpolation, sides=sides, finer=1
    )  # fmt: skip
    masks = geometry.sample_nearest(values["masks"], geometry.places(*told, sides, affine))
    moved, within = (move(values["boxes"], *told, affine) for move in (geometry.move_boxes, geometry.warp_boxes))
    left = extents(masks, values["boxes"].shape[1])
    cut = ((moved - within).abs() > _CUT).any(-1) if affine is None else torch.ones_like(values["crowd"])
    tight = torch.cat([within[..., :2].maximum(left[..., :2]), within[..., 2:].minimum(left[..., 2:])], dim=-1)
    boxes = torch.where(cut[..., None], tight, within)
    there = (left[..., 2] > left[..., 0]) & (boxes[..., 2:] > boxes[..., :2]).all(-1) & (values["classes"] != VOID)
    whole = torch.cat([torch.zeros_like(sides), sides.flip(1)], dim=1)[:, None].float()
    ends = geometry.warp_boxes(whole, *told, affine)[:, 0, [3, 2]].round().long().clamp(min=1)
    targets = {
        "boxes": torch.where(there[..., None], boxes, 0.0),
        "classes": torch.where(there, values["classes"], VOID),
        "crowd": values["crowd"] & there,
        "masks": masks,
        "sides": ends,
    }
    return recoloured(images, noise, config, mean, std), targets
