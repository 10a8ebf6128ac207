"""The steps of the attack with samples, each against a slow reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats
from torch import Tensor

from situs.locks.attacks.match import (
    BALANCE,
    CUT,
    REFINE,
    agreement,
    assign,
    centred_rows,
    correlation_rows,
    correlations,
    graduated_assignment,
    hard_assignment,
    likelihood_ratio,
    long_schedule,
    normal_scores,
    refined_assignment,
    root_correlations,
    score_distance,
    short_schedule,
    sinkhorn,
    unit_rows,
    zscore,
)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gram(size: int, seed: int, samples: int = 40) -> Tensor:
    values = torch.randn(size, samples, generator=seeded(seed))
    return values @ values.T


def slow_rows(given: np.ndarray) -> np.ndarray:
    size = len(given)
    table = np.zeros((size, size))
    for i in range(size):
        for j in range(size):
            if i != j:
                table[i, j] = given[i, j] / np.sqrt(given[i, i] * given[j, j])
    for i in range(size):
        table[i] -= sum(table[i]) / size
        table[i] /= np.sqrt(sum(table[i] ** 2))
    return table


def slow_zscore(table: np.ndarray) -> np.ndarray:
    table = table.copy()
    for i in range(len(table)):
        table[i] = (table[i] - table[i].mean()) / table[i].std()
    for j in range(table.shape[1]):
        table[:, j] = (table[:, j] - table[:, j].mean()) / table[:, j].std()
    return table


def slow_sinkhorn(logits: np.ndarray) -> np.ndarray:
    logits = np.maximum(logits - logits.max(axis=1, keepdims=True), -CUT)
    for _ in range(BALANCE):
        logits = logits - special.logsumexp(logits, axis=1, keepdims=True)
        logits = logits - special.logsumexp(logits, axis=0, keepdims=True)
    return np.exp(logits)


@given(st.integers(2, 9), st.integers(0, 50))
def test_rows_are_correlations_without_the_diagonal(size: int, seed: int) -> None:
    given_ = gram(size, seed)
    if size == 2:  # two channels have one correlation, and a row of it and 0 is ±(1, -1) / √2
        assert torch.allclose(correlation_rows(given_).abs(), torch.full((2, 2), 0.5**0.5), atol=1e-4)
        return
    assert np.allclose(correlation_rows(given_).numpy(), slow_rows(given_.double().numpy()), atol=1e-5)
    scale = torch.rand(size, generator=seeded(seed + 1)) + 0.1  # as a norm's weight or LayerScale has it
    assert torch.allclose(correlation_rows(scale[:, None] * given_ * scale), correlation_rows(given_), atol=1e-5)
    q = torch.randperm(size, generator=seeded(seed + 2))
    assert torch.allclose(correlation_rows(given_[q][:, q]), correlation_rows(given_)[q][:, q], atol=1e-5)


def test_a_dead_channel_is_a_row_of_zeros_and_no_nan() -> None:
    given_ = gram(5, 0)
    given_[2], given_[:, 2] = 0, 0
    table = correlation_rows(given_)
    assert bool(table.isfinite().all()) and float(table[2].abs().max()) < 1e-6
    assert torch.equal(unit_rows(torch.zeros(2, 3)), torch.zeros(2, 3))


def test_the_root_is_the_square_root_of_the_correlations() -> None:
    given_ = gram(12, 3)
    assert torch.allclose(root_correlations(given_) @ root_correlations(given_), correlations(given_), atol=1e-4)
    assert torch.allclose(correlations(given_).diagonal(), torch.ones(12))
    before = root_correlations(given_)
    assert torch.allclose(centred_rows(before).sum(dim=1), torch.zeros(12), atol=1e-5)
    assert torch.equal(before, root_correlations(given_))  # centred left its argument alone


@given(st.integers(1, 30), st.integers(0, 99))
def test_normal_scores_are_quantiles_of_the_ranks(size: int, seed: int) -> None:
    values = torch.randn(size, generator=seeded(seed))
    expected = stats.norm.ppf((stats.rankdata(values.numpy()) - 0.5) / size)
    assert np.allclose(normal_scores(values).numpy(), expected, atol=1e-5)
    assert torch.equal(normal_scores(values.exp() * 3), normal_scores(values))  # the order alone


def test_hints_are_what_their_names_say() -> None:
    a, b = torch.randn(6, generator=seeded(0)), torch.randn(6, generator=seeded(1))
    x, y = normal_scores(a).double().numpy(), normal_scores(b).double().numpy()
    distance, ratio = score_distance(a, b), likelihood_ratio(a, b, -0.7)
    joint = stats.multivariate_normal(cov=[[1, -0.7], [-0.7, 1]])
    base = 0.5 * np.log(1 - 0.49)  # the constant that no assignment sees
    for i in range(6):
        for j in range(6):
            assert float(distance[i, j]) == pytest.approx(-((x[i] - y[j]) ** 2), abs=1e-5)
            expected = joint.logpdf([x[i], y[j]]) - stats.norm.logpdf(x[i]) - stats.norm.logpdf(y[j]) + base
            assert float(ratio[i, j]) == pytest.approx(expected, abs=1e-5)


@given(st.integers(2, 8), st.integers(0, 50))
def test_zscore_takes_rows_and_then_columns(size: int, seed: int) -> None:
    table = torch.randn(size, size + 1, generator=seeded(seed), dtype=torch.float64)
    assert np.allclose(zscore(table).numpy(), slow_zscore(table.numpy()), atol=1e-9)


@settings(deadline=None)
@given(st.integers(2, 8), st.floats(0.1, 400), st.integers(0, 50))
def test_sinkhorn_in_scales_is_sinkhorn_in_logarithms(size: int, reach: float, seed: int) -> None:
    logits = reach * torch.randn(size, size, generator=seeded(seed))
    place = sinkhorn(logits)
    assert np.allclose(place.numpy(), slow_sinkhorn(logits.double().numpy()), atol=1e-5)
    assert torch.allclose(place.sum(dim=0), torch.ones(size), atol=1e-5)


def test_schedules_run_from_soft_to_hard() -> None:
    quick, slow = short_schedule(0.2), long_schedule(0.5)
    assert (quick.start, len(quick.steps), slow.start, len(slow.steps)) == (5.0, 12, 1.0, 40)
    assert quick.steps[0] == pytest.approx((0.2, 3.0 / 0.2)) and quick.steps[-1] == pytest.approx((0.05, 0.1 / 0.05))
    assert slow.steps[0] == pytest.approx((0.5, 2.0)) and slow.steps[-1] == pytest.approx((0.05, 0.5))
    for steps in (quick.steps, slow.steps):
        heats = np.array([heat for heat, _ in steps])
        assert np.allclose(heats[1:] / heats[:-1], heats[1] / heats[0])  # geometric


def test_graduated_assignment_step_by_step() -> None:
    a, b, hint = correlation_rows(gram(9, 0)), correlation_rows(gram(9, 1)), torch.randn(9, 9, generator=seeded(2))
    schedule = short_schedule(0.4)
    place = slow_sinkhorn(hint.double().numpy() * schedule.start)
    for heat, weight in schedule.steps:
        agreed = slow_zscore(a.double().numpy() @ place @ b.double().numpy().T)
        place = slow_sinkhorn(agreed / heat + weight * hint.double().numpy())
    assert torch.equal(graduated_assignment(a, b, hint, schedule), assign(torch.from_numpy(place)))


def planted(size: int, noise: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Tables of a locked and a clear side that agree but for noise, and the permutation between them."""
    clear = gram(size, seed, 2 * size)
    q = torch.randperm(size, generator=seeded(seed + 1))
    locked = clear[q][:, q] + noise * clear.std() * gram(size, seed + 2, 2 * size) / (2 * size) ** 0.5
    return correlation_rows(locked), correlation_rows(clear), q


