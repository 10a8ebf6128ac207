"""The page of a model's attention."""

from __future__ import annotations

from situs.errors import counted
from situs.measure.attention import Attention, Shown, Survey, uniform_distance
from situs.report.attention import attention_over_images, relative_maps
from situs.report.figures import channels_drawn, value_grids
from situs.report.html import Page, Section
from situs.results import Table, percent


def page(found: Attention) -> Page:
    """Over images, layer by head, and by relative offset."""
    said = found.summary()
    page = Page(f"Attention of {found.provenance.name}", lead=said.sentence)
    survey = found.survey
    page.number(f"{survey.entropy.min():.2f} of {survey.uniform_entropy:.2f}", "nats, the sharpest head of all")
    page.number(f"{survey.distance.min():.1f}", "patches, how far the nearest-looking head looks")
    page.number(percent(found.shown.brightest_tenth, 0), "of the mean map on a tenth of the patches")
    _images(page, found.shown)
    _heads(page.section("Layer by head"), found.survey, said.tables[0])
    _relative(page.section("By relative offset"), found.survey)
    return page.end(found.provenance.facts)


def _images(page: Page, shown: Shown) -> None:
    section = page.section("Over images")
    drawn = attention_over_images(shown.images.numpy(), shown.maps.numpy())
    whose = (
        "What the CLS token takes from each patch"
        if shown.cls
        else "The model has no CLS token, so this is the mean over all patches of what each takes from each patch"
    )
    section.text(
        f"{whose}, in layer {shown.layer + 1}; what goes to prefix tokens is left out and the rest scaled to sum 1. "
        + ("" if shown.positions else "The model was trained without positions and is run without them here. ")
        + "On the brightest tenth of the patches lies "
        f"{percent(shown.brightest_tenth, 0)} of the mean map; even attention would put 10 % there."
    )
    page.opening.figure(
        drawn,
        "Each map has its own scale, from 0 (black) to its 99th percentile (light), so compare shapes, not colours, "
        "between maps.",
        alt="Images, the mean attention over heads, and the attention of each head.",
        name="images",
    )
    if said := channels_drawn(shown.images.shape[1]):
        section.text(said)


def _heads(section: Section, found: Survey, table: Table) -> None:
    section.text(
        "The entropy of a head is −Σ a log a over the keys, prefix tokens included, averaged over "
        f"{counted(found.images, 'images')} and all patch queries: 0 nats is one token, {found.uniform_entropy:.2f} "
        f"nats (log {found.tokens}) all tokens alike. The distance is that of the attended patches from the query; "
        f"even attention would have {uniform_distance(found.grid):.1f} patches on this "
        f"{found.grid[0]}×{found.grid[1]} grid."
    )
    panels = {
        "Entropy of each head": (found.entropy.numpy(), "nats"),
        "How far each head looks": (found.distance.numpy(), "patches"),
    }
    alt = "Entropy and distance by layer and head."
    layers, heads = (range(1, count + 1) for count in found.entropy.shape)
    drawn = value_grids(panels, layers, heads, "head", "layer", digits=".2f", cell=(0.45, 0.27))
    section.figure(drawn, "Dark: sharp, near. Light: wide, far.", alt=alt, name="heads")
    section.table(table.header, table.rows, "By layer, over its heads; entropies in nats, distance in patches.")


def _relative(section: Section, found: Survey) -> None:
    height, width = found.grid
    section.text(
        "How much a patch takes on average from the patch that stands (Δrow, Δcolumn) away from it. The query is in "
        f"the middle; offsets run from −{height - 1} to {height - 1} down and from −{width - 1} to {width - 1} across. "
        "Each offset is averaged over just the pairs of patches that have it, so that offsets that occur seldom (a "
        f"corner's once an image, (0, 0) {height * width:,} times) are not darkened by the pairs that the image's "
        "border cuts off; they are noisier instead."
    )
    section.figure(
        relative_maps(found.relative.numpy(), found.entropy.numpy()),
        "Under each map its head's entropy in nats. Colours go with the square root of the weight, from 0 to each "
        "map's own maximum; ticks point at the query itself.",
        alt="Average attention by relative offset for every layer and head.",
        name="relative",
    )
