"""Two tables of steps side by side: what became faster or slower beyond the spread, and what else differs."""

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
"""Repeats on each side from which a spread says something."""

UNTOLD = "cannot be told"


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
        """ "faster" or "slower" only where the slowest repeat of one is faster than the fastest of the other."""
        one, two = self.before.times.seconds, self.after.times.seconds
        if min(len(one), len(two)) < ENOUGH:
            return UNTOLD
        return "faster" if max(two) < min(one) else "slower" if min(two) > max(one) else "same"


@dataclass(frozen=True)
class StepComparison(Result):
    """Pairs of rows of two tables, by name. alone: cases that only one of them has. differs: what else is not alike."""

    file: ClassVar[str] = "comparison"
    names: tuple[str, str]
    pairs: tuple[Pair, ...]
    alone: tuple[str, ...]
    differs: Mapping[str, tuple[Any, Any]]

    def summary(self) -> Summary:
        """How many became faster or slower, the pairs, and what differs in machine, versions and settings."""
        count = [pair.verdict for pair in self.pairs].count
        told = [f"{count(word)} {word}" for word in ("faster", "slower", "same", UNTOLD) if count(word)]
        one, two = self.names
        cases = f"{len(self.pairs)} cases" if len(self.pairs) > 1 else "one case"
        said = f"{two} beside {one}, {cases}: {', '.join(told)}; a change is one beyond the spread of the repeats."
        header = ["case", "model", "batch", f"{one}, ms", f"{two}, ms", "time ratio", "verdict", "GiB", "GiB after"]
        tables = [Table(f"{one} and {two}", header, [_cells(pair) for pair in self.pairs])]
        if self.differs:
            rows = [[name, *map(_said, values)] for name, values in self.differs.items()]
            tables.insert(0, Table("what differs besides", ["", one, two], rows))
        numbers = tuple((f"{pair.ratio:.2f} ×", f"time of a step, {pair.after.case.label}") for pair in self.pairs[:1])
        return Summary(said, tuple(tables), tuple(self._notes()), numbers)

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
            yield f"Measured on different machines ({', '.join(hardware)}): a ratio is not the code's alone."
        elif self.differs:
            yield "Not the code alone differs: see above."
        if any(pair.verdict == UNTOLD for pair in self.pairs):
            yield f"Fewer than {ENOUGH} repeats on a side have no spread that would tell a change."
        yield from (f"only in {each}" for each in self.alone)

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


def _said(value: Any) -> Cell:
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def compare_steps(before: StepTable | str | Path, after: StepTable | str | Path) -> StepComparison:
    """Two tables of `bench_step`, or the JSON files of two, case by case.

    A case is the same where the same is computed; in which precision, compiled or not, on which machine may differ and
    is said. Tables of a CPU and a GPU, or without a case in common, are refused.
    """
    names = _names(before, after)
    one, two = (each if isinstance(each, StepTable) else read_steps(each) for each in (before, after))
    if one.machine["kind"] != two.machine["kind"]:
        kinds = f"{names[0]} was measured on {one.machine['kind']} and {names[1]} on {two.machine['kind']}"
        raise SitusError(f"{kinds}: their times do not compare", field=("before", "after"))
    pairs = tuple(_pairs(one, two))
    if not pairs:
        raise SitusError(f"{names[0]} and {names[1]} have no case in common", field=("before", "after"))
    paired = [row for pair in pairs for row in pair]
    alone = tuple(
        f"{name}: {row.case.label}, {row.case.shape}, batch {row.case.batch}"
        for name, table in zip(names, (one, two), strict=True)
        for row in table.rows
        if not any(row is each for each in paired)
    )
    return StepComparison(names, pairs, alone, _differences(one, two, pairs), provenance=Provenance())


def _names(*given: StepTable | str | Path) -> tuple[str, str]:
    """Short names of two tables, that are not the same."""
    paths = [None if isinstance(each, StepTable) else Path(each) for each in given]
    for short in (lambda path: path.stem, lambda path: path.parent.name, str):
        one, two = ("" if path is None else short(path) for path in paths)
        if one and two and one != two:
            return one, two
    return "before", "after"


def _pairs(one: StepTable, two: StepTable) -> Iterator[Pair]:
    """Rows in which the same is computed; of several that differ in their means, those of the same means."""
    for row in two.rows:
        same = [each for each in one.rows if each.case.work == row.case.work]
        alike = [each for each in same if each.case == row.case]
        rivals = [each for each in two.rows if each.case.work == row.case.work]
        if alike or (len(same) == 1 and len(rivals) == 1):
            yield Pair((alike or same)[0], row)


def _differences(one: StepTable, two: StepTable, pairs: tuple[Pair, ...]) -> dict[str, tuple[Any, Any]]:
    """Machine, versions, timing and what the cases are computed with: name -> (first, second)."""
    found: dict[str, tuple[Any, Any]] = {}
    for kind, a, b in (("machine", one.machine, two.machine), ("timing", asdict(one.timing), asdict(two.timing))):
        for name in dict.fromkeys((*a, *b)):
            if a.get(name) != b.get(name):
                found[f"{kind}: {name}"] = a.get(name), b.get(name)
    for name in MEANS:
        sides = [sorted({str(getattr(row.case, name)) for row in side}) for side in zip(*pairs, strict=True)]
        if any(getattr(pair.before.case, name) != getattr(pair.after.case, name) for pair in pairs):
            found[f"cases: {name}"] = ", ".join(sides[0]), ", ".join(sides[1])
    return found
