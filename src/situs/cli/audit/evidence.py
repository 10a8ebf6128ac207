"""The command that made a result, as it is given again."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from situs.cli.parser.flags import flags_of


def command_of(verb: str, args: Any) -> str:
    """The command with every flag that is not its default; of paths the last part, since a page tells no folders."""
    places, words = ["situs", *verb.split()], []
    for flag in flags_of(type(args)):
        value = getattr(args, flag.fields[0])
        if flag.positional:
            places += [_word(each) for each in (value if isinstance(value, tuple) else (value,))]
        elif value == flag.default:
            continue
        elif isinstance(value, bool):
            words.append(flag.name if value else f"--no-{flag.name[2:]}")
        elif isinstance(value, dict):
            words += [word for key, held in value.items() for word in (f"{flag.name}.{key}", json.dumps(held))]
        else:
            words += [flag.name, ",".join(map(str, value)) if isinstance(value, tuple) else _word(value)]
    return shlex.join([*places, *words])


def _word(value: Any) -> str:
    """A word of the command, without folders: of a path, of NAME=FILE and of file.py:Name the last part."""
    text = str(value)
    name, equals, file = text.partition("=")
    if equals and not Path(text).exists():
        return f"{name}={_word(file)}"
    place, colon, name = text.rpartition(":")
    if colon and place.endswith(".py"):
        return f"{Path(place).name}:{name}"
    is_path = isinstance(value, Path) or (isinstance(value, str) and (Path(text).is_absolute() or Path(text).exists()))
    return Path(text).resolve().name if is_path else text
