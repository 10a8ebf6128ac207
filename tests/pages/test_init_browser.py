"""Every kind of page in a real browser: nothing fails or overflows, all can be read, and the verdict comes first."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import RESULTS, provenance
from torch.nn.functional import interpolate

from situs.audit import NoDefence, PatchEmbedding
from situs.audit.cases import Case
from situs.audit.defences import Step
from situs.audit.gradients import Audit
from situs.audit.scores import measure_all
from situs.pages import make_page
from situs.report.figures import pixel_rows
from situs.report.html import Finding, Page, Section

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install 'situs[dev]')")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium on the path"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
LARGEST = 3_000_000

UNREADABLE = """() => {
  const linear = (v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (c) => { const [r, g, b] = c.map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const parts = (text) => text.match(/[\\d.]+/g).map(Number);
  const behind = (e) => { for (; e; e = e.parentElement) { const c = parts(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c.slice(0, 3); } return [255, 255, 255]; };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const text = walk.currentNode.textContent.trim(), e = walk.currentNode.parentElement;
    if (!text || !e.getClientRects().length) continue;
    const [a, b] = [light(parts(getComputedStyle(e).color).slice(0, 3)), light(behind(e))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) found.push([text.slice(0, 40), Math.round(contrast * 100) / 100]);
  }
  return found;
}"""

BROKEN = """() => [...document.querySelectorAll('a[href]')].map((a) => a.getAttribute('href')).filter(
  (to) => !(to.startsWith('#') && document.getElementById(decodeURIComponent(to.slice(1)))))"""

WIDE = """() => [...document.querySelectorAll('body *')].filter((e) => !e.closest('.wide, pre') &&
  e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.tagName + '.' + e.className).slice(0, 5)"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


def look(browser: Any, path: Path) -> None:
    """All that must hold of any page."""
    assert path.stat().st_size < LARGEST
    for width, scheme in ((400, "light"), (1600, "light"), (400, "dark"), (1600, "dark")):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        wrong: list[str] = []
        page.on("pageerror", lambda error, wrong=wrong: wrong.append(str(error)))
        page.on("console", lambda said, wrong=wrong: wrong.append(said.text) if said.type == "error" else None)
        page.on("request", lambda asked, wrong=wrong: wrong.append(asked.url[:80]) if "://" in asked.url[5:] else None)
        page.goto(f"file://{path}")
        page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        assert [each for each in wrong if not each.startswith("file:")] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width, page.evaluate(WIDE)
        assert page.evaluate(UNREADABLE) == [], (width, scheme)
        if width == 400 and scheme == "light":
            assert page.evaluate(BROKEN) == []
            assert page.evaluate("[...document.images].every((each) => each.alt.trim() && each.naturalWidth)")
            assert page.evaluate(
                "[...document.querySelectorAll('[role=img]')].every((each) => each.getAttribute('aria-label'))"
            )
        page.close()


def check_first_screen(browser: Any, path: Path) -> None:
    """At 1,280 × 800 the verdict, the picture and the first number are there without scrolling."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto(f"file://{path}")
    ends = {part: page.evaluate(f"document.querySelector('{part}')?.getBoundingClientRect().bottom ?? null")
            for part in ("h1", ".opening figure, .opening .words", ".strip p")}  # fmt: skip
    page.close()
    assert None not in ends.values() and max(ends.values()) <= 800, ends


@pytest.mark.parametrize("name", RESULTS)
def test_every_kind_of_page(name: str, browser: Any, tmp_path: Path) -> None:
    path = make_page(replace(RESULTS[name][0](), provenance=provenance())).write(tmp_path / "page.html")
    look(browser, path)
    check_first_screen(browser, path)


def test_a_page_of_photographs_is_small_and_its_headline_is_the_worst(browser: Any, tmp_path: Path) -> None:
    """Three attacks on twelve photographs of 224 pixels, of which every byte came back."""
    chance = torch.Generator().manual_seed(0)
    rough = torch.rand(12, 3, 28, 28, generator=chance, dtype=torch.float64)
    grain = 0.05 * torch.rand(12, 3, 224, 224, generator=chance)
    images = (interpolate(rough, 224, mode="bilinear") + grain).clamp(0, 1)
    scores, model = measure_all(images[:2], images[:2], 16), None
    scores = {name: None if values is None else [*values, *values * 5] for name, values in scores.items()}
    cases = [Case("m", model, NoDefence(), PatchEmbedding()) for _ in range(3)]  # pyright: ignore[reportArgumentType]
    done = [
        case.finding("done", range(12), scores=scores, facts=[{"bytes": True}] * 12, shown=images) for case in cases
    ]
    audit = Audit(done, [str(n) for n in range(12)], images, "m", Step(), {}, about={"none": "as it is"})
    path = make_page(audit).write(tmp_path / "page.html")
    look(browser, path)
    check_first_screen(browser, path)
    assert "<h1>12 of 12 images were recovered byte for byte from one step of training" in path.read_text()


def test_findings_links_and_print(browser: Any, tmp_path: Path) -> None:
    """A link opens the fold that it leads to, and what is folded is printed."""
    page = Page("Demo", "What was found. In so many words.")
    picture = Section("").figure(pixel_rows([torch.rand(2, 1, 8, 8)]), "Pixels.")
    page.findings.append(Finding("It is so.", "8 of 8", "images", "In words.", picture, ("How", "Details")))
    bars = Section("").bars({"with the key": (92.0, "good"), "without": (10.0, "")}, "%")
    page.findings.append(Finding("A second.", "+3.0", "points", "More words.", bars, ("The same", "Details")))
    page.fold("Details").text("Here is how.").fold("More", Section("").text("And more."))
    page.section("Now").code("situs " + "pretrain " * 30)
    path = page.write(tmp_path / "page.html")
    look(browser, path)
    shown = browser.new_page(viewport={"width": 1280, "height": 800})
    shown.goto(f"file://{path}")
    closed = shown.get_by_text("Here is how.")
    assert not closed.is_visible()
    shown.emulate_media(media="print")
    assert closed.bounding_box()["height"] > 0 and shown.get_by_text("And more.").bounding_box()["height"] > 0
    shown.emulate_media(media="screen")
    shown.get_by_role("link", name="How").click()
    closed.wait_for(state="visible", timeout=5000)
    shown.close()
