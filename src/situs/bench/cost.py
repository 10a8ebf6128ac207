"""How the cost of a step grows: over batch, image size, depth and number of patches, beside the line of operations.

The line goes through the reference: there a step makes so many operations a second, and at that rate it would take
operations / rate anywhere else. A point above the line uses the machine less well than the reference, one below it
better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple

from situs.bench.cases import StepCase, StepConfig, StepShape, Timing, make_cases
from situs.bench.measure import StepRow, make_method
from situs.bench.step import StepTable, measure_cases, timing_of
from situs.errors import SitusError
from situs.limits import Count, Natural
from situs.results import Cell, Provenance, Result, Summary, Table, percent


@dataclass(frozen=True)
class CostConfig(StepShape, Timing):
    """The reference, and what is changed about it, one thing at a time."""

    model: str = "vit_small_patch16_224"
    """The backbone."""

    batch: Count = 64
    """Images a step at the reference."""

    batches: tuple[Count, ...] = (16, 32, 64, 128, 256)
    """Batches."""

    img_sizes: tuple[Count, ...] = (224, 288, 352, 416, 512)
    """Sides of the images in pixels, at the patch size of the reference."""

    depths: tuple[Count, ...] = (3, 6, 12, 18, 24)
    """Numbers of blocks."""

    patch_sizes: tuple[Count, ...] = (32, 28, 16, 14, 8)
    """Sides of a patch in pixels, at the image size of the reference: what makes the number of patches."""

    compile: bool = False
    """Compile every point: a minute each, or all at the same time in processes of their own."""

    warmup: Count = 6
    """Steps before the clock runs; the update is recorded after four."""

    steps: Count = 10
    """Steps of one repeat."""

    repeats: Count = 3
    """How often that many steps are timed."""

    profiled: Natural = 0
    """Steps that are run once more under the profiler, for the GPU's busy share; 0: none."""


class Point(NamedTuple):
    """One step of a curve. value: what it stands at on its axis."""

    value: int
    row: StepRow


AXES = {
    "batch": "images a step",
    "image size": "side of the image, pixels",
    "depth": "blocks",
    "patches": "patches of an image",
}
"""axis -> the words under it."""


@dataclass(frozen=True)
class CostCurves(Result):
    """Steps along each axis, the reference, and the table of all that was measured."""

    file: ClassVar[str] = "cost"
    reference: StepRow
    axes: Mapping[str, tuple[Point, ...]]
    table: StepTable

    def predicted(self, row: StepRow) -> float:
        """Seconds of a step that makes as many operations a second as the reference."""
        return row.flops / self.reference.flops_per_second

    def over(self, row: StepRow) -> float:
        """The time of a step over the one that its operations predict."""
        return row.times.median / self.predicted(row)

    def summary(self) -> Summary:
        """How far the points lie from the line."""
        points = [(axis, point) for axis, held in self.axes.items() for point in held]
        low, high = (pick(points, key=lambda each: self.over(each[1].row)) for pick in (min, max))
        told = [f"{self.over(point.row):.2f} times the line at {axis} {point.value}" for axis, point in (low, high)]
        case, share = self.reference.case, self.table.share(self.reference)
        at = "" if share is None else f", which is {percent(share)} of the ceiling there"
        said = (
            f"{case.label}, {case.shape}: at the rate of the reference{at}, operations alone would draw a line; a step "
            f"takes from {told[0]} to {told[1]}."
        )
        header = ["axis", "value", "ms", "predicted ms", "over the line", "GFLOP", "of ceiling", "GiB"]
        title = f"{self.table.title()}; reference: batch {case.batch}, {case.shape}"
        return Summary(said, (Table(title, header, list(self._rows())),), self.table.summary().notes)

    def _rows(self) -> Iterator[list[Cell]]:
        for axis, points in self.axes.items():
            for value, row in points:
                share, gib = self.table.share(row), row.times.gib
                yield [
                    axis,
                    value,
                    f"{1e3 * row.times.median:.2f}",
                    f"{1e3 * self.predicted(row):.2f}",
                    f"{self.over(row):.2f}",
                    f"{row.flops / 1e9:,.4g}",
                    None if share is None else percent(share),
                    None if gib is None else f"{gib:.2f}",
                ]

    def numbers(self) -> dict[str, Any]:
        """Every point, with the line at it."""
        axes = {
            axis: [
                {"value": value, "predicted_ms": 1e3 * self.predicted(row), **row.to_json()} for value, row in points
            ]
            for axis, points in self.axes.items()
        }
        return {**self.table.numbers(), "measures": "cost", "reference": self.reference.to_json(), "axes": axes}


