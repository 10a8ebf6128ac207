"""The tables of the settings of Table 5: every row with its metrics, and all at a glance."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from situs.audit.gradients import summary
from situs.audit.scores.metrics import Mean
from situs.audit.settings import SETTINGS, Comparison, attacker_of, setting_of
from situs.audit.tables import COLUMNS, REFUSED, alone, interval
from situs.results import Cell

PARTS = {
    "shown_psnr": "shown patches, PSNR, dB",
    "hidden_psnr": "hidden patches in any order, PSNR, dB",
    "hidden_order": "hidden patches at their place",
}


def settings_table(
    comparison: Comparison,
    columns: Sequence[str] = (*COLUMNS, *PARTS),
    cell: Callable[[Mean | None], Cell] | None = None,
) -> tuple[list[str], list[list[Cell]]]:
    """Header and rows: setting, model, attacker, exact, metrics; then who saw no gradient. cell: shows a mean."""
    cell, rows = cell or interval, list[list[Cell]]()
    for setting in SETTINGS:
        for row in comparison.rows:
            if setting_of(row) != setting:
                continue
            name: list[Cell] = [setting, row.case.name, attacker_of(row)]
            if row.reason is not None:
                rows.append([*name, REFUSED, *[None] * len(columns)])
                continue
            means, done = summary(row.scores), len(row.facts)
            exact = f"{row.exact} of {done}" + ", stopped" * (row.partial is not None)
            rows.append([*name, exact, *(cell(means.get(column)) for column in columns)])
        for (where, guess), scores in comparison.guesses.items():
            if where == setting:
                means = summary(scores)
                rows.append([setting, "no gradient", guess, None, *(cell(means.get(column)) for column in columns)])
    heads = {**COLUMNS, **PARTS}
    return ["setting", "model", "attacker", "exact", *(heads[column] for column in columns)], rows


def glance(comparison: Comparison) -> tuple[list[str], list[list[Cell]]]:
    """Models and attackers down, settings across: mean PSNR and how many images were recovered exactly."""
    settings = [setting for setting in SETTINGS if any(setting_of(row) == setting for row in comparison.rows)]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in comparison.rows:
        psnr = summary(row.scores).get("psnr")
        said = REFUSED if row.reason is not None else f"{alone(psnr)} dB, {row.exact} of {len(row.facts)}"
        cells.setdefault((row.case.name, attacker_of(row)), {})[setting_of(row)] = said
    for (setting, guess), scores in comparison.guesses.items():
        cells.setdefault(("no gradient", guess), {})[setting] = f"{alone(summary(scores)['psnr'])} dB"
    header = ["model", "attacker", *(f"({setting}) {_short(setting)}" for setting in settings)]
    return header, [[*name, *(found.get(setting) for setting in settings)] for name, found in cells.items()]


def _short(setting: str) -> str:
    """ "step on x̃, compared with x"."""
    return SETTINGS[setting].removeprefix("attack a ").replace("compare with", "compared with")
