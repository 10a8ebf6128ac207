"""One self-contained HTML page: text, tables, facts, code and pictures; no script, and nothing fetched.

    page = Page("Demo", lead="What exists.")
    section = page.section("Patches")
    section.text("Each image is cut in `7×7` patches.")
    section.table(["γ", "masked"], [[0.15, 7], [0.5, 24]])
    section.figure(png_bytes, caption="The cut.")
    page.write(path)

Everything given is text and is escaped, with one exception for ease of writing: `backticks` become code. The
page adds no date and no path of its own, so the same results give the same bytes.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from situs.config import write_text
from situs.errors import SitusError
from situs.report.style import CSS

Cell = str | int | float | bool | None
"""What a table or a list of facts may hold; None is shown as a dash."""

_PNG = b"\x89PNG\r\n\x1a\n"
_PIXELS_PER_POINT = 2  # pictures are drawn at twice the page's resolution, so that they are sharp on fine screens
_INTERVAL = re.compile(r" \[[^\[\]]+\]$")  # behind a number: its ends
_NUMBER = re.compile(r"[-+−±<>≈]?\s?\d[\d.,   ]*(e[-+−]?\d+)?\s?(%|×|dB|s|ms|MB|B)?")
_SHARE = re.compile(r"\d[\d,]* of \d[\d,]*")  # 59 of 64


@dataclass
class Section:
    """A heading and what stands under it, in the order it was added. Methods return the section itself."""

    title: str
    blocks: list[str] = field(default_factory=list)

    def text(self, text: str) -> Section:
        """Paragraphs, apart by blank lines."""
        self.blocks += [f"<p>{_inline(part.strip())}</p>" for part in re.split(r"\n\s*\n", text.strip())]
        return self

    def note(self, text: str) -> Section:
        """A remark set apart: what a reader must not overlook."""
        return self._add(f'<p class="note">{_inline(text.strip())}</p>')

    def facts(self, facts: Mapping[str, Cell]) -> Section:
        """A list of names and values."""
        rows = "".join(f"<dt>{_inline(name)}</dt><dd>{_inline(show(value))}</dd>" for name, value in facts.items())
        return self._add(f"<dl>{rows}</dl>")

    def code(self, code: str) -> Section:
        """Verbatim lines."""
        return self._add(f"<pre><code>{html.escape(code.strip(chr(10)))}</code></pre>")

    def fold(self, summary: str, code: str) -> Section:
        """Verbatim lines that are shown when the reader opens them."""
        lines = f"<pre><code>{html.escape(code.strip(chr(10)))}</code></pre>"
        return self._add(f"<details><summary>{_inline(summary)}</summary>{lines}</details>")

    def table(self, header: Sequence[str], rows: Sequence[Sequence[Cell]], caption: str = "") -> Section:
        """A table; columns of numbers, of numbers [with, intervals] and of shares (59 of 64) are set flush right."""
        for row in rows:
            if len(row) != len(header):
                raise SitusError(f"a table row has {len(row)} cells and the header {len(header)}: {list(row)!r}")
        kinds = [' class="number"' if _is_numeric([row[i] for row in rows]) else "" for i in range(len(header))]
        head = _cells("th", header, [f' scope="col"{kind}' for kind in kinds])
        body = "".join(f"<tr>{_cells('td', row, kinds)}</tr>" for row in rows)
        title = f"<caption>{_inline(caption)}</caption>" if caption else ""
        table = f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return self._add(f'<div class="wide">{table}</div>')

    def figure(self, picture: bytes, caption: str, alt: str = "") -> Section:
        """A PNG or SVG file's bytes with its caption. alt: for who cannot see it, else the caption."""
        alt = html.escape(alt or caption.replace("`", ""), quote=True)
        image = f'<img src="{_data_uri(picture)}" alt="{alt}"{_size(picture)}>'
        return self._add(f"<figure>{image}<figcaption>{_inline(caption)}</figcaption></figure>")

    def _add(self, block: str) -> Section:
        self.blocks.append(block)
        return self


