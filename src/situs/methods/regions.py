"""Mask R-CNN's regions: torchvision's own parts, with draws by number, exact strides and losses image by image.

What is changed: which regions are trained on follows from a sample's own numbers, not from a generator; a map may have
any stride (a patch of 14 pixels gives 3.5); boxes are float32 whatever the maps are; the middle of a place is its own,
where torchvision reads half of one too far on; each loss is the mean over an image's regions, and then over images.
ViTDet trained one image a GPU, where that is the same; here it makes ranks and micro-batches come to what the whole
batch comes to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss, maskrcnn_loss
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead, concat_box_prediction_layers
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.poolers import initLevelMapper

from situs.core.random import uniform
from situs.methods.pyramid import channel_norm

RATIOS = (0.5, 1.0, 2.0)
"""Height over width of the anchors at a place."""

BOX, MASK = 7, 14
"""Sides of what is pooled from a region for its box, and for its mask, whose own side is twice that."""

CANONICAL = 14.0
"""A region of this many strides is pooled from the map of that stride: 224 pixels from the map of stride 16."""

Truth = list[dict[str, Tensor]]
"""The objects of each image as torchvision has them: boxes [m, 4], labels [m] from 1 on, masks [m, H, W]."""

Shapes = list[tuple[int, int]]
"""Height and width of each image without its padding."""


class Chooser:
    """Which regions of an image are trained on: at most `count`, of them at most `share` objects, by `keys`.

    keys: [B] int64, a sample's own number, from which the order of its regions is drawn.
    """

    def __init__(self, count: int, share: float, stream: str) -> None:
        self.count, self.share, self.stream = count, share, stream
        self.keys = torch.empty(0, dtype=torch.int64)

    def __call__(self, labels: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """labels [n] of each image: an object's class, 0 for background, -1 for neither -> [n] bool, chosen of both."""
        found: tuple[list[Tensor], list[Tensor]] = [], []
        for own, key in zip(labels, self.keys.split(1), strict=True):
            numbers = uniform(0, 0, key, self.stream, (len(own),))[0]
            objects = _least(own >= 1, numbers, int(self.count * self.share))
            found[0].append(objects)
            found[1].append(_least(own == 0, numbers, self.count - int(objects.sum())))
        return found


def _least(among: Tensor, numbers: Tensor, most: int) -> Tensor:
    """[n] bool: at most `most` of those `among`, that have the least numbers."""
    places = among.nonzero()[:, 0]
    places = places[numbers[places].argsort(stable=True)[:most]]
    return torch.zeros_like(among).index_fill(0, places, value=True)


class Proposals(RegionProposalNetwork):
    """Boxes that may hold an object, from anchors at every place of every map. anchor: their side, in strides."""

    def __init__(self, strides: Sequence[float], width: int, anchor: float, count: int, proposals: int) -> None:
        anchors = AnchorGenerator(tuple((anchor * stride,) for stride in strides), (RATIOS,) * len(strides))  # pyright: ignore[reportArgumentType]
        before, after = ({"training": n, "testing": m} for n, m in ((2 * proposals, proposals), (proposals, proposals)))
        super().__init__(anchors, RPNHead(width, len(RATIOS), conv_depth=2), 0.7, 0.3, count, 0.5, before, after, 0.7)
        self.strides = strides
        self.fg_bg_sampler: Any = Chooser(count, 0.5, "detection.anchors")

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, maps: list[Tensor], shapes: Shapes, truth: Truth | None = None, keys: Tensor | None = None
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """maps [B, C, h_i, w_i] -> the proposals [n, 4] of each image, and the two losses where the truth is given."""
        found, moves = self.head(maps)
        counts = [each[0].numel() for each in found]
        scores, moves = (each.float() for each in concat_box_prediction_layers(found, moves))
        self.anchor_generator.set_cell_anchors(torch.float32, scores.device)
        strides: Any = [(stride, stride) for stride in self.strides]
        anchors = torch.cat(self.anchor_generator.grid_anchors([list(each.shape[-2:]) for each in maps], strides))
        every = [anchors] * len(shapes)
        boxes = self.box_coder.decode(moves.detach(), every).view(len(shapes), -1, 4)
        proposals, _ = self.filter_proposals(boxes, scores, shapes, counts)
        if truth is None or keys is None:
            return proposals, {}
        labels, matched = self.assign_targets_to_anchors(every, truth)
        wanted, images = self.box_coder.encode(tuple(matched), tuple(every)), []  # pyright: ignore[reportArgumentType]
        parts = zip(scores.chunk(len(shapes)), moves.chunk(len(shapes)), labels, wanted, keys.split(1), strict=True)
        for score, move, label, target, key in parts:
            self.fg_bg_sampler.keys = key
            images.append(self.compute_loss(score, move, [label], [target]))
        return proposals, mean_over_images(("loss_objectness", "loss_rpn_box_reg"), images)


