"""On-device augmentation of a batch: what is drawn (`draw`, not compiled) and what it does (`apply`, may be compiled).

Every number comes from the counter-based hash of (seed, epoch, draw id), and every step treats the rows of a batch
independently, so a sample's view does not depend on the batch, its order, the worker or the rank. Only MixUp and CutMix
use a second sample (`situs.data.augment.mix`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from situs.config import Checked
from situs.core.random import uniform
from situs.data.audio import AudioAugment
from situs.data.augment import geometry, mix, randaugment
from situs.data.batch import VOID
from situs.data.objects import extents
from situs.limits import Count, Natural, NotNegative, Positive, Rule, Share, Within

_RISING = Rule("two rising numbers in (0, 1]", lambda pair: 0 < pair[0] <= pair[1] <= 1)


@dataclass(frozen=True)
class AugmentConfig(Checked):
    """The augmentation of training samples."""

    retired: ClassVar = {
        "magnitude": (9.0, "the strength of RandAugment is 9, as in DeiT"),
        "magnitude_std": (0.5, "the strength of RandAugment has a standard deviation of 0.5, as in DeiT"),
        "operation_probability": (0.5, "each operation of RandAugment is applied with probability 0.5, as in DeiT"),
        "erasing_area": ([0.02, 1 / 3], "a fiftieth to a third of the image is erased, as in DeiT"),
        "erasing_with": ("noise", "erased pixels become noise, as in DeiT"),
        "mix_probability": (1.0, "all samples are mixed if mixup or cutmix is on"),
        "ratio": ([3 / 4, 4 / 3], "a crop's width is 3/4 to 4/3 of its height"),
        "mix_switch": (0.5, "if mixup and cutmix are both on, each mixes half of the samples"),
    }

    crop: Literal["none", "resized", "pad", "scaled", "fitted"] = "resized"
    """How an image is cropped. resized: take a random crop and resize it. pad: shift the image by at most `augment.pad`
    pixels. none: take the whole image. scaled (for masks): scale the image at random, then crop it. fitted (for
    objects): scale the image at random, then pad it (large-scale jitter)."""

    scale: Annotated[tuple[float, float], _RISING] = (0.08, 1.0)
    """With crop=resized: smallest and largest area of the crop, as a fraction of the image's area."""

    pad: Natural = 4
    """With crop=pad: largest shift in pixels."""

    scales: Annotated[tuple[Positive, Positive], Rule("two rising numbers", lambda pair: pair[0] <= pair[1])] = (
        0.5,
        2.0,
    )
    """With crop=scaled or crop=fitted: smallest and largest scale. At scale 1 the image just covers the model's input
    (scaled) or just fits into the input (fitted)."""

    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    """Interpolation for resizing."""

    flip: Share = 0.5
    """Probability of a horizontal flip."""

    jitter: NotNegative = 0.0
    """Largest change of brightness, contrast and saturation. With 0.4, each factor is drawn from [0.6, 1.4]. With 0,
    nothing changes."""

    operations: Natural = 0
    """RandAugment: number of operations drawn per sample. Each operation is applied with probability 0.5, at a strength
    of about 9 of 10. With 0, RandAugment is off."""

    erasing: Share = 0.0
    """Random erasing: probability that a random rectangle of an image is filled with noise."""

    mixup: NotNegative = 0.0
    """MixUp's α. With 0, MixUp is off."""

    cutmix: NotNegative = 0.0
    """CutMix's α. With 0, CutMix is off. If MixUp is on too, each of MixUp and CutMix is applied to half of the
    samples."""

    label_smoothing: Annotated[float, Within("[0, 1)")] = 0.0
    """Label smoothing: probability mass that is spread over all classes. With several labels per sample, the mass is
    spread over "yes" and "no" of each class."""

    repeated: Count = 1
    """Repeated augmentation: number of copies of a sample in a batch. Each copy is augmented differently."""

    audio: AudioAugment = field(default_factory=AudioAugment)
    """Augmentation of clips. Label smoothing and repeated augmentation also apply to clips."""

    @property
    def mixes(self) -> bool:
        """Whether images are mixed with others."""
        return self.mixup > 0 or self.cutmix > 0

    @property
    def softens(self) -> bool:
        """Whether labels leave the loader as distributions [B, K] and not as numbers [B]."""
        return self.mixes or self.label_smoothing > 0


NONE = AugmentConfig(crop="none", flip=0.0)
Noise = dict[str, Tensor]


