"""No file of the package imports another in a circle, not even for its types alone."""

from __future__ import annotations

import re
from pathlib import Path

SRC = Path(__file__).resolve().parents[1] / "src"


def names_of(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts)


IMPORT = re.compile(r"^ *(?:import (situs[\w.]*)|from (situs[\w.]*) import (\([^)]*\)|[^\n]*))", re.MULTILINE)
"""An import of ours, anywhere in a file: to parse all files takes seconds."""


def imports(path: Path, modules: set[str]) -> set[str]:
    """The files that a file imports, wherever in it; what an `__init__` gives is looked up there."""
    found = set()
    for whole, module, names in IMPORT.findall(path.read_text(encoding="utf-8")):
        found |= {whole or module, *(f"{module}.{name}" for name in re.findall(r"\w+", names))}
    return found & modules - {names_of(path)}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Files that reach one another, largest first (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            part = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(part) > 1:
                found.append(sorted(part))

    for name in graph:
        if name not in index:
            visit(name)
    return sorted(found, key=len, reverse=True)


def test_no_files_import_one_another_in_a_circle() -> None:
    files = [path for path in (SRC / "situs").rglob("*.py") if path.name != "__init__.py"]
    modules = {names_of(path) for path in files}
    assert circles({names_of(path): imports(path, modules) for path in files}) == []


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
