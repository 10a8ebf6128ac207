"""The order in blocks: a permutation, the same for any ranks and workers, each block read once, little of it open."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from situs.data.batch import Batch
from situs.data.loader import WorkerStream, _Schedule
from situs.data.pipeline import Pipeline
from situs.data.sampler import BatchPlan, BlockOrder, batches_for, block_order, sample_of
from situs.data.sources.base import Blocks, Source
from situs.data.sources.subset import Rows, Subset
from situs.errors import BrokenSampleError


class Runs(Source):
    """Numbers in blocks, which counts how often each block is read and how many are open."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__("runs", None, None, strict=False)
        self.ends = np.cumsum(sizes)
        self._ends: list[int] = self.ends.tolist()
        self.open: set[int] = set()
        self.reads: Counter[int] = Counter()
        self.most = 0

    def __len__(self) -> int:
        return int(self.ends[-1])

    def blocks(self) -> Blocks:
        return Blocks(self.ends, 10 * len(self.ends), slow_random_access=True, name="runs")

    def block(self, index: int) -> int:
        return bisect_right(self._ends, index)

    def read(self, index: int) -> dict[str, Any]:
        if (block := self.block(index)) not in self.open:
            self.open.add(block)
            self.reads[block] += 1
            self.most = max(self.most, len(self.open))
        return {"number": index}

    def release(self, index: int | None = None) -> None:
        self.open = set() if index is None else self.open - {self.block(index)}


