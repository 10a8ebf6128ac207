"""What detection is made of: a pyramid of feature maps, from fine to coarse and of one width, and Mask R-CNN's heads.

The simple pyramid is that of ViTDet (Li et al., 2022): strides of 4, 8, 16, 32 and 64 pixels from the one map of a
plain transformer, by transposed convolutions and pooling, with norms over the channels at each point. A hierarchical
model has maps of several strides itself, which torchvision's feature pyramid network joins.

The heads are torchvision's own parts. Changes: the regions trained on are drawn by a hash of the sample's id, not by a
generator; a map may have any stride (a patch of 14 pixels gives 3.5); boxes are float32 whatever the maps are; regions
are aligned with pixel centres, where torchvision is half a stride off; each loss is the mean over an image's regions,
then over images. ViTDet trained one image per GPU, where that is the same; here it makes ranks and micro-batches equal
to the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss, maskrcnn_loss
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead, concat_box_prediction_layers
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool
from torchvision.ops.misc import Permute
from torchvision.ops.poolers import initLevelMapper

from situs.backbones.base import Level
from situs.core.random import uniform

FINEST = 4
"""Stride in pixels of the finest map, where the patches' side is a power of two."""

LEVELS = 4
"""Maps before the coarsest, which is the last of them subsampled."""


def channel_norm(channels: int) -> nn.Sequential:
    """LayerNorm over the channels at each point of maps [B, C, h, w]."""
    return nn.Sequential(Permute([0, 2, 3, 1]), nn.LayerNorm(channels, eps=1e-6), Permute([0, 3, 1, 2]))


class SimplePyramid(nn.Module):
    """ViTDet's pyramid: one map [B, dim, h, w] at five sizes, all of `width` channels. patch: the map's stride."""

    def __init__(self, dim: int, width: int, patch: int) -> None:
        super().__init__()
        finest = max(0, round(math.log2(patch / FINEST)))  # how often the finest map is doubled
        doubled = range(finest, finest - LEVELS, -1)
        self.strides = [patch * 2.0**-times for times in [*doubled, doubled[-1] - 1]]
        self.scales = nn.ModuleList([_scaled(dim, times) for times in doubled])
        self.smooth = nn.ModuleList([_smooth(dim >> max(0, times), width) for times in doubled])

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        levels = [smooth(scale(maps[-1])) for scale, smooth in zip(self.scales, self.smooth, strict=True)]
        return [*levels, F.max_pool2d(levels[-1], 1, 2)]


def _scaled(dim: int, times: int) -> nn.Sequential:
    """A map doubled in size `times` times, its channels halved as often; halved in size where negative."""
    if times <= 0:
        return nn.Sequential(*[nn.MaxPool2d(2, ceil_mode=True) for _ in range(-times)])
    layers: list[nn.Module] = []
    for done in range(times):
        if done:
            layers += [channel_norm(dim >> done), nn.GELU()]
        layers.append(nn.ConvTranspose2d(dim >> done, dim >> (done + 1), 2, 2))
    return nn.Sequential(*layers)


def _smooth(have: int, width: int) -> nn.Sequential:
    layers = [nn.Conv2d(have, width, 1, bias=False), nn.Conv2d(width, width, 3, padding=1, bias=False)]
    return nn.Sequential(*[part for layer in layers for part in (layer, channel_norm(width))])


class StagePyramid(nn.Module):
    """An FPN: the stages of a hierarchical model joined from coarse to fine, and the coarsest subsampled."""

    def __init__(self, levels: Sequence[Level], width: int, patch: int) -> None:
        super().__init__()
        self.strides = [float(patch * 2**level.halved) for level in levels]
        self.strides.append(2 * self.strides[-1])
        widths = [level.dim for level in levels]
        self.joined = FeaturePyramidNetwork(widths, width, LastLevelMaxPool(), norm_layer=channel_norm)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        return list(self.joined({str(number): level for number, level in enumerate(maps)}).values())


RATIOS = (0.5, 1.0, 2.0)
"""Height over width of the anchors at each point."""

ANCHORS, REGIONS = 0.5, 0.25
"""Highest fraction of the chosen anchors, and of the chosen regions, that match an object."""