def partly(q: Tensor, share: float, seed: int = 0) -> Tensor:
    wrong = torch.randperm(len(q), generator=seeded(seed))[int(share * len(q)) :]
    out = q.clone()
    out[wrong] = q[wrong.roll(1)]
    return out


def test_hard_rounds_finish_what_is_partly_right_and_then_stand() -> None:
    a, b, q = planted(40, 0.3)
    assert torch.equal(hard_assignment(a, b, partly(q, 0.4)), q)
    assert torch.equal(hard_assignment(a, b, q), q)
    assert torch.equal(assign(a @ b[:, q].T), q)


def test_a_hint_softly_taken_finds_the_planted_order() -> None:
    a, b, q = planted(40, 0.3, 5)
    clue = torch.randn(40, generator=seeded(9))
    other = clue[q] + 0.3 * torch.randn(40, generator=seeded(10))
    found = hard_assignment(a, b, graduated_assignment(a, b, likelihood_ratio(other, clue, 0.9), long_schedule(0.5)))
    assert torch.equal(found, q)


def test_agreement_is_the_sum_over_pairs() -> None:
    a, b, q = planted(7, 0.5)
    slow = sum(float(a[i, k] * b[q[i], q[k]]) for i in range(7) for k in range(7)) / 7
    assert agreement(a, b, q) == pytest.approx(slow, abs=1e-6)
    assert agreement(a, b, q) > agreement(a, b, q.roll(1))
    assert agreement(a, a, torch.arange(7)) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("seed", range(0, 120, 10))
def test_refinement_round_by_round(seed: int) -> None:
    ours, theirs = (
        [correlation_rows(gram(8, seed + s)) for s in (0, 1)],
        [correlation_rows(gram(8, seed + s)) for s in (2, 3)],
    )
    hint, q = torch.randn(8, 8, generator=seeded(seed + 4)), torch.randperm(8, generator=seeded(seed + 5))
    place = np.eye(8)[q.numpy()]
    expected = q.numpy()
    for _ in range(REFINE):
        total = np.zeros((8, 8))
        tables = [a.double().numpy() @ place @ b.double().numpy().T for a in ours for b in theirs]
        for table in (*tables, hint.double().numpy()):
            vote = slow_zscore(table)
            total += vote[np.arange(8), expected].mean() * vote
        expected = assign(torch.from_numpy(total)).numpy()
        place = (place + np.eye(8)[expected]) / 2
    assert refined_assignment(ours, theirs, hint, q).tolist() == expected.tolist()


def test_refinement_mends_what_one_pair_of_tables_cannot_tell() -> None:
    pairs = [planted(30, 1.0, seed) for seed in (0, 1)]
    # Both pairs of tables are moved to one permutation.
    q = pairs[0][2]
    ours = [pairs[0][0], pairs[1][0][pairs[1][2].argsort()][:, pairs[1][2].argsort()][q][:, q]]
    theirs = [pairs[0][1], pairs[1][1]]
    found = refined_assignment(ours, theirs, torch.zeros(30, 30), partly(q, 0.7))
    assert int((found == q).sum()) > int((partly(q, 0.7) == q).sum())
