"""Recipes by name. Each is one TOML file in this folder whose opening comment gives its command, hardware, time
and the figure to expect; the keys are those of the config it is for.

`extends = "_cifar100"` lays a preset over another, so that recipes do not repeat each other's lines. A name that
opens with an underscore is such a ground layer, no recipe of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any

from situs.config import choices_of, merge
from situs.errors import SitusError, unknown_name
from situs.files import read_toml

LENGTHS = ("epochs", "max_steps")
"""The two ways in which a config says how long a training is."""


def preset_names() -> list[str]:
    """The recipes there are, sorted."""
    return sorted(name for name in _files() if not name.startswith("_"))


def load_preset(name: str) -> dict[str, Any]:
    """A recipe's tables, laid over those it extends."""
    layers: dict[str, dict[str, Any]] = {}
    below: Any = name
    while below is not None:
        if below in layers:
            raise SitusError(f"preset {name!r} extends itself: {' -> '.join([*layers, below])}")
        layers[below] = read_toml(_file(below))
        below = layers[below].pop("extends", None)
    recipe: dict[str, Any] = {}
    for layer in reversed(layers.values()):
        recipe = merge(recipe, layer)
    return recipe


def preset_header(name: str) -> str:
    """The opening comment of a recipe, without its `#`."""
    lines = []
    for line in _file(name).read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" "))
    return "\n".join(lines)


def _files() -> dict[str, Any]:
    return {entry.name.removesuffix(".toml"): entry for entry in folder().iterdir() if entry.name.endswith(".toml")}


def _file(name: str) -> Any:
    found = _files()
    if name not in found:
        raise unknown_name("preset", name, preset_names())
    return found[name]


def folder() -> Any:
    """Where the recipes lie (a wheel is installed as files, so this is a path)."""
    return files("situs.presets")


def one_length(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """A layer that gives the length of a training in one way, over one that gave it in the other: that one goes."""
    train = given.get("train")
    lengths = [name for name in LENGTHS if isinstance(train, Mapping) and train.get(name) not in (None, "none")]
    if len(lengths) != 1:
        return given
    other = next(name for name in LENGTHS if name not in lengths)
    return merge({"train": {other: None}}, given)


def laid(cls: type[Any], layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The layers put over one another, the last on top."""
    tables: dict[str, Any] = {}
    for each in layers:
        tables = merge(tables, each, choices_of(cls))
    return tables
