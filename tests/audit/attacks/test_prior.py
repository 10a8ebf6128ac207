"""Under noise the attacker with priors sees what patchembed does not, and without noise the same; or says why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import small_vit
from outcomes import reason
from torch import Tensor, nn
from torch.nn import functional as F

from situs.audit import Clip, Knowledge, MaskedJigsaw, Noise, NoPositionGradient, PatchEmbedding, audit_gradients
from situs.audit.adapter import adapt
from situs.audit.attacks.prior import PatchEmbeddingPrior, channel_covariance, image_prior
from situs.audit.client import victim_gradients
from situs.audit.deadline import Deadline
from situs.audit.defences import Step, create_defence
from situs.audit.public import ATTACKED
from situs.audit.stem import require_stem
from situs.audit.victim import PUBLIC, load_test_set, open_victim
from situs.gate import Limit, exposed


@pytest.fixture(autouse=True)
def fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The covariance of a small model's channels, of fewer images."""
    monkeypatch.setattr("situs.audit.attacks.prior.GRADIENTS", 12)


def victim(**fields: Any) -> Any:
    """With weights of a trained model's size: at the start all patches have nearly the same gradient."""
    torch.manual_seed(0)
    given = {"img_size": 32, "width": 64, "heads": 4, "patch_size": 8, "num_classes": 5, **fields}
    backbone = small_vit(**given).eval()
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter *= 6 if parameter.dim() > 1 else 1
    return backbone


def photographs(count: int, shape: tuple[int, int, int] = (3, 32, 32)) -> Tensor:
    """Smooth images, as photographs are."""
    return image_prior(shape).draw(count, torch.Generator().manual_seed(1)).float()


def error(found: Tensor, real: Tensor) -> float:
    """In decibels: -20 log10(|found - real| / |real|)."""
    return -20 * float(((found.double() - real.double()).norm() / real.double().norm()).log10())


def sent(backbone: Any, image: Tensor, defence: Any, **step: Any) -> dict[str, Tensor]:
    return victim_gradients(backbone, image, torch.tensor([3]), defence=defence, step=Step(**step))


def noise_for(backbone: Any, image: Tensor, share: float) -> float:
    """The deviation that is a share of the root mean square of the table's gradient."""
    gradient = sent(backbone, image, Noise(0.0))["model.pos_embed"]
    return share * float(gradient.square().mean().sqrt())


@pytest.mark.parametrize(
    ("fields", "gain"),
    [
        ({}, 2.0),
        pytest.param({"img_size": (16, 40)}, 1.5, marks=pytest.mark.slow),
        pytest.param({"in_chans": 1, "patch_size": 16}, 0.5, marks=pytest.mark.slow),
    ],
)
def test_priors_see_more_under_noise(fields: dict[str, Any], gain: float) -> None:
    backbone = victim(**fields)
    every = photographs(41, (backbone.input.channels, *backbone.input.shape))
    image, public = every[:1], every[1:]
    known = Knowledge(Noise(noise_for(backbone, image, 0.05)), public=public)
    upload = [sent(backbone, image, known.defence)]
    before = error(PatchEmbedding().recover(backbone, upload, known, Deadline()).images, image)
    assert error(PatchEmbeddingPrior().recover(backbone, upload, known, Deadline()).images, image) > before + gain
    alone = Knowledge(known.defence)  # with no public image at all
    assert error(PatchEmbeddingPrior().recover(backbone, upload, alone, Deadline()).images, image) > before + gain - 0.3


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_a_clipped_gradient_and_bfloat16_do_not_stop_it(dtype: torch.dtype) -> None:
    backbone = victim()
    image = photographs(1)
    norm = float(torch.cat([g.flatten() for g in sent(backbone, image, Noise(0.0)).values()]).norm())
    known = Knowledge(Clip(norm / 10, noise_for(backbone, image, 0.05) / norm))
    upload = [sent(backbone, image, known.defence, dtype=dtype)]
    before = error(PatchEmbedding().recover(backbone, upload, known, Deadline()).images, image)
    assert error(PatchEmbeddingPrior().recover(backbone, upload, known, Deadline()).images, image) > before + 1


