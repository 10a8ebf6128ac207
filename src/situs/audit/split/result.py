"""The result of a split audit: scores, tables (among them the paper's Table 6), the threat model and the verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from torch import Tensor

from situs.audit.split.attackers import ATTACKS, SENDINGS, SplitFinding
from situs.audit.split.stage import LOOKED_AT, Kept
from situs.errors import counted
from situs.findings import Exposure, Metric
from situs.gate import Report
from situs.locks.veil import Veil
from situs.results import Cell, Summary, Table, Tone, percent

UNDOING = ("order", "old-embedding", "ordered-decoder", "repeats")
"""Attackers that undo permutations before they make pictures."""

_decibels: Callable[[float], str] = "{:.1f} dB".format
_number: Callable[[float], str] = "{:.3f}".format
SCORES: dict[str, tuple[Callable[[float], str], str]] = {
    "places": (percent, "patches assigned to their true position, if rows are permuted"),
    "channels": (percent, "the fraction of the key that was recovered, if columns are permuted"),
    "samples": (percent, "patches assigned to the right sample, if a batch shuffle exchanges patches between samples"),
    "linked": (percent, "samples that are re-identified when they are sent a second time"),
    "labels": (
        percent,
        (
            "labels that an attacker with the head infers from the gradients at the cut. If an image has "
            "several labels, only known labels count"
        ),
    ),
    "unnamed labels": (
        percent,
        "labels inferred without the head. The attacker groups the samples but does not know the names of the classes",
    ),
    "psnr": (_decibels, "mean PSNR of the recovered images"),
    "best psnr": (_decibels, "PSNR of the most exposed sample"),
    "patch psnr": (
        _decibels,
        "PSNR when each patch is compared with the recovered patch that fits it best, at any position",
    ),
    "ssim": (_number, f"mean structural similarity of the first {LOOKED_AT} samples"),
    "fsim": (
        _number,
        (
            "mean cosine between the model's pooled features of original and recovered image, over the first "
            f"{LOOKED_AT} samples"
        ),
    ),
}
"""score -> (how it is written, what it is)."""


@dataclass(frozen=True)
class SettingResult:
    """One setting: the utility that is left for the client, and each attacker's finding."""

    veil: Veil
    kept: Kept
    findings: tuple[SplitFinding, ...]

    def best(self, score: str) -> float | None:
        """The highest value of a score over the attackers; None where no attack gave it."""
        return max((finding.figures[score] for finding in self.findings if score in finding.figures), default=None)

    def pictured(self, among: Collection[str] = tuple(ATTACKS)) -> SplitFinding | None:
        """The finding with the best pictures among the attackers named; None without pictures."""
        pictured = [finding for finding in self.findings if "psnr" in finding.figures and finding.attack in among]
        return max(pictured, key=lambda finding: finding.figures["psnr"], default=None)

    @property
    def hidden(self) -> bool:
        """Whether rows or channels are not where an attacker expects them."""
        return self.veil.rows or self.veil.columns or self.veil.kind == "batch-shuffle"


UTILITY: dict[str, tuple[Callable[[Kept], float | None], str]] = {
    "accuracy": (lambda kept: kept.accuracy, "top-1 accuracy of the model's classifier"),
    "kNN": (
        lambda kept: kept.knn,
        (
            "the accuracy if each image is classified by its five nearest neighbours (on frozen features) among the "
            "other attacked and public images"
        ),
    ),
    "probe": (lambda kept: kept.probe, "a linear probe on frozen features; each image is left out in turn"),
    "neighbours": (
        lambda kept: kept.neighbours,
        "the fraction of the five nearest neighbours that stay the same under the defence",
    ),
    "features": (lambda kept: kept.cosine, "mean cosine between pooled features with and without the defence"),
}
"""Measure of utility -> (its value, what it is), the most telling first."""

PAPER = {"none": "SL", "noise": "GN", "lowpass": "LP", "batch-shuffle": "BS"}
PRIVACY = ("ssim", "psnr", "fsim", "patch psnr")

Settings = Sequence[SettingResult]
Blind = Mapping[str, Mapping[str, float]]
"""guess -> its scores."""


