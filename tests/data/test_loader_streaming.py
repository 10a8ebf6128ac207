from __future__ import annotations

import gc
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from situs.data import loader as streaming
from situs.data.augment.recipes import AugmentConfig
from situs.data.config import DataConfig
from situs.data.loader import Loader, WorkerStream, _read, _Task, make_loader
from situs.data.modalities.image import ImagePipeline
from situs.data.open import open_source
from situs.data.pipeline import Pipeline, WorkerBatch
from situs.data.sampler import BatchPlan, batches_for, block_order, epoch_order
from situs.data.sources.base import Blocks, Source, TensorSource

CROP = AugmentConfig()


def chunks(folder, workers: int, epoch: int = 2, start: int = 0, **plan) -> list[WorkerBatch]:
    source = open_source(folder, channels=3)
    views = ImagePipeline(source, DataConfig(img_size=(12, 16), seed=5), CROP)
    stream = WorkerStream(views, BatchPlan(len(source), 6, 5, **plan), workers, pin=False)
    return [part for (part,) in stream.batches(epoch, start)]


def test_workers_that_nobody_closed_end_at_once_with_their_stream(folder):
    """In a circle too, as an error's traceback makes one, of which torch would wait five seconds for each."""
    source = open_source(folder, channels=3)
    stream: Any = WorkerStream(
        ImagePipeline(source, DataConfig(img_size=(12, 16), seed=5), CROP), BatchPlan(len(source), 6, 5), 1, pin=False
    )
    next(stream.batches(0, 0))
    (worker,) = stream._loader._iterator._workers
    stream.itself, stream = stream, None
    began = time.monotonic()
    gc.collect()
    assert not worker.is_alive() and time.monotonic() - began < 4


def test_the_same_stream_serves_many_epochs_from_any_step(folder):
    source = open_source(folder, channels=3)
    stream = WorkerStream(
        ImagePipeline(source, DataConfig(img_size=(12, 16), seed=5), CROP),
        BatchPlan(len(source), 6, 5),
        workers=1,
        pin=False,
    )
    first = [next(stream.batches(epoch, 1))[0].ids for epoch in (0, 1)]  # left in mid-epoch
    again = [next(stream.batches(epoch, 1))[0].ids for epoch in (0, 1)]
    assert torch.equal(torch.stack(first), torch.stack(again))
    assert not torch.equal(first[0], first[1])


class Told(Source):
    """Says in a file which samples were read, so that the reads of other processes are seen."""

    def __init__(self, log: Path) -> None:
        super().__init__("told", None, None, strict=False)
        self.log = log

    def __len__(self) -> int:
        return 12

    def read(self, index: int) -> dict[str, Any]:
        with self.log.open("a") as file:
            file.write(f"{index}\n")
        return {"image": torch.zeros(3, 4, 4, dtype=torch.uint8)}


def reads_after(log: Path, count: int) -> int:
    """How many reads there are, once there are `count` of them."""
    for _ in range(400):
        if log.exists() and len(log.read_text().splitlines()) >= count:
            break
        time.sleep(0.05)
    return len(log.read_text().splitlines())


@pytest.mark.thin(2)
@pytest.mark.parametrize("shuffle", [True, False])
def test_workers_go_on_with_the_next_epoch_and_not_further_than_they_may(tmp_path, shuffle):
    source = Told(tmp_path / "log")
    plan = BatchPlan(12, 4, shuffle=shuffle)
    stream = WorkerStream(ImagePipeline(source, DataConfig(img_size=(4, 4)), CROP), plan, workers=1, pin=False)
    ahead = streaming._PREFETCH * 4
    epoch = stream.batches(0, 0)
    next(epoch)
    if not shuffle:  # evaluation: the epoch and no more
        assert len(list(epoch)) == 2
        time.sleep(0.3)
        assert reads_after(source.log, 12) == 12
        return
    # One batch is taken: the worker has read as far ahead as it may, into the next epoch.
    assert reads_after(source.log, 4 + ahead) == 4 + ahead
    assert len(list(epoch)) == 2
    assert reads_after(source.log, 12 + ahead) == 12 + ahead
    second = [part.ids for (part,) in stream.batches(1, 0)]
    assert torch.equal(torch.cat(second), torch.cat(list(batches_for(plan, 1))))
    assert reads_after(source.log, 24 + ahead) == 24 + ahead  # nothing was read twice
    again = [part.ids for (part,) in stream.batches(1, 1)]  # not what comes next: begun anew
    assert torch.equal(torch.cat(again), torch.cat(second[1:]))


