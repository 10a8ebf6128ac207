"""The feature defence that a run was trained under (`situs.split`), noted in its folder: an audit must know it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from situs.errors import SitusError
from situs.files import read_json
from situs.train.private.accounting import Spent

FILE = "defence.json"


class Under(NamedTuple):
    """defence: as the owner named it. scale: what a σ of noise was a multiple of, from the first step to the last."""

    defence: str
    scale: float


def trained_under(run: str | Path) -> Under | None:
    """What a run's folder says; None where it says nothing."""
    file = Path(run) / FILE
    if not file.is_file():
        return None
    held = read_json(file)
    if not isinstance(held.get("defence"), str) or type(held.get("scale")) not in (int, float):
        raise SitusError(f"{file}: is damaged: it must hold a defence and its scale")
    return Under(held["defence"], held["scale"])


def protection(spent: Spent | None, defence: str | None) -> list[str]:
    """What a card says of how the training protected its samples, one sentence each; nothing where it did not."""
    told = [] if spent is None else [f"Differential privacy: {spent}."]
    return told + (
        [] if defence is None else [f"Split learning: its server saw tokens under {defence}, which promises no ε."]
    )