def tables(title: str, settings: Settings, blind: Blind) -> tuple[Table, ...]:
    """All attackers; the paper's Table 6 and the strengths, where the settings allow them."""
    shown = [table(title, settings, blind)]
    if any(setting.pictured(("decoder",)) for setting in settings):
        shown.append(paper_table(settings))
    if strengths(settings):
        shown.append(trade_off(settings))
    return tuple(shown)


def utilities(settings: Settings) -> list[str]:
    """The measures of utility that some setting has."""
    return [
        name
        for name, (value_of, _) in UTILITY.items()
        if any(value_of(setting.kept) is not None for setting in settings)
    ]


def strengths(settings: Settings) -> list[str]:
    """The kinds of defence that were audited at several strengths."""
    several: dict[str, set[float]] = {}
    for setting in settings:
        several.setdefault(setting.veil.kind, set()).add(setting.veil.strength)
    return [kind for kind, values in several.items() if len(values) > 1]


def table(title: str, settings: Settings, blind: Blind) -> Table:
    """Blind guesses, then a row for each attacker below its setting; scores that nobody has are left out."""
    everyone = [finding.figures for setting in settings for finding in setting.findings]
    scores = [name for name in SCORES if any(name in figures for figures in (*everyone, *blind.values()))]
    kept = utilities(settings)
    rows: list[list[Cell]] = [
        ["nothing", *[None] * len(kept), f"guess: {name}", "nothing", *_cells(figures, scores)]
        for name, figures in blind.items()
    ]
    for setting in settings:
        lead: list[Cell] = [str(setting.veil), *_kept(setting.kept, kept)]
        for finding in (finding for finding in setting.findings if finding.status == "done"):
            rows.append([*lead, finding.attack, finding.knows, *_cells(finding.figures, scores)])
            lead = [""] * len(lead)
        if lead[0]:
            rows.append([*lead, "none was tried", None, *_cells({}, scores)])
    return Table(title, ("client sends", *kept, "attacker", "knows", *scores), rows)


def paper_table(settings: Settings) -> Table:
    """Table 6 of the paper: its own attacker, which does not know of permutations, beside the best that undoes them.

    '+' is with rows permuted. Permuted columns have rows of their own, without another defence.
    """
    kept, single = utilities(settings)[:2], [name for name in UNDOING if name != "repeats"]
    often = any(setting.pictured(("repeats",)) for setting in settings)
    rows: list[list[Cell]] = []
    for setting in settings:
        defence, columns = setting.veil.defence, setting.veil.columns
        if columns and defence.kind != "none":
            continue
        name = PAPER[defence.kind] + "+" * setting.veil.rows
        shown = str(setting.veil if columns else setting.veil.defence) if defence.kind != "none" or columns else "rows"
        blind, best = setting.pictured(("decoder",)), setting.pictured(single)
        rows.append([
            shown if columns else name if name == "SL" else f"{name} ({shown})", *_kept(setting.kept, kept),
            *_of(blind, PRIVACY), None if best is None else best.attack, *_of(best, (*PRIVACY, "places", "channels")),
            *_of(setting.pictured(("repeats",)), ["psnr"] * often),
        ])  # fmt: skip
    header = ["", *kept, *(f"decoder {name}" for name in PRIVACY), "undone by", *PRIVACY, "places", "channels"]
    title = (
        "Privacy as in Table 6 of Xu et al. (CVPR 2024): against the attacker of that paper, and against an attacker "
        "that undoes permutations"
    )
    return Table(title, [*header, *[f"psnr, {SENDINGS} uploads"] * often], rows)


def trade_off(settings: Settings) -> Table:
    """A row for each strength: utility, and what the best attacker, who knows the defence, recovers."""
    kept = utilities(settings)
    shares = [name for name in ("places", "linked", "labels") if any(f.best(name) is not None for f in settings)]
    rows: list[list[Cell]] = []
    for setting in settings:
        best = setting.pictured()
        written = [None if (share := setting.best(name)) is None else percent(share) for name in shares]
        attacker = None if best is None else best.attack
        rows.append([str(setting.veil), *_kept(setting.kept, kept), attacker, *_of(best, PRIVACY), *written])
    title = "Utility at each strength, and what the best finished attack recovers"
    return Table(title, ("client sends", *kept, "best attacker", *PRIVACY, *shares), rows)


