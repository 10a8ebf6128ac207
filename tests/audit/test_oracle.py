"""The oracle: against a dense solve in float64, at the ends of the noise, and its prior against sums by hand."""

from __future__ import annotations

import math

import pytest
import torch
from builders import small_vit
from scipy.fft import dctn
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from situs.audit import create_defence
from situs.audit.attacks.base import Knowledge
from situs.audit.attacks.matching import simulation
from situs.audit.attacks.prior import cosine_basis
from situs.audit.client import victim_gradients
from situs.audit.deadline import Deadline
from situs.audit.defences import Step, method_of
from situs.audit.oracle import RINGS, Oracle, estimate, own_prior
from situs.audit.scores import mse

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(3)).cumsum(-1).cumsum(-2) / 8


def test_cosines_are_scipys_and_the_prior_has_each_images_own_energy() -> None:
    images = IMAGES.double()
    rows = cosine_basis(8, images)
    torch.testing.assert_close(rows @ rows.T, torch.eye(8, dtype=torch.float64))
    by_scipy = torch.from_numpy(dctn(images.numpy(), axes=(2, 3), norm="ortho"))
    torch.testing.assert_close(rows @ images @ rows.T, by_scipy)
    prior = own_prior(images)
    torch.testing.assert_close(prior.variance.sum(dim=(1, 2, 3)), images.square().sum(dim=(1, 2, 3)))
    grey = images.sum(dim=1) / 3**0.5  # the mean of all pixels is a ring of its own
    torch.testing.assert_close(prior.variance[:, 0, 0, 0], (grey.sum(dim=(1, 2)) / 8).square())
    assert all(len(each.unique()) <= RINGS + 1 for each in prior.variance.flatten(0, 1))
    one = torch.rand(1, 1, 8, 6, dtype=torch.float64)
    assert own_prior(one).root(one).shape == one.shape  # of one channel, and no square


@pytest.mark.parametrize(("channels", "height", "width"), [(3, 8, 8), (1, 8, 6), (2, 5, 16), (1, 1, 1), (1, 1, 4)])
def test_the_prior_is_the_mean_energy_of_rings_of_frequency(channels: int, height: int, width: int) -> None:
    """Cosine by cosine; the rings are as wide as one another in the logarithm of frequency."""
    images = torch.randn(2, channels, height, width, generator=torch.Generator().manual_seed(1)).double()
    grey = torch.tensor([[1.0, 1, 1], [1, 0, -1], [1, -2, 1]], dtype=torch.float64)
    colours = grey / grey.norm(dim=1, keepdim=True) if channels == 3 else torch.eye(channels, dtype=torch.float64)
    energy = dctn(torch.einsum("dc,bchw->bdhw", colours, images).numpy(), axes=(2, 3), norm="ortho") ** 2
    radius = {(i, j): math.hypot(i / height, j / width) for i in range(height) for j in range(width)}
    lowest = min((r for r in radius.values() if r > 0), default=1.0)
    rings: dict[int, list[tuple[int, int]]] = {}
    for place, r in radius.items():
        width_of_rings = math.log(2**0.5 / lowest) / (RINGS - 1)
        rings.setdefault(1 + math.floor(math.log(r / lowest) / width_of_rings + 1e-9) if r else 0, []).append(place)
    variance = own_prior(images).variance
    for ring in rings.values():
        down, across = zip(*ring, strict=True)
        mean = torch.from_numpy(energy[:, :, down, across].mean(-1))
        torch.testing.assert_close(variance[:, :, down, across], mean.unsqueeze(-1).expand(-1, -1, len(ring)))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
