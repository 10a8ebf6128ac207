"""The tables of audits: attacks × defences, the settings of Table 5, what the gate says, and what does not apply."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from situs.audit.cases import SETTINGS, Outcome
from situs.audit.judge.gate import NO_NOISE, Ruling
from situs.audit.scores.metrics import Mean, means_of
from situs.audit.scores.scoring import Scores
from situs.results import Cell

if TYPE_CHECKING:
    from situs.audit.gradients import Audit
    from situs.audit.settings import Comparison

Cells = tuple[list[str], list[list[Cell]]]
"""Header and rows."""

COLUMNS = {
    "psnr": "PSNR, dB",
    "ssim": "SSIM",
    "mse": "MSE",
    "fft2d": "FFT2D",
    "lpips": "LPIPS",
    "patch_psnr": "best-match PSNR, dB",
    "order_accuracy": "order",
    "reidentified": "re-identified",
}
"""metric -> the head of its column."""

PARTS = {
    "shown_psnr": "shown patches, PSNR, dB",
    "hidden_psnr": "hidden patches in any order, PSNR, dB",
    "hidden_order": "hidden patches at their place",
}
"""The same of shown and hidden patches apart."""

REFUSED = "not attacked here"
"""What stands where an attack does not apply: its reason is given, and nothing is known of privacy."""

WORST = "PSNR of the most exposed image, dB"


def interval(mean: Mean | None) -> str | None:
    """A mean and its 95 % interval."""
    if mean is None or mean.low is None or mean.high is None:
        return alone(mean)
    return f"{mean.mean:.3g} [{mean.low:.3g}, {mean.high:.3g}]"


def alone(mean: Mean | None) -> str | None:
    """A mean; what is nearly nothing is said so."""
    if mean is None:
        return None
    return "< 1e-6" if 0 < mean.mean < 1e-6 else f"{mean.mean:.3g}"


Show = Callable[[Mean | None], Cell]


def table(audit: Audit, columns: Sequence[str] = tuple(COLUMNS), show: Show = interval) -> Cells:
    """A row for each attack × defence and baseline: exact, highest PSNR, metrics, rank, condition.

    show: a mean. A bound was asked about a few images, of which finding them again says nothing.
    """
    rows: list[list[Cell]] = []
    for pair in audit.pairs:
        if pair.reason is not None:
            rows.append([pair.attack, pair.defence, REFUSED, *[None] * (len(columns) + 3)])
        else:
            scores = {**pair.scores, "reidentified": None} if pair.is_bound else pair.scores
            found = [_exact(pair), f"{pair.worst_psnr:.3g}", *_means(scores, columns, show), *_system(pair)]
            rows.append([_named(pair), pair.defence, *found])
    for guess, scores in audit.baselines.items():
        best = f"{max(scores['psnr'] or [0.0]):.3g}"
        rows.append(["baseline", guess, None, best, *_means(scores, columns, show), None, None])
    header = ["attack", "defence", "exact", WORST, *(COLUMNS[name] for name in columns), "rank of G", "condition of G"]
    return header, rows


def settings_table(comparison: Comparison, columns: Sequence[str] = (*COLUMNS, *PARTS), show: Show = interval) -> Cells:
    """Setting, model, attacker, exact, metrics; then who saw no gradient."""
    rows: list[list[Cell]] = []
    for setting in SETTINGS:
        for row in comparison.pairs:
            if row.case.setting == setting:
                found = [REFUSED, *[None] * len(columns)]
                if row.reason is None:
                    found = [_exact(row), *_means(row.scores, columns, show)]
                rows.append([setting, row.case.name, row.case.attacker, *found])
        for (where, guess), scores in comparison.baselines.items():
            if where == setting:
                rows.append([setting, "no gradient", guess, None, *_means(scores, columns, show)])
    heads = COLUMNS | PARTS
    return ["setting", "model", "attacker", "exact", *(heads[column] for column in columns)], rows


def _named(pair: Outcome) -> str:
    """The attack; what is told the images is called a bound."""
    return f"{pair.attack} (a bound, told the image)" if pair.is_bound else pair.attack


def _exact(pair: Outcome) -> str:
    return f"{pair.exact} of {pair.count}" + ", stopped" * (pair.partial is not None)


def _means(scores: Scores, columns: Sequence[str], show: Show) -> list[Cell]:
    found = means_of(scores)
    return [show(found.get(name)) for name in columns]


def grid(audit: Audit) -> Cells:
    """Attacks down, defences across: PSNR of the mean and of the most exposed image, and how many were exact."""
    attacks = dict.fromkeys([*map(_named, audit.pairs), *(attack for attack, _ in audit.undone)])
    cells: dict[tuple[str, str], str] = dict.fromkeys(audit.undone, "not attacked")
    for pair in audit.pairs:
        psnr = means_of(pair.scores).get("psnr")
        said = f"mean {alone(psnr)}, most exposed {pair.worst_psnr:.3g}; exact {_exact(pair)}"
        cells[_named(pair), pair.defence] = REFUSED if psnr is None else said
    rows: list[list[Cell]] = [[attack, *(cells.get((attack, name)) for name in audit.about)] for attack in attacks]
    return ["attack", *audit.about], rows


def glance(comparison: Comparison) -> Cells:
    """Models and attackers down, settings across: mean PSNR and how many images were recovered exactly."""
    settings = [name for name in SETTINGS if any(row.case.setting == name for row in comparison.pairs)]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in comparison.pairs:
        psnr = means_of(row.scores).get("psnr")
        said = REFUSED if row.reason is not None else f"{alone(psnr)} dB, {row.exact} of {row.count}"
        cells.setdefault((row.case.name, row.case.attacker), {})[row.case.setting] = said
    for (setting, guess), scores in comparison.baselines.items():
        cells.setdefault(("no gradient", guess), {})[setting] = f"{alone(means_of(scores)['psnr'])} dB"
    heads = (
        f"({name}) step on {SETTINGS[name].trained_on}, compared with {SETTINGS[name].compared_with}"
        for name in settings
    )
    return ["model", "attacker", *heads], [[*who, *map(found.get, settings)] for who, found in cells.items()]


def judged(ruling: Ruling) -> Cells:
    """A row for each defence: what the gate says of it, and by which image; the ruling's sentence says why."""
    rows: list[list[Cell]] = []
    for each in ruling.judgements:
        one, shown = each.worst, [None] * 5
        if one is not None:
            limits = (None if value is None else f"{value:.4g}" for value in (one.limit, one.blind))
            shown = [one.image, f"{one.metric} {one.value:.4g}", *limits, one.attack]
        rows.append([each.defence, each.outcome, *shown])
    return ["defence", "gate", "most exposed", "has", "limit", "a blind guess", "by"], rows


