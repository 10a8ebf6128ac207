from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as tv

from situs.core.random import uniform
from situs.data.augment import AugmentConfig
from situs.data.base import TensorSource
from situs.data.geometry import CROP_NOISE, resized_crop_boxes
from situs.data.images import BrokenImageError
from situs.data.sampler import BatchPlan, draw_ids
from situs.data.sources import open_source
from situs.data.streaming import Chunk, Stream, View, Views, centre_crop, collate, random_crops
from situs.errors import SitusError

CROP = AugmentConfig()


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(23):
        height, width = rng.integers(10, 40, 2)
        array = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        (tmp_path / f"{number % 3}").mkdir(exist_ok=True)
        Image.fromarray(array).save(tmp_path / f"{number % 3}" / f"{number:02}.png")
    return tmp_path


def chunks(folder, workers: int, epoch: int = 2, start: int = 0, **plan) -> list[Chunk]:
    source = open_source(folder, channels=3)
    views = Views(source, (12, 16), 5, CROP)
    return list(Stream(views, BatchPlan(len(source), 6, 5, **plan), workers, pin=False).chunks(epoch, start))


def test_workers_rank_and_resume_change_nothing(folder):
    alone = chunks(folder, 0)
    assert [len(chunk.ids) for chunk in alone] == [6, 6, 6]
    state = torch.random.get_rng_state()
    for other in (chunks(folder, 1), chunks(folder, 2)):
        for a, b in zip(alone, other, strict=True):
            assert torch.equal(a.images, b.images)
            assert a.labels is not None
            assert b.labels is not None
            assert torch.equal(a.labels, b.labels)
            assert torch.equal(a.ids, b.ids)
    assert torch.equal(torch.random.get_rng_state(), state)  # torch's generator is left alone
    resumed = chunks(folder, 0, start=2)
    assert torch.equal(resumed[0].images, alone[2].images)
    assert len(resumed) == 1
    ranks = [chunks(folder, 0, rank=rank, world=3) for rank in range(3)]
    for step, whole in enumerate(alone):
        assert torch.equal(torch.cat([share[step].images for share in ranks]), whole.images)
    assert not torch.equal(chunks(folder, 0, epoch=3)[0].ids, alone[0].ids)


def test_the_same_stream_serves_many_epochs_from_any_step(folder):
    source = open_source(folder, channels=3)
    stream = Stream(Views(source, (12, 16), 5, CROP), BatchPlan(len(source), 6, 5), workers=1, pin=False)
    first = [next(stream.chunks(epoch, 1)).ids for epoch in (0, 1)]  # left in mid-epoch
    again = [next(stream.chunks(epoch, 1)).ids for epoch in (0, 1)]
    assert torch.equal(torch.stack(first), torch.stack(again))
    assert not torch.equal(first[0], first[1])


def test_the_crop_is_torchvisions_at_the_boxes_of_the_hash():
    image = torch.randint(0, 256, (3, 50, 70), dtype=torch.uint8)
    got = random_crops([image], (16, 20), CROP, seed=1, epoch=2, draws=[77])[0]
    noise = uniform(1, 2, torch.tensor([77]), "augment.crop", (CROP_NOISE,))
    top, left, height, width = resized_crop_boxes(noise, 50, 70, CROP.scale, CROP.ratio)[0].int().tolist()
    cut = image[:, top : top + height, left : left + width]
    assert torch.equal(got, tv.resize(cut, [16, 20], InterpolationMode.BICUBIC, antialias=True))
    assert not torch.equal(got, random_crops([image], (16, 20), CROP, seed=1, epoch=3, draws=[77])[0])


def test_copies_have_their_own_crops():
    source = TensorSource(torch.randint(0, 256, (2, 3, 40, 40), dtype=torch.uint8), None, None)
    views = Views(source, (16, 16), 0, CROP)
    first, second = (views[0, int(draw_ids(torch.tensor(1), torch.tensor(copy)))] for copy in (0, 1))
    assert first.image is not None
    assert second.image is not None
    assert not torch.equal(first.image, second.image)


def test_a_broken_image_is_replaced_in_training_and_left_out_in_evaluation(folder):
    files = sorted(folder.rglob("*.png"))
    files[4].write_bytes(b"broken")
    files[5].write_bytes(files[5].read_bytes()[:70])
    source = open_source(folder, channels=3)
    view = Views(source, (8, 8), 0, CROP)[0, 4]
    assert view.image is not None
    assert torch.equal(view.image, random_crops([source.read(6)[0]], (8, 8), CROP, 0, 0, [4])[0])
    assert (view.label, view.draw, [index for index, _ in view.broken]) == (source.read(6)[1], 4, [4, 5])
    left_out = Views(source, (8, 8), 0, None)[0, 4]
    assert left_out.image is None
    assert len(left_out.broken) == 1
    source.strict = True
    with pytest.raises(BrokenImageError, match=files[4].name):
        Views(source, (8, 8), 0, CROP)[0, 4]
    # A worker's own sentence, without its traceback.
    for workers in (0, 1):
        stream = Stream(Views(source, (8, 8), 0, CROP), BatchPlan(len(source), len(source)), workers, pin=False)
        with pytest.raises(BrokenImageError, match=r"^\S+\.png: cannot be decoded as an image \(.*\)$"):
            list(stream.chunks(0, 0))


def test_nothing_readable(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(b"")
    with pytest.raises(SitusError, match="none of its 3 images can be read"):
        Views(open_source(tmp_path), (8, 8), 0, CROP)[0, 1]


def test_the_centre_crop_keeps_the_central_share():
    image = torch.rand(3, 64, 64)
    assert torch.equal(centre_crop(image, (56, 56), 56 / 64), image[:, 4:60, 4:60])
    assert torch.equal(centre_crop(image, (64, 64), 1.0), image)
    wide = torch.randint(0, 256, (3, 300, 500), dtype=torch.uint8)
    wanted = tv.center_crop(tv.resize(wide, [256], InterpolationMode.BICUBIC, antialias=True), [224, 224])
    assert torch.equal(centre_crop(wide, (224, 224), 0.875), wanted)  # ImageNet's evaluation, as torchvision does it


def test_collate():
    deep, flat = torch.rand(3, 2, 2), torch.full((3, 2, 2), 255, dtype=torch.uint8)
    chunk = collate([View(deep, 1, 0, []), View(flat, 0, 1, [(7, "why")]), View(None, None, 2, [(2, "gone")])])
    assert torch.equal(chunk.images, torch.stack([deep, torch.ones(3, 2, 2)]))
    assert (chunk.ids.tolist(), chunk.broken) == ([0, 1], [(7, "why"), (2, "gone")])
    assert collate([View(None, None, 2, [])]).ids.tolist() == []
    with pytest.raises(SitusError, match="images of 1 and 3 channels in one batch"):
        collate([View(deep, 1, 0, []), View(deep[:1], 0, 1, [])])
