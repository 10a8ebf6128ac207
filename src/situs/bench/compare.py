"""Two tables of steps side by side: which steps are faster or slower beyond the spread, and what else differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from situs.bench.cases import MEANS
from situs.bench.measure import StepRow
from situs.bench.step import StepTable, read_steps
from situs.errors import SitusError
from situs.results import Cell, Figure, Provenance, Result, Summary, Table

ENOUGH = 3
"""The fewest repeats on each side for a comparison of spreads."""

UNDECIDED = "undecided"


class Pair(NamedTuple):
    """The same case in both tables."""

    before: StepRow
    after: StepRow

    @property
    def ratio(self) -> float:
        """The second's time over the first's."""
        return self.after.times.median / self.before.times.median

    @property
    def verdict(self) -> str:
        """ "faster" or "slower" only where all repeats of one are faster than all of the other."""
        one, two = self.before.times.seconds, self.after.times.seconds
        if min(len(one), len(two)) < ENOUGH:
            return UNDECIDED
        return "faster" if max(two) < min(one) else "slower" if min(two) > max(one) else "same"


@dataclass(frozen=True)
class StepComparison(Result):
    """Pairs of rows of two tables, by name. alone: cases in only one of them. differs: other differences."""

    file: ClassVar[str] = "comparison"
    names: tuple[str, str]
    pairs: tuple[Pair, ...]
    alone: tuple[str, ...]
    differs: Mapping[str, tuple[Any, Any]]

    def summary(self) -> Summary:
        """How many steps are faster or slower, the pairs, and differences of machine, versions and settings."""
        count = [pair.verdict for pair in self.pairs].count
        counts = [f"{count(word)} {word}" for word in ("faster", "slower", "same", UNDECIDED) if count(word)]
        one, two = self.names
        cases = f"{len(self.pairs)} cases" if len(self.pairs) > 1 else "one case"
        sentence = (
            f"{two} against {one}, {cases}: {', '.join(counts)}. A case counts as faster or slower only if the change "
            "exceeds the spread of the repeats."
        )
        header = ["case", "model", "batch", f"{one}, ms", f"{two}, ms", "time ratio", "verdict", "GiB", "GiB after"]
        tables = [Table(f"{one} and {two}", header, [_cells(pair) for pair in self.pairs])]
        if self.differs:
            rows = [[name, *map(_cell_of, values)] for name, values in self.differs.items()]
            tables.insert(0, Table("other differences", ["", one, two], rows))
        numbers = tuple((f"{pair.ratio:.2f} ×", f"time of a step, {pair.after.case.label}") for pair in self.pairs[:1])
        return Summary(sentence, tuple(tables), tuple(self._notes()), numbers)

    @property
    def title(self) -> str:
        """Of the page."""
        return f"Steps of {' and '.join(self.names)}"

    def figures(self) -> list[Figure]:
        """The first pairs."""
        return [
            Figure("", f"A step of {pair.after.case.label}.", "bars",
                   ({name: 1e3 * row.times.median for name, row in zip(self.names, pair, strict=True)}, "ms"))
            for pair in self.pairs[:4]
        ]  # fmt: skip

    def _notes(self) -> Iterator[str]:
        if hardware := [name for name in ("device", "cores", "threads") if f"machine: {name}" in self.differs]:
            yield (
                f"The two tables come from different machines ({', '.join(hardware)}), so the ratios do "
                "not show the effect of the code alone."
            )
        elif self.differs:
            yield (
                "The code is not the only difference between the two measurements: see the table of other differences."
            )
        if any(pair.verdict == UNDECIDED for pair in self.pairs):
            yield f"If a table has fewer than {ENOUGH} repeats, a change cannot be distinguished from noise."
        yield from (f"only in {case}" for case in self.alone)

    def numbers(self) -> dict[str, Any]:
        """Both sides of every pair."""
        pairs = [
            {
                "case": pair.after.case.label,
                "model": pair.after.case.shape,
                "batch": pair.after.case.batch,
                "ms": [1e3 * row.times.median for row in pair],
                "ratio": pair.ratio,
                "verdict": pair.verdict,
                "gib": [row.times.gib for row in pair],
            }
            for pair in self.pairs
        ]
        differs = {name: list(values) for name, values in self.differs.items()}
        return {
            "measures": "comparison",
            "names": list(self.names),
            "pairs": pairs,
            "alone": list(self.alone),
            "differs": differs,
        }


def _cells(pair: Pair) -> list[Cell]:
    case = pair.after.case
    times = [f"{1e3 * row.times.median:.2f}" for row in pair]
    memory = [None if row.times.gib is None else f"{row.times.gib:.2f}" for row in pair]
    return [case.label, case.shape, case.batch, *times, f"{pair.ratio:.3f}", pair.verdict, *memory]


def _cell_of(value: Any) -> Cell:
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def compare_steps(before: StepTable | str | Path, after: StepTable | str | Path) -> StepComparison:
    """Two tables of `bench_step`, or their JSON files, case by case.

    Two cases are the same where the same is computed; precision, compilation and machine may differ and are listed.
    Tables of a CPU and a GPU, or without a case in common, are refused.
    """
    names = _names(before, after)
    one, two = (side if isinstance(side, StepTable) else read_steps(side) for side in (before, after))
    if one.machine["kind"] != two.machine["kind"]:
        raise SitusError(
            f"{names[0]} was measured on {one.machine['kind']}, but {names[1]} on {two.machine['kind']}, so their "
            "times cannot be compared",
            field=("before", "after"),
        )
    pairs = tuple(_pairs(one, two))
    if not pairs:
        raise SitusError(f"{names[0]} and {names[1]} have no case in common", field=("before", "after"))
    paired = [row for pair in pairs for row in pair]
    alone = tuple(
        f"{name}: {row.case.label}, {row.case.shape}, batch {row.case.batch}"
        for name, table in zip(names, (one, two), strict=True)
        for row in table.rows
        if not any(row is other for other in paired)
    )
    return StepComparison(names, pairs, alone, _differences(one, two, pairs), provenance=Provenance())


def _names(*tables: StepTable | str | Path) -> tuple[str, str]:
    """Two short and different names of the tables."""
    paths = [None if isinstance(table, StepTable) else Path(table) for table in tables]
    for short in (lambda path: path.stem, lambda path: path.parent.name, str):
        one, two = ("" if path is None else short(path) for path in paths)
        if one and two and one != two:
            return one, two
    return "before", "after"


def _pairs(one: StepTable, two: StepTable) -> Iterator[Pair]:
    """Rows in which the same is computed; of several, those with the same precision, compilation and graph."""
    for row in two.rows:
        same = [other for other in one.rows if other.case.work == row.case.work]
        alike = [other for other in same if other.case == row.case]
        rivals = [other for other in two.rows if other.case.work == row.case.work]
        if alike or (len(same) == 1 and len(rivals) == 1):
            yield Pair((alike or same)[0], row)


def _differences(one: StepTable, two: StepTable, pairs: tuple[Pair, ...]) -> dict[str, tuple[Any, Any]]:
    """Differences of machine, versions, timing and `MEANS`: name -> (first, second)."""
    differences: dict[str, tuple[Any, Any]] = {}
    for kind, a, b in (("machine", one.machine, two.machine), ("timing", asdict(one.timing), asdict(two.timing))):
        for name in dict.fromkeys((*a, *b)):
            if a.get(name) != b.get(name):
                differences[f"{kind}: {name}"] = a.get(name), b.get(name)
    for name in MEANS:
        sides = [sorted({str(getattr(row.case, name)) for row in side}) for side in zip(*pairs, strict=True)]
        if any(getattr(pair.before.case, name) != getattr(pair.after.case, name) for pair in pairs):
            differences[f"cases: {name}"] = ", ".join(sides[0]), ", ".join(sides[1])
    return differences
