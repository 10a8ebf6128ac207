"""The tables of a split audit: every attacker, the paper's Table 6, what strengths cost and hide, who was tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from situs.audit.split.attackers import ATTACKS, SENDINGS, Reading
from situs.audit.split.found import SCORES, UNDOING, SettingFound
from situs.audit.split.utility import Kept
from situs.results import Cell, Table, percent

UTILITY: dict[str, tuple[Callable[[Kept], float | None], str]] = {
    "accuracy": (lambda kept: kept.accuracy, "top-1 of the model's own classifier"),
    "kNN": (lambda kept: kept.knn, "nearest five of the frozen features, each image left out in turn, public ones too"),
    "probe": (lambda kept: kept.probe, "a linear probe of the frozen features, each image left out in turn"),
    "neighbours": (lambda kept: kept.neighbours, "of the nearest five without the defence, the share that still are"),
    "features": (lambda kept: kept.cosine, "mean cosine of the pooled features with those of the undefended samples"),
}
"""What the client's task keeps, the most telling first -> (its value, what it is)."""

PAPER = {"none": "SL", "noise": "GN", "lowpass": "LP", "batch-shuffle": "BS"}
PRIVACY = ("ssim", "psnr", "fsim", "patch psnr")

Settings = Sequence[SettingFound]
Blind = Mapping[str, Mapping[str, float]]
"""guess -> its scores."""


def tables(title: str, settings: Settings, blind: Blind) -> tuple[Table, ...]:
    """Those that there is something for."""
    made = [table(title, settings, blind)]
    if any(found.pictured(("decoder",)) for found in settings):
        made.append(paper_table(settings))
    if strengths(settings):
        made.append(trade_off(settings))
    return tuple(made)


def utilities(settings: Settings) -> list[str]:
    """The measures of utility that some setting has."""
    return [name for name, (of, _) in UTILITY.items() if any(of(found.kept) is not None for found in settings)]


def strengths(settings: Settings) -> list[str]:
    """The kinds of defence that were audited at several strengths."""
    several: dict[str, set[float]] = {}
    for found in settings:
        several.setdefault(found.setting.defence.kind, set()).add(found.setting.defence.strength)
    return [kind for kind, held in several.items() if len(held) > 1]


def table(title: str, settings: Settings, blind: Blind) -> Table:
    """Blind guesses, then a row an attacker below its setting; scores that nobody has are left out."""
    everyone = [reading.scores for found in settings for reading in found.readings]
    scores = [name for name in SCORES if any(name in each for each in (*everyone, *blind.values()))]
    kept = utilities(settings)
    rows: list[list[Cell]] = [
        ["nothing", *[None] * len(kept), f"guess: {name}", "nothing", *_cells(each, scores)]
        for name, each in blind.items()
    ]
    for found in settings:
        lead: list[Cell] = [str(found.setting), *_kept(found.kept, kept)]
        for reading in (each for each in found.readings if each.status == "done"):
            rows.append([*lead, reading.attack, reading.knows, *_cells(reading.scores, scores)])
            lead = [""] * len(lead)
        if lead[0]:
            rows.append([*lead, "none was tried", None, *_cells({}, scores)])
    return Table(title, ("client sends", *kept, "attacker", "knows", *scores), rows)


def paper_table(settings: Settings) -> Table:
    """Table 6 of the paper: its own attacker, who knows of no permutation, beside the best who puts it back.

    '+' is with rows permuted. Columns are permuted on their own and with rows, as they are beside the defences.
    """
    kept, single = utilities(settings)[:2], [name for name in UNDOING if name != "repeats"]
    often = any(found.pictured(("repeats",)) for found in settings)
    rows: list[list[Cell]] = []
    for found in settings:
        defence, columns = found.setting.defence, found.setting.columns
        if columns and defence.kind != "none":
            continue
        name = PAPER[defence.kind] + "+" * found.setting.rows
        told = str(found.setting if columns else defence) if defence.kind != "none" or columns else "rows"
        blind, best = found.pictured(("decoder",)), found.pictured(single)
        rows.append([
            told if columns else name if name == "SL" else f"{name} ({told})", *_kept(found.kept, kept),
            *_of(blind, PRIVACY), None if best is None else best.attack, *_of(best, (*PRIVACY, "places", "channels")),
            *_of(found.pictured(("repeats",)), ["psnr"] * often),
        ])  # fmt: skip
    header = ["", *kept, *(f"decoder {name}" for name in PRIVACY), "undone by", *PRIVACY, "places", "channels"]
    title = "As the paper's Table 6: the privacy by its own attacker, and by one who undoes permutations"
    return Table(title, [*header, *[f"psnr, {SENDINGS} sendings"] * often], rows)


def trade_off(settings: Settings) -> Table:
    """Each strength: what the task keeps, and what the best attacker, who knows the defence, finds."""
    kept = utilities(settings)
    shares = [name for name in ("places", "linked", "labels") if any(f.best(name) is not None for f in settings)]
    rows: list[list[Cell]] = []
    for found in settings:
        best = found.pictured()
        found_shares = [None if (share := found.best(name)) is None else percent(share) for name in shares]
        attacker = None if best is None else best.attack
        rows.append([str(found.setting), *_kept(found.kept, kept), attacker, *_of(best, PRIVACY), *found_shares])
    title = "What each strength keeps, and what the best attacker on pictures that was tried finds"
    return Table(title, ("client sends", *kept, "best attacker", *PRIVACY, *shares), rows)


def who_was_tried(settings: Settings) -> Table:
    """Every setting against every attacker there is: tried, not tried, not asked for."""

    def said(found: SettingFound, name: str) -> str:
        status = {reading.attack: reading.status for reading in found.readings}.get(name)
        return {"done": "tried", None: "not asked for"}.get(status, "not tried")

    rows = [[str(found.setting), *(said(found, name) for name in ATTACKS)] for found in settings]
    return Table("Who was tried on what", ("client sends", *ATTACKS), rows)


def _kept(kept: Kept, names: Sequence[str]) -> list[Cell]:
    found = [UTILITY[name][0](kept) for name in names]
    written = zip(names, found, strict=True)
    return [None if each is None else f"{each:.3f}" if name == "features" else percent(each) for name, each in written]


def _of(reading: Reading | None, scores: Sequence[str]) -> list[Cell]:
    return _cells({} if reading is None else reading.scores, scores)


def _cells(held: Mapping[str, float], scores: Sequence[str]) -> list[Cell]:
    return [SCORES[name][0](held[name]) if name in held else None for name in scores]
