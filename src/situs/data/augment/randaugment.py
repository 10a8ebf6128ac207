"""RandAugment (Cubuk et al., 2020) of a whole batch, with the fifteen operations and ranges that DeiT trained with.

Each sample draws its own operations. The geometric ones become affine matrices for the resampling of the crop
(`geometry.warp`), so they cost no pass over the pixels; the colour ones become one look-up for each slot and two
blends. Geometric operations therefore come before the colour ones of the same sample, whatever the order drawn.
Saturation does not change images that are not RGB.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from situs.data.augment import colour, geometry

OPERATIONS = (
    *("auto_contrast", "equalize", "invert", "posterize", "solarize", "solarize_add", "brightness", "contrast"),
    *("colour", "sharpness", "rotate", "shear_x", "shear_y", "translate_x", "translate_y"),
)
NOISE = 5  # numbers a slot: operation, whether, sign, and two for the magnitude's normal noise
_LARGEST = 10.0


class AugmentPlan(NamedTuple):
    """What each sample does in each slot, [B, n] each. strength: in [0, 1]. sign: −1 or 1."""

    operation: Tensor
    active: Tensor
    strength: Tensor
    sign: Tensor


def plan(noise: Tensor, magnitude: float, std: float = 0.5, probability: float = 0.5) -> AugmentPlan:
    """The draws of RandAugment from noise [B, n, 5]; the magnitude is of 10 and spreads normally with `std`."""
    choose, whether, sign, radius, angle = noise.unbind(-1)
    operation = (choose * len(OPERATIONS)).long()
    normal = torch.sqrt(-2.0 * torch.log1p(-radius)) * torch.cos(2.0 * math.pi * angle)
    strength = (magnitude + std * normal).clamp(0.0, _LARGEST) / _LARGEST
    return AugmentPlan(operation, whether < probability, strength, torch.where(sign < 0.5, -1.0, 1.0))


def _is(drawn: AugmentPlan, name: str) -> Tensor:
    return drawn.active & (drawn.operation == OPERATIONS.index(name))


def matrices(drawn: AugmentPlan, height: int, width: int) -> Tensor:
    """The geometric operations as affine maps, [B, n, 2, 3]; the identity where a slot has none."""
    signed = drawn.strength * drawn.sign
    flat = [part.flatten() for part in (signed, *(_is(drawn, name) for name in OPERATIONS[10:]))]
    amount, turn, shear_x, shear_y, move_x, move_y = flat
    zero = torch.zeros_like(amount)

    def only(where: Tensor, largest: float) -> Tensor:
        return torch.where(where, amount * largest, zero)

    # At most one of these is not the identity, so one matrix holds their sum without multiplying them out.
    rotated = geometry.rotation(only(turn, 30.0), height, width)
    sheared = geometry.shear(only(shear_x, 0.3), only(shear_y, 0.3))
    moved = geometry.translation(only(move_x, 0.45 * width), only(move_y, 0.45 * height))
    identity = torch.eye(2, 3, device=amount.device)
    return (rotated + sheared + moved - 2 * identity).view(*signed.shape, 2, 3)


def recolour(levels: Tensor, drawn: AugmentPlan) -> Tensor:
    """The colour operations of every slot in turn. levels: [B, C, H, W] whole numbers in 0..255."""
    for slot in range(drawn.operation.shape[1]):
        levels = _recolour_once(levels, AugmentPlan(*(part[:, slot] for part in drawn)))
    return levels


def _recolour_once(levels: Tensor, drawn: AugmentPlan) -> Tensor:
    strength = drawn.strength
    factor = (1.0 + 0.9 * strength * drawn.sign).clamp(min=0.1)
    luma = colour.grey(levels)
    index = levels.flatten(2).long()
    counts = colour.histogram(index)
    tables = {
        "auto_contrast": colour.autocontrast_table(counts),
        "equalize": colour.equalize_table(counts),
        "invert": colour.solarize_table(torch.zeros_like(strength)),
        "posterize": colour.posterize_table(4.0 - (strength * 4.0).floor()),
        "solarize": colour.solarize_table(256.0 - (strength * 256.0).floor()),
        "solarize_add": colour.solarize_add_table((strength * 110.0).floor()),
        "brightness": colour.blend_table(factor, 0.0),
        "contrast": colour.blend_table(factor, colour.mean_grey(luma)),
    }
    table = colour.ramp(levels.device).expand(counts.shape)
    for name, changed in tables.items():
        table = torch.where(_is(drawn, name).view(-1, 1, 1), changed, table)
    looked_up = colour.look_up(index, table).view(levels.shape)
    sharpen, saturate = (_is(drawn, name).view(-1, 1, 1, 1) for name in ("sharpness", "colour"))
    if levels.shape[1] != 3:
        saturate = torch.zeros_like(saturate)
    dull = torch.where(sharpen, colour.smooth(levels), torch.where(saturate, luma, looked_up))
    return colour.blend(looked_up, dull, factor.view(-1, 1, 1, 1))
