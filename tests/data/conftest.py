"""What the tests of data share: a folder of small images, and a judge of random draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import stats
from torch import Tensor

Columns = Mapping[str, Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """23 images of noise, of other sizes each, in three classes."""
    rng = np.random.default_rng(0)
    for number in range(23):
        height, width = rng.integers(10, 40, 2)
        array = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        (tmp_path / f"{number % 3}").mkdir(exist_ok=True)
        Image.fromarray(array).save(tmp_path / f"{number % 3}" / f"{number:02}.png")
    return tmp_path


@pytest.fixture
def related() -> Callable[[Columns], dict[str, float]]:
    """The pairs of columns [n] that are no independent draws, with their p-value: by the contingency of their quarters.

    A test of independence and not of correlation: |x − ½| depends on x and is not correlated with it.
    """

    def find(columns: Columns) -> dict[str, float]:
        names, quarters = list(columns), []
        for column in columns.values():
            values = column.double().numpy().ravel()
            edges = np.unique(np.quantile(values, [0.25, 0.5, 0.75]))
            kinds = np.unique(np.searchsorted(edges, values, side="right"), return_inverse=True)[1]
            quarters.append(np.eye(kinds.max() + 1)[kinds])
        found = {}
        for number, first in enumerate(quarters):
            for other in range(number + 1, len(quarters)):
                table = first.T @ quarters[other]
                expected = np.outer(table.sum(1), table.sum(0)) / table.sum()
                freedom = (table.shape[0] - 1) * (table.shape[1] - 1)
                chance = stats.chi2.sf(((table - expected) ** 2 / expected).sum(), max(1, freedom))
                if chance < 1e-6:
                    found[f"{names[number]}, {names[other]}"] = float(chance)
        return found

    return find
