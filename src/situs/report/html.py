"""One self-contained HTML page: text, tables, facts, code and pictures; no script, and nothing fetched.

    page = Page("Gradient audit", lead="59 of 64 images came back. The gate asked for none.")
    page.judge("bad", "Not private").number("59 of 64", "images exact")
    page.opening.figure(png_bytes, caption="Originals, and what came back.")
    page.box("What the attacker had").facts({"sees": "one gradient"})
    page.section("Numbers").table(["image", "PSNR, dB"], [["a", 60.1], ["b", 41.0]])
    page.write(path)

The first screen holds the verdict (the lead's first sentence, as the headline), one number or a few, and the picture of
`opening`; sections follow, and long tables and definitions are folded. `page.html.jinja` is the skeleton,
`blocks.html.jinja` what stands in a section, `page.css` the style sheet. Everything given is text and is escaped, with
one exception for ease of writing: `backticks` become code. The page adds no date and no path of its own, so the same
results give the same bytes.
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

from situs.errors import SitusError
from situs.files import write_result
from situs.results import Cell, show

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Tone = Literal["good", "bad", "unsure", ""]
"""What a number or a verdict means to its reader; colours follow it, and a sign or words always stand beside them."""

SIGNS: dict[str, str] = {"good": "✓", "bad": "✗", "unsure": "?", "": ""}
LONG_TABLE = 12
"""Rows from which on a table is folded."""

MOST_BARS = 8
"""Bars of a picture; the caller gives the most important ones first."""

_PNG = b"\x89PNG\r\n\x1a\n"
_LARGE = 150_000  # bytes of a PNG from which on the page holds it as WebP; the file beside the page stays a PNG
_PIXELS_PER_POINT = 2  # pictures are drawn at twice the page's resolution, so that they are sharp on fine screens
_INTERVAL = re.compile(r" \[[^\[\]]+\]$")  # behind a number: its ends
_NUMBER = re.compile(r"[-+−±<>≈]?\s?\d[\d.,   ]*(e[-+−]?\d+)?\s?(%|×|dB|s|ms|MB|B)?")
_SHARE = re.compile(r"\d[\d,]* of \d[\d,]*")  # 59 of 64
_NEXT = re.compile(r"(?<=[^.\s]{2}[.!?]) (?=[A-Z\d`])|\n\s*\n")  # where a second sentence begins


@dataclass
class Section:
    """A heading and what stands under it, in the order it was added. Methods return the section itself.

    look: "" as it is, "box" in a frame of its own, "fold" shown when the reader opens it. pictures: PNG files that are
    kept beside the page too, by name; those of all sections of a page.
    """

    title: str
    blocks: list[Markup] = field(default_factory=list)
    pictures: dict[str, bytes] = field(default_factory=dict)
    look: Literal["", "box", "fold"] = ""

    def text(self, text: str) -> Section:
        """Paragraphs, apart by blank lines."""
        for part in re.split(r"\n\s*\n", text.strip()):
            self._add("paragraph", part.strip())
        return self

    def note(self, *texts: str) -> Section:
        """Remarks set apart: what a reader must not overlook."""
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
        """Words in a row, each with its mark: "right", "wrong", "missing", or "" for none."""
        return self._add("words", words, caption)

    def fold(self, summary: str, held: Section) -> Section:
        """What `held` holds, shown when the reader opens it."""
        return self._add("fold", summary, Markup("\n").join(held.blocks)) if held.blocks else self

    def bars(
        self, values: Mapping[str, float] | Mapping[str, tuple[float, Tone]], unit: str, caption: str = ""
    ) -> Section:
        """Bars by name with their numbers, from 0 to the largest; to 100 where the unit is %."""
        told = {name: value if isinstance(value, tuple) else (value, "") for name, value in values.items()}
        top = 100.0 if unit == "%" else max([value for value, _ in told.values() if value > 0], default=1.0)
        rows = [
            (name, _figures(value), max(0.0, min(100.0, 100 * value / top)), tone)
            for name, (value, tone) in list(told.items())[:MOST_BARS]
        ]
        if len(told) > MOST_BARS:
            caption = f"{caption} {len(told) - MOST_BARS} more stand in the tables below.".strip()
        said = "; ".join(f"{name}: {figures} {unit}".strip() for name, figures, *_ in rows)
        return self._add("bars", rows, unit, caption, said.replace("`", "")) if rows else self

    def table(self, header: Sequence[str], rows: Sequence[Sequence[Cell]], caption: str = "") -> Section:
        """A table; columns of numbers, of numbers [with, intervals] and of shares (59 of 64) are set flush right.

        A long one is folded under its caption. A cell that opens with the sign of a verdict has its colour.
        """
        for row in rows:
            if len(row) != len(header):
                raise SitusError(f"a table row has {len(row)} cells and the header {len(header)}: {list(row)!r}")
        numeric = [_is_numeric([row[i] for row in rows]) for i in range(len(header))]
        return self._add("table", header, rows, numeric, caption, len(rows) >= LONG_TABLE)

    def figure(self, picture: bytes | Figure, caption: str, alt: str = "", *, name: str = "") -> Section:
        """A matplotlib figure, or a PNG or SVG file's bytes, with its caption.

        alt: for who cannot see it, else the caption. name: keeps a PNG as a file beside the page too.
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
    """A thing that was found: in one sentence, one number, a few words and its picture. link: (words, section)."""

    title: str
    number: str
    of: str
    text: str
    picture: Section
    link: tuple[str, str] | None = None


