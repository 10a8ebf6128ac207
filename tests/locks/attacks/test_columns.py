"""The column attacker: the whole key, under any order of rows and channels, with a fixed row and without."""

from __future__ import annotations

import pytest
import torch
from sent import sent, streams_of

from situs.errors import SitusError
from situs.locks.attacks.columns import apart, recover_columns

PUBLIC = streams_of(60, sample=1)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("count", [1, 6])
def test_the_whole_key_from_any_order_of_rows(seed: int, count: int) -> None:
    public = streams_of(60, seed=seed, sample=1)
    seen, truth = sent(streams_of(count, seed=seed).z, "none", "rows", "columns")
    found = recover_columns(seen, public.z, public.fixed)
    assert torch.equal(found.q, truth.channels)
    clear = streams_of(count, seed=seed).z
    order = truth.row[..., None].expand_as(clear)
    assert torch.equal(seen[..., found.q.argsort()], clear.gather(1, order))


def test_another_key_gives_the_same_channels_in_its_order() -> None:
    seen = streams_of(4).z
    first = recover_columns(seen, PUBLIC.z, PUBLIC.fixed).q
    key = torch.randperm(24, generator=torch.Generator().manual_seed(3))
    assert torch.equal(recover_columns(seen[..., key], PUBLIC.z, PUBLIC.fixed).q, first[key])


def test_without_a_fixed_row_many_samples_tell() -> None:
    seen, truth = sent(streams_of(60).z[:, 1:], "none", "rows", "columns", prefix=0)
    found = recover_columns(seen, PUBLIC.z[:, 1:], PUBLIC.fixed[:0])
    assert torch.equal(found.q, truth.channels)


def test_noise_does_not_hide_the_key() -> None:
    z, scale = streams_of(8).z, float(PUBLIC.z.std())
    seen, truth = sent(z, "noise=0.1", "rows", "columns", scale=scale)
    public = sent(PUBLIC.z, "noise=0.1", number=2, scale=scale).seen
    assert torch.equal(recover_columns(seen, public, PUBLIC.fixed).q, truth.channels)


def test_fixed_rows_are_known_by_their_sorted_values() -> None:
    z = streams_of(5).z
    seen, truth = sent(z, "none", "rows", "columns")
    found, others = apart(seen, PUBLIC.fixed)
    assert torch.equal(found, PUBLIC.fixed[:, truth.channels].expand(5, 1, -1))
    assert torch.equal(others, seen[truth.row > 0])
    none, every = apart(seen, PUBLIC.fixed[:0])
    assert none.shape == (5, 0, 24) and torch.equal(every, seen.flatten(0, 1))


def test_another_width_is_refused() -> None:
    with pytest.raises(SitusError, match="23 channels were seen, and the public embedding has 24"):
        recover_columns(PUBLIC.z[..., :23], PUBLIC.z, PUBLIC.fixed)
