"""The attacker with labelled samples: it trains around the lock instead of looking for the key.

All weights but the head's are frozen. A trained matrix before the blocks maps the stream to the order that the blocks
expect, and another matrix after the blocks maps it back: with the right permutations in both matrices, the lock would
be open.
The result
is compared with a control, the same attack on random blocks: only the difference is due to the locked blocks.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs.backbones.base import Backbone
from situs.backbones.layout import Group
from situs.backbones.weights import HEADS
from situs.errors import SitusError, counted
from situs.locks.attacks.match import assign
from situs.locks.attacks.recovery import KeyRecovery, judged
from situs.locks.groups import residual_only
from situs.models.inference import evaluating
from situs.progress import tracked

BATCH = 50
"""Samples per step. If there are fewer samples, a step uses all samples."""


class Labelled(NamedTuple):
    """Samples and their classes [n]. inputs: images [n, C, H, W], or ids [n, N] (of pairs
    [n, 2, N]) with mask [n, N], False for padding."""

    inputs: Tensor
    labels: Tensor
    mask: Tensor | None = None

    def part(self, index: Tensor) -> tuple[Tensor, Tensor | None]:
        """Some of the samples; sentences are cut to the longest of them."""
        if self.mask is None:
            return self.inputs[index], None
        mask = self.mask[index]
        width = int(mask.any(dim=0).nonzero().max()) + 1
        return self.inputs[index][..., :width], mask[:, :width]

    def unpadded(self) -> Tensor:
        """The inputs; of sentences those of the most frequent length, which need no padding."""
        if self.mask is None:
            return self.inputs
        lengths = self.mask.sum(dim=1)
        commonest = int(lengths.mode().values)
        return self.inputs[lengths == commonest, ..., :commonest]


class Adapted(nn.Module):
    """A model with a matrix before its blocks and one behind them, both [D, D] and initially the identity."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone
        weight = next(backbone.model.parameters())
        self.before = nn.Parameter(torch.eye(backbone.dim, dtype=weight.dtype, device=weight.device))
        self.behind = nn.Parameter(self.before.detach().clone())

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        backbone = self.backbone
        grid = (inputs.shape[-1],) if backbone.input.words else None
        stream = backbone.assemble(backbone.embed(inputs), backbone.positions(grid), mask)
        stream = backbone.blocks(replace(stream, z=stream.z @ self.before))
        features = backbone.finish(replace(stream, z=stream.z @ self.behind))
        return backbone.classify(features._replace(real=mask))

    def learned(self) -> list[nn.Parameter]:
        """The two matrices and the head's weights, which the attacker trains."""
        named = self.backbone.model.named_parameters()
        return [self.before, self.behind, *(value for name, value in named if name.startswith(HEADS))]


def recover_with_labels(
    backbone: Backbone,
    groups: Sequence[Group],
    samples: Labelled,
    test: Labelled,
    *,
    steps: int = 200,
    lr: float = 1e-3,
    seed: int = 0,
    truth: Mapping[str, Tensor] | None = None,
    owner: float | None = None,
) -> KeyRecovery:
    """Trains the adapter on a copy of the locked `backbone`, and reads the key from the matrix before the blocks.

    samples, test: to train and to measure accuracy on. steps, lr: of AdamW, whose rate falls to 0 along a cosine. seed:
    of the order of samples and of the control's random blocks. owner: the accuracy with the key.
    """
    residual = residual_only(groups)
    if len(residual) != 1:
        raise SitusError(
            "the attacker `labels` needs a lock with one key for the residual channels, but this lock has "
            f"{len(residual)} such keys"
        )
    before = accuracy_of(backbone, test)
    began = time.perf_counter()
    attacked = train_adapter(copy.deepcopy(backbone), samples, steps, lr, seed)
    seconds = time.perf_counter() - began
    control = train_adapter(randomised(backbone, groups, seed), samples, steps, lr, seed)
    # before[j, i] is the weight of clear channel j in locked channel i; the key has 1 at j = p[i].
    keys = {residual[0].name: assign(attacked.before.detach().T)}
    cost = f"{counted(len(samples.labels), 'labelled samples')}, {counted(steps, 'steps')} of "
    cost += str(min(BATCH, len(samples.labels)))
    scores = {"before": before, "after": accuracy_of(attacked, test), "owner": owner}
    scores |= {"control": accuracy_of(control, test), "tested": len(test.labels)}
    return judged("labels", residual, keys, truth, seconds=seconds, cost=cost, **scores)


def train_adapter(backbone: Backbone, samples: Labelled, steps: int, lr: float, seed: int = 0) -> Adapted:
    """Trains the two matrices and the head; all other weights of `backbone` are frozen, in place."""
    labels = samples.labels
    model = Adapted(backbone.eval())
    backbone.requires_grad_(False)
    for parameter in model.learned():
        parameter.requires_grad_(True)
    optimiser = torch.optim.AdamW(model.learned(), lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in tracked(range(steps), "training an adapter"):
        chosen = torch.randperm(len(labels), generator=generator)[:BATCH].to(labels.device)
        loss = F.cross_entropy(model(*samples.part(chosen)).float(), labels[chosen])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return model


def accuracy_of(model: nn.Module, test: Labelled, batch: int = 256) -> float:
    """Share of samples whose most likely class is the label."""
    rows = torch.arange(len(test.labels), device=test.labels.device)
    with evaluating(model):
        classes = torch.cat([model(*test.part(part)).argmax(dim=-1) for part in rows.split(batch)])
    return int((classes == test.labels).sum()) / len(test.labels)


def randomised(backbone: Backbone, groups: Sequence[Group], seed: int) -> Backbone:
    """A copy whose keyed tensors are noise of the same mean and standard deviation: untrained blocks."""
    blank = copy.deepcopy(backbone)
    generator = torch.Generator().manual_seed(seed)
    state = blank.model.state_dict()
    for name in sorted({member.tensor for group in groups for member in group.members}):
        value = state[name]
        if value.is_floating_point() and value.numel() > 1:
            exact = value.cpu().double()
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            state[name] = (exact.mean() + exact.std() * noise).to(value)
    blank.model.load_state_dict(state)
    return blank
