"""Pictures of runs side by side: one panel a metric, one line a run, the same colour and dash in all panels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from situs.report.canvas import DASHES, FAINT, LABEL, PAGE_WIDTH, PALETTE, canvas
from situs.report.canvas import label as label_axis

_PANEL_HEIGHT = 2.5


def curve_panels(metrics: Mapping[str, Mapping[str, tuple[Any, Any]]], x_label: str) -> Figure:
    """metrics: label -> run -> (x, y); a run that did not log a metric is missing there. Two panels a row."""
    across = min(2, len(metrics))
    rows = -(-len(metrics) // across)
    runs = list(dict.fromkeys(run for lines in metrics.values() for run in lines))
    legend = 0.3 * -(-len(runs) // 4) if len(runs) > 1 else 0.0
    width = PAGE_WIDTH if across == 2 else 6.4
    figure, axes = canvas(rows, across, width, _PANEL_HEIGHT * rows + legend)
    handles: dict[str, Any] = {}
    for axis, (label, lines) in zip(axes, metrics.items(), strict=False):
        for run, (x, y) in lines.items():
            index = runs.index(run)
            x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
            marker = "o" if len(x) <= 20 else None
            (line,) = axis.plot(x, y, linewidth=1.6, marker=marker, markersize=3.5)
            line.set(color=PALETTE[index % len(PALETTE)], linestyle=DASHES[index % len(DASHES)])
            handles[run] = line
        label_axis(axis, "", x_label, label)
        axis.grid(color=FAINT, linewidth=0.6)
    for axis in axes[len(metrics) :]:
        axis.set_visible(False)
    if len(runs) > 1:
        named = [(handles[run], run) for run in runs]
        figure.legend(*zip(*named, strict=True), loc="outside upper left", ncols=4, frameon=False, fontsize=LABEL)
    return figure
