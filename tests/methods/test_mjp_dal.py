from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.linear_model import LinearRegression
from torch import Tensor

from situs.backbones import create_backbone
from situs.core.components import principal_axes, principal_guesses
from situs.core.position import coordinates
from situs.methods.mjp import MJP, Dal, Regressor, dal_loss

GRID = (5, 7)


def backbone() -> Any:
    torch.manual_seed(0)
    return create_backbone("vit_tiny_patch16_224", img_size=(20, 28), patch_size=4, model_args={"depth": 1}).double()


def table() -> Tensor:
    """35 vectors in which the grid shows through noise, so that their spectrum falls steeply."""
    torch.manual_seed(2)
    places = coordinates(GRID).double()
    return places @ torch.randn(2, 24, dtype=torch.float64) + 0.3 * torch.randn(35, 24, dtype=torch.float64) + 5.0


def masks() -> Tensor:
    return torch.rand(3, 35, generator=torch.Generator().manual_seed(3)) < 0.4


@pytest.mark.parametrize("mean_axes", [False, True])
def test_loss_is_the_papers_expectation(mean_axes: bool) -> None:
    torch.manual_seed(0)
    guesses = torch.randn(35, 2, dtype=torch.float64)
    targets = coordinates(GRID).float()
    samples = []
    for mask in masks():
        errors = []
        for place in range(35):
            if mask[place]:
                continue
            row, column = place // 7, place % 7
            total = abs(float(guesses[place, 0]) - row) + abs(float(guesses[place, 1]) - column)
            errors.append(total / 2 if mean_axes else total)
        samples.append(sum(errors) / len(errors))
    ours = dal_loss(guesses, targets, masks(), mean_axes=mean_axes)
    assert float(ours) == pytest.approx(sum(samples) / 3, rel=1e-6)
    own = dal_loss(guesses.expand(3, -1, -1), targets, masks(), mean_axes=mean_axes)
    assert float(own) == pytest.approx(float(ours), rel=1e-12)
    whole = dal_loss(guesses, targets, None, mean_axes=mean_axes)
    assert float(whole) == pytest.approx(
        float(dal_loss(guesses, targets, torch.zeros(1, 35, dtype=torch.bool), mean_axes=mean_axes))
    )
    assert float(dal_loss(guesses, targets, torch.ones(2, 35, dtype=torch.bool))) == 0.0


def test_principal_axes_are_scikit_learns() -> None:
    vectors = table()
    ours = principal_axes(vectors, 2, rounds=60).numpy()
    theirs = PCA(2).fit(vectors.numpy()).components_.T
    assert np.allclose(np.abs((ours * theirs).sum(0)), 1.0, atol=1e-8)
    assert np.allclose(ours.T @ ours, np.eye(2), atol=1e-10)


@pytest.mark.parametrize("count", [2, 3])
def test_pca_is_a_regression_on_the_principal_components(count: int) -> None:
    vectors = table()
    targets = coordinates(GRID).float()
    scores = PCA(count).fit_transform(vectors.numpy())
    theirs = LinearRegression().fit(scores, targets.numpy()).predict(scores)
    ours = principal_guesses(vectors, targets, count).numpy()
    # The third component is noise, where 16 power iterations have not settled yet.
    assert np.allclose(ours, theirs, atol=1e-6 if count == 2 else 0.05)
    assert np.abs(ours - targets.numpy()).mean() < 0.3
    if count == 2:  # as MJP itself does
        assert np.array_equal(Dal(backbone(), "pca", MJP.regressor)(vectors, targets).numpy(), ours)


def test_pca_without_a_fit_compares_the_scores_themselves() -> None:
    places = coordinates(GRID).double()
    vectors = table() + 9.0 * places[:, :1]  # rows weigh more than columns, so the two components are well apart
    ours = principal_guesses(vectors, places, 2, fit=False).numpy()
    theirs = vectors.numpy() @ PCA(2).fit(vectors.numpy()).components_.T
    assert np.allclose(np.abs(ours), np.abs(theirs), atol=1e-6)


def test_pca_without_a_fit_takes_its_components_from_the_unmasked_rows() -> None:
    """What a masked row holds must not matter, and each sample has its own: as scikit-learn says sample by sample."""
    places = coordinates(GRID).double()
    vectors = table() + 9.0 * places[:, :1]
    vectors[masks().all(0)] *= -30.0
    assert masks().all(0).any()
    ours = principal_guesses(vectors, places, 2, fit=False, mask=masks()).numpy()
    assert ours.shape == (3, 35, 2)
    for guesses, mask in zip(ours, masks().numpy(), strict=True):
        theirs = vectors.numpy() @ PCA(2).fit(vectors.numpy()[~mask]).components_.T
        assert np.allclose(np.abs(guesses), np.abs(theirs), atol=1e-5)
    model = backbone()
    loss = [
        dal_loss(Dal(model, "pca", Regressor(fit=False))(vectors, places, m), places, m) for m in (masks(), masks()[:1])
    ]
    errors = np.abs(ours - places.numpy()).sum(-1)
    slow = [errors[b][~mask].mean() for b, mask in enumerate(masks().numpy())]
    assert [float(each) for each in loss] == pytest.approx([np.mean(slow), slow[0]], rel=1e-9)


def test_principal_axes_of_a_sample_with_one_row_or_none_are_finite() -> None:
    mask = torch.ones(2, 35, dtype=torch.bool)
    mask[0, 3] = False
    assert torch.isfinite(principal_axes(table(), 2, mask=mask)).all()


def test_pca_teaches_the_table_and_holds_its_own_map_constant() -> None:
    vectors = (0.02 * torch.randn(35, 24, dtype=torch.float64)).requires_grad_()
    targets = coordinates(GRID).float()
    loss = dal_loss(principal_guesses(vectors, targets, 2), targets, masks())
    (grad,) = torch.autograd.grad(loss, vectors)
    assert torch.isfinite(grad).all()
    always = masks().all(0)
    assert torch.equal(grad.abs().sum(-1) == 0, always)  # a place masked in every sample learns nothing
    start = dal_loss(principal_guesses(vectors, targets, 2), targets, None).item()
    optimiser = torch.optim.Adam([vectors], lr=1e-2)
    for _ in range(100):
        optimiser.zero_grad()
        dal_loss(principal_guesses(vectors, targets, 2), targets, None).backward()
        optimiser.step()
    assert dal_loss(principal_guesses(vectors, targets, 2), targets, None).item() < 0.3 * start


def test_half_precision_stays_out() -> None:
    model = backbone().float()
    targets = coordinates(GRID).float()
    for kind in ("pca", "linear", "nonlinear"):
        dal = Dal(model, kind, Regressor())  # type: ignore[arg-type]
        full = dal(model.positions().table, targets)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(dal(model.positions().table, targets), full)
        assert full.dtype == torch.float32
