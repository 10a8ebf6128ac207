"""RandAugment (Cubuk et al., 2020) of a whole batch, with the fifteen operations and ranges that DeiT trained with.

Each sample draws its own operations. The geometric ones become affine matrices for the resampling of the crop
(`geometry.warp`), so they cost no pass over the pixels; the colour ones become one look-up for each slot and two
blends. Geometric operations therefore come before the colour ones of the same sample, whatever the order drawn.
Saturation does not change images that are not RGB.

Colours change on 256 levels, as Pillow defines it: `levels` are [B, C, H, W] float32 holding integers in 0..255. Most
operations map each level to another, so they are tables of 256 entries a channel.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from situs.data.augment import geometry

OPERATIONS = (
    *("auto_contrast", "equalize", "invert", "posterize", "solarize", "solarize_add", "brightness", "contrast"),
    *("colour", "sharpness", "rotate", "shear_x", "shear_y", "translate_x", "translate_y"),
)
NOISE = 5  # numbers a slot: operation, whether, sign, and two for the magnitude's normal noise
_STRENGTH, _LARGEST = 9.0, 10.0


class AugmentPlan(NamedTuple):
    """What each sample does in each slot, [B, n] each. strength: in [0, 1]. sign: −1 or 1."""

    operation: Tensor
    active: Tensor
    strength: Tensor
    sign: Tensor


def plan(noise: Tensor) -> AugmentPlan:
    """The draws of RandAugment from noise [B, n, 5]: half of the operations, of strength 9 ± 0.5 of 10."""
    choose, whether, sign, radius, angle = noise.unbind(-1)
    operation = (choose * len(OPERATIONS)).long()
    normal = torch.sqrt(-2.0 * torch.log1p(-radius)) * torch.cos(2.0 * math.pi * angle)
    strength = (_STRENGTH + 0.5 * normal).clamp(max=_LARGEST) / _LARGEST
    return AugmentPlan(operation, whether < 0.5, strength, torch.where(sign < 0.5, -1.0, 1.0))


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
    factor = 1.0 + 0.9 * strength * drawn.sign
    luma = grey(levels)
    index = levels.flatten(2).long()
    counts = histogram(index)
    tables = {
        "auto_contrast": autocontrast_table(counts),
        "equalize": equalize_table(counts),
        "invert": solarize_table(torch.zeros_like(strength)),
        "posterize": posterize_table(4.0 - (strength * 4.0).floor()),
        "solarize": solarize_table(256.0 - (strength * 256.0).floor()),
        "solarize_add": solarize_add_table((strength * 110.0).floor()),
        "brightness": blend_table(factor, 0.0),
        "contrast": blend_table(factor, mean_grey(luma)),
    }
    table = ramp(levels.device).expand(counts.shape)
    for name, changed in tables.items():
        table = torch.where(_is(drawn, name).view(-1, 1, 1), changed, table)
    looked_up = look_up(index, table).view(levels.shape)
    sharpen, saturate = (_is(drawn, name).view(-1, 1, 1, 1) for name in ("sharpness", "colour"))
    if levels.shape[1] != 3:
        saturate = torch.zeros_like(saturate)
    dull = torch.where(sharpen, smooth(levels), torch.where(saturate, luma, looked_up))
    return blend(looked_up, dull, factor.view(-1, 1, 1, 1))


LEVELS = 256


def to_levels(images: Tensor) -> Tensor:
    """Images in [0, 1] as whole numbers in 0..255. Deeper images lose their depth here."""
    return (images * 255.0).round_()


def grey(levels: Tensor) -> Tensor:
    """Luma of RGB, [B, 1, H, W], rounded as Pillow does; the mean over any other number of channels."""
    if levels.shape[1] == 3:
        red, green, blue = levels.unbind(1)
        # Pillow's own fixed-point weights. The sum stays below 2^24, so float32 holds it exactly.
        sums = (red * 19595).add_(green, alpha=38470).add_(blue, alpha=7471)
        return sums.add_(32768).div_(65536).floor_()[:, None]
    return levels.mean(1, keepdim=True).round_()


def histogram(index: Tensor) -> Tensor:
    """How often each level comes in each channel, [B, C, 256] float32 (exact whole numbers). index: [B, C, n] int64."""
    counts = torch.zeros(*index.shape[:2], LEVELS, device=index.device)
    return counts.scatter_add_(2, index, torch.ones((), device=index.device).expand(index.shape))


def look_up(index: Tensor, table: Tensor) -> Tensor:
    """Each level of `index` [B, C, n] int64 replaced by its entry in `table` [B, C, 256]."""
    return table.gather(2, index)


def ramp(device: torch.device) -> Tensor:
    """The table that changes nothing, [1, 1, 256]."""
    return torch.arange(LEVELS, device=device, dtype=torch.float32).view(1, 1, -1)


def autocontrast_table(counts: Tensor) -> Tensor:
    """Stretch each channel so that its darkest level becomes 0 and its brightest 255; [B, C, 256]."""
    present = (counts > 0).to(torch.uint8)
    low = present.argmax(2, keepdim=True).float()
    high = (LEVELS - 1) - present.flip(2).argmax(2, keepdim=True).float()
    level = ramp(counts.device)
    # Levels stay whole numbers until the division, so that the top comes out at 255 and not just below.
    stretched = ((level - low) * 255.0 / (high - low)).floor()
    return torch.where(high > low, stretched, level)


def equalize_table(counts: Tensor) -> Tensor:
    """Make each channel's levels about equally frequent; [B, C, 256]."""
    whole = counts.to(torch.int64)
    level = torch.arange(LEVELS, device=counts.device)
    last = torch.where(whole > 0, level, -1).amax(2, keepdim=True)
    step = (whole.sum(2, keepdim=True) - whole.gather(2, last)) // (LEVELS - 1)
    before = whole.cumsum(2) - whole
    spread = ((step // 2 + before) // step.clamp(min=1)).clamp(max=LEVELS - 1)
    return torch.where(step > 0, spread, level).float()


def posterize_table(bits: Tensor) -> Tensor:
    """Keep the `bits` [B] highest bits of each level; [B, 1, 256]."""
    width = torch.exp2(8 - bits).view(-1, 1, 1)
    return (ramp(bits.device) / width).floor() * width


def solarize_table(threshold: Tensor) -> Tensor:
    """Invert the levels from `threshold` [B] on (0 inverts the image); [B, 1, 256]."""
    level = ramp(threshold.device)
    return torch.where(level < threshold.view(-1, 1, 1), level, 255 - level)


def solarize_add_table(amount: Tensor) -> Tensor:
    """Add `amount` [B], at most 128, to the levels of the darker half; [B, 1, 256]."""
    level = ramp(amount.device)
    return torch.where(level < 128, level + amount.view(-1, 1, 1), level)


def blend_table(factor: Tensor, dull: Tensor | float) -> Tensor:
    """Blend each level with the level `dull` ([B] or one number); factor [B]: 1 changes nothing; [B, 1, 256]."""
    other = dull.view(-1, 1, 1) if isinstance(dull, Tensor) else dull
    return blend(ramp(factor.device), other, factor.view(-1, 1, 1))


def blend(levels: Tensor, dull: Tensor | float, factor: Tensor) -> Tensor:
    """dull + factor · (levels − dull), cut to whole levels: the form of all four of Pillow's enhancers."""
    return (factor * (levels - dull)).add_(dull).clamp_(0, 255).floor_()


def mean_grey(luma: Tensor) -> Tensor:
    """The rounded mean of `grey`, [B]: what contrast blends with. Sums of whole numbers, so batches do not matter."""
    return (luma.flatten(1).to(torch.float64).mean(1) + 0.5).floor().float()


def smooth(levels: Tensor) -> Tensor:
    """Pillow's 3 × 3 smoothing (the middle weighs 5 of 13), with the border left as it is: sharpness blends with it."""
    # Sums of slices: exact on whole numbers, and several times faster on a CPU than pooling.
    rows = (levels[:, :, :-2] + levels[:, :, 1:-1]).add_(levels[:, :, 2:])
    total = (rows[..., :-2] + rows[..., 1:-1]).add_(rows[..., 2:]).add_(levels[:, :, 1:-1, 1:-1], alpha=4)
    result = levels.clone()
    result[:, :, 1:-1, 1:-1] = total.div_(13).round_()
    return result


def jitter(levels: Tensor, factors: Tensor) -> Tensor:
    """Brightness, contrast and (of RGB) saturation changed one after the other by `factors` [B, 3]."""
    bright, contrast, colour = factors.view(-1, 3, 1, 1, 1).unbind(1)
    levels = blend(levels, 0.0, bright)
    levels = blend(levels, mean_grey(grey(levels)).view(-1, 1, 1, 1), contrast)
    return blend(levels, grey(levels), colour) if levels.shape[1] == 3 else levels
