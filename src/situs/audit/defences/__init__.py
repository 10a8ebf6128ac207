"""Defences by name: what clients do so that their gradients tell less, and what attackers know of it."""

from __future__ import annotations

import re
from dataclasses import fields

from situs.audit.defences.base import (
    THREAT,
    UNKNOWN,
    Defence,
    Gradients,
    NoDefence,
    Step,
    blurred,
    method_of,
)
from situs.audit.defences.sent import (
    Bfloat,
    Clip,
    ClipBatch,
    Int8,
    Noise,
    NoPositionGradient,
    OwnDp,
    Rounded,
    Withhold,
)
from situs.audit.defences.together import Together
from situs.audit.defences.trained import Accumulate, Autocast, Dropout, DropPath, FedAdam, FedAvg, MaskedJigsaw
from situs.audit.plugins import Plugins
from situs.errors import SitusError, unknown_name

__all__ = [
    "DEFENCES",
    "THREAT",
    "UNKNOWN",
    "Clip",
    "Defence",
    "FedAvg",
    "Gradients",
    "MaskedJigsaw",
    "NoDefence",
    "NoPositionGradient",
    "Noise",
    "OwnDp",
    "Step",
    "Together",
    "Withhold",
    "blurred",
    "create_defence",
    "method_of",
]

_KINDS = (
    Accumulate,
    Autocast,
    Bfloat,
    Clip,
    ClipBatch,
    DropPath,
    Dropout,
    FedAdam,
    FedAvg,
    Int8,
    MaskedJigsaw,
    NoDefence,
    NoPositionGradient,
    Noise,
    Rounded,
    Withhold,
)

DEFENCES: Plugins[type[Defence]] = Plugins(
    {kind.name: kind for kind in _KINDS}, "situs.defences", ("name", "about", "upload")
)
"""Every defence by name; `create_defence("noise=1e-4")` sets its first setting."""


def create_defence(text: str | Defence) -> Defence:
    """A defence by name, with its settings behind "=": "noise=1e-4", "clip=0.5:1" (norm, noise multiplier), "mjp=0.27".

    Several at once are joined by "+": "noise=1e-4+no-pe-gradient".
    """
    if isinstance(text, Defence):
        return text
    parts = re.split(r"(?<!\de)\+", text)  # the sign of a number as 1e+3 joins nothing
    if len(parts) > 1:
        return Together(tuple(create_defence(part) for part in parts))
    name, equals, value = text.partition("=")
    if name not in DEFENCES:
        raise unknown_name("defence", name, DEFENCES, field="defences")
    kind = DEFENCES[name]
    if not equals:
        return kind()
    most = len(fields(kind))
    if not most:
        raise SitusError(f"{text}: {name} has no setting", field="defences")
    given = value.split(":")
    if len(given) > most:
        raise SitusError(f"{text}: {name} has {most} setting{'s' * (most > 1)}", field="defences")
    try:
        numbers = [float(each) for each in given]
    except ValueError:
        raise SitusError(f"{text}: {value!r} is no number", field="defences") from None
    return kind(*numbers)
