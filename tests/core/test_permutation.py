"""The laws of permutations, in float64 and against plain Python loops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from situs.core.permutation import (
    compose,
    identity,
    invert,
    is_permutation,
    permute_columns,
    permute_rows,
    random_permutation,
)
from situs.errors import SitusError

BATCH = 3
sizes = st.integers(1, 9)
seeds = st.integers(0, 2**31)
shared_or_not = st.booleans()


def draw(n: int, shared: bool, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand((n,) if shared else (BATCH, n), generator=generator)
    return random_permutation(noise)


def data(n: int, seed: int, *tail: int) -> Tensor:
    return torch.randn(BATCH, n, *tail, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def row(p: Tensor, b: int) -> list[int]:
    return (p if p.dim() == 1 else p[b]).tolist()


@given(sizes, shared_or_not, seeds)
def test_a_permutation_times_its_inverse_is_the_identity(n: int, shared: bool, seed: int):
    p = draw(n, shared, seed)
    assert is_permutation(p).all()
    for product in (compose(p, invert(p)), compose(invert(p), p)):
        assert torch.equal(product, identity(n).expand_as(p))


@given(sizes, shared_or_not, shared_or_not, seeds)
def test_applying_a_composition_is_applying_one_after_the_other(n: int, a: bool, b: bool, seed: int):
    first, then, x = draw(n, a, seed), draw(n, b, seed + 1), data(n, seed, 2)
    assert compose(first, then).dim() == (1 if a and b else 2)
    assert torch.equal(permute_rows(x, compose(first, then)), permute_rows(permute_rows(x, first), then))
    columns = x.transpose(1, 2).contiguous()
    twice = permute_columns(permute_columns(columns, first), then)
    assert torch.equal(permute_columns(columns, compose(first, then)), twice)


@given(sizes, shared_or_not, seeds, st.lists(st.integers(1, 3), max_size=2))
def test_rows_move_as_in_a_loop(n: int, shared: bool, seed: int, tail: list[int]):
    p, x = draw(n, shared, seed), data(n, seed, *tail)
    moved = permute_rows(x, p)
    assert moved.shape == x.shape
    for b in range(BATCH):
        for i, source in enumerate(row(p, b)):
            assert torch.equal(moved[b, i], x[b, source])


@given(sizes, shared_or_not, seeds, st.lists(st.integers(1, 3), max_size=2))
def test_columns_move_as_in_a_loop(n: int, shared: bool, seed: int, middle: list[int]):
    p, x = (
        draw(n, shared, seed),
        data(middle[0] if middle else n, seed, *middle[1:], *([n] if middle else [])),
    )
    moved = permute_columns(x, p)
    assert moved.shape == x.shape
    for b in range(BATCH):
        for i, source in enumerate(row(p, b)):
            assert torch.equal(moved[b, ..., i], x[b, ..., source])


@given(sizes, shared_or_not, seeds)
def test_gradients_are_carried_back_by_the_inverse(n: int, shared: bool, seed: int):
    p, x, upstream = draw(n, shared, seed), data(n, seed, 2).requires_grad_(), data(n, seed + 1, 2)
    (gradient,) = torch.autograd.grad(permute_rows(x, p), x, upstream)
    assert torch.equal(gradient, permute_rows(upstream, invert(p)))
    columns = data(2, seed, n).requires_grad_()
    upstream = data(2, seed + 1, n)
    (gradient,) = torch.autograd.grad(permute_columns(columns, p), columns, upstream)
    assert torch.equal(gradient, permute_columns(upstream, invert(p)))


def test_is_permutation_sees_repeats_gaps_and_wrong_types():
    rows = torch.tensor([[2, 0, 1], [0, 0, 1], [1, 2, 3], [-1, 0, 1]])
    assert is_permutation(rows).tolist() == [True, False, False, False]
    assert is_permutation(rows[0]).shape == ()
    assert bool(is_permutation(identity(0)))
    assert not is_permutation(torch.tensor([0.0, 1.0]))


def test_random_permutation_follows_the_noise_and_keeps_ties_in_order():
    assert random_permutation(torch.tensor([[0.5, 0.1, 0.5, 0.1]])).tolist() == [[1, 3, 0, 2]]


P = torch.tensor([1, 0])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: compose(P, identity(3)), "the same length, not 2 and 3"),
        (lambda: compose(P.expand(2, 2), P.expand(3, 2)), "samples, not 2 and 3"),
        (lambda: compose(P.int(), P), "torch.int32"),
        (lambda: invert(P.float()), "torch.int64"),
        (lambda: invert(P.view(1, 1, 2)), r"\[B, N\]"),
        (lambda: permute_rows(torch.zeros(2, 3), P), r"\(2, 3\)"),
        (lambda: permute_rows(torch.zeros(2), P), r"\[B, N, ...\]"),
        (lambda: permute_rows(torch.zeros(3, 2), P.expand(2, 2)), "2 permutations do not fit 3 samples"),
        (lambda: permute_columns(torch.zeros(2, 3), P), "2 entries"),
        (lambda: permute_columns(torch.zeros(2), P.expand(2, 2)), r"\[B, ..., D\]"),
        (lambda: permute_columns(torch.zeros(3, 4, 2), P.expand(2, 2)), "3 samples"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(call, words: str):
    with pytest.raises(SitusError, match=words):
        call()


CALLS: dict[str, tuple[str, Callable[[Tensor], object]]] = {
    "invert": ("p", invert),
    "rows": ("p", lambda p: permute_rows(torch.zeros(2, 3, 3), p)),
    "columns": ("p", lambda p: permute_columns(torch.zeros(2, 3, 3), p)),
    "first": ("first", lambda p: compose(p, identity(3))),
    "then": ("then", lambda p: compose(identity(3), p)),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_index_of_another_kind_is_refused_by_its_name(call: str) -> None:
    name, run = CALLS[call]
    run(identity(3))
    for wrong, words in (
        (identity(3).int(), r"torch.int32 of shape \(3,\)"),
        (identity(3).view(1, 1, 3), r"\(1, 1, 3\)"),
    ):
        with pytest.raises(SitusError, match=f"^{name} is .*{words}: a permutation must be torch.int64 of shape "):
            run(wrong)
