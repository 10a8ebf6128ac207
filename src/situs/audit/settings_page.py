"""The settings of Table 5 as one page: verdict, the table, shown and hidden patches apart, pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from situs.audit.gradients import summary
from situs.audit.metrics import Mean
from situs.audit.page import COLUMNS, EXACTLY, REFUSED, alone, interval
from situs.audit.settings import SETTINGS, Comparison, means_of, verdict
from situs.audit.threat import THREAT
from situs.report import figures
from situs.report.html import Cell, Page

TABLE = ("mse", "fft2d", "psnr", "ssim", "lpips")
CERTAIN = ("psnr", "patch_psnr", "order_accuracy", "reidentified")
"""The paper's own metrics, and those that a shuffle cannot hide from beside PSNR, with intervals."""

SHUFFLED = "an image, and the same image with the patches of a block mask shuffled, as MJP trains on it"
PARTS = {
    "shown_psnr": "shown patches, PSNR, dB",
    "hidden_psnr": "hidden patches in any order, PSNR, dB",
    "hidden_order": "hidden patches at their place",
}
PUBLISHED = [
    ["DeiT-S", "a", 0.0350, 0.0057, 18.94, 0.5182, 0.3767],
    ["DeiT-S + MJP", "a", 0.1055, 0.0166, 11.52, 0.4053, 0.6545],
    ["DeiT-S", "b", 0.0391, 0.0024, 17.60, 0.5991, 0.3355],
    ["DeiT-S + MJP", "b", 0.1043, 0.0059, 11.66, 0.4493, 0.6519],
    ["DeiT-S + MJP", "c", 0.1706, 0.0338, 8.07, 0.0875, 0.8945],
]
"""MJP's Table 5 (γ = 0.27, 1,000 images of ImageNet, APRIL's analytic attack by one who does not know MJP)."""


def settings_table(
    comparison: Comparison,
    columns: Sequence[str] = (*COLUMNS, *PARTS),
    cell: Callable[[Mean | None], Cell] | None = None,
) -> tuple[list[str], list[list[Cell]]]:
    """Header and rows: setting, model, attacker, exact, metrics; then who saw no gradient. cell: shows a mean."""
    cell, rows = cell or interval, list[list[Cell]]()
    for setting in SETTINGS:
        for row in comparison.rows:
            if row.setting != setting:
                continue
            name: list[Cell] = [setting, row.model, row.attacker]
            if row.reason is not None:
                rows.append([*name, REFUSED, *[None] * len(columns)])
                continue
            means, done = means_of(row), len(row.facts)
            exact = f"{row.exact} of {done}" + ", stopped" * (row.partial is not None or done < len(comparison.images))
            rows.append([*name, exact, *(cell(means.get(column)) for column in columns)])
        for (where, guess), scores in comparison.guesses.items():
            if where == setting:
                means = summary(scores)
                rows.append([setting, "no gradient", guess, None, *(cell(means.get(column)) for column in columns)])
    heads = {**COLUMNS, **PARTS}
    return ["setting", "model", "attacker", "exact", *(heads[column] for column in columns)], rows


def settings_page(comparison: Comparison, facts: Mapping[str, Cell]) -> Page:
    """The page. facts: where models and images come from."""
    page = Page(
        "Gradient leakage in the settings of MJP's Table 5",
        lead="What plain training and MJP give away, to attackers who do not know MJP and to one who does.",
    )
    shown = {f"setting {name}": said for name, said in SETTINGS.items()}
    page.section("Threat model").facts(THREAT).facts({"x and x̃": SHUFFLED, **shown})
    page.section("Verdict").note(verdict(comparison)).text(EXACTLY)
    section = page.section("The table")
    some = "" if comparison.stopped is None else " Of a row that was stopped they are over the images it had come to."
    section.table(
        *settings_table(comparison, TABLE, alone),
        f"Means over {len(comparison.images)} images, in the paper's metrics.{some} MSE, FFT2D and LPIPS are "
        "distances: low is a leak; of PSNR and SSIM high is one.",
    )
    section.table(
        *settings_table(comparison, CERTAIN),
        "What shuffling cannot hide, with 95 % intervals: best-match PSNR compares each patch with the recovered one "
        "that fits it, wherever that stands; order is the share of patches at their own place; re-identified the share "
        "of images whose nearest original is the right one.",
    )
    _shown_and_hidden(page, comparison)
    _pictures(page, comparison)
    header = ["model", "setting", "MSE", "FFT2D", "PSNR, dB", "SSIM", "LPIPS"]
    page.section("What the paper reports").table(
        header,
        PUBLISHED,
        "MJP's Table 5: γ = 0.27, 1,000 ImageNet images, APRIL's analytic attack. That attacker does not know MJP: he "
        "neither subtracts the gradient of DAL nor separates the hidden patches.",
    )
    page.section("How this page was made").facts(facts)
    return page


def _shown_and_hidden(page: Page, comparison: Comparison) -> None:
    rows = []
    for row in comparison.rows:
        if row.setting == "a" or row.reason is not None:
            continue
        means = means_of(row)
        rows.append([row.setting, row.model, row.attacker, *(interval(means.get(part)) for part in PARTS)])
    if rows:
        page.section("Shown and hidden patches apart").table(
            ["setting", "model", "attacker", *PARTS.values()],
            rows,
            f"{comparison.hidden} of {comparison.patches} patches are hidden (γ = {comparison.ratio:g}). Places are "
            "those of x̃ in (b) and of x in (c).",
        )


def _pictures(page: Page, comparison: Comparison, most: int = 6) -> None:
    """Originals, shuffled, and what each attacker made of the step on x̃."""
    shown = [row for row in comparison.rows if row.images is not None and row.setting in ("a", "c")]
    if not shown:
        return
    section = page.section("Pictures")
    for setting in ("a", "c"):
        rows = [row for row in shown if row.setting == setting]
        if not rows:
            continue
        strips = [("x", comparison.images)] + ([("x̃", comparison.shuffled)] if setting == "c" else [])
        for row in rows:
            assert row.images is not None
            strips.append((f"{row.model}:\n{row.attacker}", row.images))
        count = min(most, len(comparison.images))
        stack = torch.cat([_padded(images[:count].cpu(), count) for _, images in strips])
        figure = figures.image_grid(
            stack if stack.shape[1] in (1, 3) else stack[:, :1],
            columns=count,
            row_titles=tuple(name for name, _ in strips),
        )
        section.figure(
            figures.png(figure),
            f"Setting ({setting}): {SETTINGS[setting]}. What each attacker recovered from one step.",
        )


def _padded(images: Tensor, count: int) -> Tensor:
    """White pictures where an attacker was stopped before he came to them."""
    return torch.cat([images, images.new_ones(count - len(images), *images.shape[1:])])
