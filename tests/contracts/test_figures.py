"""The numbers of figures, tables and sentences are numbers of the result, which are in its JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from kinds import RESULTS

DRAWN = {"bars", "figures.bars", "figures.curves"}

MORE = {("Adapted", "classes"), ("PositionTables", "energy"), ("Robustness", "severity")}
"""Figures that also have a line or a bar for comparison, which the JSON has not."""


EXTRA: dict[str, set[float]] = {
    "Adapted": {66.7, -75.0, 55.9, 100.0, 66.67, 43.6, 97.0, 87.5},  # shares of a whole, differences, intervals
    "ClassAccuracy": {35.2, 64.8, 45.0},  # an interval; the most frequent class
    "Ensemble": {35.2, 64.8},
    "PositionCurve": {6.25},  # chance
    "PositionGrid": {6.25},
    "PositionTables": {54.61, 68.55, 77.95, 85.54, 90.74, 46.74, 58.36, 69.1, 78.13, 84.55, 1.301},  # of random tables
    "Reconstruction": {25.0},  # chance
    "Runs": {0.1},  # a setting
    "SplitAudit": {0.2},  # a setting
    "StepTable": {2.11},  # a ratio of two
}
"""Numbers of tables and sentences that are not in the JSON."""


def numbers_in(value: Any) -> Iterator[float]:
    """All finite numbers of nested values, names aside."""
    if isinstance(value, torch.Tensor | np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        value = [item for pair in value.items() for item in pair]
    if isinstance(value, list | tuple):
        for each in value:
            yield from numbers_in(each)
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        yield float(value)


@pytest.mark.parametrize("name", RESULTS)
def test_what_bars_and_lines_show_is_in_the_json(name: str) -> None:
    result = RESULTS[name][0]()
    numbers = np.array([*numbers_in(result.numbers())])
    for figure in result.figures():
        if figure.draw not in DRAWN:
            continue
        shown = np.array([*numbers_in(figure.values)])
        # As it is, or as a percentage.
        away = np.abs(np.concatenate([numbers, 100 * numbers])[:, None] - shown).min(axis=0)
        there = away <= 1e-6 * np.abs(shown).clip(1)
        assert len(shown) and (there.all() or (name, figure.name) in MORE), (figure.name, shown[~there])
        assert there.sum() >= len(shown) / 2, (figure.name, shown[~there])


@pytest.mark.parametrize("name", RESULTS)
def test_what_tables_and_sentences_say_is_in_the_json(name: str) -> None:
    """Numbers with a decimal point, each to its last digit."""
    result = RESULTS[name][0]()
    numbers, summary = np.array([0.0, *numbers_in(result.numbers())]), result.summary()
    cells = [cell for table in (*summary.tables, *result.details()) for row in table.rows for cell in row]
    written = [(cell, 1e-6 * max(1, abs(cell))) for cell in cells if isinstance(cell, float) and math.isfinite(cell)]
    for text in (summary.sentence, *(value for value, _ in summary.numbers), *cells):
        numerals = re.findall(r"(?<![\w.,])-?\d+\.\d+(?![\w.])", text) if isinstance(text, str) else []
        written += [(float(numeral), 0.51 * 10 ** -len(numeral.partition(".")[2])) for numeral in numerals]
    away = {value for value, by in written if np.abs(np.concatenate([numbers, 100 * numbers]) - value).min() > by}
    assert {round(value, 3) for value in away} == EXTRA.get(name, set())


@pytest.mark.parametrize("name", RESULTS)
def test_a_row_has_a_cell_for_each_column(name: str) -> None:
    result = RESULTS[name][0]()
    for table in (*result.summary().tables, *result.details()):
        assert len({len(row) for row in table.rows}) <= 1
        assert not table.header or all(len(row) == len(table.header) for row in table.rows)
