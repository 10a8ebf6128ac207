from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from situs.core.random import uniform
from situs.data.sampler import (
    Balanced,
    BatchPlan,
    LengthBuckets,
    batches_for,
    draw_ids,
    epoch_order,
    sample_of,
)
from situs.errors import SitusError


def all_rows(plan: BatchPlan, epoch: int = 0, start: int = 0) -> list[list[int]]:
    return [ids.tolist() for ids in batches_for(plan, epoch, start)]


def test_the_order_is_a_fresh_permutation_each_epoch_and_seed():
    orders = [epoch_order(seed, epoch, 1000) for seed in (0, 1) for epoch in (0, 1)]
    for order in orders:
        assert torch.equal(order.sort().values, torch.arange(1000))
    assert all(not torch.equal(a, b) for i, a in enumerate(orders) for b in orders[:i])
    assert torch.equal(epoch_order(0, 0, 1000), orders[0])


def test_the_order_is_uniform():
    """Each of the 24 orders of four samples comes equally often: chi-square over 2,400 epochs."""
    counts = {}
    for epoch in range(2400):
        key = tuple(epoch_order(5, epoch, 4).tolist())
        counts[key] = counts.get(key, 0) + 1
    assert len(counts) == 24
    chi = sum((count - 100) ** 2 / 100 for count in counts.values())
    assert chi < 49.7  # the 99.9 % point at 23 degrees of freedom


@given(
    n=st.integers(1, 200),
    per_rank=st.integers(1, 9),
    world=st.integers(1, 5),
    repeated=st.integers(1, 4),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_the_ranks_together_are_the_single_rank_and_resume_goes_on(n, per_rank, world, repeated, drop_last, epoch):
    batch = per_rank * world
    if drop_last and n < batch:
        return
    alone = BatchPlan(n, batch, seed=3, repeated=repeated, drop_last=drop_last)
    whole = all_rows(alone, epoch)
    shares = [
        all_rows(BatchPlan(n, batch, 3, rank, world, repeated, drop_last=drop_last), epoch) for rank in range(world)
    ]
    assert [list(chain.from_iterable(parts)) for parts in zip(*shares, strict=True)] == whole
    assert len(whole) == alone.steps == (n // batch if drop_last else -(-n // batch))
    for start in range(alone.steps + 1):
        assert all_rows(alone, epoch, start) == whole[start:]
    ids = list(chain.from_iterable(whole))
    assert len(ids) == len(set(ids)) == (n // batch * batch if drop_last else n)
    assert all(len(part) == per_rank for share in shares for part in share[: n // batch])


def test_a_step_sampler_is_asked_once_for_each_step_of_the_run():
    asked = []

    def sampled(*step_n_batch):
        asked.append(step_n_batch)
        return torch.tensor([len(asked), 7])

    plan = BatchPlan(11, 4, step_sampler=sampled)
    assert (all_rows(plan), all_rows(plan, epoch=2, start=1)) == ([[1, 7], [2, 7]], [[3, 7]])
    assert asked == [(0, 11, 4), (1, 11, 4), (5, 11, 4)]


def test_without_repeats_every_sample_comes_once():
    assert sorted(chain.from_iterable(all_rows(BatchPlan(10, 4, drop_last=False)))) == list(range(10))
    assert all_rows(BatchPlan(10, 4, shuffle=False, drop_last=False)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_repeats_are_copies_of_one_sample_far_apart_in_one_batch():
    for ids in all_rows(BatchPlan(90, 12, repeated=3)):
        samples = sample_of(torch.tensor(ids))
        assert len(samples.unique()) == 4
        assert samples.bincount().max() == 3
        assert torch.equal(samples[:4], samples[4:8])
        assert torch.equal(torch.tensor(ids), draw_ids(samples, torch.arange(12) // 4))
        assert len(set(ids)) == 12


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ({"n": 10, "batch": 12}, "batch=12: must be at most the set's 10 samples"),
        ({"n": 10, "batch": 3, "world": 2}, "batch=3: must be a multiple of the 2 ranks"),
        ({"n": 10, "batch": 0}, "batch=0"),
        ({"n": 10, "batch": 2, "repeated": 0}, r"repeated=0: must be at least 1"),
    ],
)
def test_impossible_plans(plan, sentence):
    with pytest.raises(SitusError, match=sentence):
        BatchPlan(**plan)


def test_the_orders_of_two_epochs_and_seeds_are_unrelated(related):
    places = {f"{seed}, {epoch}": epoch_order(seed, epoch, 20000).argsort() for seed in (0, 1) for epoch in (0, 1)}
    before = {"the place in the set": torch.arange(20000)}
    assert related({**places, **before}) == {}
    crop = uniform(0, 0, torch.arange(20000), "augment.crop", (1,))[:, 0]
    assert related({**places, "the crop": crop}) == {}


@pytest.mark.parametrize(("sizes", "repeated"), [((80, 30, 7, 1), 1), ((5, 5), 1), ((40, 0, 3), 2), ((9,), 1)])
def test_a_balanced_epoch_has_each_class_equally_often(sizes, repeated):
    labels = torch.cat([torch.full((size,), number) for number, size in enumerate(sizes)] + [torch.tensor([-1])])
    labels = labels[epoch_order(3, 0, len(labels))]
    order, n, there = Balanced(labels, repeated), len(labels), sum(size > 0 for size in sizes)
    seen = torch.zeros(n)
    for epoch in range(30):
        ids = order(0, epoch, n)
        assert ids.shape == (n,) and len(ids.unique()) == n  # no copy twice: each is augmented anew
        counts = labels[sample_of(ids)].bincount(minlength=len(sizes))
        assert all(counts[number] in (n // there, -(-n // there)) for number, size in enumerate(sizes) if size)
        rows = torch.zeros(n).index_add_(0, sample_of(ids), torch.ones(n))
        for number, size in enumerate(sizes):  # the samples of a class come equally often too
            if size:
                own = rows[labels == number]
                assert own.max() - own.min() <= 1
        seen += rows
        assert ((ids >> 40) % repeated == 0).all()  # between them stand the plan's own copies
    assert bool((seen[labels >= 0] > 0).all()) and bool((seen[labels < 0] == 0).all())
    assert torch.equal(order(0, 5, n), order(0, 5, n)) and not torch.equal(order(0, 5, n), order(0, 6, n))


def test_buckets_hold_every_sample_once_and_like_lengths_together():
    n, batch = 330, 8
    lengths = torch.randint(1, 60, (n,), generator=torch.Generator().manual_seed(0))
    order = LengthBuckets(lengths, batch, pool=10)
    first = order(3, 0, n)
    assert torch.equal(first.sort().values, torch.arange(n))
    assert torch.equal(first, order(3, 0, n)) and not torch.equal(first, order(3, 1, n))
    assert torch.equal(first[-2:], epoch_order(3, 0, n)[-2:])  # what fills no batch

    def padding(rows: torch.Tensor) -> float:
        held = lengths[rows[: n // batch * batch]].view(-1, batch)
        return float((held.amax(1, keepdim=True) - held).sum())

    assert padding(first) < 0.3 * padding(epoch_order(3, 0, n))
    longest = lengths[first[: n // batch * batch]].view(-1, batch).amax(1)
    assert not torch.equal(longest, longest.sort().values)  # the batches themselves are in no order of length
    assert torch.equal(LengthBuckets(lengths[:5], batch)(0, 0, 5), epoch_order(0, 0, 5))