def draw(config: AugmentConfig, ids: Tensor, *, seed: int, epoch: int) -> Noise:
    """All the random numbers of a batch, [B, …] each. ids: [B] draw numbers (`situs.data.sampler.draw_ids`)."""
    shapes: dict[str, tuple[int, ...]] = {}
    if config.crop != "none":
        shapes["crop"] = (geometry.CROP_NOISE,)
    if config.flip > 0:
        shapes["flip"] = ()
    if config.jitter > 0:
        shapes["jitter"] = (3,)
    if config.operations > 0:
        shapes["operations"] = (config.operations, randaugment.NOISE)
    if config.erasing > 0:
        shapes["erasing"] = (mix.ERASE_NOISE,)
    if config.mixes:
        shapes["mix"] = (mix.NOISE,)
    noise = {name: uniform(seed, epoch, ids, f"augment.{name}", shape) for name, shape in shapes.items()}
    if config.erasing > 0:
        noise["table"] = mix.normal_table(ids.device)
    return noise


def apply(
    images: Tensor, noise: Noise, config: AugmentConfig, size: tuple[int, int], mean: Tensor, std: Tensor
) -> Tensor:
    """Normalised, augmented images [B, C, *size] float32, without mixing. Pure; no host sync; fixed shapes.

    images: [B, C, H, W] uint8, or float in [0, 1]. mean, std: [C]; the mean also fills what lies outside an image.
    """
    images = as_floats(images)
    return recoloured(_geometry(images, noise, config, size, mean), noise, config, mean, std)


def apply_masked(
    images: Tensor,
    masks: Tensor,
    sides: Tensor,
    noise: Noise,
    config: AugmentConfig,
    size: tuple[int, int],
    normalisation: tuple[Tensor, Tensor],
    finer: int = 1,
) -> tuple[Tensor, Tensor]:
    """`apply` to images and, with the same geometry, to their masks [B, H, W]: [B, C, *size] and [B, *size].

    sides: [B, 2], height and width of each; the last row and column of a smaller image are repeated behind it.
    normalisation: mean and std. finer: samples along a side of each pixel.
    """
    mean, std = normalisation
    boxes, flip, affine = draw_geometry(noise, config, size, (sides[:, 0], sides[:, 1]), sides[:, 0])
    warped = geometry.warp(
        as_floats(images), boxes, flip, size, mean, affine, config.interpolation, sides=sides, finer=finer
    )
    moved = geometry.warp_masks(masks, boxes, flip, size, affine, fill=VOID, sides=sides)
    return recoloured(warped, noise, config, mean, std), moved


def recoloured(images: Tensor, noise: Noise, config: AugmentConfig, mean: Tensor, std: Tensor) -> Tensor:
    """The steps after the geometry: colours, normalisation, erasing."""
    if "jitter" in noise or "operations" in noise:
        levels = randaugment.to_levels(images)
        if "jitter" in noise:
            factors = 1.0 + config.jitter * (2.0 * noise["jitter"] - 1.0)
            levels = randaugment.jitter(levels, factors.clamp(min=0.0))
        if "operations" in noise:
            levels = randaugment.recolour(levels, randaugment.plan(noise["operations"]))
        images = levels / 255.0
    images = normalise(images, mean, std)
    if "erasing" in noise:
        images = mix.erase(images, noise["erasing"], config.erasing, noise["table"])
    return images


def apply_mix(
    images: Tensor, labels: Tensor | None, noise: Noise, config: AugmentConfig, classes: int
) -> tuple[Tensor, Tensor | None]:
    """MixUp, CutMix and label smoothing: images unchanged or mixed, labels unchanged or soft [B, K].

    labels: [B], or [B, K] of a multi-label set.
    """
    if labels is None or not config.softens:
        return images, labels
    smoothing, many = config.label_smoothing, labels.dim() == 2
    targets = mix.soft_multi_labels(labels, smoothing) if many else mix.soft_labels(labels, classes, smoothing)
    if not config.mixes:
        return images, targets
    return mix.mix(images, targets, noise["mix"], mixup=config.mixup, cutmix=config.cutmix)


