"""Prints the resolved config as TOML: every value, with its origin (preset, file, flag or default)."""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from situs.api import FLAGGED
from situs.cli.shell import answer
from situs.config import choices_of, flat, from_dict, merge, tables_of, to_dict
from situs.errors import SitusError
from situs.presets import LENGTHS, merge_layers

BARE = re.compile(r"[\w-]+", re.ASCII)
"""A key of TOML that needs no quotes."""

Layers = Mapping[str, Mapping[str, Any]]


def print_config(config: Any, layers: Layers, flags: Mapping[str, str], prog: str, others: Sequence[str] = ()) -> None:
    """Prints the config. layers: by their origin, the lowest first. flags: path -> its flag on the command line.

    others: further flags of the command line; their values are not printed, since one may name a key.
    """
    sources = sources_of(type(config), layers, flags)
    origins = {path: sources.get(path, "default") for path in flat(to_dict(config))}
    answer({"config": to_dict(config), "sources": origins, "beside": [*others]}, toml_of(config, origins, prog, others))


def sources_of(cls: type[Any], layers: Layers, flags: Mapping[str, str]) -> dict[str, str]:
    """path -> the origin of its value, for all values that are not defaults."""
    sources: dict[str, str] = {}
    below: list[Mapping[str, Any]] = []
    for name, tables in layers.items():
        old, new = flat(merge_layers(cls, below)), flat(tables)
        for choice in choices_of(cls):  # another method: the fields of the old one do not apply
            if (chosen := new.get(f"{choice}.name")) is not None and chosen != old.get(f"{choice}.name", chosen):
                sources = {path: source for path, source in sources.items() if not path.startswith(f"{choice}.")}
        sources |= {path: _flag(path, flags) if name == FLAGGED else name for path in new}
        below.append(tables)
    return sources


def _flag(path: str, flags: Mapping[str, str]) -> str:
    """The flag that set this field; a length unset by the other length has that one's flag."""
    names = [flag for start, flag in flags.items() if f"{path}.".startswith(f"{start}.")]  # or its table's flag
    return names[0] if names else next(flags[f"train.{name}"] for name in LENGTHS if f"train.{name}" in flags)


def toml_of(config: Any, sources: Mapping[str, str], prog: str, others: Sequence[str] = ()) -> str:
    """A TOML file that gives the same config, with the origin of each value as a comment."""
    tables = to_dict(config)
    again = f" with the same {' and '.join(others)}" if others else ""
    lines = [f"# {prog}: every value and its origin; --config FILE{again} gives the same run."]
    alone = {name: value for name, value in tables.items() if not isinstance(value, Mapping)}
    lines += _lines(config, alone, "", sources)
    for name, table in tables.items():
        if isinstance(table, Mapping) and (rows := [*_lines(config, table, f"{name}.", sources)]):
            lines += ["", f"[{name}]", *rows]
    text = "\n".join(lines)
    assert from_dict(type(config), tomllib.loads(text)) == config
    return text


def _lines(config: Any, table: Mapping[str, Any], above: str, sources: Mapping[str, str]) -> Iterator[str]:
    for path, value in flat(table).items():
        key = ".".join(part if BARE.fullmatch(part) else json.dumps(part) for part in path.split("."))
        source = sources.get(above + path, "default")
        if value is not None:
            yield f"{key} = {json.dumps(value, ensure_ascii=False)}  # {source}"
        elif _accepts_none(config, above + path):
            yield f'{key} = "none"  # {source}'
        else:
            yield f"# {key} is not set  # {source}"  # TOML has no null, and here "none" would be a text


def _accepts_none(config: Any, path: str) -> bool:
    """Whether the text "none" means None in this field."""
    try:
        return from_dict(type(config), merge(to_dict(config), tables_of([("", path, "none")]))) == config
    except SitusError:
        return False


def report_length(layers: Layers, flags: Mapping[str, str]) -> None:
    """Says on stderr that --epochs or --steps overrides the other length in a preset or file."""
    lengths = [name for name in LENGTHS if f"train.{name}" in flags]
    if len(lengths) != 1 or os.environ.get("RANK", "0") != "0":
        return
    flag = flags[f"train.{lengths[0]}"]
    [other] = [name for name in LENGTHS if name not in lengths]
    for source, tables in reversed([*layers.items()]):
        table = tables.get("train", {})
        if other in table:
            if table[other] not in (None, "none"):
                print(f"situs: {flag} overrides train.{other}={table[other]} of {source}", file=sys.stderr)
            return
