"""Methods by name: built-in ones, plugins of other packages (entry points), and a user's class as file.py:Class or
package.module:Class."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

from situs.errors import SitusError
from situs.files import load_code, names_code
from situs.methods.base import Method
from situs.plugins import Plugins


class Registry(Plugins[type[Method]]):
    """name -> method."""

    def __getitem__(self, name: str) -> type[Method]:
        if name not in self._classes and names_code(name):
            self._classes[name] = self._classes[self.name_of(load_code(name))]
        if name not in self._classes:
            self._classes[name] = _checked(*self._load(name))
        return self._classes[name]

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys([*self._classes, *sorted(self._declared())])

    def name_of(self, kind: Any) -> str:
        """The name of a class, by its file or module; registers the class under it."""
        for name, known in self._classes.items():
            if known is kind:
                return name
        place = getattr(kind, "__module__", "?")
        main = getattr(sys.modules.get(place), "__file__", None)
        if main is not None and (place == "__main__" or sys.modules[place].__package__ in (None, "")):
            place = str(Path(main).resolve())  # a script or a file beside it: found from any folder
        name = f"{place}:{getattr(kind, '__name__', kind)}"
        _checked(kind, f"method {name}")
        if any(known.Config is kind.Config for known in self._classes.values()):
            # A run's method is identified by its config's class: an inherited config gets a class of its own.
            subclass = type(f"{kind.__name__}Config", (kind.Config,), {"__module__": kind.__module__})
            kind.Config = dataclass(frozen=True)(subclass)
        self._classes[name] = kind
        return name


def _checked(kind: Any, where: str) -> type[Method]:
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise SitusError(f"{where} is not a subclass of situs.methods.Method")
    if not is_dataclass(getattr(kind, "Config", None)):
        raise SitusError(f"{where} has no dataclass Config")
    return kind