def _geometry(images: Tensor, noise: Noise, config: AugmentConfig, size: tuple[int, int], mean: Tensor) -> Tensor:
    count, _, height, width = images.shape
    if config.crop == "none" and "operations" not in noise and (height, width) == size:
        flip = noise["flip"] < config.flip if "flip" in noise else None
        return images if flip is None else torch.where(flip.view(-1, 1, 1, 1), images.flip(-1), images)
    boxes, flip, affine = draw_geometry(noise, config, size, (height, width), images.new_empty(count))
    return geometry.warp(images, boxes, flip, size, mean, affine, config.interpolation)


def draw_geometry(
    noise: Noise, config: AugmentConfig, size: tuple[int, int], sides: tuple[Tensor | int, Tensor | int], like: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The geometry of a batch: boxes [B, 4], flips [B], affine transforms. like: [B] on the device."""
    count, device = like.shape[0], like.device
    flip = noise["flip"] < config.flip if "flip" in noise else torch.zeros(count, dtype=torch.bool, device=device)
    if config.crop == "resized":
        boxes = geometry.resized_crop_boxes(noise["crop"], *sides, config.scale)
    elif config.crop == "scaled":
        boxes = geometry.scaled_crop_boxes(noise["crop"], *sides, size, config.scales)
    elif config.crop == "fitted":
        boxes = geometry.scaled_crop_boxes(noise["crop"], *sides, size, config.scales, flip)
    elif config.crop == "pad":
        boxes = geometry.pad_crop_boxes(noise["crop"], *sides, config.pad)
    else:
        boxes = geometry.whole_boxes(count, *sides, device)
    return (
        boxes,
        flip,
        randaugment.matrices(randaugment.plan(noise["operations"]), *size) if "operations" in noise else None,
    )


def as_floats(images: Tensor) -> Tensor:
    """uint8 0..255 to float32 in [0, 1]; floats stay."""
    return images.to(torch.float32) / 255.0 if images.dtype == torch.uint8 else images.to(torch.float32)


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(images − mean) / std for each channel; mean, std: [C]."""
    return (images - mean.view(1, -1, 1, 1)) / std.view(1, -1, 1, 1)


def denormalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Normalised images as pixels: images · std + mean for each channel, clipped to [0, 1]."""
    return (images * std.view(1, -1, 1, 1) + mean.view(1, -1, 1, 1)).clamp(0.0, 1.0)


_CUT = 1e-3  # pixels beyond the border that may come from rounding


def apply_objects(
    values: Mapping[str, Tensor],
    noise: Noise,
    config: AugmentConfig,
    size: tuple[int, int],
    normalisation: tuple[Tensor, Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """`apply` to images, and to their objects: [B, C, *size], and the targets of a batch.

    values: "image" [B, C, H, W], "sides" [B, 2] of each, and "boxes", "classes", "crowd" and "masks" as in a batch, in
    the images' pixels. Masks take the nearest pixel. A box that the border cuts becomes the box of what is left of its
    mask, and an object without a pixel is removed.
    """
    sides, (mean, std) = values["sides"], normalisation
    crops, flip, affine = draw_geometry(noise, config, size, (sides[:, 0], sides[:, 1]), sides[:, 0])
    view = (crops, flip, size)
    pixels = as_floats(values["image"])
    images = geometry.warp(pixels, *view, mean, affine, config.interpolation, sides=sides, finer=1)
    masks = geometry.sample_nearest(values["masks"], geometry.sampling_grid(*view, sides, affine))
    moved, within = (move(values["boxes"], *view, affine) for move in (geometry.move_boxes, geometry.warp_boxes))
    visible = extents(masks, values["boxes"].shape[1])
    cut = ((moved - within).abs() > _CUT).any(-1) if affine is None else torch.ones_like(values["crowd"])
    tight = torch.cat([within[..., :2].maximum(visible[..., :2]), within[..., 2:].minimum(visible[..., 2:])], dim=-1)
    boxes = torch.where(cut[..., None], tight, within)
    has_area = (visible[..., 2] > visible[..., 0]) & (boxes[..., 2:] > boxes[..., :2]).all(-1)
    exists = has_area & (values["classes"] != VOID)
    whole = torch.cat([torch.zeros_like(sides), sides.flip(1)], dim=1)[:, None].float()
    ends = geometry.warp_boxes(whole, *view, affine)[:, 0, [3, 2]].round().long().clamp(min=1)
    targets = {
        "boxes": torch.where(exists[..., None], boxes, 0.0),
        "classes": torch.where(exists, values["classes"], VOID),
        "crowd": values["crowd"] & exists,
        "masks": masks,
        "sides": ends,
    }
    return recoloured(images, noise, config, mean, std), targets
