"""The pages about sets of images: what was packed, and what was found in one."""

from __future__ import annotations

from situs.data.check import KINDS, DataCheck
from situs.data.pack import Packed
from situs.report.html import Page

PACKED = """
Each image whose shorter side was longer than the limit was shrunk to it and written anew; the others keep their bytes.
Images that could not be decoded are left out. `manifest.json` beside the shards holds the SHA-256 of each, to which
`situs data check` holds them.
"""


def packed(made: Packed) -> Page:
    """The shards of each split, and every image that was left out."""
    said = made.summary()
    page = Page(f"{made.provenance.facts.get('data', 'images')}: packed", lead=said.sentence)
    page.section("Shards").table(*said.tables[0][1:])
    if made.broken:
        rows = [[each["split"] or "all", each["name"], each["reason"]] for each in made.broken]
        page.section("Broken images").table(["split", "image", "why"], rows)
    return page.end(made.provenance.facts, PACKED)


def check(found: DataCheck) -> Page:
    """What was found, kind by kind."""
    said = found.summary()
    page = Page(f"{found.provenance.facts.get('data', 'images')}: checked", lead=said.sentence)
    section = page.section("Found").table(*said.tables[0][1:])
    for note in said.notes:
        section.note(note)
    for kind, every in found.found.items():
        if every:
            rows = [[each.split or "all", each.name, each.what or None] for each in every]
            shown = f"{found.counts[kind]:,} in all, {len(every):,} listed: {KINDS[kind]}."
            page.section(kind.capitalize()).table(["split", "image", "what"], rows, shown)
    return page.end(found.provenance.facts)
