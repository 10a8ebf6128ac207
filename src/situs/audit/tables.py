"""Columns and cells of the tables and JSON files of image audits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from situs.audit.cases import ImageFinding
from situs.audit.scores.metrics import Mean, means_of
from situs.findings import Finding
from situs.results import Cell

Cells = tuple[list[str], list[list[Cell]]]
"""Header and rows."""

COLUMNS = {
    "psnr": "PSNR, dB",
    "ssim": "SSIM",
    "mse": "MSE",
    "fft2d": "FFT2D",
    "lpips": "LPIPS",
    "patch_psnr": "best-match PSNR, dB",
    "order_accuracy": "order",
    "reidentified": "re-identified",
}
"""metric -> the head of its column."""

PARTS = {
    "shown_psnr": "shown patches, PSNR, dB",
    "hidden_psnr": "hidden patches in any order, PSNR, dB",
    "hidden_order": "hidden patches at their place",
}
"""The same of shown and hidden patches apart."""

REFUSED = "not attacked here"
"""The cell of an attack that does not apply, which says nothing about privacy."""

WORST = "PSNR of the most exposed image, dB"


def interval(mean: Mean | None) -> str | None:
    """A mean and its 95 % interval."""
    if mean is None or mean.low is None or mean.high is None:
        return alone(mean)
    return f"{mean.mean:.3g} [{mean.low:.3g}, {mean.high:.3g}]"


def alone(mean: Mean | None) -> str | None:
    """A mean; a tiny one as "< 1e-6"."""
    if mean is None:
        return None
    return "< 1e-6" if 0 < mean.mean < 1e-6 else f"{mean.mean:.3g}"


Show = Callable[[Mean | None], Cell]


def exact_of(pair: ImageFinding) -> str:
    """How many images were recovered exactly."""
    return f"{pair.exact} of {pair.count}" + ", stopped" * (pair.status == "stopped")


def mean_cells(scores: Mapping[str, Sequence[float] | None], columns: Sequence[str], show: Show) -> list[Cell]:
    """The means of these metrics."""
    means = means_of(scores)
    return [show(means.get(name)) for name in columns]


def measured(columns: Sequence[str], rows: Iterable[Finding]) -> tuple[str, ...]:
    """Those of the metrics that some row has: LPIPS needs a file."""
    rows = list(rows)
    return tuple(name for name in columns if any(row.scores.get(name) is not None for row in rows))


def unmeasured(rows: Iterable[Finding]) -> str:
    """A note that LPIPS is missing; else ""."""
    return "" if measured(("lpips",), rows) else " LPIPS was not measured (it needs a file of weights)."


def system_of(pair: ImageFinding) -> tuple[Cell, Cell]:
    """The least rank and the median condition of the systems solved; infinite below full rank.

    adaptive-mjp solves a system for images without hidden patches alone, so that some images may have none.
    """
    solved = [fact for fact in pair.facts if "rank" in fact]
    if not solved:
        return None, None
    ranks: list[Any] = [fact["rank"] for fact in solved]
    sizes: list[Any] = [fact["condition"] for fact in solved]
    middle = sorted(math.inf if size is None else size for size in sizes)[len(sizes) // 2]
    rank = f"{min(ranks)} of {solved[0]['unknowns']}"
    return rank, "∞" if middle == math.inf else f"{middle:.3g}"


def mean_numbers(scores: Mapping[str, Sequence[float] | None]) -> dict[str, Any]:
    """Means and intervals, as JSON holds them."""
    return {name: None if mean is None else mean._asdict() for name, mean in means_of(scores).items()}


def image_numbers(
    scores: Mapping[str, Sequence[float] | None], names: Sequence[str], facts: Sequence[Mapping[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Each image's scores and facts; of a stopped attack, of the images it attacked."""
    facts = [{}] * len(scores.get("psnr") or ()) if facts is None else facts
    return [
        {"image": image, **{name: None if values is None else values[i] for name, values in scores.items()}, **fact}
        for i, (image, fact) in enumerate(zip(names, facts, strict=False))
    ]
