"""Clusters: rows of one place are together and no others, whatever the order; names survive a drift."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.linalg
import torch
from sent import sent, streams_of
from sklearn.manifold import Isomap

from situs.audit.split.blind import (
    Clusters,
    _content,
    _draw,
    _misfit,
    _onto,
    _standard_pairs,
    _swapped,
    _whitener_of,
    average,
    cluster_rows,
    co_occurrence,
    fingerprints,
    found_again,
    lay_out,
    link,
    name_clusters,
    symmetries,
)
from situs.errors import SitusError


def test_rows_of_one_place_are_one_cluster() -> None:
    made = streams_of(20)
    seen, truth = sent(made.z, "none", "rows")
    found = cluster_rows(seen, 1)
    named = torch.full((17,), -1).scatter_(0, found.of.flatten(), truth.row.flatten())
    assert torch.equal(named[found.of], truth.row) and len(named.unique()) == 17
    assert named[0] == 0  # the fixed row's cluster is the first
    rows = torch.empty_like(made.z).scatter_(1, truth.row[..., None].expand_as(seen), seen)
    torch.testing.assert_close(found.centres, rows.mean(dim=0)[named])
    left = (rows - rows.mean(dim=0))[:, 1:].flatten(0, 1)
    torch.testing.assert_close(found.within, left.T @ left / len(left))


@pytest.mark.parametrize("prefix", [0, 1])
def test_clusters_are_named_by_places_that_have_drifted(prefix: int) -> None:
    made = streams_of(20)
    seen, truth = sent(made.z[:, 1 - prefix :], "none", "rows", prefix=prefix)
    found = cluster_rows(seen, prefix)
    chance = torch.Generator().manual_seed(0)
    moved = made.places + 0.2 * torch.randn(made.places.shape, generator=chance, dtype=torch.float64) + 3.0
    for places in (made.places, moved):
        assert torch.equal(name_clusters(found, places, prefix), truth.row)


def test_one_sample_is_refused() -> None:
    with pytest.raises(SitusError, match="needs two or more"):
        cluster_rows(streams_of(1).z, 1)


def test_a_slow_field_is_laid_out_without_an_embedding() -> None:
    seen, truth = sent(streams_of(100, grid=5, width=32).z, "none", "rows", "columns")
    clusters = cluster_rows(seen, 1)
    place = lay_out(seen, clusters, 1)
    assert torch.equal(place.sort().values, torch.arange(25))
    real = torch.empty(26, dtype=torch.long).scatter_(0, clusters.of.flatten(), truth.row.flatten())[1:] - 1
    assert any(torch.equal(turn[place], real) for turn in symmetries(5))


def symmetric(count: int, seed: int = 0) -> torch.Tensor:
    table = torch.randn(count, count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return table + table.T


def grid(side: int) -> torch.Tensor:
    return torch.cartesian_prod(torch.arange(side), torch.arange(side)).double()


def test_contents_are_alike_along_the_directions_images_differ_in_most() -> None:
    """By scipy: directions of the generalised eigenvalue problem, and the correlation of places along each."""
    chance = torch.Generator().manual_seed(1)
    rows, root = (torch.randn(*n, generator=chance, dtype=torch.float64) for n in ((30, 17, 8), (8, 8)))
    rows += 2 * torch.randn(30, 1, 8, generator=chance, dtype=torch.float64)  # images differ as a whole
    of = torch.stack([torch.randperm(17, generator=chance) for _ in range(30)])
    clusters = Clusters(of, torch.randn(17, 8, generator=chance, dtype=torch.float64), root @ root.T + torch.eye(8))
    seen = rows.gather(1, of[..., None].expand_as(rows))
    content = (rows - clusters.centres)[:, 1:].numpy()
    means = content.mean(axis=1)
    _, axes = scipy.linalg.eigh(means.T @ means / 30, clusters.within.numpy())
    along = content @ axes[:, -4:]
    each = [np.corrcoef(along[:, :, axis].T) for axis in range(4)]
    expected = torch.from_numpy(np.mean(each, axis=0)) * 29 / 30  # the deviation is that of a sample
    torch.testing.assert_close(_content(seen, clusters, 1), expected, rtol=1e-5, atol=1e-6)


def test_pairs_are_standardised_without_the_diagonal() -> None:
    found = _standard_pairs(3 + 5 * symmetric(6))
    pairs = [float(found[i, j]) for i, j in itertools.permutations(range(6), 2)]
    assert np.mean(pairs) == pytest.approx(0, abs=1e-12) and np.std(pairs, ddof=1) == pytest.approx(1)


@pytest.mark.parametrize("neighbours", [5, 6])
def test_clusters_are_drawn_as_isomap_draws_them(neighbours: int) -> None:
    points = grid(5) + 0.2 * torch.randn(25, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    away = torch.cdist(points, points)
    lengths = (away - away[~torch.eye(25, dtype=torch.bool)].min() + 0.1).fill_diagonal_(0)
    peer = torch.from_numpy(Isomap(n_neighbors=neighbours, metric="precomputed").fit_transform(lengths.numpy()))
    drawn = _draw(7 - away, neighbours)
    assert drawn is not None
    torch.testing.assert_close(torch.cdist(drawn, drawn), torch.cdist(peer, peer))
    away[:12, 12:] = away[12:, :12] = 99.0
    assert _draw(-away, 2) is None


@pytest.mark.parametrize("angle", [0.0, 0.3, 1.2])
def test_a_drawing_is_turned_and_stretched_over_the_grid(angle: float) -> None:
    cells = grid(6)
    back = torch.tensor([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]], dtype=torch.float64)
    stretched = cells * torch.tensor([0.1, 7.0], dtype=torch.float64) - 40
    assert torch.equal(_onto(stretched @ back, angle, cells), torch.arange(36))
    assert not torch.equal(_onto(stretched @ back, angle + 0.7, cells), torch.arange(36))


def test_a_layout_fits_as_far_as_similarity_depends_on_distance_alone() -> None:
    """The variance of pairs that are equally far apart, over all pairs, by loops."""
    chance = torch.Generator().manual_seed(2)
    place, tables = torch.randperm(16, generator=chance), [symmetric(16, 3), symmetric(16, 4)]
    cells = grid(4)
    apart = torch.cdist(cells, cells).square().round().long()
    expected = 0.0
    for table in tables:
        groups: dict[int, list[float]] = {}
        for i, j in itertools.permutations(range(16), 2):
            groups.setdefault(int(apart[place[i], place[j]]), []).append(float(table[i, j]))
        expected += sum(len(group) * np.var(group) for group in groups.values()) / (16 * 15)
    assert _misfit(place, tables, apart) == pytest.approx(expected)


def test_the_best_exchange_comes_first_and_the_last_leaves_none() -> None:
    alike, wanted = (symmetric(9, seed).fill_diagonal_(0).numpy() for seed in (5, 6))

    def fit(place: np.ndarray) -> float:
        return float((alike * wanted[place][:, place]).sum())

    def exchanged(place: np.ndarray, one: int, other: int) -> np.ndarray:
        place = place.copy()
        place[[one, other]] = place[[other, one]]
        return place

    place = np.arange(9)
    while True:
        best = max((exchanged(place, *pair) for pair in itertools.combinations(range(9), 2)), key=fit)
        if fit(best) <= fit(place) + 1e-9:
            break
        place = best
    start = np.arange(9)
    assert (_swapped(start, alike, wanted) == place).all() and (start == np.arange(9)).all()


def test_a_whitener_takes_a_covariance_to_one_and_bears_directions_without_tokens() -> None:
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64) * torch.arange(1, 7)
    whiten = _whitener_of(x.T @ x)
    torch.testing.assert_close(whiten.T @ (x.T @ x) @ whiten, torch.eye(6).double(), rtol=0, atol=1e-6)
    flat = x[:, :3] @ x[:3]
    values = torch.linalg.eigvalsh(_whitener_of(flat.T @ flat).T @ (flat.T @ flat) @ _whitener_of(flat.T @ flat))
    torch.testing.assert_close(values, torch.tensor([0.0, 0, 0, 1, 1, 1]).double(), rtol=0, atol=1e-4)


def test_the_symmetries_keep_distances() -> None:
    turns = symmetries(4)
    assert len({tuple(turn.tolist()) for turn in turns}) == 8
    cells = torch.cartesian_prod(torch.arange(4), torch.arange(4)).double()
    for turn in turns:
        torch.testing.assert_close(torch.cdist(cells[turn], cells[turn]), torch.cdist(cells, cells))


def test_a_grid_that_is_no_square_is_refused() -> None:
    found = Clusters(torch.arange(7).expand(2, 7), torch.zeros(7, 3), torch.eye(3))
    with pytest.raises(SitusError, match="square grid, but there are 6"):
        lay_out(torch.zeros(2, 7, 3), found, 1)


def test_fingerprints_do_not_change_with_the_order_of_rows() -> None:
    z = streams_of(6).z
    torch.testing.assert_close(fingerprints(sent(z, "none", "rows").seen), fingerprints(z), rtol=0, atol=1e-10)
    assert not torch.allclose(fingerprints(z), fingerprints(z.flip(0)))


def test_fingerprints_by_hand() -> None:
    z = torch.randn(6, 9, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).numpy()
    parts = [
        z.mean(axis=1),
        z.std(axis=1, ddof=1),
        *(np.quantile(z, at, axis=1) for at in np.linspace(0.05, 0.95, 9)),
        np.sort(np.sqrt((z**2).sum(axis=2)), axis=1),
    ]
    units = [(part - part.mean(axis=0)) / part.std(axis=0, ddof=1) / math.sqrt(part.shape[1]) for part in parts]
    torch.testing.assert_close(fingerprints(torch.from_numpy(z)), torch.from_numpy(np.concatenate(units, axis=1)))


def test_a_sample_is_found_again() -> None:
    z = streams_of(40).z
    later = sent(z, "noise=0.2", "rows", number=1, scale=float(z.std())).seen
    assert torch.equal(link(sent(z, "none", "rows").seen, later), torch.arange(40))
    moved = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(link(z, later[moved]), moved)


def test_sendings_add_up_and_the_noise_goes_down_with_their_number() -> None:
    z = streams_of(1).z
    sendings = torch.stack([sent(z, "noise=0.1", "rows", number=k, scale=float(z.std())).seen[0] for k in range(16)])
    row = sent(z, "noise=0.1", "rows").truth.row[0]
    errors = [float((average(sendings[:k]) - z[0, row])[row > 0].square().mean()) for k in (1, 4, 16)]
    for error, k in zip(errors, (1, 4, 16), strict=True):
        assert 0.7 < error * k / (0.1 * float(z.std())) ** 2 < 1.4
    assert torch.equal(average(sendings[:1]), sendings[0])


def test_tokens_that_exchange_keep_their_company() -> None:
    z, size = streams_of(24).z, 6
    chance = torch.Generator().manual_seed(0)
    sendings, samples = [], []
    for number in range(8):
        mixed = torch.randperm(24, generator=chance)
        seen, truth = sent(z[mixed], f"batch-shuffle={size}", "rows", "columns", number=number)
        seen = seen[..., truth.channels.argsort()]  # `sent` draws a key a step; a client has one
        sendings.append(seen)
        samples.append((mixed[truth.sample], truth.row))
    sample, row = samples[0]
    patches = row > 0
    group = co_occurrence(sendings, size)[patches]
    assert found_again(group, sample[patches]) == 1
    for each in range(24):  # all of a sample, and nothing else
        assert torch.equal(group == group[sample[patches] == each][0], sample[patches] == each)
    assert found_again(co_occurrence(sendings[:1], size)[patches], sample[patches]) == 0


def test_a_sample_is_found_that_has_most_of_a_group_and_a_group_that_has_most_of_it() -> None:
    sample = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
    assert found_again(sample, sample) == 1
    assert found_again(torch.tensor([0, 0, 1, 1, 1, 1, 2, 3, 4]), sample) == pytest.approx(2 / 3)
    assert found_again(torch.zeros(9, dtype=torch.long), sample) == 0
    assert found_again(torch.tensor([0, 0, 1, 0, 0, 2, 3, 3, 3]), sample) == pytest.approx(1 / 3)  # half is not most
    assert found_again(torch.tensor([0, 0, 1, 2]), torch.zeros(4, dtype=torch.long)) == 0