@pytest.mark.parametrize(
    ("sigma", "batch", "defence"),
    [
        pytest.param(0.3, 2, "noise", marks=pytest.mark.slow),
        (0.05, 1, "clip"),
        pytest.param(0.02, 1, "noise", marks=pytest.mark.slow),
    ],
)
def test_it_is_the_dense_solution(sigma: float, batch: int, defence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """argmin |upload - g(x) - J (y - x)|² / σ² + yᵀ Λ⁻¹ y, with J made column by column."""
    torch.manual_seed(0)
    backbone = small_vit(8, depth=1, width=16, num_classes=3).eval()
    chosen = create_defence(f"noise={sigma}" if defence == "noise" else f"clip=0.5:{sigma}")
    x, y = IMAGES[:batch], torch.arange(batch)
    upload = victim_gradients(backbone, x, y, defence=chosen)
    known = Knowledge(chosen, Step(batch), method=method_of(chosen, backbone))
    monkeypatch.setattr("situs.audit.oracle.LEFT", 1e-4)
    monkeypatch.setattr("situs.audit.oracle.ITERATIONS", 300)
    ours = estimate(method_of(chosen, backbone), upload, x, y, {}, known)
    assert ours.ended
    model = small_vit(8, depth=1, width=16, num_classes=3).double().eval()
    model.load_state_dict(backbone.state_dict())
    run = simulation(method_of(chosen, model), known, list(upload))
    names = list(upload)

    def flat(images: Tensor) -> Tensor:
        gradients = run(images, y, {})
        return torch.cat([gradients[name].flatten() for name in names])

    at = x.double()
    root_of, size = own_prior(at).root, at.numel()
    root = torch.stack([root_of(unit.view_as(at)).flatten() for unit in torch.eye(size, dtype=torch.float64)])
    sent = torch.cat([upload[name].double().flatten() for name in names])
    level = chosen.noise_level(batch)
    assert len(ours.pictures) == 2  # around the image, and around what that gives
    for picture in ours.pictures:
        with sdpa_kernel(SDPBackend.MATH):
            jacobian = torch.func.jacfwd(flat)(at).flatten(1)
            here = flat(at)
        matrix = jacobian @ root / level
        right = matrix.T @ (sent - here + jacobian @ at.flatten()) / level
        dense = root @ torch.linalg.solve(matrix.T @ matrix + torch.eye(size, dtype=torch.float64), right)
        assert float((picture.flatten() - dense).norm()) <= 1e-3 * float(x.norm())
        at = picture


@pytest.mark.slow
def test_more_noise_leaves_less_and_the_most_leaves_grey() -> None:
    torch.manual_seed(0)
    backbone = small_vit(8, depth=1, width=16, num_classes=3).eval()
    left = []
    for sigma in (1e-3, 1e-1, 1e4):
        chosen = create_defence(f"noise={sigma}")
        upload = victim_gradients(backbone, IMAGES[:1], torch.tensor([0]), defence=chosen)
        known = Knowledge(chosen, Step(1), method=method_of(chosen, backbone))
        made = estimate(method_of(chosen, backbone), upload, IMAGES[:1], torch.tensor([0]), {}, known).pictures[0]
        left.append(float(mse(made, IMAGES[:1])))
    power = float(IMAGES[:1].double().square().mean())
    assert left[0] < 0.5 * left[1] and left[1] < 0.9 * power and left[2] == pytest.approx(power, rel=1e-2)


def test_it_stops_when_asked_and_when_it_has_told_enough() -> None:
    torch.manual_seed(0)
    backbone = small_vit(8, depth=1, width=16, num_classes=3).eval()
    chosen = create_defence("noise=0.01")
    given = (IMAGES[:1], torch.tensor([0]))
    upload = victim_gradients(backbone, *given, defence=chosen)
    known = Knowledge(chosen, Step(1), method=method_of(chosen, backbone))
    stopped = estimate(method_of(chosen, backbone), upload, *given, {}, known, stop=lambda: True)
    assert not stopped.ended and len(stopped.pictures) == 1 and not stopped.pictures[0].any()
    looks: list[Tensor] = []

    def enough(images: Tensor) -> bool:
        looks.append(images)
        return len(looks) >= 2

    told = estimate(method_of(chosen, backbone), upload, *given, {}, known, enough)
    assert told.ended and len(told.pictures) == 1 and torch.equal(told.pictures[0], looks[-1])
    assert float(mse(looks[1], IMAGES[:1])) < float(mse(looks[0], IMAGES[:1]))


def test_it_is_no_attack() -> None:
    assert Oracle.is_bound and not Oracle.closed_form
    with pytest.raises(AssertionError, match="needs the images"):
        Oracle().recover(small_vit(8), [{}], Knowledge(), Deadline())
