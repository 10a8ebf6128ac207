"""The counter-based numbers: the same for a sample wherever it stands, and random to every test here."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from situs.core import random
from situs.core.random import bits, normal, stream_number, uniform

MASK = 2**64 - 1
words = st.integers(-(2**63), 2**63 - 1)


def splitmix(x: int) -> int:
    """The finaliser of SplitMix64 on unbounded Python integers."""
    x &= MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


@given(st.lists(words, min_size=1, max_size=20))
def test_the_hash_of_a_tensor_is_the_hash_of_integers(values: list[int]):
    hashed = random._mix(torch.tensor(values))
    assert [x & MASK for x in hashed.tolist()] == [splitmix(x) for x in values]
    assert [random._mix_int(x) for x in values] == [splitmix(x) for x in values]
    assert torch.equal(hashed, torch.tensor([random._signed(random._mix_int(x)) for x in values]))


def test_the_hash_is_the_published_generator():
    """SplitMix64 seeded with 1234567 begins with this number, in Vigna's C and in every port of it."""
    gamma = 0x9E3779B97F4A7C15
    assert splitmix(1234567 + gamma) == 6457827717110365317
    assert splitmix(1234567 + 2 * gamma) == 3203168211198807973


@given(st.integers(), st.integers(0, 2**40), words, st.text(st.characters(exclude_categories=["Cs"]), max_size=8))
def test_words_are_those_of_plain_integers(seed: int, epoch: int, sample: int, stream: str):
    gamma = 0x9E3779B97F4A7C15
    shared = splitmix(splitmix(seed + gamma) ^ splitmix(epoch + 1) ^ stream_number(stream))
    key = splitmix(sample * gamma + shared)
    expected = [splitmix(key + k * gamma) for k in range(1, 5)]
    assert [x & MASK for x in bits(seed, epoch, torch.tensor([sample]), stream, (4,))[0].tolist()] == expected
    numbers = uniform(seed, epoch, torch.tensor([sample]), stream, (2, 2)).flatten().tolist()
    assert numbers == [(x >> 40) / 2**24 for x in expected]


def test_no_numbers_are_asked_of_no_kernel(monkeypatch: pytest.MonkeyPatch):
    """A kernel cannot be launched over nothing, and γ = 0 asks for that."""
    monkeypatch.setattr(random, "runs_kernels", lambda _: True)
    assert uniform(0, 0, torch.arange(3), "s", (0,)).shape == (3, 0)
    assert uniform(0, 0, torch.arange(3), "s", (2, 0)).shape == (3, 2, 0)


@given(st.permutations(range(12)), st.integers(1, 12))
def test_a_sample_keeps_its_numbers_in_any_batch(order: list[int], size: int):
    ids = torch.arange(100, 112)
    whole = uniform(1, 2, ids, "s", (3, 5))
    part = torch.tensor(order[:size])
    assert torch.equal(uniform(1, 2, ids[part], "s", (3, 5)), whole[part])


def test_the_first_numbers_do_not_depend_on_how_many_are_drawn():
    ids = torch.tensor([3, 70_000])
    assert torch.equal(uniform(0, 0, ids, "s", (40,))[:, :7], uniform(0, 0, ids, "s", (7,)))
    assert uniform(0, 0, ids, "s", ()).shape == (2,)
    assert uniform(0, 0, ids, "s", (0,)).shape == (2, 0)
    assert uniform(0, 0, ids[:0], "s", (4,)).shape == (0, 4)
    assert torch.equal(uniform(0, 0, ids.int(), "s", (4,)), uniform(0, 0, ids, "s", (4,)))


def test_the_drawing_leaves_the_ids_alone():
    ids = torch.arange(5)
    uniform(0, 0, ids, "s", (3,))
    assert torch.equal(ids, torch.arange(5))


def test_stream_numbers_are_stable():
    assert stream_number("mp3.context") == 3273294229378570132
    assert stream_number("a") != stream_number("b")


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63, 2**64 - 1, 10**30])
def test_negative_and_large_seeds_work(seed: int):
    ids = torch.arange(2000)
    numbers = uniform(seed, 0, ids, "s", (10,))
    assert stats.kstest(numbers.flatten().numpy(), "uniform").pvalue > 1e-4
    assert not torch.equal(numbers, uniform(seed + 1, 0, ids, "s", (10,)))


def test_numbers_are_uniform():
    numbers = uniform(0, 0, torch.arange(1000), "s", (200,))
    assert numbers.dtype == torch.float32
    assert float(numbers.min()) >= 0.0
    assert float(numbers.max()) < 1.0
    assert stats.kstest(numbers.flatten().double().numpy(), "uniform").pvalue > 1e-3
    for few in (numbers[0], numbers[:, 0], numbers[:, -1]):
        assert stats.kstest(few.numpy(), "uniform").pvalue > 1e-3
    # Each of the 24 bits is set half of the time.
    levels = (numbers.double().flatten() * 2**24).long()
    for bit in range(24):
        share = ((levels >> bit) & 1).double().mean()
        assert abs(float(share) - 0.5) < 4.5 * 0.5 / math.sqrt(levels.numel())


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack((a.flatten(), b.flatten())).double())[0, 1])


def test_streams_epochs_seeds_samples_and_counters_are_independent():
    ids = torch.arange(500)
    base = uniform(0, 0, ids, "s", (200,))
    others = {
        "stream": uniform(0, 0, ids, "t", (200,)),
        "epoch": uniform(0, 1, ids, "s", (200,)),
        "seed": uniform(1, 0, ids, "s", (200,)),
        "seed and epoch swapped": uniform(1, 2, ids, "s", (200,)) - uniform(2, 1, ids, "s", (200,)),
        "next sample": base.roll(1, 0),
        "next counter": base.roll(1, 1),
        "sample and counter swapped": base[:200].T.repeat(3, 1)[:500],
    }
    for name, other in others.items():
        assert abs(correlation(base, other)) < 4.5 / math.sqrt(base.numel()), name
    # Not a shifted copy either: the mean over 32 lags would show one.
    for name in ("stream", "epoch", "seed"):
        for lag in range(1, 33):
            assert abs(correlation(base, others[name].roll(lag, 1))) < 5 / math.sqrt(base.numel()), (
                name,
                lag,
            )


def test_no_word_comes_twice_in_a_million_draws():
    million = [bits(0, epoch, torch.arange(1000), stream, (250,)) for epoch in (0, 1) for stream in ("s", "t")]
    assert len(torch.cat(million).unique()) == 1_000_000


def test_normal_numbers_are_normal():
    numbers = normal(0, 0, torch.arange(1000), "s", (100,))
    assert numbers.isfinite().all()
    assert stats.kstest(numbers.flatten().double().numpy(), "norm").pvalue > 1e-3
    assert abs(correlation(numbers, uniform(0, 0, torch.arange(1000), "s", (100,)))) < 0.02
    assert torch.equal(normal(0, 0, torch.tensor([7, 3]), "s", (5,)), numbers[[7, 3], :5])


@pytest.mark.gpu
def test_the_gpu_draws_the_same_bits():
    ids = torch.tensor([0, 1, 5, 10**12, -3])
    here = bits(-7, 3, ids, "s", (1000,))
    assert torch.equal(bits(-7, 3, ids.cuda(), "s", (1000,)).cpu(), here)
    for shape in ((9,), (0,), (3, 0), (2, 700)):
        assert torch.equal(uniform(-7, 3, ids.cuda(), "s", shape).cpu(), uniform(-7, 3, ids, "s", shape))
