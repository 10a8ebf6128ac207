"""A config as the command line has resolved it: every value with the layer that it comes from, as TOML."""

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
from situs.presets import LENGTHS, laid

BARE = re.compile(r"[\w-]+", re.ASCII)
"""A key of TOML that needs no quotes."""

Layers = Mapping[str, Mapping[str, Any]]


def print_config(config: Any, layers: Layers, flags: Mapping[str, str], prog: str, beside: Sequence[str] = ()) -> None:
    """Prints it. layers: by where they come from, the lowest first. flags: path -> the flag that was given. beside:
    flags that were given too and are no part of the config; their values are not told, for one may name a key."""
    sources = sources_of(type(config), layers, flags)
    told = {path: sources.get(path, "default") for path in flat(to_dict(config))}
    answer({"config": to_dict(config), "sources": told, "beside": [*beside]}, toml_of(config, told, prog, beside))


def sources_of(cls: type[Any], layers: Layers, flags: Mapping[str, str]) -> dict[str, str]:
    """path -> where its value comes from, of all that some layer gives."""
    found: dict[str, str] = {}
    below: list[Mapping[str, Any]] = []
    for name, tables in layers.items():
        old, new = flat(laid(cls, below)), flat(tables)
        for path in choices_of(cls):  # another method: what was said of the old one is gone
            if (chosen := new.get(f"{path}.name")) is not None and chosen != old.get(f"{path}.name", chosen):
                found = {each: source for each, source in found.items() if not each.startswith(f"{path}.")}
        found |= {path: _flag(path, flags) if name == FLAGGED else name for path in new}
        below.append(tables)
    return found


def _flag(path: str, flags: Mapping[str, str]) -> str:
    """The flag that gave this field; a length that the other one took away has that one's."""
    own = [flag for each, flag in flags.items() if f"{path}.".startswith(f"{each}.")]  # a table's flag has any key
    return own[0] if own else next(flags[f"train.{name}"] for name in LENGTHS if f"train.{name}" in flags)


def toml_of(config: Any, sources: Mapping[str, str], prog: str, beside: Sequence[str] = ()) -> str:
    """A file that gives the same config back, with a comment behind each value."""
    tables = to_dict(config)
    again = f" with {' and '.join(beside)} as here" if beside else ""
    lines = [f"# {prog}: every value, and where it comes from; --config FILE{again} gives the same run."]
    alone = {name: value for name, value in tables.items() if not isinstance(value, Mapping)}
    lines += _lines(config, alone, "", sources)
    for name, table in tables.items():
        if isinstance(table, Mapping) and (held := [*_lines(config, table, f"{name}.", sources)]):
            lines += ["", f"[{name}]", *held]
    text = "\n".join(lines)
    assert from_dict(type(config), tomllib.loads(text)) == config
    return text


def _lines(config: Any, table: Mapping[str, Any], above: str, sources: Mapping[str, str]) -> Iterator[str]:
    for path, value in flat(table).items():
        key = ".".join(part if BARE.fullmatch(part) else json.dumps(part) for part in path.split("."))
        source = sources.get(above + path, "default")
        if value is not None:
            yield f"{key} = {json.dumps(value, ensure_ascii=False)}  # {source}"
        elif _says_none(config, above + path):
            yield f'{key} = "none"  # {source}'
        else:
            yield f"# {key} is not given  # {source}"  # TOML has no word for it where any text may stand


def _says_none(config: Any, path: str) -> bool:
    """Whether the word none is read as such in this field."""
    try:
        return from_dict(type(config), merge(to_dict(config), tables_of([("", path, "none")]))) == config
    except SitusError:
        return False


def tell_length(layers: Layers, flags: Mapping[str, str]) -> None:
    """Says so where a flag gives the length of a training in the place of what a preset or a file says of it."""
    given = [name for name in LENGTHS if f"train.{name}" in flags]
    if len(given) != 1 or os.environ.get("RANK", "0") != "0":
        return
    [other] = [name for name in LENGTHS if name not in given]
    for source, tables in reversed([*layers.items()]):
        table = tables.get("train", {})
        if other in table:
            if table[other] not in (None, "none"):
                told = f"{flags[f'train.{given[0]}']} takes the place of train.{other}={table[other]} of {source}"
                print(f"situs: {told}", file=sys.stderr)
            return
