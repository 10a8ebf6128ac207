"""Presets by name. Each is one TOML file in this folder; its opening comment gives the command, hardware, time and the
accuracy to expect; its keys are those of the config.

`extends = "_cifar100"` puts a preset on top of another, so that presets do not repeat each other's lines. A name with a
leading underscore is a base for others, not a preset of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any

from situs.config import choices_of, merge
from situs.errors import SitusError, unknown_name
from situs.files import read_toml

LENGTHS = ("epochs", "max_steps")
"""The two fields of a config for the length of a training."""


def preset_names() -> list[str]:
    """The names of all presets, sorted."""
    return sorted(name for name in _files() if not name.startswith("_"))


def load_preset(name: str) -> dict[str, Any]:
    """A preset's tables, on top of those it extends."""
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
    """The opening comment of a preset, without its `#`."""
    lines = []
    for line in _file(name).read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" "))
    return "\n".join(lines)


def _files() -> dict[str, Any]:
    return {entry.name.removesuffix(".toml"): entry for entry in folder().iterdir() if entry.name.endswith(".toml")}


def _file(name: str) -> Any:
    files_by_name = _files()
    if name not in files_by_name:
        raise unknown_name("preset", name, preset_names())
    return files_by_name[name]


def folder() -> Any:
    """The folder of the presets (a wheel is installed as files, so this is a path)."""
    return files("situs.presets")


def one_length(layer: Mapping[str, Any]) -> Mapping[str, Any]:
    """A layer that sets the length of a training in one way also unsets the other way of a lower layer."""
    train = layer.get("train")
    lengths = [name for name in LENGTHS if isinstance(train, Mapping) and train.get(name) not in (None, "none")]
    if len(lengths) != 1:
        return layer
    other = next(name for name in LENGTHS if name not in lengths)
    return merge({"train": {other: None}}, layer)


def merge_layers(cls: type[Any], layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The layers merged, the last on top."""
    tables: dict[str, Any] = {}
    for layer in layers:
        tables = merge(tables, layer, choices_of(cls))
    return tables
