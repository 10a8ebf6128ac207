from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from situs.report.figures import pixel_rows


def read(picture: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(picture)))


@pytest.mark.parametrize("channels", [1, 3])
def test_every_pixel_is_there_and_the_rest_is_white(channels: int) -> None:
    """Two rows of which the second is short: each image is found again at its place, to the byte."""
    images = np.random.default_rng(0).integers(0, 256, (3, channels, 4, 6), dtype=np.uint8)
    whole = read(pixel_rows([images[:2], images[2:]], gap=1))
    zoom = whole.shape[0] // 9
    assert whole.shape[:2] == (9 * zoom, 13 * zoom)
    small = whole[::zoom, ::zoom].reshape(9, 13, channels)
    assert np.array_equal(small.repeat(zoom, 0).repeat(zoom, 1).reshape(whole.shape), whole)
    places = {0: (0, 0), 1: (0, 7), 2: (5, 0)}
    rest = np.ones((9, 13), dtype=bool)
    for which, (top, left) in places.items():
        assert np.array_equal(small[top : top + 4, left : left + 6], images[which].transpose(1, 2, 0))
        rest[top : top + 4, left : left + 6] = False
    assert (small[rest] == 255).all()


def test_patches_stand_apart_and_floats_are_rounded() -> None:
    image = np.array([[[0.0, 0.5], [1.0, 0.25]]])
    whole = read(pixel_rows([[image]], grid=(2, 2)))
    zoom = whole.shape[0] // 3
    assert whole[::zoom, ::zoom].tolist() == [[0, 255, 128], [255, 255, 255], [255, 255, 64]]


def test_large_images_are_not_enlarged() -> None:
    assert read(pixel_rows([[np.zeros((1, 900, 900))]])).shape == (900, 900)
