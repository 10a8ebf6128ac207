"""The audit as one page: threat model, verdict, table of attacks × defences, pictures, what would reduce the leak."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from situs.audit.gate import Ruling
from situs.audit.gradients import EXACT, Audit, Pair, Scores, summary, verdict
from situs.audit.metrics import Mean
from situs.audit.threat import THREAT
from situs.report import figures
from situs.report.html import Cell, Page

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

REMEDIES = """
Do not send the gradient of the position table, or freeze it: the closed forms then have nothing to solve with. Gradient
matching works with whatever is sent; what it gets stands in the table above if it was run (--attack matching).

Use fixed (sin-cos) or rotary positions instead of a learned table: no row holds a patch's own gradient.

Aggregate securely over many images, so that only sums over a batch are seen: the closed forms fail from two images on,
gradient matching does not, and gets harder with every image. A batch of one is always exposed, and several local steps
on one image do not help.

Train with differential privacy and a noise multiplier that means something (0.5 and more), not with clipping alone:
clipping multiplies all gradients by one number, and the solution does not change.
"""
"""What would reduce the leak, each with its limit."""


def make_page(
    audit: Audit,
    facts: Mapping[str, Cell],
    ruling: Ruling | None = None,
    notes: Mapping[str, Cell] | None = None,
) -> Page:
    """The page. facts: where the model and the images come from. ruling: the gate's, None without a gate.

    notes: what is special about the victim (a lock, its own method); they stand beside the threat.
    """
    page = Page(
        f"Gradient audit of {audit.model}",
        lead="What someone who sees this model's training gradients can see of the images behind them.",
    )
    page.section("Threat model").facts({**THREAT, **(notes or {})}).facts(audit.about)
    section = page.section("Verdict").note(verdict(audit))
    section.text(
        f"Exactly means a PSNR of {EXACT:g} dB or more: the mean error is below half a grey level of 255, so that the "
        "recovered picture and the original are the same to any eye and to nearly any file."
    )
    if audit.undone:
        section.table(["attack", "defence: not attacked before the stop"], audit.undone)
    if ruling is not None:
        section.text(ruling.sentence)
    _tables(page, audit)
    _pictures(page, audit)
    page.section("What would reduce the leak").text(REMEDIES)
    page.section("How this page was made").facts(facts)
    return page


def table(audit: Audit, columns: Sequence[str] = tuple(COLUMNS)) -> tuple[list[str], list[list[Cell]]]:
    """Header, and a row for each attack × defence and baseline: exact, metrics with intervals, rank, condition."""
    rows: list[list[Cell]] = []
    for pair in audit.pairs:
        name: list[Cell] = [pair.attack, pair.defence]
        if pair.reason is not None:
            rows.append([*name, "does not apply", *[None] * (len(columns) + 2)])
            continue
        rows.append([*name, f"{pair.exact} of {pair.count}", *_cells(pair.scores, columns), *_system(pair)])
    for guess, scores in audit.baselines.items():
        rows.append(["baseline", guess, None, *_cells(scores, columns), None, None])
    return ["attack", "defence", "exact", *(COLUMNS[name] for name in columns), "rank of G", "condition of G"], rows


def reasons(audit: Audit) -> list[tuple[str, str]]:
    """(attack against defence, why it does not apply or is not exact)."""
    return [
        (f"{pair.attack} against {pair.defence}", said)
        for pair in audit.pairs
        for said in dict.fromkeys(
            [pair.reason, _stopped(pair), pair.caveat, *(str(f.get("verdict") or "") for f in pair.facts)]
        )
        if said
    ]


def _stopped(pair: Pair) -> str | None:
    return None if pair.partial is None else f"stopped after {pair.partial}"


def _searched(pair: Pair, batch: int) -> str | None:
    """What an optimisation attack can say of its search and of the labels it inferred."""
    facts = pair.facts[::batch]  # one an upload
    if not facts or "distance" not in facts[0]:
        return None
    values: list[Any] = [fact["distance"] for fact in facts if fact["distance"] is not None] or [math.nan]
    rights: list[Any] = [fact["labels_right"] for fact in facts if "labels_right" in fact]
    told = f"{sum(rights)} of {len(rights) * batch} labels inferred rightly" if rights else "labels given"
    return (
        f"{pair.attack} against {pair.defence}: {facts[0]['iterations']:,} iterations from {facts[0]['restarts']} "
        f"start(s), mean distance of the gradients {sum(values) / len(values):.2g}, {told}."
    )


def _tables(page: Page, audit: Audit) -> None:
    section = page.section("Attacks and defences")
    if any(pair.reason is None for pair in audit.pairs):
        section.table(
            *table(audit),
            f"Means over {len(audit.images)} images and their 95 % intervals. MSE, FFT2D and LPIPS are distances. "
            f"Re-identified: the nearest of the {len(audit.images)} originals is the right one.",
        )
        for pair in audit.pairs:
            if said := _searched(pair, audit.step.batch):
                section.text(said)
    else:
        section.text("No attack applies, so there is no table of results.")
    if said := reasons(audit):
        section.table(["attack", "why it does not apply, or is not exact"], said)


def _cells(scores: Scores, columns: Sequence[str]) -> list[Cell]:
    found = summary(scores)
    return [_interval(found[name]) for name in columns]


def _interval(mean: Mean | None) -> str | None:
    if mean is None:
        return None
    if mean.low is None or mean.high is None:
        return f"{mean.mean:.3g}"
    return f"{mean.mean:.3g} [{mean.low:.3g}, {mean.high:.3g}]"


def _system(pair: Pair) -> tuple[Cell, Cell]:
    """Rank and condition over the images: the least rank and the median condition, infinite below full rank."""
    if "rank" not in pair.facts[0]:
        return None, None
    ranks: list[Any] = [fact["rank"] for fact in pair.facts]
    sizes: list[Any] = [fact["condition"] for fact in pair.facts]
    middle = sorted(math.inf if size is None else size for size in sizes)[len(sizes) // 2]
    rank = f"{min(ranks)} of {pair.facts[0]['unknowns']}"
    return rank, "∞" if middle == math.inf else f"{middle:.3g}"


def _pictures(page: Page, audit: Audit, most: int = 4) -> None:
    shown = [pair for pair in audit.pairs if pair.images is not None]
    if not shown:
        return
    section = page.section("Pictures")
    for pair in shown:
        assert pair.images is not None
        values = (pair.scores["psnr"] or [])[:most]
        figure = figures.image_grid(
            _strip(audit.images[: len(values)], pair.images[: len(values)]),
            [f"{value:.1f} dB" for value in values],
            columns=len(values),
            row_titles=("original", "recovered", "difference"),
        )
        section.figure(
            figures.png(figure),
            f"{pair.attack} against {pair.defence}: originals, what was recovered from the gradients, and the absolute "
            "difference.",
        )


def _strip(real: Tensor, found: Tensor) -> Tensor:
    """Originals, recovered, differences, [3 n, C, H, W]; channels that are neither 1 nor 3 show the first."""
    rows = torch.cat([real, found, (real - found).abs()]).cpu()
    return rows if rows.shape[1] in (1, 3) else rows[:, :1]
