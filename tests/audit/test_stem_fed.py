"""What the patch embedding was fed: recorded through copies, as pictures, and only where it is not the image."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from builders import small_vit
from torch import Tensor, nn

from situs.audit import adapt, create_attack, create_defence
from situs.audit.cases import TestSet
from situs.audit.gradients import attack_gradients
from situs.audit.stem import pictures_fed, reading_stem, recorded
from situs.core.tokens import patchify
from situs.gate import ABOVE

CHANCE = torch.Generator().manual_seed(0)
LEVELS = (255 * torch.rand(6, 3, 16, 16, generator=CHANCE).cumsum(-1).cumsum(-2).remainder(1.0)).round() / 255
IMAGES = (LEVELS - 0.5) / 0.5
HALVES = ([0.5] * 3, [0.5] * 3)


class Net(nn.Module):
    """A ViT of one block that does something to its images first. linear: patches by a linear layer."""

    def __init__(self, change: Callable[[Tensor], Tensor], linear: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.change, self.linear = change, linear
        self.patch = nn.Linear(48, 64) if linear else nn.Conv2d(3, 64, 4, 4)
        self.table = nn.Parameter(0.1 * torch.randn(1, 16, 64))
        self.block, self.head = nn.TransformerEncoderLayer(64, 2, 64, 0.0, batch_first=True), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.change(x)
        tokens = self.patch(F.unfold(x, 4, stride=4).mT) if self.linear else self.patch(x).flatten(2).mT
        return self.head(self.block(tokens + self.table).mean(dim=1))


def by_chance(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A change that is made or not, by torch's generator."""
    return lambda x: change(x) if float(torch.rand(())) < 0.7 else x


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "flip": by_chance(lambda x: x.flip(-1)),
    "shift": lambda x: x.roll((int(torch.randint(4, (1,))), int(torch.randint(4, (1,)))), (2, 3)),
    "crop": lambda x: F.interpolate(x[:, :, : 12 + int(torch.randint(4, (1,))), 2:], (16, 16), mode="bilinear"),
    "colour": lambda x: x * (0.4 + torch.rand(1, 3, 1, 1)) + 0.3 * torch.randn(1, 3, 1, 1),
    "partner": lambda x: 0.6 * x + 0.4 * IMAGES[torch.randint(6, (len(x),))],
    "noise": lambda x: x + 0.5 * torch.randn_like(x),
}


@pytest.mark.parametrize("linear", [False, True])
def test_what_was_fed_is_recorded_as_pictures_also_by_a_copy(linear: bool) -> None:
    flipped = adapt(Net(lambda x: x.flip(-1) if x.mean() > 0 else x.clone(), linear), 16, normalisation=HALVES)
    stem = reading_stem(flipped)
    with recorded(flipped, stem) as inputs:
        deepcopy(flipped)(IMAGES[:2])
    assert [each.shape for each in inputs] == [(2, 16, 48)]
    with recorded(flipped, stem) as others:
        pass
    flipped(IMAGES[:2])
    assert others == [] and len(inputs) == 1  # it listens within alone


def test_a_model_of_timm_is_fed_its_images() -> None:
    backbone = small_vit(16, width=48).eval()
    stem = reading_stem(backbone)
    with recorded(backbone, stem) as inputs:
        backbone(IMAGES[:2])
    inputs = inputs or [patchify(IMAGES[:2], 4)]  # nothing stands before its patches, which it multiplies by itself
    assert pictures_fed(backbone, stem, inputs, IMAGES[:2]) is None
    other = pictures_fed(backbone, stem, inputs, IMAGES[2:4])
    assert other is not None
    torch.testing.assert_close(other, IMAGES[:2])
    assert pictures_fed(backbone, stem, [], IMAGES[:2]) is None
    assert pictures_fed(backbone, stem, inputs, IMAGES[:3]) is None  # of too few
    assert pictures_fed(backbone, None, inputs, IMAGES[:2]) is None


@pytest.mark.parametrize(  # the others change their images as these do
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("shift", "partner", "noise"))) for name in CHANGES]
)
@pytest.mark.parametrize("linear", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_model_that_changes_its_images_is_judged_by_what_its_layer_was_fed(name: str, linear: bool) -> None:
    """Without noise the layer's input is known, and that is what leaks: never a pass."""
    torch.manual_seed(1)
    backbone = adapt(Net(CHANGES[name], linear), 16, normalisation=HALVES)
    audit = attack_gradients(
        backbone, TestSet(IMAGES[:4], torch.arange(4), HALVES), [create_attack("patchembed")], [create_defence("none")]
    )
    assert audit.judge(psnr=20).status == ABOVE
    [pair] = audit.pairs
    assert sum(value > 40 for value in pair.scores["aligned_psnr"] or ()) >= 3
