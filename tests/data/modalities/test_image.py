from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as tv

from situs.core.random import uniform
from situs.data.augment.geometry import CROP_NOISE, resized_crop_boxes
from situs.data.augment.recipes import AugmentConfig
from situs.data.config import DataConfig
from situs.data.loader import WorkerStream
from situs.data.modalities.image import ImagePipeline, centre_crop, random_cuts, resident_size
from situs.data.open import open_source
from situs.data.resize import resized
from situs.data.sampler import BatchPlan, draw_ids
from situs.data.sources.base import Source, TensorSource
from situs.errors import BrokenSampleError, SitusError

CROP = AugmentConfig()


def crop(image, size, seed, epoch, draw):
    return resized(random_cuts([image], CROP, seed, epoch, [draw])[0], size, CROP.interpolation)


def test_the_crop_is_torchvisions_at_the_boxes_of_the_hash():
    image = torch.randint(0, 256, (3, 50, 70), dtype=torch.uint8)
    got = crop(image, (16, 20), 1, 2, 77)
    noise = uniform(1, 2, torch.tensor([77]), "augment.crop", (CROP_NOISE,))
    top, left, height, width = resized_crop_boxes(noise, 50, 70, CROP.scale)[0].int().tolist()
    cut = image[:, top : top + height, left : left + width]
    assert torch.equal(got, tv.resize(cut, [16, 20], InterpolationMode.BICUBIC, antialias=True))
    assert not torch.equal(got, crop(image, (16, 20), 1, 3, 77))


def test_copies_have_their_own_crops():
    source = TensorSource(torch.randint(0, 256, (2, 3, 40, 40), dtype=torch.uint8), None, None)
    draws = [int(draw_ids(torch.tensor(1), torch.tensor(copy))) for copy in (0, 1)]
    first, second = ImagePipeline(source, DataConfig(img_size=(16, 16)), CROP).read(0, draws).values["image"]
    assert not torch.equal(first, second)


def test_a_broken_image_is_replaced_in_training_and_left_out_in_evaluation(folder):
    files = sorted(folder.rglob("*.png"))
    files[4].write_bytes(b"broken")
    files[5].write_bytes(files[5].read_bytes()[:70])
    source = open_source(folder, channels=3)
    read = ImagePipeline(source, DataConfig(img_size=(8, 8)), CROP).read(0, [4])
    assert torch.equal(read.values["image"][0], crop(source.read(6)["image"], (8, 8), 0, 0, 4))
    assert read.values["label"].tolist() == [source.read(6)["label"]]
    assert (read.ids.tolist(), [index for index, _ in read.broken]) == ([4], [4, 5])
    left_out = ImagePipeline(source, DataConfig(img_size=(8, 8)), None).read(0, [4])
    assert (left_out.values, left_out.ids.tolist(), len(left_out.broken)) == ({}, [], 1)
    some = ImagePipeline(source, DataConfig(img_size=(8, 8)), None).read(0, [3, 4, 6])
    assert (some.ids.tolist(), len(some.values["image"])) == ([3, 6], 2)
    source.strict = True
    with pytest.raises(BrokenSampleError, match=files[4].name):
        ImagePipeline(source, DataConfig(img_size=(8, 8)), CROP).read(0, [4])
    # A worker's own sentence, without its traceback.
    for workers in (0, 1):
        stream = WorkerStream(
            ImagePipeline(source, DataConfig(img_size=(8, 8)), CROP),
            BatchPlan(len(source), len(source)),
            workers,
            pin=False,
        )
        with pytest.raises(BrokenSampleError, match=r"^\S+\.png: cannot be decoded as an image \(.*\)$"):
            list(stream.batches(0, 0))


