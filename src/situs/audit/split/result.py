"""What a split audit found: the threat model, and the verdict that the numbers come to. Its tables: `tables`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from situs.audit.split.attackers import ATTACKS
from situs.audit.split.found import SCORES, UNDOING, SettingFound
from situs.audit.split.tables import tables
from situs.errors import counted
from situs.locks.features import Defence
from situs.results import Result, Summary, Table, Tone, percent

RECOGNISED = 20.0
"""dB from which a picture is said to be seen; the numbers stand beside it."""

SEEN = {
    "psnr": "the server sees the samples",
    "best psnr": "the server sees some of the samples",
    "patch psnr": "the server sees patches out of place",
}
"""score -> what is said where it reaches that, the worst first."""

AGAIN = (
    "What is not in the tables was not attacked, which is no protection. The audit keeps nothing to go on with: given "
    "again, it starts anew."
)
"""What is said of an audit that was stopped."""

CLEARER, MORE = 3.0, 0.1
"""dB, and share of places, labels and the like, above a guess from which an attacker is said to know something."""

CHANCE = {"labels": 0.5, "unnamed labels": 0.5, "samples": 0.5}
"""The most that a guess of them comes to, where none was made: one of two."""

LISTED = 6
"""Settings that a note names one by one."""

THREAT = {
    "the server": "honest but curious: it runs the blocks as it should, keeps all it is sent and looks at it",
    "it has": "public images of the same kind, and what each attacker is said to know beside them",
    "it is sent": "each sample once, and several times where an attacker is said to see several sendings",
    "TLS": "keeps others out, not the server",
    "no claim": "nothing here is cryptography or differential privacy; an attack that was not tried is no protection",
    "not attacked here": "a server that departs from the protocol; the key, by who has the locked blocks and no "
    "embedding (`situs audit lock` tries); pictures, by who has no embedding; a decoder that learns to re-order; "
    "labels by who has no head, where an image has any number of classes; "
    "pixels behind an old embedding, by who allows for its drift (old-embedding reads them as if there were none)",
}


@dataclass(frozen=True)
class SplitAudit(Result):
    """All settings. blind: what guesses without any token come to. pictures: the samples, where the page shows them.

    stopped: by what and how far it came, None where it is whole. trained: the defence that a run was trained under, in
    units of its tokens as they are now. thin: why public images are too few, None where not.
    """

    file: ClassVar[str] = "split-audit"

    name: str
    samples: int
    public: int
    settings: tuple[SettingFound, ...]
    blind: Mapping[str, Mapping[str, float]]
    pictures: Tensor | None = None
    stopped: str | None = None
    trained: Defence | None = None
    thin: str | None = None

    @property
    def private(self) -> bool:
        """Its page shows the images and what was made of them."""
        return self.pictures is not None

    @property
    def tone(self) -> Tone:
        """Bad where an attacker came to clearly more than a guess; never good, for others may do better."""
        return "bad" if any(self._beats_a_guess(score) for score in SCORES) else "unsure"

    def best(self, score: str) -> float | None:
        """The highest value of a score over all settings; None where no attack gave it."""
        return max((value for found in self.settings if (value := found.best(score)) is not None), default=None)

    def guess(self, score: str) -> float | None:
        """The best of those who saw no token; None where there is none."""
        return max((each[score] for each in self.blind.values() if score in each), default=None)

    def _beats_a_guess(self, score: str) -> bool:
        value, guess = self.best(score), self.guess(score)
        if value is None or score in ("ssim", "fsim"):  # the picture's own scores; its PSNR speaks for them
            return False
        if score in SEEN:
            least = 0.0 if score == "psnr" else RECOGNISED
            return value >= least and value > (guess or 0.0) + CLEARER
        blind = 1 / self.samples if score == "linked" else CHANCE.get(score, 0.0)
        return value > (blind if guess is None else guess) + MORE

    @property
    def skipped(self) -> dict[str, list[str]]:
        """What was not tried and why -> the settings."""
        found: dict[str, list[str]] = {}
        for each in self.settings:
            for reading in each.readings:
                if reading.status == "not tried":
                    found.setdefault(f"{reading.attack}: {reading.reason}", []).append(str(each.setting))
        return found

    @property
    def weaker(self) -> dict[str, list[str]]:
        """What an attacker that was tried lacked -> the settings."""
        found: dict[str, list[str]] = {}
        for each in self.settings:
            for reading in each.readings:
                if reading.status == "done" and reading.reason:
                    found.setdefault(f"{reading.attack}: {reading.reason}", []).append(str(each.setting))
        return found

    @property
    def tables(self) -> tuple[Table, ...]:
        """Every attacker; the paper's Table 6; strengths, where there are several."""
        return tables(
            f"{self.name}: what a server learns of {counted(self.samples, 'samples')}", self.settings, self.blind
        )

    def summary(self) -> Summary:
        """The verdict, the tables, and what was not tried."""
        notes = [] if self.stopped is None else [AGAIN]
        notes += [] if self.trained is None else [self._of_training(self.trained)]
        notes += [f"Not tried, which is no protection: {why} ({self._where(at)})." for why, at in self.skipped.items()]
        notes += [
            f"Weaker than it can be, which is no protection: {why} ({self._where(at)})."
            for why, at in self.weaker.items()
        ]
        if self.settings and (unasked := [name for name in ATTACKS if name not in self.asked]):
            notes.append(f"Not asked for, which is no protection: {', '.join(unasked)}.")
        return Summary(verdict(self), self.tables, tuple(notes))

    def _of_training(self, trained: Defence) -> str:
        """What was sent in training, where something else was audited."""
        said = f"This run was trained under what is {trained} of its tokens now"
        beyond = any(
            each.setting.defence.kind == "noise" == trained.kind
            and each.setting.defence.strength > 1.01 * trained.strength
            for each in self.settings
        )
        more = "; its server has seen less noise than the strongest here" if beyond else ""
        missing = all(each.setting.defence.kind != trained.kind for each in self.settings)
        return f"{said}{', which was not audited here' if missing else more}."

    def _where(self, at: list[str]) -> str:
        if len(at) == len(self.settings) > 1:
            return "everywhere"
        return ", ".join(at) if len(at) <= LISTED else f"{len(at)} of {counted(len(self.settings), 'settings')}"

    @property
    def asked(self) -> tuple[str, ...]:
        """The attackers that were asked for."""
        return tuple(dict.fromkeys(reading.attack for found in self.settings for reading in found.readings))

    def numbers(self) -> dict[str, Any]:
        """Every score of every attacker."""
        return {
            "threat_model": THREAT,
            "verdict": verdict(self),
            "trained_under": None if self.trained is None else str(self.trained),
            "partial": self.stopped is not None,
            "stopped": self.stopped,
            "samples": self.samples,
            "public_images": self.public,
            "too_few_public_images": self.thin,
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
    """What the settings leave to the server, in sentences: those with the same conclusion together."""
    if audit.stopped is not None and not audit.settings:
        return f"Stopped by {audit.stopped}, before any attack was through: this page says nothing about the model."
    groups: dict[str, list[SettingFound]] = {}
    for found in audit.settings:
        groups.setdefault(_conclusion(found), []).append(found)
    said = [f"{_named(settings, audit.settings)}: {_said(what, settings)}" for what, settings in groups.items()]
    if audit.thin is not None:
        said.insert(0, f"too few public images ({audit.thin}): what was not found is not hidden by that.")
    if audit.stopped is not None:
        said.insert(0, f"a partial result: stopped by {audit.stopped}.")
    for score, what in (
        ("labels", "labels, read off what comes back"),
        ("unnamed labels", "up to names, without the head"),
    ):
        if shares := _span(audit.settings, score, percent):
            guess = audit.guess(score)
            blind = "" if guess is None else f" ({percent(guess)} by a guess that saw no gradient)"
            said.append(f"{what}: {shares}{blind}.")
    return " ".join(each[0].upper() + each[1:] for each in said)


def _conclusion(found: SettingFound) -> str:
    """Of pictures: all, some, or their patches without their places, so that a mean hides none of them."""
    if found.pictured() is None:
        return "no attack on the pictures was tried, which is no protection"
    seen = [what for score, what in SEEN.items() if (found.best(score) or 0.0) >= RECOGNISED]
    return seen[0] if seen else "the attacks that were tried come to"


def _said(what: str, settings: list[SettingFound]) -> str:
    if settings[0].pictured() is not None:
        mean, best, patch = (_span(settings, score, "{:.1f}".format) for score in ("psnr", "best psnr", "patch psnr"))
        figures = {
            SEEN["psnr"]: f" ({mean} dB)",
            SEEN["best psnr"]: f" ({best} dB at best, {mean} in the mean)",
            SEEN["patch psnr"]: f" ({patch} dB; {mean} as pictures)",
        }
        what += figures.get(what, f" {mean} dB")
    parts = [what]
    if places := _span(settings, "places", percent):
        parts.append(f"{places} of the patches were put in their places")
    if linked := _span(settings, "linked", percent):
        parts.append(f"{linked} of the samples were found again")
    if any(found.hidden and found.pictured() and found.pictured(UNDOING) is None for found in settings):
        parts.append("no attack that puts back what is permuted was tried, which is no protection")
    if cut := dict.fromkeys(each.attack for found in settings for each in found.readings if each.cut):
        parts.append(f"{', '.join(cut)} did not come to an end, which is no protection")
    return "; ".join(parts) + "."


def _span(settings: Sequence[SettingFound], score: str, written: Callable[[float], str]) -> str:
    held = [value for found in settings if (value := found.best(score)) is not None]
    return " to ".join(dict.fromkeys(map(written, (min(held), max(held))))) if held else ""


def _named(settings: list[SettingFound], every: Sequence[SettingFound]) -> str:
    """The settings; a defence once, where all that can be permuted beside it came to the same."""
    named: dict[str, None] = {}
    for found in settings:
        alike = [other for other in every if other.setting.defence == found.setting.defence]
        moved = [name for name in ("rows", "columns") if any(getattr(other.setting, name) for other in alike)]
        whole = len(alike) == 2 ** len(moved) > 1 and all(other in settings for other in alike)
        what = "" if len(moved) == 2 else f"{''.join(moved)} "
        named[f"{found.setting.defence} ({what}permuted or not)" if whole else str(found.setting)] = None
    return ", ".join(named)