def test_with_hardly_any_noise_it_is_the_solution_of_patchembed() -> None:
    backbone = victim()
    image = photographs(1)
    known = Knowledge(Noise(noise_for(backbone, image, 1e-4)))
    upload = [sent(backbone, image, known.defence)]
    found = [
        kind().recover(backbone, upload, known, Deadline()).images for kind in (PatchEmbedding, PatchEmbeddingPrior)
    ]
    assert error(found[1], found[0]) > 45
    assert error(found[1], image) >= error(found[0], image)


def test_noise_that_is_not_there_is_not_believed() -> None:
    """Told a hundred times the noise, it reads off ∂l/∂W what there is."""
    backbone = victim()
    image = photographs(1)
    sigma = noise_for(backbone, image, 1e-2)
    upload = [sent(backbone, image, Noise(sigma))]
    found = PatchEmbeddingPrior().recover(backbone, upload, Knowledge(Noise(100 * sigma)), Deadline())
    assert float(found.facts[0]["sigma"] or 0) == pytest.approx(sigma, rel=0.25)
    assert (
        error(found.images, image)
        > error(PatchEmbedding().recover(backbone, upload, Knowledge(), Deadline()).images, image) - 1
    )


class Prepares(nn.Module):
    """A model that normalises by itself, and may shrink the image."""

    def __init__(self, model: nn.Module, shrink: bool) -> None:
        super().__init__()
        self.model, self.shrink = model, shrink

    def forward(self, x: Tensor) -> Tensor:
        x = 2 * x + 0.3
        return self.model(F.interpolate(x, (32, 32), mode="bilinear", antialias=False) if self.shrink else x)