def test_nothing_readable(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(b"")
    with pytest.raises(SitusError, match="none of its 3 images can be read"):
        ImagePipeline(open_source(tmp_path), DataConfig(img_size=(8, 8)), CROP).read(0, [1])


def test_the_centre_crop_keeps_the_central_share():
    image = torch.rand(3, 64, 64)
    assert torch.equal(centre_crop(image, (56, 56), 56 / 64), image[:, 4:60, 4:60])
    assert torch.equal(centre_crop(image, (64, 64), 1.0), image)
    wide = torch.randint(0, 256, (3, 300, 500), dtype=torch.uint8)
    wanted = tv.center_crop(tv.resize(wide, [256], InterpolationMode.BICUBIC, antialias=True), [224, 224])
    assert torch.equal(centre_crop(wide, (224, 224), 0.875), wanted)  # ImageNet's evaluation, as torchvision does it


@pytest.fixture
def photographs(tmp_path):
    """Smooth pictures of many sizes, of which a crop of 32 pixels needs the whole, a half, a quarter or an eighth."""
    sizes = [(40, 50), (90, 70), (150, 200), (301, 205), (640, 517)]
    for number, (height, width) in enumerate(sizes):
        y, x = np.mgrid[0:height, 0:width]
        waves = [127 + 120 * np.sin(y / height * (3 + c) + x / width * (5 - c) + number) for c in range(3)]
        Image.fromarray(np.stack(waves, -1).astype(np.uint8)).save(tmp_path / f"{number}.jpg", quality=95)
    return open_source(tmp_path, channels=3)


def test_collate():
    deep, flat = torch.rand(3, 2, 2), torch.full((3, 2, 2), 255, dtype=torch.uint8)
    pipeline = ImagePipeline(TensorSource(flat[None], None, None), DataConfig(img_size=(2, 2)), None)
    values = pipeline.collate(0, [0, 1], [{"image": deep, "label": 1}, {"image": flat, "label": 0}])
    assert torch.equal(values["image"], torch.stack([deep, torch.ones(3, 2, 2)]))
    assert values["label"].tolist() == [1, 0]
    assert pipeline.collate(0, [0], [{"image": flat}]).keys() == {"image"}
    with pytest.raises(SitusError, match="images of 1 and 3 channels cannot be in one batch"):
        pipeline.collate(0, [0, 1], [{"image": deep}, {"image": deep[:1]}])


class Sized(Source):
    """Images of these sizes, of which None is broken."""

    def __init__(self, sizes: list[tuple[int, int] | None]) -> None:
        super().__init__("sized", None, 3, strict=False)
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def read(self, index: int) -> dict[str, Any]:
        if (size := self.sizes[index]) is None:
            raise BrokenSampleError("torn")
        return {"image": torch.zeros(3, *size, dtype=torch.uint8)}


ALIKE: list[tuple[int, int] | None] = [(16, 24)] * 5
BYTES = 5 * 3 * 16 * 24


@pytest.mark.parametrize(
    ("sizes", "asked", "held"),
    [
        (ALIKE, {}, (16, 24)),
        (ALIKE, {"resident": "never"}, None),
        (ALIKE, {"resident_gib": BYTES / 2**30}, (16, 24)),
        (ALIKE, {"resident_gib": (BYTES - 1) / 2**30}, None),
        ([None, *ALIKE], {}, (16, 24)),
        ([*ALIKE, (16, 25)], {}, None),
        ([*ALIKE, (16, 25)], {"resident": "always"}, (16, 24)),  # eight sevenths of the model's
        (ALIKE, {"img_size": (8, 12)}, (16, 24)),  # twice the model's
        (ALIKE, {"img_size": (7, 12)}, None),
        (ALIKE, {"img_size": (8, 11)}, None),
        (ALIKE, {"img_size": (7, 11), "resident": "always"}, (16, 24)),
        (ALIKE, {"img_size": (2, 3), "resident": "always"}, (16, 24)),  # eight times the model's
        ([(17, 24)] * 5, {"img_size": (2, 3), "resident": "always"}, (2, 3)),
        (ALIKE, {"img_size": (1, 14), "resident": "always"}, (1, 16)),
        (ALIKE, {"img_size": (14, 2), "resident": "always"}, (16, 2)),
        ([(9, 9)] * 31 + [(9, 10)] + [(9, 9)] * 15, {}, (9, 9)),  # every second of so many is looked at
        ([(9, 9)] * 30 + [(9, 10)] + [(9, 9)] * 16, {}, None),
    ],
)  # fmt: skip
def test_images_are_held_at_their_own_size_or_a_little_larger_than_the_models(
    sizes: list[tuple[int, int] | None], asked: dict[str, Any], held: tuple[int, int] | None
) -> None:
    config = DataConfig(**{"img_size": (14, 21), "channels": 3, **asked})
    assert resident_size(Sized(sizes), config) == held
