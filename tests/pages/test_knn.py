"""The page of kNN layer by layer: its one figure."""

from __future__ import annotations

from situs.evaluate.knn import LayerAccuracy, LayerKnn
from situs.pages.knn import curves


def test_every_block_has_its_tick_and_of_many_every_second() -> None:
    for count, ticks in ((16, list(range(1, 17))), (17, list(range(1, 18, 2)))):
        rows = tuple(LayerAccuracy(layer, "mean", layer / 100) for layer in range(1, count + 1))
        axis = curves(LayerKnn(rows, 10, 5, None, 3, 0.07, 0.1)).axes[0]
        assert axis.get_xticks().tolist() == ticks
        lines = {line.get_label(): line.get_ydata().tolist() for line in axis.get_lines()}  # type: ignore[union-attr]
        assert [100 * row.accuracy for row in rows] in lines.values()
