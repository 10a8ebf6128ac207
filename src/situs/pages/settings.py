"""The page of the settings of Table 5: verdict, the table, shown and hidden patches apart, pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from situs.audit.cases import Outcome
from situs.audit.defences import THREAT
from situs.audit.gradients import summary
from situs.audit.settings import SETTINGS, Comparison, attacker_of, setting_of, verdict
from situs.audit.settings_tables import PARTS, glance, settings_table
from situs.audit.tables import COLUMNS, REFUSED, alone, interval, measured, unmeasured
from situs.pages.gradients import EXACTLY, PRIVATE, described
from situs.report import figures
from situs.report.html import Page
from situs.results import Cell

CERTAIN = ("psnr", "patch_psnr", "order_accuracy", "reidentified")
"""The metrics shown with intervals: PSNR, and those that a shuffle cannot hide from."""

SHUFFLED = "an image, and the same image with the patches of a block mask shuffled, as MJP trains on it"

STATIC = "does not know that MJP is at work, as in the paper; who knows MJP has its method and its weights"

ORDERED = """
In (b) one who knows MJP is compared with x̃ although he puts the patches in the order of x; that he has them all is
shown by the best-match PSNR below, and by (c).
"""

UNORDERED = """
In (c) a plain model gives away x̃, and x̃ is not x: nothing in its gradients says which patches were moved, so that
nobody puts them back.
"""

PUBLISHED = [
    ["DeiT-S", "a", 0.0350, 0.0057, 18.94, 0.5182, 0.3767],
    ["DeiT-S + MJP", "a", 0.1055, 0.0166, 11.52, 0.4053, 0.6545],
    ["DeiT-S", "b", 0.0391, 0.0024, 17.60, 0.5991, 0.3355],
    ["DeiT-S + MJP", "b", 0.1043, 0.0059, 11.66, 0.4493, 0.6519],
    ["DeiT-S + MJP", "c", 0.1706, 0.0338, 8.07, 0.0875, 0.8945],
]
"""MJP's Table 5 (γ = 0.27, 1,000 images of ImageNet, APRIL's analytic attack by one who does not know MJP)."""


def settings_page(comparison: Comparison, facts: Mapping[str, Cell], *, pictures: bool = True) -> Page:
    """The page. facts: where models and images come from. pictures: whether they and what was recovered are on it."""
    drawn = (
        [row for row in comparison.rows if row.pictures is not None and setting_of(row) in ("a", "c")]
        if pictures
        else []
    )
    lead = "What plain training and MJP give away, to attackers who do not know MJP and to one who does."
    page = Page("Gradient leakage in the settings of MJP's Table 5", lead, PRIVATE if drawn else "")
    shown = {f"setting {name}": said for name, said in SETTINGS.items()}
    attacks = dict.fromkeys(row.attack for row in comparison.rows)
    page.section("Threat model").facts(
        {**THREAT, "x and x̃": SHUFFLED, **shown, **described(attacks), "a static attacker": STATIC}
    )
    section, done = page.section("Verdict").note(verdict(comparison)), [r for r in comparison.rows if r.reason is None]
    if done:
        section.table(
            *glance(comparison), "At a glance: mean PSNR in dB, and how many images were recovered exactly, by setting."
        )
    if any(setting_of(row) == "b" and row.case.informed and row.case.name in comparison.mjp for row in done):
        section.text(ORDERED)
    if any(setting_of(row) == "c" and row.case.name not in comparison.mjp for row in done):
        section.text(UNORDERED)
    section.text(EXACTLY)
    _pictures(page, comparison, drawn)
    _tables(page, comparison)
    _shown_and_hidden(page, comparison)
    header = ["model", "setting", "MSE", "FFT2D", "PSNR, dB", "SSIM", "LPIPS"]
    page.section("What the paper reports").table(
        header,
        PUBLISHED,
        "MJP's Table 5: γ = 0.27, 1,000 ImageNet images, APRIL's analytic attack. That attacker does not know MJP: he "
        "neither subtracts the gradient of DAL nor separates the hidden patches.",
    )
    page.section("How this page was made").facts(facts)
    return page


def _tables(page: Page, comparison: Comparison) -> None:
    """All means, a table for each setting; then the intervals."""
    section = page.section("The table")
    some = "" if comparison.stopped is None else " Of a row that was stopped they are over the images it had come to."
    section.text(
        f"Means over {len(comparison.names)} images.{some} MSE, FFT2D and LPIPS are distances: low is a leak; of the "
        "others high is one. Best-match PSNR compares each patch with the recovered one that fits it, wherever that "
        "stands; order is the share of patches at their own place; re-identified the share of images whose nearest of "
        f"the {len(comparison.names)} originals is the right one, not defined for one.{unmeasured(comparison.rows)}"
    )
    header, rows = settings_table(comparison, measured(tuple(COLUMNS), comparison.rows) or ("psnr",), alone)
    for setting, said in SETTINGS.items():
        if chosen := [row[1:] for row in rows if row[0] == setting]:
            section.table(header[1:], chosen, f"Setting ({setting}): {said}.")
    header, rows = settings_table(comparison, CERTAIN)
    chosen = [[*row[:3], *row[4:]] for row in rows if row[3] not in (None, REFUSED)]
    if chosen:
        section.table([*header[:3], *header[4:]], chosen, "The same means with their 95 % intervals.")


def _shown_and_hidden(page: Page, comparison: Comparison) -> None:
    rows = []
    for row in comparison.rows:
        if setting_of(row) == "a" or row.reason is not None:
            continue
        means = summary(row.scores)
        rows.append([setting_of(row), row.case.name, attacker_of(row), *(interval(means.get(part)) for part in PARTS)])
    if rows:
        page.section("Shown and hidden patches apart").table(
            ["setting", "model", "attacker", *PARTS.values()],
            rows,
            f"{comparison.hidden} of {comparison.patches} patches are hidden (γ = {comparison.ratio:g}). Places are "
            "those of x̃ in (b) and of x in (c).",
        )


def _pictures(page: Page, comparison: Comparison, shown: Sequence[Outcome], most: int = 6) -> None:
    """Originals, shuffled, and what each attacker made of the step on x̃; then of the step on x."""
    if not shown:
        return
    section = page.section("Pictures")
    for setting in ("c", "a"):
        # MJP's models first, and in a model those who do not know MJP first: the order of the argument.
        rows = sorted(
            (row for row in shown if setting_of(row) == setting), key=lambda row: row.case.name not in comparison.mjp
        )
        if not rows:
            continue
        strips = [("original x", comparison.images)]
        strips += [("x̃, in the step", comparison.shuffled)] if setting == "c" else []
        for row in rows:
            assert row.pictures is not None
            strips.append((_label(row), row.pictures))
        count = min(most, len(comparison.names))
        stack = torch.cat([_padded(images[:count].cpu(), count) for _, images in strips])
        figure = figures.image_grid(
            stack if stack.shape[1] in (1, 3) else stack[:, :1],
            columns=count,
            row_titles=tuple(name for name, _ in strips),
        )
        section.figure(
            figure,
            f"Setting ({setting}): {SETTINGS[setting]}. What each attacker recovered from one step on the first "
            f"{count} images; beside each row the mean PSNR against x over those he came to of all "
            f"{len(comparison.names)}.",
        )


def _label(row: Outcome) -> str:
    """Model, attack, what he knows, mean PSNR: each on a line, since a row of pictures leaves little room beside it."""
    model = (
        row.case.name
        if len(row.case.name) < 16
        else "with MJP's step"
        if row.case.name.endswith("MJP's step")
        else "the model"
    )
    return f"{model}:\n" + attacker_of(row).replace(", ", "\n") + f"\n{alone(summary(row.scores)['psnr'])} dB"


def _padded(images: Tensor, count: int) -> Tensor:
    """White pictures where an attacker was stopped before he came to them."""
    return torch.cat([images, images.new_ones(count - len(images), *images.shape[1:])])
