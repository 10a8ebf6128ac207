"""Names that say nothing: how often src binds one, by file.

python tests/names.py [FOLDER]
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

EMPTY = frozenset({"found", "said", "told", "own", "held", "given", "made"})
_ONE = f"(?:{'|'.join(sorted(EMPTY))})"
MAY_BIND = re.compile(rf"\b{_ONE}\s*(?:[=:,)\]]|in\b|[^\w\s]{{1,2}}=)|\b(?:def|class)\s+{_ONE}\b")
"""Files without a match bind none of these names: to parse them all takes seconds."""


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
    counts: Counter[Path] = Counter()
    for file in sorted(folder.rglob("*.py")):
        text = file.read_text()
        counts[file] = sum(name in EMPTY for name in bound(ast.parse(text))) if MAY_BIND.search(text) else 0
    return counts


if __name__ == "__main__":
    counts = count(Path(sys.argv[1] if len(sys.argv) > 1 else "src"))
    for file, number in counts.most_common():
        if number:
            print(f"{number:4} {file}")
    print(f"{counts.total():4} in all")
