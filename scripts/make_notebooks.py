"""Makes the notebooks of the tutorials from examples/*.py: python scripts/make_notebooks.py

A notebook has no outputs. Comments that open a paragraph become headings, the command line's flags become one cell of
settings, and what a script prints of a result is shown as its page.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TUTORIALS = ("pretrain_on_my_images", "audit_my_model", "lock_my_model", "use_the_features", "add_a_method")
NOTEBOOKS = ROOT / "examples" / "notebooks"

HEADING = re.compile(r"# (?:\d+\. )?(.+)")
SENTENCE = re.compile(r"print\((\w+)\.summary\(\)\.sentence\)")
RESULT = re.compile(r"print\((\w+|situs\.\w+\(.*\))\)", re.DOTALL)


def notebook(path: Path) -> str:
    """The notebook of a script, as the text of its file."""
    source = path.read_text(encoding="utf-8")
    title = (ast.get_docstring(ast.parse(source)) or "").splitlines()[0].partition(" python ")[0].rstrip(":")
    package = "situs[locks]" if "situs.lock(" in source else "situs"
    first = f"# {title}\n\nMade of `examples/{path.name}`. It needs `pip install '{package}'`."
    cells = [markdown(first), *(cell for block in blocks(source) for cell in cells_of(block))]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    document = {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def blocks(source: str) -> Iterator[str]:
    """The code in parts: one at each comment that opens a paragraph, and one for each class and for the settings."""
    lines = source.splitlines()
    body = ast.parse(source).body[1:]  # without the docstring
    starts = {number for number, line in enumerate(lines) if line.startswith("# ") and not lines[number - 1]}
    settings = [node for node in body if ast.unparse(node).startswith(("parser", "args = parser"))]
    for first, last in [(node, node) for node in body if isinstance(node, ast.ClassDef)] + [
        (settings[0], settings[-1])
    ]:
        decorators = [decorator.lineno for decorator in getattr(first, "decorator_list", ())]
        starts |= {min([first.lineno, *decorators]) - 1, last.end_lineno or last.lineno}
    edges = sorted(starts | {body[0].lineno - 1, len(lines)})
    for start, end in pairwise(edges):
        if block := "\n".join(lines[start:end]).strip("\n"):
            yield block


def cells_of(block: str) -> Iterator[dict[str, Any]]:
    """The heading of a part, where it opens with a comment, and its code."""
    head, _, rest = block.partition("\n")
    if heading := HEADING.fullmatch(head):
        yield markdown(f"## {heading[1]}")
        block = rest
    if block.startswith("parser ="):
        block = settings_of(block)
    block = block.replace("import argparse\n", "")
    code = "\n".join(shown(statement) for statement in statements(block)).strip("\n")
    yield {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": as_lines(code)}


def statements(block: str) -> Iterator[str]:
    """Each statement of a part with the blank lines and comments before it."""
    lines, start = block.splitlines(), 0
    for node in ast.parse(block).body:
        end = node.end_lineno or node.lineno
        yield "\n".join(lines[start:end])
        start = end
    yield "\n".join(lines[start:])


def shown(statement: str) -> str:
    """A printed result as a displayed one; every other statement as it is."""
    code = statement.lstrip("\n")
    blank = statement.removesuffix(code)
    if result := SENTENCE.fullmatch(code) or RESULT.fullmatch(code):
        return f"{blank}display({result[1]})"
    return statement


def settings_of(block: str) -> str:
    """The flags as values that a reader changes."""
    rows = ["from types import SimpleNamespace", "", "args = SimpleNamespace("]
    for call in (node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)):
        if not ast.unparse(call.func).endswith("add_argument"):
            continue
        options = {option.arg: option.value for option in call.keywords}
        name = ast.literal_eval(call.args[0]).removeprefix("--")
        value = ast.unparse(options["default"]) if "default" in options else "None"
        about = f"  # {ast.literal_eval(options['help'])}" if "help" in options else ""
        rows.append(f"    {name}={value.replace(chr(39), chr(34))},{about}")
    return "\n".join([*rows, ")"])


def markdown(text: str) -> dict[str, Any]:
    """A cell of text."""
    return {"cell_type": "markdown", "metadata": {}, "source": as_lines(text)}


def as_lines(text: str) -> list[str]:
    """Text as a notebook's file has it."""
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; the status is 1 where one is out of date")
    args = parser.parse_args()
    stale = []
    for name in TUTORIALS:
        file, text = NOTEBOOKS / f"{name}.ipynb", notebook(ROOT / "examples" / f"{name}.py")
        if args.check and (not file.is_file() or file.read_text(encoding="utf-8") != text):
            stale.append(file.name)
        elif not args.check:
            NOTEBOOKS.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
    sys.exit(f"out of date: {', '.join(stale)}" if stale else 0)
