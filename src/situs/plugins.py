"""Registries of methods, attacks, defences and scenarios: ours, those of other packages, and those of a user's files.

Another package declares an entry point, as `[project.entry-points."situs.attacks"] mine = "package:Mine"`; a script
calls `ATTACKS.add(Mine)`, and a command names it as file.py:Class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from situs.errors import SitusError
from situs.files import load_code, names_code

T = TypeVar("T")


class Plugins(Mapping[str, T]):
    """name -> class. A class of another package is imported on its first use, so a broken one affects no other."""

    def __init__(self, classes: Mapping[str, T], group: str, needs: tuple[str, ...] = ()) -> None:
        """group: of the entry points. needs: attributes that every class must have."""
        self.group, self.needs, self._classes = group, needs, dict(classes)
        self._ours = frozenset(classes)
        self._points: dict[str, EntryPoint] | None = None

    def add(self, kind: T) -> T:
        """Registers a class under its `name`; none of ours is replaced."""
        called = getattr(kind, "__name__", kind)
        missing = [name for name in self.needs if not hasattr(kind, name)]
        if missing:
            raise SitusError(f"{called}: has no attribute {' and no attribute '.join(missing)} ({self.group})")
        name = str(getattr(kind, "name"))  # noqa: B009  (T is any class with these attributes)
        if self._classes.get(name, kind) is not kind and name in self._ours:
            raise SitusError(
                f"{called}: its name {name!r} is already used by Situs; choose another name ({self.group})"
            )
        self._classes[name] = kind
        return kind

    def __getitem__(self, name: str) -> T:
        if name in self._classes:
            return self._classes[name]
        kind: Any = load_code(name) if names_code(name) else self._load(name)[0]
        self._classes[name] = self.add(kind)
        return kind

    def __contains__(self, name: object) -> bool:
        return name in self._classes or name in self._declared() or (isinstance(name, str) and names_code(name))

    def __iter__(self) -> Iterator[str]:
        yield from sorted({*self._classes, *self._declared()})

    def __len__(self) -> int:
        return len({*self._classes, *self._declared()})

    def _declared(self) -> dict[str, EntryPoint]:
        if self._points is None:  # once: it reads the files of every installed package
            self._points = {point.name: point for point in entry_points(group=self.group)}
        return self._points

    def _load(self, name: str) -> tuple[Any, str]:
        """A declared class, and its name for an error's sentence."""
        point = self._declared()[name]
        package = point.dist.name if point.dist else "another package"
        where = f"{self.group.rpartition('.')[2].removesuffix('s')} {name!r} ({point.value} of {package})"
        try:
            return point.load(), where
        except Exception as error:  # whatever another package's import may raise
            raise SitusError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error
