"""Headline figures, written once in figures.toml (or a study's `ours`) and filled into README.md and the pages.

.venv/bin/python docs/make_figures.py            writes figures between their markers, and the table of docs/results.md
.venv/bin/python docs/make_figures.py --check    says what differs or was typed by hand, and exits with 1 if anything
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

DOCS = Path(__file__).resolve().parent
STUDIES = DOCS.parent / "src" / "situs" / "studies" / "papers"
MARKED = re.compile(r"<!--f:([a-z0-9-]+)(?::(\d))?-->(.*?)<!--/f-->", flags=re.DOTALL)
TABLE = re.compile(r"(<!--figures-->\n).*?(<!--/figures-->)", flags=re.DOTALL)
UNITS = ("%", "dB", "img/s", "images/s", "s", "ms", "GiB", "px", "points", "patches", "MiB", "MB", "µs")
BREAKS = re.compile(r"^\s*(?:[-*+>]|\d+\.)?\s*(<!--f:[a-z0-9-]+)", flags=re.MULTILINE)
"""A comment at the start of a line ends the paragraph: Markdown takes it for a block of HTML."""
STRICT = ("README.md", "docs/results.md", "docs/gradients_for_managers.md", "docs/which_method.md")
"""Pages on which every percentage, decibel and "N of M" must come from figures.toml."""


class Figure(NamedTuple):
    """number: what a study holds, for a marker that asks for other digits. short: too common a text to look for."""

    value: str
    unit: str
    shows: str
    number: float | None = None
    short: bool = False


class Run(NamedTuple):
    title: str
    page: str
    command: str
    machine: str
    day: str
    figures: dict[str, Figure]


def load() -> list[Run]:
    """Every run with its figures, those of a study with its command, machine and day."""
    entries = tomllib.loads((DOCS / "figures.toml").read_text(encoding="utf-8"))["runs"]
    return [_run(entry) for entry in entries]


def _run(entry: dict[str, Any]) -> Run:
    study = {}
    if "study" in entry:
        study = tomllib.loads((STUDIES / f"{entry['study']}.toml").read_text(encoding="utf-8"))
        entry = {
            "command": f"situs study run {entry['study']}",
            "machine": study["measured"]["machine"],
            "day": study["measured"]["date"],
        } | entry
    figures: dict[str, Figure] = {}
    for each in entry["figures"]:
        unit, shows, digits = each.get("unit", ""), each["shows"], each.get("digits", 1)
        source = each.get("seeds")
        if "row" in each:
            source = _ours(study, each["row"], each["column"], each.get("table"))
        number = mean(source) if isinstance(source, list) else source
        if isinstance(source, list):
            spread = f"{stdev(source):.2f}".lstrip("0")
            figures[f"{each['name']}-spread"] = Figure(f"{number:.2f} ± {spread}", unit, shows)
        value = each["value"] if number is None else f"{number:.{digits}f}"
        figures[each["name"]] = Figure(value, unit, shows, number, each.get("short", False))
    return Run(*(entry[key] for key in ("title", "page", "command", "machine", "day")), figures)


def _ours(study: dict[str, Any], row: str, column: str | int, number: int | None) -> float | list[float]:
    """The figure in this row and column (by name, or counted from 1) of a table; number None: of the one with both."""
    hits = [
        each["ours"][index]
        for at, table in enumerate(study["tables"], start=1)
        if number in (None, at)
        for each in table["rows"]
        for index, head in enumerate(table["columns"])
        if each["name"] == row and column in (head["name"], index + 1) and "ours" in each
    ]
    if len(hits) != 1:
        raise SystemExit(f"figures.toml: {len(hits)} cells of {study['title']!r} are called {row!r}, {column!r}")
    return hits[0]


def by_name(runs: list[Run]) -> dict[str, Figure]:
    names = [name for run in runs for name in run.figures]
    if twice := {name for name in names if names.count(name) > 1}:
        raise SystemExit(f"figures.toml: named twice: {', '.join(sorted(twice))}")
    return {name: figure for run in runs for name, figure in run.figures.items()}


def table(runs: list[Run]) -> str:
    """The headline figures, a row for each run."""
    lines = ["| measured | figures |", "|---|---|"]
    for run in runs:
        shown = [
            f"{figure.shows}: {text}"
            for name, figure in run.figures.items()
            if (text := f"**{figure.value}{f' {figure.unit}' if figure.unit else ''}**")
            and name + "-spread" not in run.figures
        ]
        lines.append(f"| [{run.title}]({run.page}) | {'; '.join(shown)} |")
    return "\n".join(lines) + "\n"


def filled(text: str, runs: list[Run]) -> str:
    """A page with every marker's figure, and the table of all where the page asks for it."""
    figures = by_name(runs)

    def fill(match: re.Match[str]) -> str:
        name, digits, _ = match.groups()
        if name not in figures:
            raise SystemExit(f"figures.toml has no {name!r}")
        figure = figures[name]
        value = figure.value
        if digits is not None:
            if figure.number is None:
                raise SystemExit(
                    f"{name}:{digits}: only a number of a study or of seeds can be asked for in other digits"
                )
            value = f"{figure.number:.{digits}f}"
        return match[0].replace(f"-->{match[3]}<!--", f"-->{value}<!--")

    text = MARKED.sub(fill, text)
    return TABLE.sub(lambda match: match[1] + table(runs) + match[2], text)


