"""Sphinx: furo, MyST pages, and the API reference from the docstrings."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import situs

sys.path.insert(0, str(Path(__file__).parent))
from make_figures import add_figures
from make_reference import add_tables

project = "Situs"
author = "the Situs authors"
copyright = "the Situs authors, Apache-2.0"  # noqa: A001 - Sphinx's own name
release = version = situs.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"Situs {release}"
html_static_path = ["_static"]
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_typehints = "signature"
suppress_warnings = ["ref.python"]  # a type's short name in a signature, where several modules have one of that name

CODE = re.compile(r"`([^`]+)`")
EMPHASIS = re.compile(r"(?<![\w*\\])\*(\w[^*]*\w|\w)\*(?![\w*])")


def to_rst(line: str) -> str:
    """A line of our docstrings (text, `code`, *stress*) as reStructuredText; shapes like [B, *s] stay."""
    parts = CODE.split(line)
    for i in range(0, len(parts), 2):
        texts = EMPHASIS.split(parts[i])
        texts[::2] = [re.sub(r"([*|]|_\b)", r"\\\1", text) for text in texts[::2]]
        parts[i] = "".join(f"*{text}*" if j % 2 else text for j, text in enumerate(texts))
    return "".join(f"``{part}``" if i % 2 else part for i, part in enumerate(parts))


def process_docstring(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Our docstrings are written to be read in the source; here they become reStructuredText.

    An indented paragraph is a drawing and stays as it is; everything else is text.
    """
    out: list[str] = []
    drawing = False
    for line in lines:
        indented = line.startswith("    ")
        if indented and not drawing and (not out or not out[-1].strip()):
            out += ["::", ""]
            drawing = True
        elif line.strip() and not indented:
            drawing = False
        out.append(line if drawing else to_rst(line))
    lines[:] = out


def setup(app: object) -> None:
    app.connect("autodoc-process-docstring", process_docstring)  # type: ignore[attr-defined]
    app.connect("source-read", add_tables)  # type: ignore[attr-defined]
    app.connect("source-read", add_figures)  # type: ignore[attr-defined]
