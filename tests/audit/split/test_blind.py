"""Clusters: rows of one place are together and no others, whatever the order; names survive a drift."""

from __future__ import annotations

import pytest
import torch
from sent import sent, streams_of

from situs.audit.split.blind import (
    Clusters,
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