class Predictor(FastRCNNPredictor):
    """torchvision's, in float32: a box would be rounded to what moves it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits, moves = super().forward(x)
        return logits.float(), moves.float()


class Regions(RoIHeads):
    """The class, the box and the mask of each proposal. classes: with the background, which is 0."""

    def __init__(
        self, strides: Sequence[float], width: int, hidden: int, classes: int, count: int, score: float, most: int
    ) -> None:
        norm: Any = channel_norm
        super().__init__(
            Pool(strides, BOX),
            FastRCNNConvFCHead((width, BOX, BOX), [width] * 4, [hidden], norm),
            Predictor(hidden, classes),
            *(0.5, 0.5, count, 0.25, None, score, 0.5, most),
            Pool(strides, MASK),
            MaskRCNNHeads(width, [width] * 4, 1, norm),
            MaskRCNNPredictor(width, width, classes),
        )
        self.fg_bg_sampler: Any = Chooser(count, 0.25, "detection.regions")

    def losses(
        self, maps: dict[str, Tensor], proposals: list[Tensor], shapes: Shapes, truth: Truth, keys: Tensor
    ) -> dict[str, Tensor]:
        """The three losses, of maps by number and the proposals [n, 4] of each image."""
        self.fg_bg_sampler.keys = keys
        boxes, matched, labels, wanted = self.select_training_samples(proposals, truth)
        logits, moves = self.box_predictor(self.box_head(self.box_roi_pool(maps, boxes, shapes)))
        held = [(own > 0).nonzero()[:, 0] for own in labels]
        outlined = [own[which] for own, which in zip(boxes, held, strict=True)]
        mask: Any = self.mask_predictor, self.mask_head, self.mask_roi_pool
        outlines = mask[0](mask[1](mask[2](maps, outlined, shapes))).float().split([len(which) for which in held])
        counts = [len(own) for own in labels]
        cut = zip(logits.split(counts), moves.split(counts), labels, wanted, strict=True)
        found = [
            fastrcnn_loss(logit, move, [own], [target]) if len(own) else (logit.sum(), move.sum())
            for logit, move, own, target in cut
        ]
        drawn = [
            # Half a pixel back: torchvision reads the truth's pixels as if their middles were at whole numbers.
            (maskrcnn_loss(outline, [box - 0.5], [own["masks"]], [own["labels"]], [match[which]]),)
            for outline, box, own, match, which in zip(outlines, outlined, truth, matched, held, strict=True)
        ]
        return mean_over_images(("loss_classifier", "loss_box_reg"), found) | mean_over_images(("loss_mask",), drawn)


def mean_over_images(names: Sequence[str], losses: Sequence[tuple[Tensor, ...]]) -> dict[str, Tensor]:
    """The mean of each loss over the images, by name."""
    return {name: torch.stack(each).mean() for name, each in zip(names, zip(*losses, strict=True), strict=True)}


class Pool(MultiScaleRoIAlign):
    """Regions pooled from the map that fits their size, the coarsest left out; the middle of a place is its own.

    torchvision takes a place's middle for its corner, so that a region is read half a stride too far on, and a flipped
    one as far the other way.
    """

    def __init__(self, strides: Sequence[float], side: int) -> None:
        used = strides[:-1]
        super().__init__([str(number) for number in range(len(used))], side, 2)
        self.scales: Any = [1.0 / stride for stride in used]
        # Told here: torchvision would take the nearest powers of two from the first batch, and keep them.
        self.map_levels: Any = initLevelMapper(0, len(used) - 1, CANONICAL * used[0], 0)  # pyright: ignore[reportArgumentType]

    def forward(self, x: dict[str, Tensor], boxes: list[Tensor], image_shapes: Shapes) -> Tensor:
        """maps by number, the regions [n, 4] of each image -> [sum of n, C, side, side]."""
        halves = boxes[0].new_tensor([0.5 / scale for scale in self.scales])
        moved = [own - halves[self.map_levels([own])][:, None] for own in boxes]
        return super().forward(x, moved, image_shapes)
