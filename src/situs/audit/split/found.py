"""What the attackers found of one setting, and what each score is."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from situs.audit.split.attackers import ATTACKS, Reading
from situs.audit.split.stage import LOOKED_AT
from situs.audit.split.utility import Kept
from situs.audit.split.view import Setting
from situs.results import percent

UNDOING = ("order", "old-embedding", "ordered-decoder", "repeats")
"""Attackers who put back what is permuted before they make pictures."""

_decibels: Callable[[float], str] = "{:.1f} dB".format
_number: Callable[[float], str] = "{:.3f}".format
SCORES: dict[str, tuple[Callable[[float], str], str]] = {
    "places": (percent, "patches that were put where they belong, where rows are permuted"),
    "channels": (percent, "the share of the key that was found, where columns are permuted"),
    "samples": (percent, "patches given to the right sample, where a batch exchanges them"),
    "linked": (percent, "samples found again among all when they were sent once more"),
    "labels": (percent, "labels read off the gradients that come back, with the head; of several an image those known"),
    "unnamed labels": (percent, "the same without the head, up to the names of the classes"),
    "psnr": (_decibels, "mean PSNR of the pictures that were made"),
    "best psnr": (_decibels, "of the sample that came back best"),
    "patch psnr": (_decibels, "each patch against the one of the picture that fits it best, wherever that stands"),
    "ssim": (_number, f"mean structural similarity of the first {LOOKED_AT} samples"),
    "fsim": (
        _number,
        f"mean cosine of the pooled features of original and picture, by the model itself, of the first {LOOKED_AT}",
    ),
}
"""score -> (how it is written, what it is)."""


@dataclass(frozen=True)
class SettingFound:
    """One setting: what the client's task keeps, and what each attacker found."""

    setting: Setting
    kept: Kept
    readings: tuple[Reading, ...]

    def best(self, score: str) -> float | None:
        """The highest value of a score over the attackers; None where no attack gave it."""
        return max((reading.scores[score] for reading in self.readings if score in reading.scores), default=None)

    def pictured(self, among: Collection[str] = tuple(ATTACKS)) -> Reading | None:
        """The attacker whose pictures are best, of those named."""
        made = [reading for reading in self.readings if "psnr" in reading.scores and reading.attack in among]
        return max(made, key=lambda reading: reading.scores["psnr"], default=None)

    @property
    def hidden(self) -> bool:
        """Whether rows or channels are not where an attacker expects them."""
        return self.setting.rows or self.setting.columns or self.setting.defence.kind == "batch-shuffle"
