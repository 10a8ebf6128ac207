"""What a split audit found, in sentences and tables: the threat model, the verdict, a row an attacker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from situs.audit.split.attackers import Reading
from situs.audit.split.stage import LOOKED_AT
from situs.audit.split.view import Setting
from situs.results import Cell, Result, Summary, Table, percent

RECOGNISED = 20.0
"""dB from which a picture is said to be seen; the numbers stand beside it."""

THREAT = {
    "the server": "honest but curious: it runs the blocks as it should, keeps all it is sent and looks at it",
    "it has": "public images of the same kind, and what each attacker is said to know beside them",
    "it is sent": "each sample once, and several times where an attacker is said to see several sendings",
    "TLS": "keeps others out, not the server",
    "no claim": "nothing here is cryptography or differential privacy; an attack that was not tried is no protection",
}

_decibels: Callable[[float], str] = "{:.1f} dB".format
_number: Callable[[float], str] = "{:.3f}".format
SCORES: dict[str, tuple[Callable[[float], str], str]] = {
    "places": (percent, "patches that were put where they belong, where rows are permuted"),
    "channels": (percent, "the share of the key that was found, where columns are permuted"),
    "samples": (percent, "patches given to the right sample, where a batch exchanges them"),
    "linked": (percent, "samples found again among all when they were sent once more"),
    "labels": (percent, "labels read off the gradients that come back, with the head"),
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
    """One setting: what the client's task keeps, and what each attacker found.

    cosine: mean similarity of the pooled features with the undefended ones. accuracy: top-1 with it, or None.
    """

    setting: Setting
    cosine: float
    accuracy: float | None
    readings: tuple[Reading, ...]

    def best(self, score: str) -> float | None:
        """The highest value of a score over the attackers; None where no attack gave it."""
        return max((reading.scores[score] for reading in self.readings if score in reading.scores), default=None)

    @property
    def pictured(self) -> Reading | None:
        """The attacker whose pictures are best."""
        made = [reading for reading in self.readings if "psnr" in reading.scores]
        return max(made, key=lambda reading: reading.scores["psnr"], default=None)


@dataclass(frozen=True)
class SplitAudit(Result):
    """All settings. blind: what guesses without any token come to. pictures: the samples, where the page shows them."""

    file: ClassVar[str] = "split-audit"

    name: str
    samples: int
    public: int
    settings: tuple[SettingFound, ...]
    blind: Mapping[str, Mapping[str, float]]
    pictures: Tensor | None = None

    @property
    def private(self) -> bool:
        """Its page shows the images and what was made of them."""
        return self.pictures is not None

    @property
    def skipped(self) -> dict[str, list[str]]:
        """What was not tried and why -> the settings."""
        found: dict[str, list[str]] = {}
        for each in self.settings:
            for reading in each.readings:
                if reading.status == "not tried":
                    found.setdefault(f"{reading.attack}: {reading.reason}", []).append(str(each.setting))
        return found

    def summary(self) -> Summary:
        """The verdict, the table, and what was not tried."""
        notes = [f"Not tried, which is no protection: {why} ({', '.join(at)})." for why, at in self.skipped.items()]
        return Summary(verdict(self), (table(self),), tuple(notes))

    def numbers(self) -> dict[str, Any]:
        """Every score of every attacker."""
        return {
            "threat_model": THREAT,
            "verdict": verdict(self),
            "samples": self.samples,
            "public_images": self.public,
            "blind_guesses": {name: _plain(scores) for name, scores in self.blind.items()},
            "settings": [
                {
                    "setting": str(found.setting),
                    "feature_cosine": found.cosine,
                    "accuracy": found.accuracy,
                    "attacks": [
                        {"attack": r.attack, "knows": r.knows, "status": r.status, "reason": r.reason or None}
                        | _plain(r.scores)
                        for r in found.readings
                    ],
                }
                for found in self.settings
            ],
        }


def _plain(scores: Mapping[str, float]) -> dict[str, float]:
    """By names without blanks, as JSON has them."""
    return {name.replace(" ", "_"): value for name, value in scores.items()}


def table(audit: SplitAudit) -> Table:
    """Blind guesses, then a row an attacker below its setting; scores that nobody has are left out."""
    everyone = [reading.scores for found in audit.settings for reading in found.readings]
    scores = [name for name in SCORES if any(name in each for each in (*everyone, *audit.blind.values()))]
    judged = any(found.accuracy is not None for found in audit.settings)
    start = ["client sends", *["accuracy"] * judged, "features", "attacker", "knows"]
    rows: list[list[Cell]] = [
        ["nothing", *[None] * judged, None, f"guess: {name}", "nothing", *_cells(each, scores)]
        for name, each in audit.blind.items()
    ]
    for found in audit.settings:
        accuracy: list[Cell] = [None if found.accuracy is None else percent(found.accuracy)] if judged else []
        lead: list[Cell] = [str(found.setting), *accuracy, f"{found.cosine:.3f}"]
        for reading in (each for each in found.readings if each.status == "done"):
            rows.append([*lead, reading.attack, reading.knows, *_cells(reading.scores, scores)])
            lead = [""] * len(lead)
        if lead[0]:
            rows.append([*lead, "none was tried", None, *_cells({}, scores)])
    return Table(f"{audit.name}: what a server learns of {audit.samples} samples", (*start, *scores), rows)


def _cells(held: Mapping[str, float], scores: list[str]) -> list[Cell]:
    return [SCORES[name][0](held[name]) if name in held else None for name in scores]


def verdict(audit: SplitAudit) -> str:
    """What each setting leaves to the server, in sentences."""
    groups: dict[str, list[str]] = {}
    for found in audit.settings:
        groups.setdefault(_said(found), []).append(str(found.setting))
    said = [f"{', '.join(settings)}: {what}" for what, settings in groups.items()]
    shares = [share for found in audit.settings if (share := found.best("labels")) is not None]
    if shares:
        low, high = percent(min(shares)), percent(max(shares))
        said.append(f"labels, read off what comes back: {high if low == high else f'{low} to {high}'}.")
    return " ".join(each[0].upper() + each[1:] for each in said)


def _said(found: SettingFound) -> str:
    quality, places, linked = (found.best(score) for score in ("psnr", "places", "linked"))
    parts = []
    if places is not None:
        parts.append(f"{percent(places)} of the patches were put in their places")
    if linked is not None:
        parts.append(f"{percent(linked)} of the samples were found again")
    if quality is None:
        return "; ".join(["no attack on the pictures was tried, which is no protection", *parts]) + "."
    if quality >= RECOGNISED:
        return "; ".join([f"the server sees the samples ({quality:.1f} dB)", *parts]) + "."
    return "; ".join([f"the attacks that were tried come to {quality:.1f} dB", *parts]) + "."
