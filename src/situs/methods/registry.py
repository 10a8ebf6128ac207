"""Methods by name: built-in ones, plugins of other packages (entry points), and a user's class as file.py:Class or
package.module:Class."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from situs.errors import SitusError
from situs.files import load_code, names_code
from situs.methods.base import Method


class Registry(Mapping[str, type[Method]]):
    """name -> method. A plugin is imported when it is looked up, so a broken one affects no other."""

    def __init__(self, built_in: Mapping[str, type[Method]], group: str) -> None:
        self.built_in, self.group = dict(built_in), group
        self._loaded: dict[str, type[Method]] = {}
        self._aliases: dict[str, str] = {}  # name as the user wrote it -> name in `_loaded`
        self._points: dict[str, EntryPoint] | None = None

    def __getitem__(self, name: str) -> type[Method]:
        if name in self.built_in:
            return self.built_in[name]
        name = self._aliases.get(name, name)
        if name not in self._loaded:
            if not names_code(name):
                self._loaded[name] = _load(self._declared()[name])
            else:
                self._aliases[name] = self.name_of(load_code(name))
                return self[name]
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self.built_in or name in self._declared() or (isinstance(name, str) and names_code(name))

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys([*self.built_in, *self._loaded, *sorted(self._declared()), *self._aliases])

    def name_of(self, kind: Any) -> str:
        """The name of a class, by its file or module; registers the class under it."""
        for name, known in {**self.built_in, **self._loaded}.items():
            if known is kind:
                return name
        place = getattr(kind, "__module__", "?")
        main = getattr(sys.modules.get(place), "__file__", None)
        if main is not None and (place == "__main__" or sys.modules[place].__package__ in (None, "")):
            place = str(Path(main).resolve())  # a script or a file beside it: found from any folder
        name = f"{place}:{getattr(kind, '__name__', kind)}"
        _check(kind, f"method {name}")
        if any(known.Config is kind.Config for known in (*self.built_in.values(), *self._loaded.values())):
            # A run's method is identified by its config's class: an inherited config gets a class of its own.
            subclass = type(f"{kind.__name__}Config", (kind.Config,), {"__module__": kind.__module__})
            kind.Config = dataclass(frozen=True)(subclass)
        self._loaded[name] = kind
        return name

    def __len__(self) -> int:
        return len(list(iter(self)))

    def _declared(self) -> dict[str, EntryPoint]:
        if self._points is None:  # once: it reads the metadata of every installed package
            self._points = {point.name: point for point in entry_points(group=self.group)}
        return self._points


def _load(point: EntryPoint) -> type[Method]:
    where = f"method {point.name!r} ({point.value} of {point.dist.name if point.dist else 'another package'})"
    try:
        kind: Any = point.load()
    except Exception as error:  # whatever another package's import may raise
        raise SitusError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error
    _check(kind, where)
    return kind


def _check(kind: Any, where: str) -> None:
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise SitusError(f"{where} is not a subclass of situs.methods.Method")
    if not is_dataclass(getattr(kind, "Config", None)):
        raise SitusError(f"{where} has no dataclass Config")
