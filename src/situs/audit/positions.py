"""How much a model knows and reveals of position: `situs.measure.position`, and the row equivariance of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

from situs.locks.equivariance import verify
from situs.measure.position.knowledge import RATIOS, PositionAudit, measure_positions
from situs.models.data import AnyData, AnyModel, Chosen, load_set, made_with, opened


def audit_positions(
    model: AnyModel,
    data: AnyData = None,
    *,
    ratios: Sequence[float] = RATIOS,
    equivariance: bool = True,
    seed: int = 0,
    **chosen: Unpack[Chosen],
) -> PositionAudit:
    """How much a model knows and reveals of position: in its position vectors, features, predictions and blocks.

    model: whatever `open_model` takes. data: a path or a source; None for the images that a run was trained on. ratios:
    shares of the patches to shuffle. equivariance: whether to measure the row equivariance of the blocks. chosen: see
    `load_set`.
    """
    model = opened(model, seed)
    model.backbone.require("tokens")
    loader = load_set(model, data, **chosen)
    knowledge = measure_positions(
        model.name,
        model.trained,
        loader,
        positions=model.positions,
        classifier=model.classifier,
        ratios=ratios,
        seed=seed,
    )
    rows = verify(model.backbone, steps=0, tokens=16, seed=seed).whole("row").numbers() if equivariance else None
    return replace(knowledge, rows=rows, provenance=made_with(model, loader, seed))
