"""One self-contained HTML page: text, tables, facts, code and pictures, without scripts or downloads.

    page = Page("Gradient audit", lead="59 of 64 images came back. The gate asked for none.")
    page.judge("bad", "Not private").number("59 of 64", "images exact")
    page.opening.figure(png_bytes, caption="Originals, and what came back.")
    page.box("What the attacker had").facts({"sees": "one gradient"})
    page.section("Numbers").table(["image", "PSNR, dB"], [["a", 60.1], ["b", 41.0]])
    page.write(path)

The first screen has the verdict (the lead's first sentence, as the headline), a few numbers, and the picture of
`opening`; sections follow, and long tables and definitions are folded. `page.html.jinja` is the skeleton,
`blocks.html.jinja` the blocks of a section, `page.css` the style sheet. All input is text and is escaped, with one
exception: `backticks` become code. The page adds no date and no path, so the same results give the same bytes.
"""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from situs.errors import SitusError, counted, verb
from situs.files import write_result
from situs.results import Cell, show

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Tone = Literal["good", "bad", "unsure", ""]
"""Whether a number or a verdict is good or bad; it sets the colour, always together with a sign or words."""

SIGNS: dict[str, str] = {"good": "✓", "bad": "✗", "unsure": "?", "": ""}
LONG_TABLE = 12
"""Number of rows from which a table is folded."""

MOST_BARS = 8
"""Largest number of bars in a picture; the caller gives the most important ones first."""

_PNG = b"\x89PNG\r\n\x1a\n"
_LARGE = 150_000  # bytes from which a PNG is in the page as WebP; the file beside the page stays a PNG
_PIXELS_PER_POINT = 2  # pictures are drawn at twice the page's resolution, so that they are sharp on fine screens
_INTERVAL = re.compile(r" \[[^\[\]]+\]$")  # behind a number: its ends
_NUMBER = re.compile(r"[-+−±<>≈]?\s?\d[\d.,   ]*(e[-+−]?\d+)?\s?(%|×|dB|s|ms|MB|B)?")
_SHARE = re.compile(r"\d[\d,]* of \d[\d,]*")  # 59 of 64
_NEXT = re.compile(r"(?<=[^.\s]{2}[.!?]) (?=[A-Z\d`])|\n\s*\n")  # where a second sentence begins