def reasons(audit: Audit) -> list[tuple[str, str]]:
    """(attack against defences, why it does not apply or is not exact); the same said of several defences, once."""
    found: dict[tuple[str, str], list[str]] = {}
    for pair in audit.pairs:
        plain = pair.doubt == NO_NOISE and pair.exact == pair.count  # it has every image
        doubt = None if pair.caveat or pair.doubt is None or plain else f"proves nothing: {pair.doubt}"
        verdicts = [str(fact.get("verdict") or "") for fact in pair.facts]
        verdicts = [each for each in verdicts if doubt is None or each != pair.doubt]  # said once
        for said in dict.fromkeys(
            [pair.reason, pair.partial and f"stopped after {pair.partial}", pair.caveat, *verdicts, doubt]
        ):
            if said:
                found.setdefault((pair.attack, said), []).append(pair.defence)
    every = len(audit.about) > 2
    names = {
        key: "every defence" if every and set(defences) == set(audit.about) else " | ".join(defences)
        for key, defences in found.items()
    }
    return [(f"{attack} against {names[attack, said]}", said) for attack, said in found]


def measured(columns: Sequence[str], rows: Iterable[Outcome]) -> tuple[str, ...]:
    """Those of the metrics that some row has: LPIPS needs a file."""
    rows = list(rows)
    return tuple(name for name in columns if any(row.scores.get(name) is not None for row in rows))


def unmeasured(rows: Iterable[Outcome]) -> str:
    """That LPIPS is missing, and how to have it; else ""."""
    return "" if measured(("lpips",), rows) else " LPIPS was not measured (it needs a file of weights)."


def _system(pair: Outcome) -> tuple[Cell, Cell]:
    """Rank and condition over the images that have them: the least rank and the median condition, infinite below full.

    An attack may solve one system for some images and search for the others (adaptive-mjp, by whether any is hidden).
    """
    solved = [fact for fact in pair.facts if "rank" in fact]
    if not solved:
        return None, None
    ranks: list[Any] = [fact["rank"] for fact in solved]
    sizes: list[Any] = [fact["condition"] for fact in solved]
    middle = sorted(math.inf if size is None else size for size in sizes)[len(sizes) // 2]
    rank = f"{min(ranks)} of {solved[0]['unknowns']}"
    return rank, "∞" if middle == math.inf else f"{middle:.3g}"
