"""The layout: every place of a field that changes slowly, up to the eight symmetries of the square."""

from __future__ import annotations

import pytest
import torch
from sent import sent, streams_of

from situs.audit.split.cluster import Clusters, cluster_rows
from situs.audit.split.grid import lay_out, symmetries
from situs.errors import SitusError


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
    with pytest.raises(SitusError, match="6 places are no square"):
        lay_out(torch.zeros(2, 7, 3), found, 1)