@dataclass
class Section:
    """A heading and its blocks, in the order they were added. Methods return the section itself.

    look: "" plain, "box" in a frame, "fold" shown when the reader opens it. pictures: PNG files that are also written
    beside the page, by name, of all sections of a page.
    """

    title: str
    blocks: list[Markup] = field(default_factory=list)
    pictures: dict[str, bytes] = field(default_factory=dict)
    look: Literal["", "box", "fold"] = ""

    def text(self, text: str) -> Section:
        """Paragraphs, separated by blank lines."""
        for part in re.split(r"\n\s*\n", text.strip()):
            self._add("paragraph", part.strip())
        return self

    def note(self, *texts: str) -> Section:
        """Remarks that a reader must not overlook."""
        for text in texts:
            self._add("note", text.strip())
        return self

    def facts(self, facts: Mapping[str, Cell]) -> Section:
        """A list of names and values."""
        return self._add("facts", list(facts.items()))

    def code(self, code: str) -> Section:
        """Verbatim lines."""
        return self._add("code", code.strip("\n"))

    def words(self, words: Sequence[tuple[str, str]], caption: str) -> Section:
        """Words in a row, each with a mark: "right", "wrong", "missing", or "" for none."""
        return self._add("words", words, caption)

    def fold(self, summary: str, content: Section) -> Section:
        """The blocks of `content`, shown when the reader opens them."""
        return self._add("fold", summary, Markup("\n").join(content.blocks)) if content.blocks else self

    def bars(
        self, values: Mapping[str, float] | Mapping[str, tuple[float, Tone]], unit: str, caption: str = ""
    ) -> Section:
        """Bars by name with their numbers, from 0 to the largest; to 100 where the unit is %."""
        toned = {name: value if isinstance(value, tuple) else (value, "") for name, value in values.items()}
        top = 100.0 if unit == "%" else max([value for value, _ in toned.values() if value > 0], default=1.0)
        rows = [
            (name, _figures(value), max(0.0, min(100.0, 100 * value / top)), tone)
            for name, (value, tone) in list(toned.items())[:MOST_BARS]
        ]
        if len(toned) > MOST_BARS:
            more = len(toned) - MOST_BARS
            caption = f"{caption} {counted(more, 'more values')} {verb(more, 'are')} in the tables below.".strip()
        alt = "; ".join(f"{name}: {figures} {unit}".strip() for name, figures, *_ in rows)
        return self._add("bars", rows, unit, caption, alt.replace("`", "")) if rows else self

    def table(self, header: Sequence[str], rows: Sequence[Sequence[Cell]], caption: str = "") -> Section:
        """A table; columns of numbers, of numbers [with, intervals] and of shares (59 of 64) are right-aligned.

        A long table is folded under its caption. A cell that begins with the sign of a verdict has its colour.
        """
        for row in rows:
            if len(row) != len(header):
                raise SitusError(f"a table row has {len(row)} cells, but the header has {len(header)}: {list(row)!r}")
        numeric = [_is_numeric([row[i] for row in rows]) for i in range(len(header))]
        return self._add("table", header, rows, numeric, caption, len(rows) >= LONG_TABLE)

    def figure(self, picture: bytes | Figure, caption: str, alt: str = "", *, name: str = "") -> Section:
        """A matplotlib figure, or a PNG or SVG file's bytes, with its caption.

        alt: alternative text; by default the caption. name: also writes the PNG beside the page.
        """
        if not isinstance(picture, bytes):
            from situs.report.figures import png

            picture = png(picture)
        if name:
            self.pictures[name] = picture
        return self._add("figure", _data_uri(picture), _size(picture), caption, alt or caption.replace("`", ""))

    def _add(self, kind: str, *values: Any) -> Section:
        self.blocks.append(getattr(_templates().get_template("blocks.html.jinja").module, kind)(*values))
        return self


@dataclass
class Finding:
    """One finding: a sentence, a number, a few words and a picture. link: (words, section)."""

    title: str
    number: str
    of: str
    text: str
    picture: Section
    link: tuple[str, str] | None = None