@dataclass
class Page:
    """A page: its first screen (what it is of, verdict, numbers, picture), findings, sections, a closing line.

    title: what is looked at. lead: what was found, of which the first sentence is the headline. notice: what must be
    seen before all else. opening: the picture. pictures: those of its figures that have a name.
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
        """What the page comes to: its tone, and the two or three words that say it without colour."""
        self.tone, self.mark = tone, mark
        return self

    def number(self, value: Cell, of: str) -> Page:
        """One of the few numbers on the first screen, the most important one first."""
        self.numbers.append((show(value), of))
        return self

    @property
    def headline(self) -> tuple[str, list[str]]:
        """The first sentence, or the title where there is none, and the paragraphs that follow it."""
        first, *rest = _NEXT.split(self.lead.strip(), maxsplit=1)
        return first or self.title, re.split(r"\n\s*\n", rest[0]) if rest else []

    def section(self, title: str, look: Literal["", "box", "fold"] = "") -> Section:
        """Opens a new section at the end."""
        self.sections.append(Section(title, pictures=self.pictures, look=look))
        return self.sections[-1]

    def box(self, title: str) -> Section:
        """Opens a section in a frame of its own: what the attacker had, what would help."""
        return self.section(title, "box")

    def fold(self, title: str) -> Section:
        """Opens a section that is shown when the reader opens it."""
        return self.section(title, "fold")

    def end(self, facts: Mapping[str, Cell], meaning: str = "") -> Page:
        """The last sections: what the numbers mean, where that needs words, and how they were made."""
        if meaning:
            self.fold("What the numbers mean").text(meaning)
        if facts:
            self.fold("How this page was made").facts(facts)
        return self

    def reword(self, word: Callable[[str], str]) -> None:
        """All its text in other words; `word` leaves markup and the pictures as they are."""
        self.title, self.lead, self.notice, self.footer = map(word, (self.title, self.lead, self.notice, self.footer))
        self.mark, self.numbers = word(self.mark), [(word(value), word(of)) for value, of in self.numbers]
        for section in (self.opening, *self.sections):
            section.title = word(section.title)
            section.blocks = [Markup(word(str(block))) for block in section.blocks]  # noqa: S704  (escaped before)

    def render(self) -> str:
        """The whole page; sections under which nothing came are left out."""
        self.sections = [section for section in self.sections if section.blocks]
        return _templates().get_template("page.html.jinja").render(page=self)

    def write(self, path: Path | str, *, private: bool = False) -> Path:
        """Writes the page under a temporary name and renames it; makes the folder where it is missing.

        private: so that nobody but its owner can read it (mode 0600).
        """
        return write_result(Path(path), self.render().encode(), private=private)


@cache
def _templates() -> Environment:
    folder = FileSystemLoader(Path(__file__).parent)
    made = Environment(loader=folder, autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    made.filters |= {"inline": _inline, "show": show, "anchor": _anchor}
    made.globals |= {"signs": SIGNS}
    return made


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
    """A number on a bar: a tenth is enough of what is large."""
    whole = isinstance(value, int) or abs(value) >= 1000
    return f"{value:,.0f}" if whole else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def _data_uri(picture: bytes) -> str:
    # An SVG goes into an image too, not into the page: its ids cannot clash there and its scripts do not run.
    if picture.startswith(_PNG):
        kind, picture = _smaller(picture) if len(picture) > _LARGE else ("image/png", picture)
    elif b"<svg" in picture[:1000]:
        kind = "image/svg+xml"
    else:
        raise SitusError(f"a figure must be the bytes of a PNG or an SVG file; these begin with {picture[:8]!r}")
    return f"data:{kind};base64,{base64.b64encode(picture).decode('ascii')}"


def _smaller(picture: bytes) -> tuple[str, bytes]:
    """A large PNG as WebP: without loss where that is small, else at a quality whose loss no eye sees.

    Every number of a page is computed from the arrays, never from what is drawn here.
    """
    from PIL import Image, features

    if not features.check("webp"):
        return "image/png", picture
    for given in ({"lossless": True, "method": 2}, {"quality": 90, "method": 4}):
        held = io.BytesIO()
        Image.open(io.BytesIO(picture)).convert("RGB").save(held, "webp", **given)
        if held.tell() <= _LARGE:
            break
    return min(("image/webp", held.getvalue()), ("image/png", picture), key=lambda each: len(each[1]))


def _size(picture: bytes) -> tuple[int, int] | None:
    """Width and height of a PNG on the page (bytes 16 to 24 of the file), so that nothing jumps."""
    if not picture.startswith(_PNG):
        return None
    width, height = (int.from_bytes(picture[start : start + 4], "big") for start in (16, 20))
    return width // _PIXELS_PER_POINT, height // _PIXELS_PER_POINT