def typed(text: str, runs: list[Run], *, strict: bool = False, tables: bool = True) -> Iterator[str]:
    """Figures of a page that stand outside of a marker; strict: also any other percentage, decibel or "N of M".

    tables: False for the pages of docs/results, whose tables hold many other numbers, some of them equal by chance.
    """
    text = TABLE.sub("", text)
    text = text if tables else re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "", MARKED.sub("<figure>", text))
    others = {unit: "|".join(map(re.escape, [each for each in UNITS if each != unit])) for unit in ("", *UNITS)}
    for name, figure in by_name(runs).items():
        if not figure.short:
            other = rf"(?!\s(?:{others.get(figure.unit, others[''])})(?!\w))"
            for match in re.finditer(rf"(?<![\d.,]){re.escape(figure.value)}(?![\d]|[.,]\d){other}", text):
                line = text[: match.start()].count("\n")
                yield f"{match[0]} ({name}) in: {text.splitlines()[line][:100]}"
    if strict:
        for match in re.finditer(r"(?<![\w=.])[\d,.]*\d (?:%|dB\b|of \d)", text):
            line = text[: match.start()].count("\n")
            yield f"{match[0]} in: {text.splitlines()[line][:100]}"


def missing(runs: list[Run]) -> Iterator[tuple[str, str]]:
    """Figures that their own page does not take from here, and those pages."""
    for run in runs:
        marked = {match[0] for match in MARKED.findall((DOCS / run.page.partition("#")[0]).read_text(encoding="utf-8"))}
        for name in run.figures:
            if not marked & {name.removesuffix("-spread"), f"{name.removesuffix('-spread')}-spread"}:
                yield name, run.page


def pages() -> list[Path]:
    found = [page for page in sorted(DOCS.rglob("*.md")) if "_build" not in page.parts]
    return [DOCS.parent / "README.md", *found]


def add_figures(app: object, name: str, source: list[str]) -> None:
    """Sphinx's event `source-read`: a page is built with the figures of today's figures.toml."""
    source[0] = filled(source[0], load())


def main(arguments: list[str]) -> int:
    runs, mistakes, markers = load(), [], 0
    for page in pages():
        text, name = page.read_text(encoding="utf-8"), page.relative_to(DOCS.parent).as_posix()
        new = filled(text, runs)
        markers += len(MARKED.findall(text))
        mistakes += [
            f"{name}: typed by hand: {each}"
            for each in typed(new, runs, strict=name in STRICT, tables=not name.startswith("docs/results/"))
        ]
        mistakes += [f"{name}: {each}: a marker must not begin a line" for each in BREAKS.findall(new)]
        if new != text and "--check" in arguments:
            mistakes.append(f"{name}: differs from figures.toml")
        elif new != text:
            page.write_text(new, encoding="utf-8")
            print(f"wrote {name}")
    mistakes += [f"{page}: has no {name}, whose page it is" for name, page in missing(runs)]
    print("\n".join([*mistakes, f"{len(by_name(runs))} figures, {markers} places"]))
    return 1 if mistakes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