@dataclass
class Page:
    """A page: its first screen (title, verdict, numbers, picture), findings, sections, a closing line.

    title: what was measured. lead: the result; its first sentence is the headline. notice: a warning above all else.
    opening: the picture. pictures: its figures that have a name.
    """

    title: str
    lead: str = ""
    notice: str = ""
    footer: str = ""
    sections: list[Section] = field(default_factory=list)
    pictures: dict[str, bytes] = field(default_factory=dict)
    tone: Tone = ""
    mark: str = ""
    numbers: list[tuple[str, str]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.opening = Section("", pictures=self.pictures)

    def judge(self, tone: Tone, mark: str) -> Page:
        """The verdict: its tone, and two or three words that express the tone without colour."""
        self.tone, self.mark = tone, mark
        return self

    def number(self, value: Cell, of: str) -> Page:
        """One of the few numbers on the first screen, the most important one first."""
        self.numbers.append((show(value), of))
        return self

    @property
    def headline(self) -> tuple[str, list[str]]:
        """The first sentence, or the title if there is none, and the paragraphs that follow it."""
        first, *following = _NEXT.split(self.lead.strip(), maxsplit=1)
        return first or self.title, re.split(r"\n\s*\n", following[0]) if following else []

    def section(self, title: str, look: Literal["", "box", "fold"] = "") -> Section:
        """Opens a new section at the end."""
        self.sections.append(Section(title, pictures=self.pictures, look=look))
        return self.sections[-1]

    def box(self, title: str) -> Section:
        """Opens a framed section: what the attacker had, what would help."""
        return self.section(title, "box")

    def fold(self, title: str) -> Section:
        """Opens a section that is shown when the reader opens it."""
        return self.section(title, "fold")

    def end(self, facts: Mapping[str, Cell], meaning: str = "") -> Page:
        """The last sections: what the numbers mean, and how they were made."""
        if meaning:
            self.fold("What the numbers mean").text(meaning)
        if facts:
            self.fold("How this page was made").facts(facts)
        return self

    def reword(self, word: Callable[[str], str]) -> None:
        """Applies `word` to all text; it must leave markup and pictures unchanged."""
        self.title, self.lead, self.notice, self.footer = map(word, (self.title, self.lead, self.notice, self.footer))
        self.mark, self.numbers = word(self.mark), [(word(value), word(of)) for value, of in self.numbers]
        for section in (self.opening, *self.sections):
            section.title = word(section.title)
            section.blocks = [Markup(word(str(block))) for block in section.blocks]  # noqa: S704  (escaped before)

    def render(self) -> str:
        """The whole page; empty sections are left out."""
        self.sections = [section for section in self.sections if section.blocks]
        return _templates().get_template("page.html.jinja").render(page=self)

    def write(self, path: Path | str, *, private: bool = False) -> Path:
        """Writes the page under a temporary name and renames it; makes the folder if it is missing.

        private: readable by its owner alone (mode 0600).
        """
        return write_result(Path(path), self.render().encode(), private=private)


@cache
def _templates() -> Environment:
    folder = FileSystemLoader(Path(__file__).parent)
    templates = Environment(loader=folder, autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    templates.filters |= {"inline": _inline, "show": show, "anchor": _anchor}
    templates.globals |= {"signs": SIGNS}
    return templates


def _inline(text: str) -> Markup:
    """Escaped text with `code` marked up; backticks hold no markup because the escaping comes first."""
    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
    return Markup(marked)  # noqa: S704  (escaped in the line above)


def _is_numeric(column: Sequence[Cell]) -> bool:
    shown = [show(cell) for cell in column if cell is not None]
    return bool(shown) and all(_NUMBER.fullmatch(_INTERVAL.sub("", text)) or _SHARE.fullmatch(text) for text in shown)


def _anchor(title: str, number: int) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    return f"s{number}-{words}" if words else f"s{number}"


def _figures(value: float) -> str:
    """A number on a bar, large ones rounded."""
    whole = isinstance(value, int) or abs(value) >= 1000
    return f"{value:,.0f}" if whole else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def _data_uri(picture: bytes) -> str:
    # An SVG goes into an image too, not into the page: its ids cannot clash there and its scripts do not run.
    if picture.startswith(_PNG):
        kind, picture = _smaller(picture) if len(picture) > _LARGE else ("image/png", picture)
    elif b"<svg" in picture[:1000]:
        kind = "image/svg+xml"
    else:
        raise SitusError(f"a figure must be the bytes of a PNG or an SVG file; these bytes begin with {picture[:8]!r}")
    return f"data:{kind};base64,{base64.b64encode(picture).decode('ascii')}"


def _smaller(picture: bytes) -> tuple[str, bytes]:
    """A large PNG as WebP: lossless if that is small, otherwise at a quality without visible loss."""
    from PIL import Image, features

    if not features.check("webp"):
        return "image/png", picture
    for options in ({"lossless": True, "method": 2}, {"quality": 90, "method": 4}):
        webp = io.BytesIO()
        Image.open(io.BytesIO(picture)).convert("RGB").save(webp, "webp", **options)
        if webp.tell() <= _LARGE:
            break
    return min(
        ("image/webp", webp.getvalue()), ("image/png", picture), key=lambda kind_and_bytes: len(kind_and_bytes[1])
    )


def _size(picture: bytes) -> tuple[int, int] | None:
    """Width and height of a PNG on the page (bytes 16 to 24 of the file), so that the layout does not shift."""
    if not picture.startswith(_PNG):
        return None
    width, height = (int.from_bytes(picture[start : start + 4], "big") for start in (16, 20))
    return width // _PIXELS_PER_POINT, height // _PIXELS_PER_POINT
