"""The page of curves: what comes back over the strength of each defence."""

from __future__ import annotations

from situs.audit.defences import THREAT
from situs.audit.sweep.curve import FAILED, IMAGES, Curves, Line, Point, curve_table, verdict
from situs.errors import counted
from situs.report import figures
from situs.report.html import Page, Section

READ = (
    "At each strength the attack that got most, among those of this page; it knows the defence and its setting. Where "
    "it stops, it has failed, and nothing is proved: see the reason beside it. Exactly: the error is below half a grey "
    "level of 255 (54.15 dB); a patch must stand at its place."
)


def _leaks(point: Point) -> bool:
    """Whether anything came back: a patch, a word, or an image that can be made out."""
    shares = (point.values.get(name, 0.0) for name in ("exact", "patches", "sentences", "tokens", "words", "picked"))
    return any(shares) or point.values.get("worst", 0.0) >= FAILED


def page(found: Curves) -> Page:
    """A figure for each curve and metric, and all points."""
    things = "images" if found.metrics == IMAGES else "sentences"
    page = Page(f"Defences of {found.model} by strength: {counted(found.count, things)}", verdict(found))
    key = "exact" if things == "images" else "sentences"
    had = [point.values[key] for line in found.lines for point in line.points if key in point.values]
    broken = sum(share > 0 for share in had)
    if any(_leaks(point) for line in found.lines for point in line.points):
        page.judge("bad", "Not private at every strength")
    else:
        page.judge("unsure", "Not proved private" if had else "Not attacked, which is not private")
    if had and found.stopped is None:
        said = f"{things.capitalize()} came back whole at {broken} of {counted(len(had), 'strengths')} attacked."
        page.lead = f"{said}\n\n{page.lead}"
    page.number(f"{broken} of {len(had)}", f"strengths attacked at which {things} came back whole")
    if things == "images":
        page.box("Threat model").facts({**THREAT, **found.notes}).fold("Attacks and defences", _about(found))
    section = page.section("Where attacks stop")
    drawn = ("psnr", "patches") if things == "images" else ("tokens", "sentences")
    for number, curve in enumerate(dict.fromkeys(line.curve for line in found.lines)):
        lines = [line for line in found.lines if line.curve == curve]
        for metric in drawn:
            caption = f"{found.metrics[metric]} over {lines[0].axis}."
            caption += " Shaded: the 95 % interval of the mean over the images." * (metric == "psnr")
            place = section if number or metric != drawn[0] else page.opening
            place.figure(draw(lines, metric, found.metrics[metric]), caption, name=f"{curve}-{metric}")
    page.section("Every point").table(*curve_table(found), READ)
    return page.end(dict(found.provenance.facts))


def _about(found: Curves) -> Section:
    return Section("").facts(found.about) if found.about else Section("")


def draw(lines: list[Line], metric: str, label: str) -> figures.Figure:
    """The lines of one curve."""
    series, bands = {}, {}
    for line in lines:
        there = [(at, point) for at, point in enumerate(line.points) if metric in point.values]
        if not there:
            continue
        x = [at for at, _ in there]
        series[line.beside] = x, [point.values[metric] for _, point in there]
        if metric == next(iter(lines[0].points[0].values), None) and all(point.ends for _, point in there):
            bands[line.beside] = tuple([point.ends[end] for _, point in there if point.ends] for end in (0, 1))
    names = [point.strength for point in lines[0].points]
    limits = None if metric == "psnr" else (0.0, 1.0)
    return figures.curves(series, lines[0].axis, label, x_names=names, y_limits=limits, bands=bands)
