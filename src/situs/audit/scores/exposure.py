"""What a gate reads of pictures: each image under each metric, with the best blind guess at it.

Four metrics count together: PSNR up to gain, offset, flips, shifts and two levels; SSIM; the order of patches; and how
many images are re-identified among the others. Each is compared with blind guesses, which saw no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from situs.audit.scores.metrics import BEST_PSNR, LOWER_IS_CLOSER
from situs.errors import counted
from situs.findings import Exposure, Metric, Remark

Scores = Mapping[str, Sequence[float] | None]
Blind = Mapping[str, Scores]
"""Scores of blind guesses, by name."""

METRICS = {
    metric.name: metric
    for metric in (
        Metric("aligned_psnr", 3.0, 1.0, 3.0, BEST_PSNR, "dB"),  # half the squared error
        Metric("ssim", 0.15, scale=0.15),
        Metric("order_accuracy"),  # its margin follows from the number of patches
        Metric("psnr", None, 1.0, 1.0, BEST_PSNR, "dB"),
        Metric("patch_psnr", None, 1.0, 1.0, BEST_PSNR, "dB"),
        Metric("reidentified"),
        *(Metric(name, rises=False) for name in LOWER_IS_CLOSER),
    )
}
"""What a gate may limit, and by how much an image may come back closer than the best blind guess at it."""

CHANCE = 1e-3
"""Images are re-identified more often than by chance where chance finds so many with less than this probability."""


def exposures_of(
    scores: Scores, names: Sequence[str], numbers: Sequence[int], blind: Blind, patches: int, chance: float
) -> list[Exposure]:
    """Every image under every metric that rises with the leak. names: of all images; numbers: of those attacked.
    chance: to find an image again among all."""
    rows = []
    for metric in METRICS.values():
        if metric.name == "order_accuracy":  # four deviations of as many throws of a coin as there are patches
            metric = metric._replace(margin=2 / math.sqrt(max(1, patches)))
        values = scores.get(metric.name) if metric.rises else None
        if not values:
            continue
        if metric.name == "reidentified":  # one image is found again or not
            rows.append(Exposure("a share of them", metric, sum(values) / len(numbers)))
            rows += _found_again(values, names, numbers, metric, chance)
            continue
        rows += [
            Exposure(names[number], metric, value, blind_at(blind, metric.name, number))
            for number, value in zip(numbers, values, strict=True)
        ]
    return rows


def _found_again(
    again: Sequence[float], names: Sequence[str], numbers: Sequence[int], metric: Metric, chance: float
) -> list[Exposure]:
    """The images that are found again among the others, where those are more than chance finds."""
    if tail(round(sum(again)), len(again), chance) >= CHANCE:
        return []
    hits = [number for number, value in zip(numbers, again, strict=True) if value > 0]
    among = f"{len(hits)} of {len(again)}"
    return [Exposure(names[number], metric, 1.0, chance, above=True, among=among) for number in hits]


def blind_at(blind: Blind, metric: str, number: int) -> float | None:
    """The best blind guess at one image."""
    values = [scores.get(metric) or () for scores in blind.values()]
    return max((guess[number] for guess in values if number < len(guess)), default=None)


def gaps_of(attack: str, scores: Scores, broken: int, count: int) -> list[Remark]:
    """What is missing of the numbers of `count` images. broken: pictures that held NaN."""
    remarks = (
        [] if not broken else [Remark("gap", f"{attack} gave back NaN for {broken} of {counted(count, 'images')}")]
    )
    return remarks + [
        Remark("gap", f"{metric.name} is not defined for so few or so small images")
        for metric in METRICS.values()
        if metric.margin is not None and scores.get(metric.name) is None
    ]


def too_few(count: int, batch: int) -> bool:
    """Whether chance may find every one of so many images again, so that nothing can pass."""
    return tail(count, count, min(1.0, batch / count)) >= CHANCE


def tail(successes: int, trials: int, chance: float) -> float:
    """The probability of so many successes or more."""
    from scipy.special import bdtrc

    return 1.0 if successes <= 0 or chance >= 1 else float(bdtrc(successes - 1, trials, chance))
