"""The feature defence of a run's split training (`situs.split`), recorded in its folder for audits."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from situs.errors import SitusError
from situs.files import read_json
from situs.train.private.accounting import Spent

FILE = "defence.json"


class FeatureDefence(NamedTuple):
    """defence: as the owner named it. scale: the unit of its noise's σ, the same in all steps."""

    defence: str
    scale: float


def feature_defence_of(run: str | Path) -> FeatureDefence | None:
    """The defence recorded in a run's folder; None where there is none."""
    file = Path(run) / FILE
    if not file.is_file():
        return None
    record = read_json(file)
    if not isinstance(record.get("defence"), str) or type(record.get("scale")) not in (int, float):
        raise SitusError(f"{file}: is damaged: it must have a defence and its scale")
    return FeatureDefence(record["defence"], record["scale"])


def protection(spent: Spent | None, defence: str | None) -> list[str]:
    """Sentences of a model card on how the training protected its samples; none where it did not."""
    sentences = [] if spent is None else [f"Differential privacy: {spent}."]
    if defence is not None:
        sentences.append(f"Split learning: its server saw tokens under {defence}, which guarantees no ε.")
    return sentences