def who_was_tried(settings: Settings) -> Table:
    """Every setting against every attacker: tried, not tried, not asked for."""

    def status_of(setting: SettingResult, name: str) -> str:
        status = {finding.attack: finding.status for finding in setting.findings}.get(name)
        return {"done": "tried", None: "not asked for"}.get(status, "not tried")

    rows = [[str(setting.veil), *(status_of(setting, name) for name in ATTACKS)] for setting in settings]
    return Table("Attackers and the settings they were tested on", ("client sends", *ATTACKS), rows)


def _kept(kept: Kept, names: Sequence[str]) -> list[Cell]:
    values = [UTILITY[name][0](kept) for name in names]
    written = zip(names, values, strict=True)
    return [
        None if value is None else f"{value:.3f}" if name == "features" else percent(value) for name, value in written
    ]


def _of(finding: SplitFinding | None, scores: Sequence[str]) -> list[Cell]:
    return _cells({} if finding is None else finding.figures, scores)


def _cells(figures: Mapping[str, float], scores: Sequence[str]) -> list[Cell]:
    return [SCORES[name][0](figures[name]) if name in figures else None for name in scores]


RECOGNISED = 20.0
"""dB from which a picture counts as recognised."""

SEEN = {
    "psnr": "the server recovers the samples",
    "best psnr": "the server recovers some of the samples",
    "patch psnr": "the server recovers patches but not their positions",
}
"""Score -> the conclusion where it reaches that, the worst first."""

AGAIN = (
    "Settings that are not in the tables were not attacked, so nothing is known about their privacy. The audit "
    "cannot be resumed: a second run starts from the beginning."
)
"""What is said of an audit that was stopped."""

CLEARER, MORE = 3.0, 0.1
"""dB, and share of places, labels and the like, above a blind guess from which an attacker counts as successful."""

CHANCE = {"labels": 0.5, "unnamed labels": 0.5, "samples": 0.5}
"""The score of a guess at one of two, where no blind guess was made."""

UNFINISHED = ("stopped", "not_run")

LISTED = 6
"""Settings that a note names one by one."""

THREAT = {
    "the server": "honest but curious. The server follows the protocol, and analyses everything that it receives",
    "it has": "public images of the same kind, and the knowledge listed for each attacker",
    "it is sent": "each sample once; for some attackers several times, as their descriptions say",
    "TLS": "TLS protects against third parties, but not against the server",
    "no claim": "no defence of this page is cryptography or differential privacy. An attack that was not "
    "run may still succeed",
    "not attacked here": "a server that departs from the protocol; recovering the key from the locked blocks without "
    "an embedding (see `situs audit lock`); recovering pictures without an embedding; a decoder that learns to restore "
    "the order; labels without the head, if images have several classes; an attacker that corrects the drift of an old "
    "embedding (the attack `old-embedding` does not correct this drift)",
}


METRICS = {
    name: Metric(name, unit="dB", most=math.inf) if "psnr" in name else Metric(name)
    for name in SCORES
    if name not in ("ssim", "fsim")
}
"""The scores that are compared with blind guesses; PSNR stands for the other scores of a picture."""


def guess_at(blind: Blind, score: str) -> float | None:
    """The best blind guess, which saw no token; None where there is none."""
    return max((scores[score] for scores in blind.values() if score in scores), default=None)


def exposures_of(figures: Mapping[str, float], blind: Blind, samples: int) -> list[Exposure]:
    """The figures of an attack that a gate reads; above: clearly more than a blind guess."""
    rows = []
    for name, metric in METRICS.items():
        if (value := figures.get(name)) is None:
            continue
        guess = guess_at(blind, name)
        if name in SEEN:
            above = value >= (0.0 if name == "psnr" else RECOGNISED) and value > (guess or 0.0) + CLEARER
        else:
            chance = 1 / samples if name == "linked" else CHANCE.get(name, 0.0)
            above = value > (chance if guess is None else guess) + MORE
        rows.append(Exposure("the samples", metric, value, guess, above=above))
    return rows