@dataclass
class Page:
    """A page: title, an opening sentence, what must be seen before all else, sections, a closing line."""

    title: str
    lead: str = ""
    notice: str = ""
    footer: str = ""
    sections: list[Section] = field(default_factory=list)

    def section(self, title: str) -> Section:
        """Opens a new section at the end."""
        self.sections.append(Section(title))
        return self.sections[-1]

    def render(self) -> str:
        """The whole page."""
        title = html.escape(self.title)
        lead = f'<p class="lead">{_inline(self.lead)}</p>' if self.lead else ""
        notice = f'<p class="note">{_inline(self.notice)}</p>' if self.notice else ""
        footer = f"<footer><p>{_inline(self.footer)}</p></footer>" if self.footer else ""
        body = "\n".join(_section(section, number) for number, section in enumerate(self.sections, start=1))
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<meta name="color-scheme" content="light dark">\n'
            f"<title>{title}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
            f"<header><h1>{title}</h1>{lead}{notice}</header>\n{_contents(self.sections)}{body}\n{footer}\n"
            "</main>\n</body>\n</html>\n"
        )

    def write(self, path: Path | str, *, private: bool = False) -> Path:
        """Writes the page under a temporary name and renames it; makes the folder where it is missing.

        private: so that nobody but its owner can read it (mode 0600).
        """
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, self.render(), private=private)
        except OSError as error:
            raise SitusError(f"{path}: cannot be written ({error.strerror or error}) (--out)") from error
        return path


def show(value: Cell) -> str:
    """A value as the page shows it: four significant digits for a float, yes or no, a dash for nothing."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return value


def _inline(text: str) -> str:
    """Escaped text with `code` marked up; backticks hold no markup because the escaping comes first."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))


def _is_numeric(column: Sequence[Cell]) -> bool:
    shown = [show(cell) for cell in column if cell is not None]
    return bool(shown) and all(_NUMBER.fullmatch(_INTERVAL.sub("", text)) or _SHARE.fullmatch(text) for text in shown)


def _cells(tag: str, cells: Sequence[Cell], attributes: Sequence[str]) -> str:
    pairs = zip(cells, attributes, strict=True)
    return "".join(f"<{tag}{attribute}>{_inline(show(cell))}</{tag}>" for cell, attribute in pairs)


def _anchor(section: Section, number: int) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-")
    return f"s{number}-{words}" if words else f"s{number}"


def _section(section: Section, number: int) -> str:
    blocks = "\n".join(section.blocks)
    return f'<section id="{_anchor(section, number)}">\n<h2>{_inline(section.title)}</h2>\n{blocks}\n</section>'


def _contents(sections: Sequence[Section]) -> str:
    """Links to the sections; a page of one or two needs none."""
    if len(sections) < 3:
        return ""
    links = (f'<li><a href="#{_anchor(s, i)}">{_inline(s.title)}</a></li>' for i, s in enumerate(sections, start=1))
    return f'<nav aria-label="Contents"><ol>{"".join(links)}</ol></nav>\n'


def _data_uri(picture: bytes) -> str:
    # An SVG goes into an image too, not into the page: its ids cannot clash there and its scripts do not run.
    if picture.startswith(_PNG):
        kind = "image/png"
    elif b"<svg" in picture[:1000]:
        kind = "image/svg+xml"
    else:
        raise SitusError(f"a figure must be the bytes of a PNG or an SVG file; these begin with {picture[:8]!r}")
    return f"data:{kind};base64,{base64.b64encode(picture).decode('ascii')}"


def _size(picture: bytes) -> str:
    """Width and height of a PNG on the page (bytes 16 to 24 of the file), so that nothing jumps."""
    if not picture.startswith(_PNG):
        return ""
    width, height = (int.from_bytes(picture[start : start + 4], "big") for start in (16, 20))
    return f' width="{width // _PIXELS_PER_POINT}" height="{height // _PIXELS_PER_POINT}"'
