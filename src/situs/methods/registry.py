"""Methods by name: ours, and those that other packages declare under an entry-point group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from situs.errors import SitusError
from situs.methods.base import Method


class Registry(Mapping[str, type[Method]]):
    """name -> method. Another package's is imported when it is asked for, so a broken one harms nobody else."""

    def __init__(self, own: Mapping[str, type[Method]], group: str) -> None:
        self.own, self.group = dict(own), group
        self._loaded: dict[str, type[Method]] = {}
        self._points: dict[str, EntryPoint] | None = None

    def __getitem__(self, name: str) -> type[Method]:
        if name in self.own:
            return self.own[name]
        if name not in self._loaded:
            self._loaded[name] = _load(self._declared()[name])
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in self._declared()

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys([*self.own, *self._loaded, *sorted(self._declared())])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def _declared(self) -> dict[str, EntryPoint]:
        if self._points is None:  # once: it reads the files of every package that is installed
            self._points = {point.name: point for point in entry_points(group=self.group)}
        return self._points


def _load(point: EntryPoint) -> type[Method]:
    where = f"method {point.name!r} ({point.value} of {point.dist.name if point.dist else 'another package'})"
    try:
        kind: Any = point.load()
    except Exception as error:  # whatever another package's import may raise
        raise SitusError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise SitusError(f"{where} is no subclass of situs.methods.Method")
    if not is_dataclass(getattr(kind, "Config", None)):
        raise SitusError(f"{where} has no dataclass Config")
    return kind
