"""What a noise's σ is a multiple of: a number of the data and the first weights, whatever the batch is."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from situs.backbones.base import Backbone
from situs.data.config import DataConfig
from situs.data.loader import make_loader
from situs.data.sources.base import Source
from situs.data.sources.subset import Subset

SAMPLES, PIECE = 256, 32


@torch.no_grad()
def noise_scale(backbone: Backbone, source: Source, data: DataConfig, device: torch.device | str = "cpu") -> float:
    """The standard deviation of the patch tokens' entries over `SAMPLES` images, chosen at random, the same every time.

    They are not augmented, and taken `PIECE` at a time. It is measured once, with the weights that a training starts
    from, and never sent.
    """
    settled = replace(data, batch=PIECE, count=None, workers=0)
    count = total = squares = 0.0
    for batch in make_loader(settled, None, device, source=Subset(source, SAMPLES)):
        z = backbone.assemble(backbone.embed(batch.inputs), backbone.positions()).z[:, backbone.num_prefix :].double()
        count, total, squares = count + z.numel(), total + float(z.sum()), squares + float(z.square().sum())
    return math.sqrt((squares - total * total / count) / (count - 1))