def bench_cost(
    case: str = "supervised",
    config: CostConfig | None = None,
    *,
    device: str | None = None,
    at_once: bool = False,
    progress: Callable[[CostCurves | None, str], None] = lambda *_: None,
) -> CostCurves:
    """Measures a step along every axis of the config, each from the reference. A point that fails is left out and told.

    case: a word as `make_cases` takes it. at_once: see `bench_step`. progress: told after each point, with the curves
    so far, or None where the reference is not measured yet.
    """
    config = config or CostConfig()
    reference, axes = cost_cases(case, config)
    cases: list[StepCase] = []
    for each in (reference, *(case for points in axes.values() for case in points.values())):
        cases += [] if each in cases else [each]
    sides = [side for side in config.patch_sizes if side not in {each.patch_size for each in axes["patches"].values()}]
    left_out = tuple(f"patches of {side} pixels do not fill the images and are left out" for side in sides)

    def curves(table: StepTable) -> CostCurves:
        return replace(curves_of(reference, axes, table), provenance=Provenance(left_out=left_out))

    def tell(table: StepTable, line: str) -> None:
        progress(curves(table) if row_of(reference, table) else None, line)

    return curves(measure_cases(cases, timing_of(config), device=device, at_once=at_once, progress=tell))


def cost_cases(word: str, config: CostConfig) -> tuple[StepCase, dict[str, dict[int, StepCase]]]:
    """The reference, all that is the model's own written out, and for each axis its cases by value."""
    shared = {each.name: getattr(config, each.name) for each in fields(StepShape)}
    [asked] = make_cases([word], StepConfig(models=(config.model,), batches=(config.batch,), **shared))
    backbone = make_method(asked).backbone
    size, patch = backbone.input.shape, backbone.input.patch
    if size is None or patch is None or patch[0] != patch[1]:
        raise SitusError(f"{asked.model}: has no patches of equal sides, over whose number its cost could be measured")
    depth = len(backbone.block_modules())

    def like(side: int | None = None, patch_size: int = patch[0], blocks: int = depth, **other: Any) -> StepCase:
        model_args = {**asked.model_args, "depth": blocks}
        sides = size if side is None else (side, side)
        return replace(asked, img_size=sides, patch_size=patch_size, model_args=model_args, **other)

    whole = [side for side in config.patch_sizes if not any(length % side for length in size)]
    return like(), {
        "batch": {batch: like(batch=batch) for batch in sorted(config.batches)},
        "image size": {side: like(side) for side in sorted(config.img_sizes)},
        "depth": {blocks: like(blocks=blocks) for blocks in sorted(config.depths)},
        "patches": {size[0] // side * (size[1] // side): like(patch_size=side) for side in sorted(whole, reverse=True)},
    }


def curves_of(reference: StepCase, axes: Mapping[str, Mapping[int, StepCase]], table: StepTable) -> CostCurves:
    """The rows of a table along the axes of its cases."""
    at = row_of(reference, table)
    if at is None:
        why = next((why for case, why in table.failed if case == reference), "it was not measured")
        raise SitusError(f"the reference could not be measured: {why}", field="case")
    found = {
        axis: tuple(Point(value, row) for value, case in cases.items() if (row := row_of(case, table)) is not None)
        for axis, cases in axes.items()
    }
    return CostCurves(at, {axis: points for axis, points in found.items() if points}, table)


def row_of(case: StepCase, table: StepTable) -> StepRow | None:
    """The row of a case, where it has one."""
    return next((row for row in table.rows if row.case.work == case.work), None)