@pytest.mark.parametrize("shrink", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_sees_through_what_is_affine(shrink: bool) -> None:
    module = Prepares(victim(patch_size=16).model, shrink).eval()
    side = 48 if shrink else 32
    backbone = adapt(module, (side, side), in_chans=3)
    image = photographs(1, (3, side, side))
    gradients = victim_gradients(backbone, image, torch.tensor([3]))
    sigma = 0.05 * float(next(g for n, g in gradients.items() if n.endswith("pos_embed")).square().mean().sqrt())
    known = Knowledge(Noise(sigma))
    upload = [victim_gradients(backbone, image, torch.tensor([3]), defence=known.defence)]
    assert reason(PatchEmbeddingPrior(), backbone, defence=known.defence) is None
    before = error(PatchEmbedding().recover(backbone, upload, known, Deadline()).images, image)
    assert error(PatchEmbeddingPrior().recover(backbone, upload, known, Deadline()).images, image) > before + 0.5


class Own(nn.Module):
    """A model that normalises each image by its own mean and deviation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model((x - x.mean((1, 2, 3), keepdim=True)) / x.std((1, 2, 3), keepdim=True))


def test_it_says_why_it_is_not_made() -> None:
    backbone, attack, noisy = victim(), PatchEmbeddingPrior(), Noise(1e-3)
    assert "no noise" in str(reason(attack, backbone))
    assert "no noise" in str(reason(attack, backbone, defence=create_defence("int8")))
    assert "batch of 2" in str(reason(attack, backbone, defence=noisy, step=Step(2)))
    assert "Adam" in str(reason(attack, backbone, defence=noisy, step=Step(adam=True)))
    withheld = NoPositionGradient().withheld(backbone)
    names = [name for name, _ in backbone.named_parameters() if name not in withheld]
    assert "not sent" in str(reason(attack, backbone, names, defence=noisy))
    method = MaskedJigsaw(0.5).method(backbone, 0)
    assert "hidden" in str(reason(attack, backbone, defence=noisy, method=method))
    assert "not affine" in str(reason(attack, adapt(Own(backbone.model).eval(), (32, 32), in_chans=3), defence=noisy))


def test_it_proves_nothing_and_a_stop_keeps_what_there_is() -> None:
    backbone = victim()
    images = photographs(2)
    known = Knowledge(Noise(noise_for(backbone, images[:1], 0.5)))
    uploads = [sent(backbone, image[None], known.defence) for image in images]
    assert not PatchEmbeddingPrior.closed_form
    over = Deadline(seconds=1e-9)
    over.begin(1)
    found = PatchEmbeddingPrior().recover(backbone, uploads, known, over)
    assert found.partial is not None and len(found.facts) == len(found.images) == 1
    assert bool(found.images.isfinite().all())


@pytest.mark.slow
def test_other_weights_have_other_gradients() -> None:
    """What is learned of a model is not kept over a step of its training."""
    backbone, attack = victim(patch_size=16), PatchEmbeddingPrior()
    image = photographs(1)
    known = Knowledge(Noise(noise_for(backbone, image, 0.5)))
    attack.recover(backbone, [sent(backbone, image, known.defence)], known, Deadline())
    assert attack._cached is not None
    before = attack._cached[2]
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    upload = [sent(backbone, image, known.defence)]
    found = attack.recover(backbone, upload, known, Deadline()).images
    assert not torch.equal(attack._cached[2], before)
    assert torch.equal(found, PatchEmbeddingPrior().recover(backbone, upload, known, Deadline()).images)


def test_the_covariance_of_channels_is_that_of_gradients_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of images with any class and, in turn, with the class that the model predicts; and a tenth in all directions."""
    backbone, images = victim(), photographs(4) * torch.tensor([1.0, 3.0, 2.0, 0.5]).view(4, 1, 1, 1)
    stem, prior = require_stem(backbone), image_prior((3, 32, 32))
    monkeypatch.setattr("situs.audit.attacks.prior.GRADIENTS", 4)
    covariance = channel_covariance(backbone, stem, prior, Knowledge(public=images))

    def part(image: Tensor, label: int) -> Tensor:
        rows = victim_gradients(backbone, image[None], torch.tensor([label]))["model.pos_embed"][0, 1:].double()
        rows = rows / rows.square().mean().sqrt()
        return rows.T @ rows / len(rows)

    predicted = sum(part(images[n], int(backbone(images[n : n + 1]).argmax())) for n in (1, 3))
    first, third = ([part(images[n], label) for label in range(5)] for n in (0, 2))
    ways = [0.1 * torch.eye(64) + (one + other + predicted) / 4 for one in first for other in third]
    assert min(float((covariance - way).norm() / way.norm()) for way in ways) < 1e-4
    monkeypatch.setattr("situs.audit.attacks.prior.GRADIENTS", 6)  # two more are drawn
    more = channel_covariance(backbone, stem, prior, Knowledge(public=images))
    assert float(more.trace()) == pytest.approx(1.1 * 64) and not torch.allclose(more, covariance)


def test_public_images_are_those_that_are_not_under_attack() -> None:
    opened = open_victim(victim(img_size=28, patch_size=7, in_chans=1).model, img_size=28)
    test = load_test_set(opened, "samples", 3)
    assert len(test) == 3 and test.public is not None and len(test.public) == PUBLIC
    assert all(not torch.equal(image, other) for image in test.pixels for other in test.public)


@pytest.mark.slow
def test_a_gate_that_patchembed_passes_fails() -> None:
    """The attacker with priors can fail a gate, and takes part in it where nobody names attacks."""
    module = victim(img_size=28, patch_size=7, in_chans=1).model
    step: dict[str, Any] = {"img_size": 28, "count": 2, "defences": ["noise=0.03"]}
    closed = audit_gradients(module, "samples", attacks=["patchembed"], **step)
    whole = audit_gradients(module, "samples", attacks=["patchembed", "patchembed-prior"], **step)
    worst = {pair.attack: pair.worst_psnr for pair in whole.pairs}
    assert worst["patchembed-prior"] > worst["patchembed"] + 0.2
    between = (worst["patchembed-prior"] + worst["patchembed"]) / 2
    limits = {
        name: [one for pair in audit.pairs for one in exposed(pair, Limit("psnr", between))]
        for name, audit in (("closed", closed), ("whole", whole))
    }
    assert {one.attack for one in limits["whole"]} - {one.attack for one in limits["closed"]} == {"patchembed-prior"}
    alone = audit_gradients(module, "samples", attacks=["patchembed-prior"], **step)
    assert not alone.judge(psnr=45).passed  # what it does not find proves nothing
    assert "patchembed-prior" in ATTACKED