def test_a_rank_without_rows_in_the_last_batch_goes_on(folder):
    parts = chunks(folder, 0, rank=5, world=6, drop_last=False)
    assert [len(part.ids) for part in parts] == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("batch", "world", "ahead"), [(256, 1, 4), (2048, 1, 1), (2048, 8, 4), (1024, 1, 3), (99999, 1, 1)]
)
def test_large_batches_are_not_prepared_further_ahead_than_memory_allows(tmp_path, batch, world, ahead):
    views = ImagePipeline(Told(tmp_path / "log"), DataConfig(img_size=(224, 224)), CROP)
    plan = BatchPlan(10**6, batch, world=world)
    assert streaming.prefetch_depth(views.row_bytes, plan, workers=16) == ahead
    assert 16 * ahead * (plan.batch // world) * 3 * 224 * 224 <= 8 << 30 or ahead == 1


def test_the_order_of_the_next_epoch_is_made_beside_this_one(folder):
    asked: dict[int, int] = {}
    made = threading.Event()

    def order(seed, epoch, n, device):
        asked[epoch] = threading.get_ident()
        if epoch == 1:
            made.set()
        return epoch_order(seed, epoch, n, device)

    plan = BatchPlan(len(source := open_source(folder, channels=3)), 4, order=order)
    stream = WorkerStream(ImagePipeline(source, DataConfig(img_size=(8, 8)), AugmentConfig()), plan, 0, pin=False)
    batches = stream.batches(0, 0)
    next(batches)
    assert made.wait(10) and asked[0] == threading.get_ident() != asked[1]
    ids = [torch.cat([part.ids for part in parts]) for epoch in (0, 1) for parts in stream.batches(epoch, 0)]
    wanted = [each for epoch in (0, 1) for each in batches_for(replace(plan, order=epoch_order), epoch)]
    assert all(torch.equal(a, b) for a, b in zip(ids, wanted, strict=True))


class Traced(TensorSource):
    """Images that keep what was read, and what was released before each and at the end; twice is as once."""

    def __init__(self) -> None:
        super().__init__(torch.arange(12, dtype=torch.uint8).view(12, 1, 1, 1), None, None)
        self.rows: list[int] = []
        self.released: list[set[int | None]] = [set()]

    def read(self, index: int) -> dict[str, Any]:
        self.rows.append(index)
        self.released.append(set())
        return super().read(index)

    def release(self, index: int | None = None) -> None:
        self.released[-1].add(index)


class Stacked(Pipeline):
    def __init__(self, by_rows: bool) -> None:
        super().__init__(Traced(), training=False)
        self.by_rows = by_rows

    def collate(self, epoch: int, draws: list[int], samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        return {"image": torch.stack([sample["image"] for sample in samples])}

    def finish(self, values: Any, ids: Tensor, noise: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("done", [None, {0: [11], 2: [7], 4: [1], 5: [2, 3], 7: [5], 10: [8, 9]}, {10: [4]}, {}])
@pytest.mark.parametrize("sizes", [[4, 3, 3], [1] * 10, [10], [5, 0, 5]])
def test_batches_that_cannot_be_divided_are_read_one_by_one_as_all_at_once(
    sizes: list[int], done: dict[int, list[int]] | None, fresh: bool
) -> None:
    task, parts, told = _Task(0, [3, 1, 4, 0, 5, 9, 2, 6, 8, 7], sizes, done, fresh), [], []
    for by_rows in (True, False):
        pipeline = Stacked(by_rows)
        parts.append(_read(pipeline, [task]))
        told.append((pipeline.source.rows, pipeline.source.released))
    [whole], apart = parts
    assert told[0] == told[1] and (None in told[0][1][0]) == fresh
    assert [len(part.ids) for part in apart] == sizes
    assert torch.equal(torch.cat([part.ids for part in apart]), whole.ids)
    images = [part.values["image"] for part in apart if len(part.ids)]
    assert torch.equal(torch.cat(images), whole.values["image"])


class Blocked(TensorSource):
    def blocks(self) -> Blocks:
        return Blocks(np.arange(4, len(self) + 1, 4), 1 << 20, True, "rows")


def test_crops_that_the_device_resizes_are_those_of_workers_in_blocks_too() -> None:
    """They have no rows of one size, so a worker's part of several batches is not divided afterwards."""
    images = torch.randint(0, 256, (48, 3, 20, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    source, data = Blocked(images, torch.arange(48) % 3, ("a", "b", "c")), DataConfig(img_size=(8, 6), seed=5)
    plan = BatchPlan(48, 12, 5, order=block_order(source.blocks(), 1 << 19, 12, 4))
    found = []
    for device_resizes, workers in ((False, 0), (True, 2)):
        pipeline = ImagePipeline(source, data, CROP, device_resizes=device_resizes)
        loader = Loader(pipeline, plan, torch.device("cpu"), workers)
        found.append(list(loader.iterate(1)))
        loader.close()
    assert len(found[0]) == 4
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.ids, other.ids) and torch.equal(one.targets["label"], other.targets["label"])
        torch.testing.assert_close(one.inputs, other.inputs, rtol=0, atol=1e-6)


def test_the_log_says_how_a_set_in_blocks_is_shuffled() -> None:
    source = Blocked(torch.zeros(48, 3, 8, 8, dtype=torch.uint8), None, None)
    config = DataConfig(img_size=8, batch=12, workers=0, resident="never", window_gib=2.0**-12)  # a quarter of it
    told = {order: make_loader(replace(config, order=order), CROP, source=source) for order in ("auto", "exact")}
    blocks = ", shuffled in blocks: 3 of 12 rows at a time (0.00024 GiB)"
    assert told["auto"].order == f"{blocks}, because the set is too large for a fully random order"
    assert told["exact"].order == (", shuffled exactly; slow, because a whole row is read for each sample (12 rows)")
    assert told["exact"].mark == "48 samples in any order" and told["auto"].mark.startswith("48 samples in blocks (")
    judged = make_loader(config, None, source=source)
    assert (judged.order, judged.mark) == ("", "48 samples in any order")
    drawn = make_loader(config, CROP, source=source, step_sampler=lambda step, n, batch: torch.arange(step, n, 4))
    assert (drawn.order, drawn.mark) == ("", "48 samples, each step by chance")
    assert [sorted(batch.ids.tolist()) for batch in drawn.iterate(0)] == [[*range(step, 48, 4)] for step in range(4)]
