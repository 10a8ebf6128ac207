"""What the tests of random draws share."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from scipy import stats
from torch import Tensor

Columns = Mapping[str, Tensor]


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
