from __future__ import annotations

import base64
import io
import stat
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from situs.errors import SitusError
from situs.report.html import Finding, Page, Section

# A whole PNG of 6 × 4 white pixels, so that sizes can be checked without a drawing library.
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAYAAAAECAAAAACP4sC2AAAAEUlEQVR4nGP8z4AATAwkcgAARwABB6Sb0rwAAAAASUVORK5CYII="
)
SVG = b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'
VOID = {"meta", "img", "br"}
NASTY = '</style><script>alert(\'x\')</script> & <b onload="y">"quoted"</b> {{ 7 * 7 }} {% raw %} {# no #} &lt;'


class Reader(HTMLParser):
    """Reads a page as a browser would: tags, attributes, the text a reader sees, and whether tags balance."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []
        self.style = ""
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == [], "tags left open"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            self.style += data
        else:
            self.text.append(data)

    def values(self, name: str) -> list[str]:
        return [value for _, key, value in self.attributes if key == name]


def page_of(text: str) -> Page:
    """A page with `text` in every place that takes text."""
    page = Page(text, lead=text, notice=text, footer=text)
    section = page.section(text)
    section.text(text).note(text).facts({text: text}).code(text).fold(text, Section("").code(text))
    section.table([text, "n"], [[text, 1]], caption=text).bars({text: (1.0, "bad")}, text, text)
    page.judge("bad", text).number(text, text).opening.text(text)
    page.findings.append(Finding(text, text, text, text, Section("").text(text), (text, text)))
    page.fold("folded").text(text)
    page.box("boxed").text(text)
    section.figure(PNG, caption=text, alt=text)
    page.section("two")
    page.section("three")
    return page


def test_everything_given_is_escaped() -> None:
    read = Reader(page_of(NASTY).render())
    plain = Reader(page_of("harmless").render())
    assert read.tags == plain.tags
    assert {(tag, name) for tag, name, _ in read.attributes} == {(tag, name) for tag, name, _ in plain.attributes}
    # title, word, h1, mark, notice, opening, number and its words, the six of a finding; h2, text, note, fact and its
    # name, code, the two of a fold, header, cell, caption, the three of bars, caption, footer, a fold and a box
    assert "\n".join(read.text).count(NASTY) == "\n".join(plain.text).count("harmless") == 32
    assert NASTY in read.values("alt") and f"{NASTY}: 1 {NASTY}" in read.values("aria-label")


@given(st.text(st.characters(exclude_characters="`\r\0", exclude_categories=["Cc", "Cs"]), min_size=1))
def test_any_text_comes_back(text: str) -> None:
    read = Reader(Page(text).render())
    assert read.text.count(text) >= 2


def test_the_page_fetches_nothing() -> None:
    page = page_of("x")
    page.section("svg").figure(SVG, "drawn")
    read = Reader(page.render())
    assert read.tags["script"] == read.tags["link"] == read.tags["iframe"] == 0
    assert all(source.startswith("data:image/") for source in read.values("src"))
    assert all(link.startswith("#") for link in read.values("href"))
    assert "url(" not in read.style
    assert "@import" not in read.style


def test_contents_lead_to_sections() -> None:
    page = Page("p")
    for title in ("Same", "Same", "γ = ½", "Fourth, & last"):
        page.section(title).text("t")
    page.fold("Folded").text("t")
    page.section("Under which nothing came")
    read = Reader(page.render())
    ids = read.values("id")
    assert [each.partition("-")[2] for each in ids] == ["same", "same", "", "fourth-last", "folded"]
    assert len(set(ids)) == 5
    assert read.values("href") == [f"#{each}" for each in ids]
    few = Page("p", sections=[Section("one").text("t"), Section("two").text("t")])
    assert Reader(few.render()).tags["nav"] == 0 and few.render().count("<h2>") == 2


def test_pictures_are_held_whole_and_at_half_size() -> None:
    page = Page("p")
    page.section("s").figure(PNG, "white `box`").figure(SVG, "drawn")
    read = Reader(page.render())
    first, second = read.values("src")
    assert base64.b64decode(first.removeprefix("data:image/png;base64,")) == PNG
    assert base64.b64decode(second.removeprefix("data:image/svg+xml;base64,")) == SVG
    assert (read.values("width"), read.values("height")) == (["3"], ["2"])
    assert read.values("alt") == ["white box", "drawn"]
    with pytest.raises(SitusError, match=r"PNG or an SVG.*GIF89a"):
        page.section("t").figure(b"GIF89a...", "no")


def test_columns_of_numbers_are_set_as_numbers() -> None:
    header = ["name", "count", "share", "mixed", "error", "blank", "yes"]
    rows = [["a", 1200, 0.51234, 1, "1.3e-15", None, True], ["b", -3, 2.0, "none", "6.9e-01 %", None, False]]
    block = Section("s").table(header, rows).blocks[0]
    read = Reader(block)
    numeric = {tag for tag, name, value in read.attributes if (name, value) == ("class", "number")}
    assert numeric == {"th", "td"}
    assert read.values("class").count("number") == 3 * 3  # three columns: count, share, error
    assert read.text[len(header) :] == [
        *("a", "1,200", "0.5123", "1", "1.3e-15", "–", "yes"),
        *("b", "-3", "2", "none", "6.9e-01 %", "–", "no"),
    ]
    with pytest.raises(SitusError, match=r"3 cells, but the header has 2"):
        Section("s").table(["a", "b"], [[1, 2, 3]])


def test_numbers_with_their_intervals_and_shares_are_numbers_and_other_brackets_are_not() -> None:
    rows = [
        ["12.6 [12.1, 13.2]", "a [1, 2]", "59 of 64"],
        [None, "3", None],
        ["0.0156 [0.00276, 0.0833]", "3", "1 of 64"],
    ]
    block = Section("s").table(["psnr", "name", "exact"], rows).blocks[0]
    assert Reader(block).values("class").count("number") == 2 * 4


def test_paragraphs_and_code() -> None:
    section = Section("s").text("one `a < b`\n\n  two\nlines").code("\nif x < 1:\n    pass\n")
    assert section.blocks == [
        "<p>one <code>a &lt; b</code></p>",
        "<p>two\nlines</p>",
        "<pre><code>if x &lt; 1:\n    pass</code></pre>",
    ]


def test_folded_lines_are_escaped_and_need_no_script() -> None:
    assert Section("s").fold("12 `fields`", Section("").code("\na < b\n")).blocks == [
        "<details><summary>12 <code>fields</code></summary>\n<pre><code>a &lt; b</code></pre>\n</details>"
    ]
    assert Section("s").fold("nothing", Section("")).blocks == []


def test_a_long_table_is_folded_under_its_caption_and_a_short_one_is_not() -> None:
    def tables(count: int) -> str:
        return Section("s").table(["n", "m"], [[row, row] for row in range(count)], "Every row.").blocks[0]

    assert "details" not in tables(11) and "<caption>Every row.</caption>" in tables(11)
    assert tables(12).startswith("<details><summary>Every row. (12 rows)</summary>")
    assert tables(12).count("<td") == 24


def test_the_headline_is_the_first_sentence_and_nothing_is_lost() -> None:
    for lead, first, rest in (
        ("59 of 64 came back. The gate failed. More.", "59 of 64 came back.", ["The gate failed. More."]),
        ("Top-1 is 65.5 % on e.g. these.", "Top-1 is 65.5 % on e.g. these.", []),
        ("One.\n\nTwo.\n\nThree.", "One.", ["Two.", "Three."]),
        ("", "Title", []),
    ):
        assert Page("Title", lead).headline == (first, rest)


def test_a_verdict_is_said_by_a_sign_and_words_and_not_by_colour_alone() -> None:
    for tone, sign in (("good", "✓"), ("bad", "✗"), ("unsure", "?")):
        text = Page("T", "It is so.").judge(tone, "In words").render()
        assert f'<div class="verdict {tone}"><p class="mark">{sign} In words</p>' in text
    assert 'class="mark"' not in Page("T", "It is so.").render()


def test_bars_say_their_numbers_to_who_cannot_see_them() -> None:
    read = Reader(Section("s").bars({"with `key`": (92.14, "good"), "without": 10.2}, "%").blocks[0])
    assert read.values("aria-label") == ["with key: 92.1 %; without: 10.2 %"]
    assert read.values("style") == ["width:92.1%", "width:10.2%"]
    counted = Reader(Section("s").bars({"done": 4, "in all": 12}, "jobs").blocks[0])
    assert counted.values("aria-label") == ["done: 4 jobs; in all: 12 jobs"]
    assert Reader(Section("s").bars({"a": 2.0, "b": 4.0}, "ms").blocks[0]).values("style") == [
        "width:50.0%",
        "width:100.0%",
    ]


@pytest.mark.parametrize(
    ("value", "figures"),
    [
        (0.12345, "0.123"), (9.994, "9.99"), (10.0, "10.0"), (-12.34, "-12.3"), (999.94, "999.9"),
        (1000.0, "1,000"), (-1000.0, "-1,000"), (1234.5, "1,234"), (7, "7"), (12345, "12,345"),
    ],
)  # fmt: skip
def test_a_bar_has_as_many_figures_as_tell_something(value: float, figures: str) -> None:
    read = Reader(Section("s").bars({"a": value}, "ms").blocks[0])
    assert read.values("aria-label") == [f"a: {figures} ms"]


def test_more_bars_than_fit_are_named_and_not_dropped_in_silence() -> None:
    block = Section("s").bars({f"b{place}": float(9 - place) for place in range(10)}, "dB", "By attack.").blocks[0]
    assert Reader(block).values("class").count("bar") == 8 and "b7" in block and "b8" not in block
    assert "By attack. 2 more values are in the tables below." in block
    block = Section("s").bars({f"b{place}": float(9 - place) for place in range(9)}, "dB").blocks[0]
    assert "1 more value is in the tables below." in block


def test_a_large_picture_is_held_small_and_kept_whole_beside_the_page() -> None:
    """Noise that no PNG can shrink, and an exact copy where WebP without loss is small enough."""
    chance = np.random.default_rng(0)
    noisy = (np.linspace(0, 220, 400)[:, None, None] + chance.integers(0, 30, (400, 400, 3))).astype(np.uint8)
    tiles = np.kron(chance.integers(0, 256, (50, 50), dtype=np.uint8), np.ones((8, 8), dtype=np.uint8))
    for pixels, exact in ((noisy, False), (np.stack([tiles] * 3, -1), True)):
        held = io.BytesIO()
        Image.fromarray(pixels).save(held, "png", compress_level=0)
        page = Page("p")
        page.section("s").figure(held.getvalue(), "pixels", name="x")
        assert page.pictures["x"] == held.getvalue()
        [source] = Reader(page.render()).values("src")
        shown = base64.b64decode(source.removeprefix("data:image/webp;base64,"))
        assert len(shown) < len(held.getvalue()) / 3
        off = np.abs(np.asarray(Image.open(io.BytesIO(shown))).astype(int) - pixels).mean()
        assert off == 0 if exact else off < 10


def test_a_notice_stands_before_everything_else() -> None:
    page = Page("Title", "Lead.", "Private <images>: `keep` them.")
    page.section("One").text("text")
    assert '<p class="note">Private &lt;images&gt;: <code>keep</code> them.</p></header>' in page.render()
    assert 'class="note"' not in Page("Title", "Lead.").render()


def test_write_makes_the_folder_and_leaves_one_readable_file(tmp_path: Path) -> None:
    page = page_of("x")
    path = page.write(tmp_path / "deep" / "report.html")
    assert [each.name for each in path.parent.iterdir()] == ["report.html"]
    assert path.read_text(encoding="utf-8") == page.render() == page_of("x").render()
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_failed_write_keeps_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")

    def full_disk(self: Path, target: Path) -> Path:
        assert (self.parent, self != target) == (target.parent, True)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(SitusError, match=r"report\.html: could not be written: no space left on device"):
        Page("new").write(path)
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]


def test_interruption_leaves_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Page("p").write(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(SitusError, match="could not be written"):
        Page("p").write(tmp_path / "taken" / "report.html")


def test_a_page_ends_with_how_it_was_made_and_before_that_with_what_needs_words() -> None:
    assert [each.title for each in Page("t").end({"seed": 3}).sections] == ["How this page was made"]
    told = Page("t").end({"seed": 3}, "A share of images.")
    assert [each.title for each in told.sections] == ["What the numbers mean", "How this page was made"]
    assert told.render().index("A share of images.") < told.render().index("<dt>seed</dt>")


def test_without_webp_a_large_picture_stays_a_png(monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import features

    picture = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (400, 400, 3), dtype=np.uint8)).save(picture, "png")
    kinds = []
    for found in (True, False):
        monkeypatch.setattr(features, "check", lambda feature, found=found: found or feature != "webp")
        page = Page("t")
        page.section("s").figure(picture.getvalue(), caption="c")
        (source,) = [value for value in Reader(page.render()).values("src") if value.startswith("data:")]
        kinds.append(source.partition(";")[0])
    assert kinds == ["data:image/webp", "data:image/png"]
    assert base64.b64decode(source.partition(",")[2]) == picture.getvalue()
