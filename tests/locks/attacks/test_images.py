"""The attacker with the locked file and unlabelled samples: from end to end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import small_vit
from torch import Tensor

from situs.backbones import create_backbone
from situs.locks.attacks.images import clear_side, recover_with_samples, shifted
from situs.locks.attacks.match import Schedule, long_schedule, root_correlations
from situs.locks.attacks.recovery import bits_left
from situs.locks.groups import permute_state, random_keys, residual_only

DIM = 32


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vit(depth: int = 2) -> Any:
    torch.manual_seed(0)
    backbone = small_vit(width=DIM, depth=depth, heads=4, num_classes=3)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return backbone.eval()


def smooth(count: int, seed: int = 0) -> Tensor:
    """Images whose neighbouring pixels are alike."""
    return torch.nn.functional.avg_pool2d(torch.randn(count, 3, 20, 20, generator=seeded(seed)), 5, 1) * 3


def plant(backbone: Any, images: Tensor) -> None:
    """Weights as training leaves them: the blocks read what varies together together, and the norm centres it."""
    clear = clear_side(backbone, backbone.groups(), shifted(images, (4, 4), 1))
    values, vectors = torch.linalg.eigh(root_correlations(clear.grams["all"]).double())
    shape = ((vectors * values.clamp_min(0).sqrt()) @ vectors.T).float()
    with torch.no_grad():
        for block in backbone.model.blocks:
            for layer in (block.attn.qkv, block.mlp.fc1):
                rows = layer.weight.shape[0]
                turned = torch.linalg.qr(torch.randn(max(rows, DIM), DIM))[0][:rows]
                layer.weight.copy_(turned @ shape + 0.02 * torch.randn(rows, DIM))
        norm = backbone.model.blocks[0].norm1
        norm.bias.copy_(-norm.weight * (clear.mean + 0.1 * clear.mean.std() * torch.randn(DIM)))


@pytest.fixture(scope="module")
def planted() -> tuple[Any, dict[str, Tensor]]:
    backbone = vit()
    plant(backbone, smooth(24))
    return backbone, {name: value.clone() for name, value in backbone.model.state_dict().items()}


def attack(backbone: Any, images: Tensor, truth: Any, cover: bool = False, **options: Any) -> Any:
    groups = backbone.groups() if cover else residual_only(backbone.groups())
    return recover_with_samples(
        backbone,
        groups,
        shifted(images, (4, 4)),
        description=f"{len(images)} unlabelled images",
        truth=truth,
        **options,
    )


@pytest.mark.parametrize("cover", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_trained_embedding_gives_the_key_away(planted: Any, cover: bool) -> None:
    backbone, state = planted
    groups = backbone.groups() if cover else residual_only(backbone.groups())
    truth = random_keys(groups, seeded(3))
    backbone.model.load_state_dict(permute_state(state, groups, truth))
    try:
        found = attack(backbone, smooth(12, 7), truth, cover)  # other images than those the weights were made on
        unjudged = attack(backbone, smooth(12, 7), None, cover)
    finally:
        backbone.model.load_state_dict(state)
    assert found.right is not None and found.right >= 0.9 * DIM
    assert found.bits is not None and found.bits <= bits_left(DIM, int(0.9 * DIM))
    assert found.agreement is not None and found.failed is not None
    assert found.agreement > found.failed + 0.1  # which tells the attacker, who has no key to compare with
    assert "12 unlabelled images" in found.cost and "J = 0." in found.cost and "starts reach at most 0." in found.cost
    assert unjudged.right is None and torch.equal(unjudged.keys["residual"], found.keys["residual"])


def test_random_weights_give_nothing_away() -> None:
    backbone = vit()
    groups = residual_only(backbone.groups())
    truth = random_keys(groups, seeded(4))
    backbone.model.load_state_dict(permute_state(backbone.model.state_dict(), groups, truth))
    found = attack(backbone, smooth(12, 7), truth)
    assert found.right is not None and found.right <= 5
    assert found.bits == pytest.approx(bits_left(DIM, found.right))
    assert found.agreement is not None and found.failed is not None and found.agreement < found.failed + 0.1


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the steps, for tests in which it does not matter how far the search comes."""
    quick = {warmth: Schedule(1.0, long_schedule(warmth).steps[::10]) for warmth in (0.25, 0.5, 1.0)}
    monkeypatch.setattr("situs.locks.attacks.images.long_schedule", quick.__getitem__)


@pytest.mark.usefixtures("hasty")
def test_the_same_seed_gives_the_same_answer_and_the_processors_mode_comes_back() -> None:
    backbone = vit(1)
    tiny = torch.tensor([1e-40])
    assert float(tiny * 1.0) > 0
    first, again, other = (attack(backbone, smooth(6), None, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.keys["residual"], again.keys["residual"])
    assert (first.agreement, first.failed) == (again.agreement, again.failed)
    assert first.failed != other.failed  # the random hints are the seed's
    assert float(tiny * 1.0) > 0


def test_the_processors_mode_comes_back_after_an_error_too() -> None:
    from situs.errors import SitusError

    backbone = vit(1)
    with pytest.raises(SitusError, match="needs samples"):
        recover_with_samples(backbone, residual_only(backbone.groups()), [], description="nothing")
    assert float(torch.tensor([1e-40]) * 1.0) > 0


@pytest.mark.thin(2)
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("name", ["eva", "swin", "bert", "llama"])
def test_every_kind_of_model_can_be_attacked(name: str, model_folder: Callable[[str], Path]) -> None:
    backbone = create_backbone(model_folder(name)).eval()
    groups = residual_only(backbone.groups())
    if backbone.input.shape is not None:
        inputs = [torch.randn(6, 3, *backbone.input.shape, generator=seeded(0))]
    else:
        inputs = [torch.randint(0, 31, (1, 12), generator=seeded(seed)) for seed in range(6)]
    truth = random_keys(groups, seeded(1))
    found = recover_with_samples(backbone, groups, inputs, description="noise", truth=truth)
    assert found.size == sum(group.size for group in groups)
    assert found.keys.keys() == {group.name for group in groups}
    assert found.right is not None and found.right < 0.4 * found.size  # weights far from any training
