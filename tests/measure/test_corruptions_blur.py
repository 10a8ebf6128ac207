"""The four blurs against slow and independent versions of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import ndimage

from situs.measure.corruptions import Draw, corrupt, defocus_blur, fetch, gaussian, glass_blur, motion_blur, zoom_blur


def images(count: int = 2, side: int = 30) -> torch.Tensor:
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(0))


def draw(name: str, count: int = 2) -> Draw:
    return Draw(0, 3, torch.arange(count) + 5, name)


def test_defocus_is_a_mean_over_a_disk() -> None:
    clean = images()
    found = defocus_blur(clean, draw("defocus_blur"), 3, 0.01)
    for y, x in ((7, 9), (15, 15), (20, 24)):
        disk = [clean[1, 2, y + a, x + b] for a in range(-3, 4) for b in range(-3, 4) if a * a + b * b <= 9]
        assert found[1, 2, y, x].item() == pytest.approx(torch.stack(disk).mean().item(), abs=1e-5)


def test_zoom_blur_is_the_mean_of_scipys_enlargements() -> None:
    clean = images(1)
    found = zoom_blur(clean, draw("zoom_blur", 1), 1.12, 0.04)[0, 0]
    image = clean[0, 0].double().numpy()
    total = image.copy()
    for factor in (1.0, 1.04, 1.08, 1.12):
        kept = int(np.ceil(30 / factor))
        top = (30 - kept) // 2
        large = ndimage.zoom(image[top : top + kept, top : top + kept], factor, order=1)
        trim = (len(large) - 30) // 2
        total += large[trim : trim + 30, trim : trim + 30]
    np.testing.assert_allclose(found.numpy(), total / 5, atol=1e-5)


@pytest.mark.parametrize("reach", [1, 2, 4])
@pytest.mark.parametrize("size", [(14, 14), (11, 17), (9, 6)])
def test_pixels_are_fetched_as_one_after_the_other(reach: int, size: tuple[int, int]) -> None:
    """Slanted lines at once give what the plain double loop from the last pixel to the first gives."""
    height, width = size
    noise = torch.rand(3, 2, *size, generator=torch.Generator().manual_seed(reach))
    start = torch.arange(height * width).repeat(3, 1)
    found = fetch(start, size, reach, noise)
    for sample in range(3):
        slow = np.arange(height * width).reshape(size).copy()
        for y in range(height - reach, reach, -1):
            for x in range(width - reach, reach, -1):
                dy = int(np.floor(float(noise[sample, 0, y, x]) * 2 * reach)) - reach
                dx = int(np.floor(float(noise[sample, 1, y, x]) * 2 * reach)) - reach
                slow[y, x] = slow[y + dy, x + dx]
        assert found[sample].view(size).tolist() == slow.tolist()
    assert torch.equal(start[0], torch.arange(height * width))  # what was given is left alone


def test_glass_fetches_from_near_places_and_smooths() -> None:
    clean = images()
    still = glass_blur(clean, draw("glass_blur"), 0.8, 1, 0)
    torch.testing.assert_close(still, gaussian(gaussian(clean, 0.8), 0.8))
    moved = glass_blur(clean, draw("glass_blur"), 0.0, 2, 1)
    assert set(moved[0, 0].flatten().tolist()) <= set(clean[0, 0].flatten().tolist())
    # The border beyond the reach stays, and all channels move together.
    assert torch.equal(moved[..., :2, :], clean[..., :2, :])
    for channel in range(3):
        kept = moved[0, channel] == clean[0, channel]
        assert torch.equal(kept, moved[0, 0] == clean[0, 0])


def test_motion_smears_along_and_not_across() -> None:
    """A point becomes a line: within 45° of the horizontal, as long as the trail."""
    point = torch.zeros(1, 1, 61, 61)
    point[..., 30, 30] = 1.0
    for number in range(6):
        one = Draw(0, 1, torch.tensor([number]), "motion_blur")
        found = motion_blur(point, one, 10, 8)[0, 0]
        assert found.sum().item() == pytest.approx(1.0, abs=1e-4)
        y, x = (found > 1e-3).nonzero().unbind(1)
        assert (x - 30).abs().max() >= 12
        assert ((y - 30).abs() <= (x - 30).abs() + 1).all()
        assert len(y) < 80


def test_flat_images_stay_flat() -> None:
    flat = torch.full((1, 3, 64, 64), 102 / 255)
    for name in ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"):
        for severity in (1, 5):
            found = corrupt(flat, name, severity, torch.tensor([0]))
            torch.testing.assert_close(found, flat, atol=1e-6, rtol=0)
