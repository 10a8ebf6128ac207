"""What a split audit found: the threat model, and the verdict that the numbers come to. Its tables: `tables`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from situs.audit.split.attackers import ATTACKS, Reading
from situs.audit.split.stage import LOOKED_AT
from situs.audit.split.utility import Kept
from situs.audit.split.view import Setting
from situs.results import Result, Summary, percent

RECOGNISED = 20.0
"""dB from which a picture is said to be seen; the numbers stand beside it."""

UNDOING = ("order", "old-embedding", "ordered-decoder", "repeats")
"""Attackers who put back what is permuted before they make pictures."""

THREAT = {
    "the server": "honest but curious: it runs the blocks as it should, keeps all it is sent and looks at it",
    "it has": "public images of the same kind, and what each attacker is said to know beside them",
    "it is sent": "each sample once, and several times where an attacker is said to see several sendings",
    "TLS": "keeps others out, not the server",
    "no claim": "nothing here is cryptography or differential privacy; an attack that was not tried is no protection",
    "not attacked here": "a server that departs from the protocol; the key, by who has the locked blocks and no "
    "embedding (`situs audit lock` tries); pictures, by who has no embedding; a decoder that learns to re-order",
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
        from situs.audit.split.tables import tables  # which are of results

        notes = [f"Not tried, which is no protection: {why} ({', '.join(at)})." for why, at in self.skipped.items()]
        if unasked := [name for name in ATTACKS if name not in self.asked]:
            notes.append(f"Not asked for, which is no protection: {', '.join(unasked)}.")
        return Summary(verdict(self), tables(self), tuple(notes))

    @property
    def asked(self) -> tuple[str, ...]:
        """The attackers that were asked for."""
        return tuple(dict.fromkeys(reading.attack for found in self.settings for reading in found.readings))

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
                    **found.kept.numbers(),
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


def verdict(audit: SplitAudit) -> str:
    """What each setting leaves to the server, in sentences."""
    groups: dict[str, list[str]] = {}
    for found in audit.settings:
        groups.setdefault(_said(found), []).append(str(found.setting))
    said = [f"{', '.join(settings)}: {what}" for what, settings in groups.items()]
    for score, what in (
        ("labels", "labels, read off what comes back"),
        ("unnamed labels", "up to names without the head"),
    ):
        if shares := [share for found in audit.settings if (share := found.best(score)) is not None]:
            low, high = percent(min(shares)), percent(max(shares))
            said.append(f"{what}: {high if low == high else f'{low} to {high}'}.")
    return " ".join(each[0].upper() + each[1:] for each in said)


def _said(found: SettingFound) -> str:
    parts = []
    if (places := found.best("places")) is not None:
        parts.append(f"{percent(places)} of the patches were put in their places")
    if (linked := found.best("linked")) is not None:
        parts.append(f"{percent(linked)} of the samples were found again")
    if found.pictured() is None:
        return "; ".join(["no attack on the pictures was tried, which is no protection", *parts]) + "."
    if found.hidden and found.pictured(UNDOING) is None:
        parts.append("no attack that puts back what is permuted was tried, which is no protection")
    return "; ".join([_seen(found), *parts]) + "."


def _seen(found: SettingFound) -> str:
    """Of pictures: all, some, or their patches without their places, so that a mean hides none of them."""
    mean, best, patch = (found.best(score) or 0.0 for score in ("psnr", "best psnr", "patch psnr"))
    if mean >= RECOGNISED:
        return f"the server sees the samples ({mean:.1f} dB)"
    if best >= RECOGNISED:
        return f"the server sees some of the samples ({best:.1f} dB at best, {mean:.1f} in the mean)"
    if patch >= RECOGNISED:
        return f"the server sees patches out of place ({patch:.1f} dB; {mean:.1f} as pictures)"
    return f"the attacks that were tried come to {mean:.1f} dB"
