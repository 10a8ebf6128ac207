from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from situs.data.augment.recipes import AugmentConfig
from situs.data.image_pipeline import ImagePipeline
from situs.data.pipeline import WorkerBatch
from situs.data.sampler import BatchPlan
from situs.data.sources import open_source
from situs.data.streaming import WorkerStream

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


def chunks(folder, workers: int, epoch: int = 2, start: int = 0, **plan) -> list[WorkerBatch]:
    source = open_source(folder, channels=3)
    views = ImagePipeline(source, (12, 16), 5, CROP)
    return list(WorkerStream(views, BatchPlan(len(source), 6, 5, **plan), workers, pin=False).batches(epoch, start))


def test_workers_rank_and_resume_change_nothing(folder):
    alone = chunks(folder, 0)
    assert [len(chunk.ids) for chunk in alone] == [6, 6, 6]
    state = torch.random.get_rng_state()
    for other in (chunks(folder, 1), chunks(folder, 2)):
        for a, b in zip(alone, other, strict=True):
            assert a.values.keys() == b.values.keys() == {"image", "label"}
            assert all(torch.equal(a.values[name], b.values[name]) for name in a.values)
            assert torch.equal(a.ids, b.ids)
    assert torch.equal(torch.random.get_rng_state(), state)  # torch's generator is left alone
    resumed = chunks(folder, 0, start=2)
    assert torch.equal(resumed[0].values["image"], alone[2].values["image"])
    assert len(resumed) == 1
    ranks = [chunks(folder, 0, rank=rank, world=3) for rank in range(3)]
    for step, whole in enumerate(alone):
        assert torch.equal(torch.cat([share[step].values["image"] for share in ranks]), whole.values["image"])
    assert not torch.equal(chunks(folder, 0, epoch=3)[0].ids, alone[0].ids)


def test_the_same_stream_serves_many_epochs_from_any_step(folder):
    source = open_source(folder, channels=3)
    stream = WorkerStream(ImagePipeline(source, (12, 16), 5, CROP), BatchPlan(len(source), 6, 5), workers=1, pin=False)
    first = [next(stream.batches(epoch, 1)).ids for epoch in (0, 1)]  # left in mid-epoch
    again = [next(stream.batches(epoch, 1)).ids for epoch in (0, 1)]
    assert torch.equal(torch.stack(first), torch.stack(again))
    assert not torch.equal(first[0], first[1])
