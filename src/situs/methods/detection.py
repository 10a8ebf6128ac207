"""Detection with Mask R-CNN over ViTDet's simple feature pyramid (Li et al., 2022): DropPos's evaluation on COCO.

The last layer's map of a plain ViT at five strides, or the stages of a hierarchical model, give proposals, and each
proposal a class, a box and a mask: torchvision's parts (`situs.methods.regions`) with ViTDet's heads. Deviations:
attention is global throughout, where ViTDet's is so in four of its blocks and in windows elsewhere (a model that has
windows keeps them); CLS and registers stay in the sequence; the map goes through the model's own final norm; regions
are pooled with two samples per cell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs.backbones.base import Backbone
from situs.config import Checked
from situs.core.random import bits
from situs.core.when import When
from situs.data.objects import objects_of
from situs.errors import SitusError
from situs.limits import Count, Positive, Within
from situs.methods.base import Batch, Draws, Method, Output
from situs.methods.heads import level_maps, own_norms


@dataclass(frozen=True)
class DetectionConfig(Checked):
    """Settings of the feature pyramid and of the detection heads."""

    width: Count = 256
    """Number of channels of the feature pyramid and of the heads' convolutions."""

    hidden: Count = 1024
    """Width of the linear layer in the box head."""

    anchor: Positive = 8.0
    """Side of a square anchor, in units of its feature map's stride. With the default, strides of 4 to 64 give anchors
    of 32 to 512 pixels."""

    proposals: Count = 1000
    """Number of proposals kept per image."""

    anchors: Count = 256
    """Number of anchors per image that train the proposal head. At most half of these anchors are objects."""

    regions: Count = 512
    """Number of proposals per image that train the detection heads. At most a quarter of these proposals are
    objects."""

    score: Annotated[float, Within("[0, 1)")] = 0.05
    """Smallest score of a detection that is kept."""

    detections: Count = 100
    """Largest number of detections per image."""


class Detection(Method):
    """Mask R-CNN on the backbone's feature maps. classes: their number without the background."""

    Config: ClassVar[type[DetectionConfig]] = DetectionConfig
    needs_targets: ClassVar[tuple[str, ...]] = ("objects",)
    compiled_part: ClassVar[str] = "maps"

    def __init__(self, backbone: Backbone | nn.Module, config: DetectionConfig, classes: int) -> None:
        super().__init__(backbone, config)
        backbone = self.backbone
        # Imported here: torchvision takes a second.
        from situs.methods.regions import Proposals, Regions, SimplePyramid, StagePyramid

        if classes < 1:
            raise SitusError("detection needs at least one class of objects", field="data.objects.classes")
        patch = backbone.input.patch or ()
        if len({*patch}) != 1 or len(patch) != 2:
            sides = " × ".join(map(str, patch))
            raise SitusError(f"detection needs square patches, but {backbone.name} has {sides}")
        self.classes, levels = classes, backbone.levels()
        staged = any(level.halved for level in levels)
        self.levels = levels if staged else levels[-1:]
        self.norms = own_norms(self.levels)
        width = config.width
        self.pyramid = StagePyramid(levels, width, patch[0]) if staged else SimplePyramid(backbone.dim, width, patch[0])
        strides = self.pyramid.strides
        self.rpn = Proposals(strides, width, config.anchor, config.anchors, config.proposals)
        limits = (config.regions, config.score, config.detections)
        self.roi_heads = Regions(strides, width, config.hidden, classes + 1, *limits)

    def draw(self, batch: Batch, when: When) -> Draws:
        return {"regions": bits(when.seed, when.epoch, batch.ids, "detection", ())}

    def maps(self, inputs: Tensor) -> list[Tensor]:
        """The pyramid of inputs [B, C, H, W], from fine to coarse, [B, width, h_i, w_i]."""
        return self.pyramid(level_maps(self.backbone, inputs, self.levels, self.norms))

    def forward(self, batch: Batch, draws: Draws) -> Output:
        maps, keys = self.maps(batch.inputs), draws["regions"]
        objects = objects_of(batch.targets)
        shapes = [image.sides for image in objects]
        truth = [{"boxes": image.boxes, "labels": image.classes + 1, "masks": image.masks} for image in objects]
        proposals, losses = self.rpn(maps, shapes, truth, keys)
        losses |= self.roi_heads.losses(numbered(maps), proposals, shapes, truth, keys)
        loss = torch.stack([*losses.values()]).sum()
        return Output(loss, {name: value.detach() for name, value in losses.items()}, {})

    @torch.no_grad()
    def detect(self, inputs: Tensor, sides: Tensor | None = None) -> list[dict[str, Tensor]]:
        """The detections in each of inputs [B, C, H, W], best first; in eval mode.

        sides: [B, 2], height and width of the image in the padded input, from the top left; None: all of it. boxes:
        [n, 4] left, top, right, bottom in pixels. labels: [n] from 0 on. scores: [n]. masks: [n, 28, 28], probability
        that a point of the box belongs to the object.
        """
        assert not self.training, "in training mode regions are sampled"
        height, width = inputs.shape[2:]
        shapes = [(height, width)] * len(inputs) if sides is None else [(int(h), int(w)) for h, w in sides.tolist()]
        side = (self.backbone.input.patch or (1,))[0]
        maps = self.maps(F.pad(inputs, (0, -width % side, 0, -height % side)))
        proposals, _ = self.rpn(maps, shapes)
        detections, _ = self.roi_heads(numbered(maps), proposals, shapes)
        return [d | {"labels": d["labels"] - 1, "masks": d["masks"][:, 0].float()} for d in detections]


def numbered(maps: list[Tensor]) -> dict[str, Tensor]:
    """Maps by number, as torchvision names them."""
    return {str(number): level for number, level in enumerate(maps)}
