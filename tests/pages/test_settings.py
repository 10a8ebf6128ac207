"""The page of Table 5: the pictures of a setting, and the tables that leave out what was not attacked."""

from __future__ import annotations

import html
import re
from typing import Any, cast

import pytest
import torch
from outcomes import outcome

from situs.audit import AdaptiveMJP, April, PatchEmbedding
from situs.audit.cases import Case, ImageFinding
from situs.audit.defences import NoDefence
from situs.audit.scores import measure_all
from situs.audit.settings import Comparison
from situs.pages import make_page
from situs.pages.settings import PUBLISHED
from situs.report import figures
from situs.studies.plan import load_study

REAL = torch.rand(8, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
SHUFFLED = REAL.flip(3)
PARTS = {"shown_psnr": [40.0] * 8, "hidden_psnr": [30.0] * 8, "hidden_order": [0.5] * 8}
MODEL: Any = outcome().case.model


def tried(name: str, where: str, attack: Any, psnr: float = 20.0, **case: Any) -> ImageFinding:
    """Eight images that one attack came to, in setting a, b or c; the pictures of each row are its own."""
    step = {"a": ("original", "original"), "b": ("shuffled", "shuffled"), "c": ("shuffled", "original")}[where]
    made = Case(name, MODEL, NoDefence(), attack, cast("Any", step[0]), step[1], **case)
    scores = {**measure_all(REAL, REAL, 8), "psnr": [psnr] * 8, **PARTS}
    return made.finding("done", range(8), scores=scores, facts=[{}] * 8, shown=torch.full_like(REAL, psnr / 100))


def compared(*pairs: ImageFinding, mjp: tuple[str, ...] = ("a run",)) -> Comparison:
    guesses = {(name, "mean image"): measure_all(REAL * 0.5, REAL, 8) for name in "abc"}
    return Comparison([*pairs], [*"12345678"], REAL, SHUFFLED, guesses, 0.25, 1, 4, mjp)


def strips(monkeypatch: pytest.MonkeyPatch, comparison: Comparison) -> list[list[tuple[str, Any]]]:
    drawn: list[list[tuple[str, Any]]] = []
    draw = figures.image_rows
    monkeypatch.setattr(figures, "image_rows", lambda rows: drawn.append(rows) or draw(rows))
    make_page(comparison)
    return drawn


def test_pictures_are_of_the_first_six_images_and_of_the_model_with_mjp_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """First of the step on the shuffled images, which are shown there; then of the step on the originals."""
    attacks = PatchEmbedding(), April()
    rows = [
        *(tried("plain", "a", attack, 10.0 + number, informed=False) for number, attack in enumerate(attacks)),
        tried("a run", "a", AdaptiveMJP(), 12.0),
        tried("plain", "b", attacks[0], 13.0),
        tried("plain", "c", attacks[0], 14.0),
        tried("a run, with MJP's step", "c", AdaptiveMJP(), 15.0),
        tried("a model of a long name", "c", attacks[0], 16.0),
    ]
    found = compared(*rows, mjp=("a run", "a run, with MJP's step"))
    shuffled, originals = strips(monkeypatch, found)
    assert [name for name, _ in shuffled] == [
        "original", "shuffled", "with MJP's step:\nadaptive-mjp\ninformed\n15 dB",
        "plain:\npatchembed\ninformed\n14 dB", "the model:\npatchembed\ninformed\n16 dB",
    ]  # fmt: skip
    assert [name for name, _ in originals] == [
        "original", "a run:\nadaptive-mjp\ninformed\n12 dB", "plain:\npatchembed\nuninformed\n10 dB",
        "plain:\napril\nuninformed\n11 dB",
    ]  # fmt: skip
    for drawn, first in ((shuffled, (REAL, SHUFFLED)), (originals, (REAL,))):
        assert all(torch.equal(images, real[:6]) for (_, images), real in zip(drawn, first, strict=False))
        assert all(images.shape == (6, 3, 8, 8) for _, images in drawn)
    page = make_page(found)
    assert set(page.pictures) == {"pictures-c", "pictures-a"}
    assert [len(section.blocks) for section in page.sections if section.title == "Pictures"] == [1]
    assert len(page.opening.blocks) == 1 and "first 6 images" in page.opening.blocks[0]


def test_one_image_is_enough_for_a_picture_and_a_setting_without_any_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    (only,) = strips(monkeypatch, compared(tried("plain", "a", PatchEmbedding()), tried("plain", "b", April())))
    assert [name.partition(":")[0] for name, _ in only] == ["original", "plain"]


def cells(page: Any, title: str) -> list[list[list[str]]]:
    """The tables of a section: their rows, the header first."""
    [section] = [each for each in page.sections if each.title == title]
    return [
        [[html.unescape(cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)]
         for row in re.findall(r"<tr>(.*?)</tr>", block, re.DOTALL)]
        for block in map(str, section.blocks) if "<table" in block
    ]  # fmt: skip


def test_tables_of_parts_and_of_intervals_leave_out_what_was_not_attacked() -> None:
    refused = Case("plain", MODEL, NoDefence(), April()).refused("no table")
    rows = [tried("a run", where, PatchEmbedding()) for where in "abc"]
    page = make_page(compared(*rows, refused))
    (parts,) = cells(page, "Visible and hidden patches, separately")
    assert parts == [
        ["setting", "model", "attacker", "shown patches, PSNR, dB", "hidden patches in the best order, PSNR, dB",
         "hidden patches at their position"],
        *([where, "a run", "patchembed, informed", "40 [40, 40]", "30 [30, 30]", "0.5 [0.5, 0.5]"] for where in "bc"),
    ]  # fmt: skip
    *settings, intervals = cells(page, "The table")
    assert [[row[0] for row in each] for each in settings] == [
        ["model", "a run", "plain", "no gradient"], *[["model", "a run", "no gradient"]] * 2,
    ]  # fmt: skip
    assert intervals[0][:4] == ["setting", "model", "attacker", "PSNR, dB"]
    assert [row[:4] for row in intervals[1:]] == [
        [where, "a run", "patchembed, informed", "20 [20, 20]"] for where in "abc"
    ]
    none = make_page(compared(tried("a run", "a", PatchEmbedding()), refused))
    assert "Visible and hidden patches, separately" not in [section.title for section in none.sections]


@pytest.mark.parametrize(
    ("model", "where", "informed", "ordered", "unordered"),
    [
        ("a run", "b", True, True, False),
        ("a run", "b", False, False, False),
        ("a run", "c", True, False, False),
        ("plain", "b", True, False, False),
        ("plain", "c", True, False, True),
        ("plain", "a", True, False, False),
    ],
)
def test_the_verdict_explains_low_numbers_of_rows_that_are_there(
    model: str, where: str, informed: bool, ordered: bool, unordered: bool
) -> None:
    page = make_page(compared(tried(model, where, PatchEmbedding(), informed=informed)))
    text = "".join(next(section.blocks for section in page.sections if section.title == "Verdict"))
    assert ("restores the original order" in text) == ordered
    assert ("a model without MJP takes one training step" in text) == unordered


def test_the_first_screen_counts_the_images_of_the_strongest_row() -> None:
    weak, strong = (tried("plain", where, PatchEmbedding(), psnr) for where, psnr in (("c", 31.0), ("a", 60.25)))
    assert make_page(compared(weak, strong)).numbers == [
        ("8 of 8", "images exact, patchembed in setting (a)"), ("60.2 dB", "the most exposed image"),
    ]  # fmt: skip


def test_the_published_numbers_are_those_of_the_study() -> None:
    study = load_study("mjp-table5", configs=False)
    rows = {tuple(row.paper[-5:]) for table in study.tables for row in table.rows}
    assert {tuple(row[2:]) for row in PUBLISHED} <= rows