BOX, MASK = 7, 14
"""Side of the pooled features of a region for its box, and for its mask, whose side is twice that."""

CANONICAL = 14.0
"""A region of this many strides is pooled from the map of that stride: 224 pixels from the map of stride 16."""

Truth = list[dict[str, Tensor]]
"""The objects of each image in torchvision's format: boxes [m, 4], labels [m] from 1 on, masks [m, H, W]."""

Shapes = list[tuple[int, int]]
"""Height and width of each image without its padding."""


class RegionSampler:
    """Samples the regions of an image to train on: at most `count`, of them at most `share` objects.

    keys: [B] int64, a number of each sample, from which the order of its regions is drawn.
    """

    def __init__(self, count: int, share: float, stream: str) -> None:
        self.count, self.share, self.stream = count, share, stream
        self.keys = torch.empty(0, dtype=torch.int64)

    def __call__(self, labels: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """labels [n] per image: an object's class, 0 for background, -1 for neither -> two masks [n]: the objects and
        the background that are trained on."""
        objects: list[Tensor] = []
        background: list[Tensor] = []
        for classes, key in zip(labels, self.keys.split(1), strict=True):
            numbers = uniform(0, 0, key, self.stream, (len(classes),))[0]
            objects.append(_smallest(classes >= 1, numbers, int(self.count * self.share)))
            background.append(_smallest(classes == 0, numbers, self.count - int(objects[-1].sum())))
        return objects, background


def _smallest(candidates: Tensor, numbers: Tensor, most: int) -> Tensor:
    """[n] bool: the `most` candidates with the smallest numbers."""
    places = candidates.nonzero()[:, 0]
    places = places[numbers[places].argsort(stable=True)[:most]]
    return torch.zeros_like(candidates).index_fill(0, places, value=True)


class Proposals(RegionProposalNetwork):
    """Boxes that may contain an object, from anchors at every point of every map. anchor: their side, in strides."""

    def __init__(self, strides: Sequence[float], width: int, anchor: float, count: int, proposals: int) -> None:
        anchors = AnchorGenerator(tuple((anchor * stride,) for stride in strides), (RATIOS,) * len(strides))  # pyright: ignore[reportArgumentType]
        before, after = ({"training": n, "testing": m} for n, m in ((2 * proposals, proposals), (proposals, proposals)))
        super().__init__(
            anchors, RPNHead(width, len(RATIOS), conv_depth=2), 0.7, 0.3, count, ANCHORS, before, after, 0.7
        )
        self.strides = strides
        self.fg_bg_sampler: Any = RegionSampler(count, ANCHORS, "detection.anchors")

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, maps: list[Tensor], shapes: Shapes, truth: Truth | None = None, keys: Tensor | None = None
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """maps [B, C, h_i, w_i] -> the proposals [n, 4] of each image, and with the truth also the two losses."""
        objectness, moves = self.head(maps)
        counts = [level[0].numel() for level in objectness]
        scores, moves = (values.float() for values in concat_box_prediction_layers(objectness, moves))
        self.anchor_generator.set_cell_anchors(torch.float32, scores.device)
        strides: Any = [(stride, stride) for stride in self.strides]
        anchors = torch.cat(self.anchor_generator.grid_anchors([list(level.shape[-2:]) for level in maps], strides))
        per_image = [anchors] * len(shapes)
        boxes = self.box_coder.decode(moves.detach(), per_image).view(len(shapes), -1, 4)
        proposals, _ = self.filter_proposals(boxes, scores, shapes, counts)
        if truth is None or keys is None:
            return proposals, {}
        labels, matched = self.assign_targets_to_anchors(per_image, truth)
        targets, losses = self.box_coder.encode(tuple(matched), tuple(per_image)), []  # pyright: ignore[reportArgumentType]
        parts = zip(scores.chunk(len(shapes)), moves.chunk(len(shapes)), labels, targets, keys.split(1), strict=True)
        for score, move, label, target, key in parts:
            self.fg_bg_sampler.keys = key
            losses.append(self.compute_loss(score, move, [label], [target]))
        return proposals, mean_over_images(("loss_objectness", "loss_rpn_box_reg"), losses)


class Predictor(FastRCNNPredictor):
    """torchvision's predictor with outputs in float32: half precision would round the boxes."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits, moves = super().forward(x)
        return logits.float(), moves.float()


class Regions(RoIHeads):
    """The class, the box and the mask of each proposal. classes: their number with the background, which is 0."""

    def __init__(
        self, strides: Sequence[float], width: int, hidden: int, classes: int, count: int, score: float, most: int
    ) -> None:
        norm: Any = channel_norm
        super().__init__(
            Pool(strides, BOX),
            FastRCNNConvFCHead((width, BOX, BOX), [width] * 4, [hidden], norm),
            Predictor(hidden, classes),
            *(0.5, 0.5, count, REGIONS, None, score, 0.5, most),
            Pool(strides, MASK),
            MaskRCNNHeads(width, [width] * 4, 1, norm),
            MaskRCNNPredictor(width, width, classes),
        )
        self.fg_bg_sampler: Any = RegionSampler(count, REGIONS, "detection.regions")

    def losses(
        self, maps: dict[str, Tensor], proposals: list[Tensor], shapes: Shapes, truth: Truth, keys: Tensor
    ) -> dict[str, Tensor]:
        """The three losses, from maps by number and the proposals [n, 4] of each image."""
        self.fg_bg_sampler.keys = keys
        boxes, matched, labels, targets = self.select_training_samples(proposals, truth)
        logits, moves = self.box_predictor(self.box_head(self.box_roi_pool(maps, boxes, shapes)))
        objects = [(classes > 0).nonzero()[:, 0] for classes in labels]
        object_boxes = [regions[which] for regions, which in zip(boxes, objects, strict=True)]
        mask: Any = self.mask_predictor, self.mask_head, self.mask_roi_pool
        masks = mask[0](mask[1](mask[2](maps, object_boxes, shapes))).float().split([len(which) for which in objects])
        counts = [len(classes) for classes in labels]
        per_image = zip(logits.split(counts), moves.split(counts), labels, targets, strict=True)
        box_losses = [
            fastrcnn_loss(logit, move, [classes], [target]) if len(classes) else (logit.sum(), move.sum())
            for logit, move, classes, target in per_image
        ]
        mask_losses = [
            # Half a pixel back: torchvision takes the truth's pixel centres for whole numbers.
            (maskrcnn_loss(guess, [box - 0.5], [image["masks"]], [image["labels"]], [match[which]]),)
            for guess, box, image, match, which in zip(masks, object_boxes, truth, matched, objects, strict=True)
        ]
        losses = mean_over_images(("loss_classifier", "loss_box_reg"), box_losses)
        return losses | mean_over_images(("loss_mask",), mask_losses)


def mean_over_images(names: Sequence[str], losses: Sequence[tuple[Tensor, ...]]) -> dict[str, Tensor]:
    """The mean of each loss over the images, by name."""
    return {name: torch.stack(values).mean() for name, values in zip(names, zip(*losses, strict=True), strict=True)}


class Pool(MultiScaleRoIAlign):
    """Regions pooled from the map that fits their size, the coarsest left out, aligned with pixel centres.

    torchvision takes a pixel's centre for its corner, so it pools a region half a stride off.
    """

    def __init__(self, strides: Sequence[float], side: int) -> None:
        used = strides[:-1]
        super().__init__([str(number) for number in range(len(used))], side, 2)
        self.scales: Any = [1.0 / stride for stride in used]
        # Set here: torchvision would infer the nearest powers of two from the first batch, and keep them.
        self.map_levels: Any = initLevelMapper(0, len(used) - 1, CANONICAL * used[0], 0)  # pyright: ignore[reportArgumentType]

    def forward(self, x: dict[str, Tensor], boxes: list[Tensor], image_shapes: Shapes) -> Tensor:
        """maps by number, the regions [n, 4] of each image -> [sum of n, C, side, side]."""
        halves = boxes[0].new_tensor([0.5 / scale for scale in self.scales])
        moved = [regions - halves[self.map_levels([regions])][:, None] for regions in boxes]
        return super().forward(x, moved, image_shapes)
