"""The page of the settings of MJP's Table 5: verdict, tables, visible and hidden patches apart, images."""

from __future__ import annotations

from situs.audit.cases import SETTINGS, ImageFinding
from situs.audit.defences import THREAT
from situs.audit.gradients import COLUMNS, PARTS, REFUSED, alone, measured, strength, unmeasured
from situs.audit.scores import means_of
from situs.audit.settings import Comparison, glance, settings_table, verdict
from situs.errors import counted
from situs.pages.gradients import CERTAIN, EXACTLY, described, facts_of
from situs.report import figures
from situs.report.html import Page, Section

SHUFFLED = (
    "the original is the image before the shuffle. In the shuffled image, the patches inside a mask of rectangular "
    "blocks have changed their positions, as in MJP's training"
)

UNINFORMED = (
    "does not know that MJP is used. The attacker in the MJP paper is uninformed. An informed attacker knows that "
    "MJP is used, and what MJP learned"
)

ORDERED = """
The informed attacker restores the original order, but setting (b) compares the reconstruction with the shuffled image.
The PSNR and SSIM in setting (b) are therefore low, even if all patches were recovered. The best-match PSNR below and
setting (c) show how well the patches were recovered.
"""

UNORDERED = """
In setting (c), a model without MJP takes one training step on the shuffled image instead of the original. The attacks
on this page can therefore recover only the shuffled image. The gradients of this step do not reveal which patches were
moved, so these attacks do not restore the order. Another attacker may find the order from the borders of the patches.
"""

PUBLISHED = [
    ["DeiT-S", "a", 0.0350, 0.0057, 18.94, 0.5182, 0.3767],
    ["DeiT-S + MJP", "a", 0.1055, 0.0166, 11.52, 0.4053, 0.6545],
    ["DeiT-S", "b", 0.0391, 0.0024, 17.60, 0.5991, 0.3355],
    ["DeiT-S + MJP", "b", 0.1043, 0.0059, 11.66, 0.4493, 0.6519],
    ["DeiT-S + MJP", "c", 0.1706, 0.0338, 8.07, 0.0875, 0.8945],
]
"""MJP's Table 5 (γ = 0.27, 1,000 images of ImageNet, APRIL's analytic attack by an uninformed attacker)."""


def page(comparison: Comparison) -> Page:
    """The page; with the images and their recoveries if the comparison has them."""
    page = Page("Gradient leakage in the settings of MJP's Table 5", verdict(comparison))
    best = max(comparison.attacked, key=strength, default=None)
    unsure = "Not proved private" if best is not None else "Not attacked, so not proved private"
    page.judge(comparison.tone, "Not private" if comparison.tone == "bad" else unsure)
    if best is not None:
        page.number(f"{best.exact} of {best.count}", f"images exact, {best.attack} in setting ({best.case.setting})")
        page.number(f"{best.worst_psnr:.1f} dB", "the most exposed image")
    settings = {f"setting {name}": setting.about for name, setting in SETTINGS.items()}
    attacks = described(dict.fromkeys(row.attack for row in comparison.pairs))
    notes = {"original and shuffled": SHUFFLED, **settings, **comparison.notes, **attacks}
    notes["an uninformed attacker"] = UNINFORMED
    page.box("Threat model").facts(THREAT).fold("Settings, attacks, attackers", Section("").facts(notes))
    section, done = page.section("Verdict"), comparison.attacked
    if done:
        section.table(
            *glance(comparison), "Overview: mean PSNR in dB, and the number of images recovered exactly, by setting."
        )
    if any(row.case.setting == "b" and row.case.informed and row.case.name in comparison.mjp for row in done):
        section.text(ORDERED)
    if any(row.case.setting == "c" and row.case.name not in comparison.mjp for row in done):
        section.text(UNORDERED)
    section.text(EXACTLY)
    _pictures(page, comparison)
    _tables(page, comparison)
    _visible_and_hidden(page, comparison)
    header = ["model", "setting", "MSE", "FFT2D", "PSNR, dB", "SSIM", "LPIPS"]
    page.section("What the paper reports").table(
        header,
        PUBLISHED,
        "These numbers are from MJP's Table 5 (γ = 0.27, 1,000 ImageNet images, APRIL's analytic attack). This "
        "attacker is uninformed: it does not subtract the gradient of MJP's position loss (DAL), and it treats hidden "
        "patches like visible patches.",
    )
    return page.end(facts_of(comparison))