@dataclass(frozen=True)
class SplitAudit(Report):
    """The report of a split audit. kept: utility by veil. blind: scores of blind guesses. pictures: the samples, where
    the page shows them.

    trained: the defence of a run's training, relative to its tokens as they are now. thin: why public images are too
    few, None where they are not.
    """

    file: ClassVar[str] = "split-audit"
    metrics: ClassVar[Mapping[str, Metric]] = METRICS

    name: str
    samples: int
    public: int
    kept: Mapping[str, Kept]
    blind: Blind
    pictures: Tensor | None = None
    trained: Veil | None = None
    thin: str | None = None

    @property
    def settings(self) -> tuple[SettingResult, ...]:
        """The results by veil; veils that were never started are left out."""
        by_veil: dict[str, list[SplitFinding]] = {}
        for finding in cast("Sequence[SplitFinding]", self.findings):
            by_veil.setdefault(finding.defence, []).append(finding)
        return tuple(
            SettingResult(findings[0].veil, self.kept[name], tuple(findings))
            for name, findings in by_veil.items()
            if any(finding.status != "not_run" for finding in findings)
        )

    @property
    def private(self) -> bool:
        """Whether its page shows the images and recovered pictures."""
        return self.pictures is not None

    @property
    def tone(self) -> Tone:
        """Bad where an attacker did clearly better than a blind guess; never good, for others may do better."""
        return "bad" if any(one.above for finding in self.findings for one in finding.exposures) else "unsure"

    def best(self, score: str) -> float | None:
        """The highest value of a score over all settings; None where no attack gave it."""
        return max((value for setting in self.settings if (value := setting.best(score)) is not None), default=None)

    def guess(self, score: str) -> float | None:
        """The best blind guess, which saw no token; None where there is none."""
        return guess_at(self.blind, score)

    def _reasons(self, *, done: bool) -> dict[str, list[str]]:
        """Why attackers that were tried could do better (done), or why others were not tried -> the settings."""
        reasons: dict[str, list[str]] = {}
        for setting in self.settings:
            for finding in setting.findings:
                if (finding.status == "done") == done and (not done or finding.reason):
                    why = finding.reason or f"stopped by {self.stopped}"
                    reasons.setdefault(f"{finding.attack}: {why}", []).append(str(setting.veil))
        return reasons

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
        for heading, done in (("Not tried", False), ("Weaker variants of attacks", True)):
            reasons = self._reasons(done=done).items()
            notes += [
                (f"{heading} (such an attack may still succeed): {why} ({self._where(where)}).")
                for why, where in reasons
            ]
        if self.settings and (unasked := [name for name in ATTACKS if name not in self.asked]):
            notes.append(f"Attacks that were not selected (they may still succeed): {', '.join(unasked)}.")
        return Summary(verdict(self), self.tables, tuple(notes))

    def _of_training(self, trained: Veil) -> str:
        """A note on the defence of the run's training."""
        relative = (
            " (the unit of σ is the standard deviation of the run's tokens after training)"
            if trained.kind == "noise"
            else ""
        )
        sentence = f"This run was trained with the defence {trained}{relative}"
        beyond = any(
            setting.veil.kind == "noise" == trained.kind and setting.veil.strength > 1.01 * trained.strength
            for setting in self.settings
        )
        more = (
            ". In that training, the server received less noise than in the strongest setting of this page"
            if beyond
            else ""
        )
        missing = all(setting.veil.kind != trained.kind for setting in self.settings)
        return f"{sentence}{'. This audit did not test that defence' if missing else more}."

    def _where(self, at: list[str]) -> str:
        if len(at) == len(self.settings) > 1:
            return "everywhere"
        return ", ".join(at) if len(at) <= LISTED else f"{len(at)} of {counted(len(self.settings), 'settings')}"

    @property
    def asked(self) -> tuple[str, ...]:
        """The attackers that were asked for."""
        return tuple(dict.fromkeys(finding.attack for setting in self.settings for finding in setting.findings))

    def numbers(self) -> dict[str, Any]:
        """Every score of every attacker."""
        return {
            "threat": self.threat.name,
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
                    "setting": str(setting.veil),
                    **setting.kept.numbers(),
                    "attacks": [
                        {"attack": finding.attack, "knows": finding.knows, "status": finding.status}
                        | {"reason": finding.reason or None, **_plain(finding.figures)}
                        for finding in setting.findings
                    ],
                }
                for setting in self.settings
            ],
        }


def _plain(scores: Mapping[str, float]) -> dict[str, float]:
    """By names without blanks, as JSON has them."""
    return {name.replace(" ", "_"): value for name, value in scores.items()}


