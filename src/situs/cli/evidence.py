"""What makes a result evidence: when, by which command and versions, and of which weights it was made."""

from __future__ import annotations

import json
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from situs.cli.flags import flags_of

if TYPE_CHECKING:
    from torch import nn


def evidence(verb: str, args: Any, model: nn.Module, weights: str | None = None) -> dict[str, str | None]:
    """Facts by name: the day and time, the command, versions, and SHA-256 of what was audited.

    model: its parameters are hashed as they are in memory. weights: where that is a file, it is hashed too.
    """
    import torch

    from situs import __version__
    from situs.audit.judge.record import weights_digest
    from situs.train.tensors import digest

    file = None if weights is None or not Path(weights).is_file() else Path(weights)
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_of(verb, args),
        "situs": __version__,
        "torch": torch.__version__,
        "weights_sha256": weights_digest(model),
        "weights_file_sha256": None if file is None else digest(file),
    }


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
