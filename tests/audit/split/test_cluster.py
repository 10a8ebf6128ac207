"""Clusters: rows of one place are together and no others, whatever the order; names survive a drift."""

from __future__ import annotations

import pytest
import torch
from sent import sent, streams_of

from situs.audit.split.cluster import cluster_rows, name_clusters
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
