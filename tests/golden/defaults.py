"""The defaults of every config and of every flag beside them: what somebody gets who sets nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import situs
from situs.cli.main import VERBS, verb_type
from situs.cli.parser.flags import flags_of
from situs.config import Checked

ROOT = Path(situs.__file__).parent


def configs() -> Iterator[type[Checked]]:
    """Every config that Situs itself defines, by its place."""
    files = {path: path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}
    kinds = [Checked]
    for kind in kinds:
        for path, text in files.items():
            if f"({kind.__name__}" in text:
                parts = ("situs", *path.relative_to(ROOT).with_suffix("").parts)
                import_module(".".join(part for part in parts if part != "__init__"))
        kinds += [other for other in kind.__subclasses__() if other not in kinds]
    for kind in kinds[1:]:
        if kind.__module__.startswith("situs.") and vars(import_module(kind.__module__)).get(kind.__name__) is kind:
            yield kind


def written(value: Any) -> str:
    """As Python writes it; a path as it is on every system."""
    return f"Path({value.as_posix()!r})" if isinstance(value, Path) else repr(value)


def record() -> dict[str, str]:
    """Class and field, or verb and flag -> the default, as Python writes it."""
    flags = {
        f"situs {verb} {flag.name}": written(flag.default)
        for verb in VERBS
        for flag in flags_of(verb_type(verb))
        if flag.in_args and flag.default is not MISSING
    }
    return flags | {
        f"{kind.__module__}.{kind.__qualname__}.{field.name}": written(field.default)
        for kind in configs()
        for field in fields(kind)
        if field.default is not MISSING
    }