class Numbers(Pipeline):
    """What the source read, as it is. by_rows: False adds a value of another length."""

    def collate(self, epoch: int, draws: list[int], samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        numbers = torch.tensor([sample["number"] for sample in samples])
        return {"number": numbers, **({} if self.by_rows else {"twice": numbers.repeat(2)})}

    def finish(self, values: Any, ids: torch.Tensor, noise: Any) -> Batch:
        return Batch(values["number"], ids)


def planned(source: Source, batch: int, window: float = 60.0, **more: Any) -> BatchPlan:
    plan = BatchPlan(len(source), batch, **more)
    blocks = source.blocks()
    assert blocks is not None
    return replace(plan, order=block_order(blocks, window, plan.distinct, plan.n // plan.batch))


def order_of(plan: BatchPlan) -> BlockOrder:
    assert isinstance(plan.order, BlockOrder)
    return plan.order


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=80),
    open_=st.integers(1, 100),
    rows=st.integers(1, 40),
    seed=st.integers(0, 3),
    epoch=st.integers(0, 3),
)
@example(sizes=[5], open_=1, rows=7, seed=0, epoch=0)
def test_every_epoch_is_a_permutation(sizes, open_, rows, seed, epoch):
    n = sum(sizes)
    order = BlockOrder(np.cumsum(sizes), open_, rows, n // rows)
    found = order(seed, epoch, n)[torch.arange(n)]
    assert found.sort().values.tolist() == list(range(n))
    # Asked for in any portions, and again.
    mixed = torch.randperm(n, generator=torch.Generator().manual_seed(epoch))
    assert torch.equal(order(seed, epoch, n)[mixed], found[mixed])


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=60),
    world=st.integers(1, 4),
    share=st.integers(1, 6),
    parts=st.integers(1, 5),
    repeated=st.integers(1, 3),
    start=st.integers(0, 4),
    drop_last=st.booleans(),
)
def test_ranks_workers_and_resume_change_nothing(sizes, world, share, parts, repeated, start, drop_last):
    source = Runs(sizes)
    batch = world * share
    if len(source) < batch:
        return
    alone = planned(source, batch, seed=4, repeated=repeated, drop_last=drop_last)
    whole = [ids.tolist() for ids in batches_for(alone, 1)]
    met: list[list[int]] = [[] for _ in whole[start:]]
    for rank in range(world):
        schedule = _Schedule(replace(alone, rank=rank, world=world), parts)
        schedule.start_at(1, start)
        tasks, step = iter(schedule), 0
        while step < len(met):
            draws = [next(tasks)[0].draws for _ in range(parts)]
            sizes_of = schedule.sizes.popleft()
            for number in range(len(sizes_of[0])):
                for part in range(parts):
                    before = sum(sizes_of[part][:number])
                    met[step] += draws[part][before : before + sizes_of[part][number]]
                step += 1
    assert met == whole[start:]
    if repeated == 1:
        assert len(set(chain.from_iterable(whole))) == (len(source) // batch * batch if drop_last else len(source))


@pytest.mark.thin(2)
@pytest.mark.parametrize(("size", "world", "parts"), [(12, 1, 1), (12, 1, 4), (12, 2, 3), (12, 4, 1), (40, 2, 3)])
def test_each_block_is_read_once_and_few_are_open(size, world, parts):
    count, batch, open_ = 130, 64, 16
    sizes = [size - number % 3 for number in range(count)]
    plan = planned(Runs(sizes), batch, window=10.0 * open_)
    order = order_of(plan)
    assert (order.open, order.lanes) == (open_, 16)
    reads, most = Counter[int](), 0
    for rank in range(world):
        sources = [Runs(sizes) for _ in range(parts)]
        schedule = _Schedule(replace(plan, rank=rank, world=world), parts)
        tasks, steps = iter(schedule), 0
        while steps < 2 * plan.steps:  # two epochs
            for source in sources:
                task = next(tasks)[0]
                if task.fresh:
                    source.release()
                Numbers(source, training=True).read(task.epoch, task.draws, task.done)
            steps += len(schedule.sizes.popleft()[0])
        for source in sources:
            reads += source.reads
            most += source.most
    # Twice is read what lies across the ends of two lanes, or in a lane that two processes share.
    shared = 0 if 16 % (world * parts) == 0 else world * parts / 16
    assert sum(reads.values()) <= 2 * (count * (1 + shared) + 16)
    assert len(reads) == count
    assert most <= open_ + (world * parts if shared else 0)


@pytest.mark.parametrize(("world", "parts"), [(1, 1), (1, 4), (2, 3)])
def test_a_block_is_released_after_its_last_row_and_not_before(world, parts):
    """Slowly: of each task the rows of the global batch, and how many of them stand before the end of a block."""
    plan, batch = planned(Runs([5] * 60), 12, window=60.0), 12
    epoch = plan.order_of(0)
    released = 0
    for rank in range(world):
        schedule = _Schedule(replace(plan, rank=rank, world=world), parts)
        tasks, step = iter(schedule), 0
        while step < plan.steps:
            round_ = [next(tasks)[0] for _ in range(parts)]
            sizes = schedule.sizes.popleft()
            wanted: list[dict[int, list[int]]] = [{} for _ in range(parts)]
            for number in range(len(sizes[0])):
                for part, places in enumerate(torch.arange(batch).tensor_split(world)[rank].tensor_split(parts)):
                    for row, sample in epoch.ended(step + number):
                        count = sum(sizes[part][:number]) + int((places < row).sum())
                        wanted[part].setdefault(count, []).append(sample)
                        released += 1
            assert [task.done for task in round_] == wanted
            step += len(sizes[0])
    assert released > 0


class Torn(Runs):
    """The last sample of every block is broken, and every fifth block altogether."""

    def read(self, index: int) -> dict[str, Any]:
        found = super().read(index)
        if index + 1 in self._ends or self.block(index) % 5 == 0:
            raise BrokenSampleError(f"sample {index}")
        return found


@pytest.mark.parametrize("by_rows", [True, False])
def test_what_stands_in_for_broken_samples_is_not_held(by_rows):
    source, open_ = Torn([4] * 60), 6
    plan = planned(source, 8, window=10.0 * open_)
    pipeline = Numbers(source, training=True)
    pipeline.by_rows = by_rows
    for _ in WorkerStream(pipeline, plan, 0, pin=False).batches(0, 0):
        assert len(source.open) <= open_
    assert source.most <= open_ + 1
    exact = Torn([4] * 60)  # without the order of blocks nobody releases anything
    Numbers(exact, training=True).read(0, list(range(240)))
    assert len(exact.open) == 60


def test_a_batch_mixes_all_that_is_open_and_the_epoch_all_blocks():
    source = Runs([20] * 600)
    plan = planned(source, 64, window=10.0 * 64)
    batches = [sample_of(ids) // 20 for ids in batches_for(plan, 0)]
    assert sum(len(blocks.unique()) for blocks in batches) / len(batches) > 63  # 64 lanes, a block each
    first = [set(blocks.tolist()) for blocks in batches]
    assert len(first[0] & first[100]) < 20  # other blocks after a while
    other = [sample_of(ids) // 20 for ids in batches_for(plan, 1)]
    assert not torch.equal(batches[0], other[0])
    # No place in an epoch has its own samples: the mean place of the first tenth of the set is that of all.
    places = torch.cat([sample_of(ids) for ids in batches_for(plan, 2)]).argsort()
    assert abs(places[:1200].double().mean() / 12000 - 0.5) < 0.1


def test_blocks_of_different_sizes_and_a_window_that_holds_all():
    assert block_order(Blocks(np.array([10]), 100, True, "runs"), 1.0, 4, 2).open == 1
    everything = block_order(Blocks(np.array([10, 20, 30]), 100, True, "runs"), 1e9, 4, 7)
    assert (everything.open, everything.lanes) == (3, 1)
    assert set(everything(0, 0, 30)[torch.arange(28)].tolist()) <= set(range(30))
    # The numbers of what is open lie in memory: so many and no more.
    tiny = Blocks(np.arange(1, 5001) * 4096, 5000, True, "runs")
    assert block_order(tiny, 1e12, 4, 7).open == 1024


def test_orders_that_differ_are_told_apart():
    blocks = Blocks(np.arange(1, 41) * 10, 400, True, "runs")
    order = block_order(blocks, 100.0, 8, 50)
    assert order.mark == block_order(blocks, 100.0, 8, 50).mark
    finer = Blocks(np.arange(1, 81) * 5, 400, True, "runs")
    others = [block_order(finer, 100.0, 8, 50), block_order(blocks, 150.0, 8, 50), replace(order, rows=4)]
    assert len({order.mark, *(other.mark for other in others)}) == 4


def test_a_part_of_a_set_has_the_blocks_of_its_rows():
    source = Runs([10] * 40)
    part = Subset(source, 60)
    blocks = part.blocks()
    assert blocks is not None
    assert blocks.bytes == 10 * len(blocks.ends)
    starts = [0, *blocks.ends[:-1].tolist()]
    for start, end in zip(starts, blocks.ends.tolist(), strict=True):
        assert len({int(row) // 10 for row in part.rows[start:end]}) == 1
    assert len({int(row) // 10 for row in part.rows}) == len(blocks.ends)
    part.read(5)
    assert source.open == {int(part.rows[5]) // 10}
    part.release(5)
    assert source.open == set()
    assert Rows(source, [3, 1]).blocks() is None
    plan = planned(part, 8, drop_last=False)
    assert sorted(torch.cat(list(batches_for(plan, 0))).tolist()) == list(range(60))


@pytest.mark.thin(2)
@pytest.mark.parametrize(("workers", "by_rows"), [(0, True), (1, False), (2, True)])
def test_a_stream_over_epochs_is_that_of_one_process(workers, by_rows):
    source = Runs([7] * 30)
    plan = planned(source, 12, seed=2)
    pipeline = Numbers(source, training=True)
    pipeline.by_rows = by_rows
    stream = WorkerStream(pipeline, plan, workers, pin=False)
    for epoch, start in ((0, 3), (1, 0), (1, 0), (2, 0), (5, 1)):  # what comes next, the same again, and later
        batches = list(stream.batches(epoch, start))
        expected = [ids.tolist() for ids in batches_for(plan, epoch, start)]
        assert [torch.cat([part.ids for part in parts]).tolist() for parts in batches] == expected
        assert [torch.cat([part.values["number"] for part in parts]).tolist() for parts in batches] == expected
        if not by_rows:
            parts = chain.from_iterable(batches)
            assert all(part.values["twice"].tolist() == part.ids.tolist() * 2 for part in parts)


def test_the_order_of_a_billion_samples_costs_what_its_blocks_cost():
    blocks = Blocks(np.arange(1, 100_001) * 10_000, 100_000 * 10_000, True, "runs")
    plan = BatchPlan(10**9, 1024, seed=1)
    plan = replace(plan, order=block_order(blocks, 1e6, plan.distinct, plan.n // plan.batch))
    ids = next(batches_for(plan, 3, plan.steps - 1))
    assert len(set(ids.tolist())) == 1024
    assert 0 <= int(ids.min()) < int(ids.max()) < 10**9