def _tables(page: Page, comparison: Comparison) -> None:
    """All means, one table per setting; then the intervals."""
    section = page.section("The table")
    some = (
        ""
        if comparison.stopped is None
        else " If an attack was stopped, its row shows the mean over the images attacked before the stop."
    )
    section.text(
        f"The table shows means over {counted(len(comparison.names), 'images')}.{some} MSE, FFT2D and LPIPS are "
        "distances, so low values show a leak. For the other metrics, high values show a leak. Best-match PSNR "
        "compares each patch with the recovered patch that fits it best, at any position. Order: the fraction of "
        "patches at their true position. Re-identified: the fraction of recovered images whose nearest original (of "
        f"{len(comparison.names)}) is the true original. Re-identification is not defined for one "
        f"image.{unmeasured(comparison.pairs)}"
    )
    header, rows = settings_table(comparison, measured(tuple(COLUMNS), comparison.pairs) or ("psnr",), alone)
    for name, setting in SETTINGS.items():
        if chosen := [row[1:] for row in rows if row[0] == name]:
            section.table(header[1:], chosen, f"Setting ({name}): {setting.about}.")
    header, rows = settings_table(comparison, CERTAIN)
    chosen = [[*row[:3], *row[4:]] for row in rows if row[3] not in (None, REFUSED)]
    if chosen:
        section.table([*header[:3], *header[4:]], chosen, "The same means with their 95 % intervals.")


def _visible_and_hidden(page: Page, comparison: Comparison) -> None:
    header, rows = settings_table(comparison, tuple(PARTS))
    rows = [row for row in rows if row[0] != "a" and row[3] not in (None, REFUSED)]
    if rows:
        page.section("Visible and hidden patches, separately").table(
            [*header[:3], *header[4:]],
            [[*row[:3], *row[4:]] for row in rows],
            f"{comparison.hidden} of {comparison.patches} patches are hidden (γ = {comparison.ratio:g}). Positions "
            "refer to the shuffled image in setting (b) and to the original image in setting (c).",
        )


def _pictures(page: Page, comparison: Comparison, most: int = 6) -> None:
    """Originals, shuffled images and recoveries of the step on the shuffled images; then of that on the originals."""
    drawn = [(row, row.shown) for row in comparison.pairs if row.shown is not None]
    for setting in ("c", "a"):
        # MJP's models first; within a model the uninformed attackers are first already.
        rows = [row for row in drawn if row[0].case.setting == setting]
        rows = sorted(rows, key=lambda row: row[0].case.name not in comparison.mjp)
        if not rows:
            continue
        section = page.section("Pictures") if page.opening.blocks else page.opening
        strips = [("original", comparison.images)]
        strips += [("shuffled", comparison.shuffled)] if setting == "c" else []
        strips += [(_label(row), pictures) for row, pictures in rows]
        count = min(most, len(comparison.names))
        section.figure(
            figures.image_rows([(name, images[:count].cpu()) for name, images in strips]),
            f"Setting ({setting}): {SETTINGS[setting].about}. The figure shows what each attacker recovered from one "
            f"step, for the first {counted(count, 'images')}. The number beside a row is the mean PSNR against the "
            f"originals, over all images attacked in that row (at most {len(comparison.names)}).",
            name=f"pictures-{setting}",
        )


def _label(row: ImageFinding) -> str:
    """Model, attack, its knowledge and mean PSNR, each on a line."""
    stepped = "with MJP's step" if row.case.name.endswith("MJP's step") else "the model"
    model = row.case.name if len(row.case.name) < 16 else stepped
    return f"{model}:\n" + row.case.attacker.replace(", ", "\n") + f"\n{alone(means_of(row.scores)['psnr'])} dB"