def verdict(audit: SplitAudit) -> str:
    """What a server learns, in sentences: settings with the same conclusion together."""
    if audit.stopped is not None and not audit.settings:
        return (
            f"The audit was stopped by {audit.stopped} before any attack was finished, so this page says nothing about "
            "privacy."
        )
    if not audit.settings:
        return "No attack was run, so nothing is known about privacy."
    groups: dict[str, list[SettingResult]] = {}
    for setting in audit.settings:
        groups.setdefault(_conclusion(setting), []).append(setting)
    sentences = [
        f"{_named(settings, audit.settings)}: {_explained(conclusion, settings)}"
        for conclusion, settings in groups.items()
    ]
    if audit.thin is not None:
        sentences.insert(
            0,
            f"there were too few public images ({audit.thin}). Attacks may have failed only for this reason, so a "
            "failed attack is no evidence of privacy.",
        )
    if audit.stopped is not None:
        sentences.insert(0, f"a partial result: stopped by {audit.stopped}.")
    for score, what in (
        ("labels", "labels inferred from the gradients at the cut"),
        (
            "unnamed labels",
            "samples that an attacker without the head groups by class correctly (it cannot name the classes)",
        ),
    ):
        if shares := _span(audit.settings, score, percent):
            guess = audit.guess(score)
            blind = "" if guess is None else f" ({percent(guess)} by a blind guess)"
            sentences.append(f"{what}: {shares}{blind}.")
    return " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)


def _conclusion(setting: SettingResult) -> str:
    """The conclusion on pictures: all, some, or patches out of place, so that a mean hides none of these."""
    if setting.pictured() is None:
        return "no attack on the pictures was run: inconclusive"
    seen = [what for score, what in SEEN.items() if (setting.best(score) or 0.0) >= RECOGNISED]
    return seen[0] if seen else "the best attack that ran reaches a PSNR of"


def _explained(conclusion: str, settings: list[SettingResult]) -> str:
    if settings[0].pictured() is not None:
        mean, best, patch = (_span(settings, score, "{:.1f}".format) for score in ("psnr", "best psnr", "patch psnr"))
        figures = {
            SEEN["psnr"]: f" (mean PSNR {mean} dB)",
            SEEN["best psnr"]: f" (PSNR of the most exposed sample {best} dB, mean {mean} dB)",
            SEEN["patch psnr"]: f" (PSNR {patch} dB if a patch may be at any position, {mean} dB for whole pictures)",
        }
        conclusion += figures.get(conclusion, f" {mean} dB")
    parts = [conclusion]
    if places := _span(settings, "places", percent):
        parts.append(f"{places} of the patches were assigned to their positions")
    if linked := _span(settings, "linked", percent):
        parts.append(f"{linked} of the samples were re-identified")
    if any(setting.hidden and setting.pictured() and setting.pictured(UNDOING) is None for setting in settings):
        parts.append("no attack that undoes the permutation was run: inconclusive")
    if cut := dict.fromkeys(
        finding.attack for setting in settings for finding in setting.findings if finding.status in UNFINISHED
    ):
        parts.append(f"inconclusive, because these attacks were not finished: {', '.join(cut)}")
    return "; ".join(parts) + "."


def _span(settings: Sequence[SettingResult], score: str, written: Callable[[float], str]) -> str:
    values = [value for setting in settings if (value := setting.best(score)) is not None]
    return " to ".join(dict.fromkeys(map(written, (min(values), max(values))))) if values else ""


def _named(settings: list[SettingResult], every: Sequence[SettingResult]) -> str:
    """The settings' names; a defence once, where all permutations beside it have the same conclusion."""
    named: dict[str, None] = {}
    for setting in settings:
        alike = [other for other in every if other.veil.defence == setting.veil.defence]
        moved = [name for name in ("rows", "columns") if any(getattr(other.veil, name) for other in alike)]
        whole = len(alike) == 2 ** len(moved) > 1 and all(other in settings for other in alike)
        permuted = "" if len(moved) == 2 else f"{''.join(moved)} "
        named[f"{setting.veil.defence} ({permuted}permuted or not)" if whole else str(setting.veil)] = None
    return ", ".join(named)
