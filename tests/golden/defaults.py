"""The defaults of every config: what somebody gets who sets nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path

import situs
from situs.config import Checked

ROOT = Path(situs.__file__).parent


def configs() -> Iterator[type[Checked]]:
    """Every config that Situs itself defines, by its place."""
    for path in sorted(ROOT.rglob("*.py")):
        if "(Checked" in path.read_text(encoding="utf-8"):
            parts = ("situs", *path.relative_to(ROOT).with_suffix("").parts)
            import_module(".".join(part for part in parts if part != "__init__"))
    kinds = list(Checked.__subclasses__())
    for kind in kinds:
        kinds += [other for other in kind.__subclasses__() if other not in kinds]
    for kind in kinds:
        if kind.__module__.startswith("situs.") and vars(import_module(kind.__module__)).get(kind.__name__) is kind:
            yield kind


def record() -> dict[str, str]:
    """Class and field -> the default, as Python writes it."""
    return {
        f"{kind.__module__}.{kind.__qualname__}.{field.name}": repr(field.default)
        for kind in configs()
        for field in fields(kind)
        if field.default is not MISSING
    }
