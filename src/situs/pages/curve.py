"""The page of curves: what attacks recover over the strength of each defence."""

from __future__ import annotations

from situs.audit.defences import THREAT
from situs.audit.sweep.curve import FAILED, IMAGES, Curves, Line, Point, curve_table, verdict
from situs.errors import counted
from situs.report import figures
from situs.report.html import Page, Section

READ = (
    "Each row shows a defence at one strength, and the attack that recovered most there. All attacks know the defence "
    "and its strength. The last column gives the reason, if it is known, why this attack did not recover more, or "
    "why no attack was run. An attack that failed, was stopped, was not run or does not apply does not prove privacy. "
    "Exact "
    "means a PSNR above 54.15 dB (a mean error of less than half of one grey level of 255), with every patch at its "
    "position."
)


def _leaks(point: Point) -> bool:
    """Whether anything was recovered: a patch, a word, or a recognisable image."""
    shares = (point.values.get(name, 0.0) for name in ("exact", "patches", "sentences", "tokens", "words", "picked"))
    return any(shares) or point.values.get("worst", 0.0) >= FAILED


def page(curves: Curves) -> Page:
    """A figure for each curve and metric, and a table of all points."""
    things = "images" if curves.metrics == IMAGES else "sentences"
    page = Page(f"Defences of {curves.model} by strength: {counted(curves.count, things)}", verdict(curves))
    key = "exact" if things == "images" else "sentences"
    shares = [point.values[key] for line in curves.lines for point in line.points if key in point.values]
    broken = sum(share > 0 for share in shares)
    if any(_leaks(point) for line in curves.lines for point in line.points):
        page.judge("bad", "Not private at one strength or more")
    else:
        page.judge("unsure", "Not proved private" if shares else "Not attacked, so not proved private")
    if shares and curves.stopped is None:
        strengths = f"{broken} of {counted(len(shares), 'attacked strengths')}"
        page.lead = f"{things.capitalize()} were recovered completely at {strengths}.\n\n{page.lead}"
    page.number(
        f"{broken} of {len(shares)}", f"attacked strengths of the defences at which {things} were recovered completely"
    )
    if things == "images":
        about = Section("").facts(curves.about) if curves.about else Section("")
        page.box("Threat model").facts({**THREAT, **curves.notes}).fold("Attacks and defences", about)
    section = page.section("Where attacks stop")
    drawn = ("psnr", "patches") if things == "images" else ("tokens", "sentences")
    for number, curve in enumerate(dict.fromkeys(line.curve for line in curves.lines)):
        lines = [line for line in curves.lines if line.curve == curve]
        for metric in drawn:
            caption = f"{curves.metrics[metric]} for each {lines[0].axis}."
            caption += " The shaded area is the 95 % interval of the mean over the images." * (metric == "psnr")
            target = section if number or metric != drawn[0] else page.opening
            target.figure(draw(lines, metric, curves.metrics[metric]), caption, name=f"{curve}-{metric}")
    page.section("Every point").table(*curve_table(curves), READ)
    return page.end(dict(curves.provenance.facts))


def draw(lines: list[Line], metric: str, label: str) -> figures.Figure:
    """The lines of one curve."""
    series, bands = {}, {}
    for line in lines:
        x = [at for at, point in enumerate(line.points) if metric in point.values]
        points = [line.points[at] for at in x]
        if not points:
            continue
        series[line.beside] = x, [point.values[metric] for point in points]
        if metric == next(iter(lines[0].points[0].values), None) and all(point.ends for point in points):
            bands[line.beside] = tuple([point.ends[end] for point in points if point.ends] for end in (0, 1))
    names = [point.strength for point in lines[0].points]
    limits = None if metric == "psnr" else (0.0, 1.0)
    return figures.curves(series, lines[0].axis, label, x_names=names, y_limits=limits, bands=bands)
