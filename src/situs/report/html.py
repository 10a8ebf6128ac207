"""One self-contained HTML page: text, tables, facts, code and pictures; no script, and nothing fetched.

    page = Page("Demo", lead="What exists.")
    section = page.section("Patches")
    section.text("Each image is cut in `7×7` patches.")
    section.table(["γ", "masked"], [[0.15, 7], [0.5, 24]])
    section.figure(png_bytes, caption="The cut.")
    page.write(path)

`page.html.jinja` is its skeleton, `blocks.html.jinja` what stands in a section, `page.css` its style sheet. Everything
given is text and is escaped, with one exception for ease of writing: `backticks` become code. The page adds no date and
no path of its own, so the same results give the same bytes.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from situs.errors import SitusError
from situs.files import write_result
from situs.results import Cell, show

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PNG = b"\x89PNG\r\n\x1a\n"
_PIXELS_PER_POINT = 2  # pictures are drawn at twice the page's resolution, so that they are sharp on fine screens
_INTERVAL = re.compile(r" \[[^\[\]]+\]$")  # behind a number: its ends
_NUMBER = re.compile(r"[-+−±<>≈]?\s?\d[\d.,   ]*(e[-+−]?\d+)?\s?(%|×|dB|s|ms|MB|B)?")
_SHARE = re.compile(r"\d[\d,]* of \d[\d,]*")  # 59 of 64


@dataclass
class Section:
    """A heading and what stands under it, in the order it was added. Methods return the section itself.

    pictures: PNG files that are kept beside the page too, by name; those of all sections of a page.
    """

    title: str
    blocks: list[Markup] = field(default_factory=list)
    pictures: dict[str, bytes] = field(default_factory=dict)

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

    def fold(self, summary: str, code: str) -> Section:
        """Verbatim lines that are shown when the reader opens them."""
        return self._add("fold", summary, code.strip("\n"))

    def table(self, header: Sequence[str], rows: Sequence[Sequence[Cell]], caption: str = "") -> Section:
        """A table; columns of numbers, of numbers [with, intervals] and of shares (59 of 64) are set flush right."""
        for row in rows:
            if len(row) != len(header):
                raise SitusError(f"a table row has {len(row)} cells and the header {len(header)}: {list(row)!r}")
        numeric = [_is_numeric([row[i] for row in rows]) for i in range(len(header))]
        return self._add("table", header, rows, numeric, caption)

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
class Page:
    """A page: title, an opening sentence, what must be seen before all else, sections, a closing line.

    pictures: those of its figures that have a name.
    """

    title: str
    lead: str = ""
    notice: str = ""
    footer: str = ""
    sections: list[Section] = field(default_factory=list)
    pictures: dict[str, bytes] = field(default_factory=dict)

    def section(self, title: str) -> Section:
        """Opens a new section at the end."""
        self.sections.append(Section(title, pictures=self.pictures))
        return self.sections[-1]

    def end(self, facts: Mapping[str, Cell], meaning: str = "") -> Page:
        """The last sections: what the numbers mean, where that needs words, and how they were made."""
        if meaning:
            self.section("What the numbers mean").text(meaning)
        self.section("How this page was made").facts(facts)
        return self

    def reword(self, word: Callable[[str], str]) -> None:
        """All its text in other words; `word` leaves markup and the pictures as they are."""
        self.title, self.lead, self.notice, self.footer = map(word, (self.title, self.lead, self.notice, self.footer))
        for section in self.sections:
            section.title = word(section.title)
            section.blocks = [Markup(word(str(block))) for block in section.blocks]  # noqa: S704  (escaped before)

    def render(self) -> str:
        """The whole page."""
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


def _data_uri(picture: bytes) -> str:
    # An SVG goes into an image too, not into the page: its ids cannot clash there and its scripts do not run.
    if picture.startswith(_PNG):
        kind = "image/png"
    elif b"<svg" in picture[:1000]:
        kind = "image/svg+xml"
    else:
        raise SitusError(f"a figure must be the bytes of a PNG or an SVG file; these begin with {picture[:8]!r}")
    return f"data:{kind};base64,{base64.b64encode(picture).decode('ascii')}"


def _size(picture: bytes) -> tuple[int, int] | None:
    """Width and height of a PNG on the page (bytes 16 to 24 of the file), so that nothing jumps."""
    if not picture.startswith(_PNG):
        return None
    width, height = (int.from_bytes(picture[start : start + 4], "big") for start in (16, 20))
    return width // _PIXELS_PER_POINT, height // _PIXELS_PER_POINT
