"""What makes a result evidence: when, by which command and versions, and of which weights it was made."""

from __future__ import annotations

import shlex
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def evidence(verb: str, args: Any, model: nn.Module, weights: str | None = None) -> dict[str, str | None]:
    """Facts by name: the day and time, the command, versions, and SHA-256 of what was audited.

    model: its parameters are hashed as they are in memory. weights: where that is a file, it is hashed too.
    """
    import torch

    from situs import __version__
    from situs.audit.record import weights_digest
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
    """The command with every flag that is not its default; of paths the last part, since a page tells no folders.

    The first field of `args` is the positional argument.
    """
    first, *rest = fields(args)
    words = ["situs", *verb.split(), _word(getattr(args, first.name))]
    for field in rest:
        value = getattr(args, field.name)
        if value == field.default:
            continue
        flag = field.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", *(_word(each) for each in (value if isinstance(value, tuple) else (value,)))]
    return shlex.join(words)


def _word(value: Any) -> str:
    text = str(value)
    is_path = isinstance(value, Path) or (isinstance(value, str) and (Path(text).is_absolute() or Path(text).exists()))
    return Path(text).resolve().name if is_path else text
