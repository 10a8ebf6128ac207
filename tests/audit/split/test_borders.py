"""Borders: patches of several pictures go back to their own, and a fit is the regression it says it is."""

from __future__ import annotations

import pytest
import torch
from sent import pictures
from sklearn.linear_model import Ridge

from situs.audit.split.borders import Borders
from situs.audit.split.labels import share_up_to_names
from situs.core.tokens import patchify

SHAPE = (4, 4, 3)


@pytest.mark.parametrize("count", [2, 5])
def test_patches_find_their_picture(count: int) -> None:
    borders = Borders.of(patchify(pictures(80, seed=1), 4), SHAPE, (4, 4))
    patches = patchify(pictures(count, seed=2), 4).flatten(0, 1)
    order = torch.randperm(len(patches), generator=torch.Generator().manual_seed(0))
    found = borders.group(patches[order], order % 16, count)
    assert share_up_to_names(found, order // 16) == 1
    for place in range(16):  # a picture has each place once
        assert torch.equal(found[order % 16 == place].sort().values, torch.arange(count))


def test_a_fit_goes_on_from_the_last_lines_to_the_next_first() -> None:
    public = pictures(40, side=8, seed=3)
    borders = Borders.of(patchify(public, 4), SHAPE, (2, 2))
    images = public.permute(0, 2, 3, 1)  # [n, H, W, C]
    for axis, (last, first) in enumerate(
        [
            (torch.cat([images[:, 2:4, :4], images[:, 2:4, 4:]]), torch.cat([images[:, 4:6, :4], images[:, 4:6, 4:]])),
            (torch.cat([images[:, :4, 2:4], images[:, 4:, 2:4]]), torch.cat([images[:, :4, 4:6], images[:, 4:, 4:6]])),
        ]
    ):
        x, y = last.flatten(1), first.flatten(1)
        reference = Ridge(alpha=1e-4 * len(x)).fit(x.numpy(), y.numpy())
        torch.testing.assert_close(
            borders.fits[axis].weights, torch.from_numpy(reference.coef_.T), rtol=1e-6, atol=1e-8
        )
        left = y - torch.from_numpy(reference.predict(x.numpy()))
        inverse = torch.linalg.inv(left.T @ left / len(left) + 1e-4 * torch.eye(x.shape[1]))
        direct = torch.einsum("nf,fg,ng->n", left, inverse, left)
        torch.testing.assert_close(borders.fits[axis].cost(x, y).diagonal(), direct, rtol=1e-5, atol=1e-8)
