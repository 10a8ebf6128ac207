"""The pages about sets of images: what was packed, and what was found in one."""

from __future__ import annotations

from situs.data.check import FAILING, KINDS, DataCheck
from situs.data.pack import Packed
from situs.errors import counted
from situs.report.html import Page, Tone

PACKED = """
Each image whose shorter side was longer than the limit was shrunk to it and written anew; the others keep their bytes.
Images that could not be decoded are left out. `manifest.json` beside the shards holds the SHA-256 of each, to which
`situs data check` holds them.
"""


def packed(made: Packed) -> Page:
    """The shards of each split, and every image that was left out."""
    said = made.summary()
    page = Page(f"{made.provenance.facts.get('data', 'images')}: packed", lead=said.sentence)
    images: dict[str, int] = {}
    for shard in made.manifest["shards"]:
        images[shard["split"] or "all"] = images.get(shard["split"] or "all", 0) + shard["images"]
    page.opening.bars(images, "images")
    page.number(f"{sum(images.values()):,}", "images packed")
    page.judge("unsure" if made.broken else "good", "Some left out" if made.broken else "All packed")
    page.section("Shards").table(*said.tables[0][1:])
    if made.broken:
        rows = [[each["split"] or "all", each["name"], each["reason"]] for each in made.broken]
        page.section("Broken images").table(["split", "image", "why"], rows)
    return page.end(made.provenance.facts, PACKED)


def check(found: DataCheck) -> Page:
    """What was found, kind by kind."""
    said = found.summary()
    page = Page(f"{found.provenance.facts.get('data', 'images')}: checked", lead=said.sentence)
    amount = sum(found.counts.values())
    most = sorted(found.counts.items(), key=lambda each: -each[1])
    tones: dict[str, Tone] = {kind: "bad" if kind in FAILING else "unsure" for kind in found.counts}
    page.opening.bars({kind: (count, tones[kind] if count else "good") for kind, count in most}, "found")
    page.number(f"{amount:,}", f"findings in {counted(sum(found.images.values()), 'images')}")
    nothing = "Nothing found" if found.decoded else "Nothing found, but not decoded"
    page.judge(found.tone, "Look at these" if amount else nothing)
    section = page.section("Found").table(*said.tables[0][1:])
    for note in said.notes:
        section.note(note)
    for kind, every in found.found.items():
        if every:
            rows = [[each.split or "all", each.name, each.what or None] for each in every]
            shown = f"{found.counts[kind]:,} in all, {len(every):,} listed: {KINDS[kind]}."
            page.section(kind.capitalize()).table(["split", "image", "what"], rows, shown)
    return page.end(found.provenance.facts)
