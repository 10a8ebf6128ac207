"""Names that say nothing: how often src binds one, by file.

python tests/names.py [FOLDER]
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

EMPTY = frozenset({"found", "said", "told", "own", "held", "given", "made"})


def bound(tree: ast.AST) -> Iterator[str]:
    """Every name that a module binds: variables, attributes, parameters, functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name


def count(folder: Path) -> Counter[Path]:
    """How many empty names each file binds."""
    files = sorted(folder.rglob("*.py"))
    return Counter({file: sum(name in EMPTY for name in bound(ast.parse(file.read_text()))) for file in files})


if __name__ == "__main__":
    counts = count(Path(sys.argv[1] if len(sys.argv) > 1 else "src"))
    for file, number in counts.most_common():
        if number:
            print(f"{number:4} {file}")
    print(f"{counts.total():4} in all")
