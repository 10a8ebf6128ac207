"""What a step costs: time, memory, the share of the machine's ceiling, and how all of it grows.

`bench_step(cases)` is the verb `situs bench step` for Python, `compare_steps` and `bench_cost` those of the same names;
each returns a result that `situs.pages.publish` writes.
"""

from situs.bench.cases import StepCase, StepConfig, Timing
from situs.bench.compare import StepComparison, compare_steps
from situs.bench.cost import CostConfig, CostCurves, bench_cost
from situs.bench.step import StepTable, bench_step, read_steps

__all__ = [
    "CostConfig",
    "CostCurves",
    "StepCase",
    "StepComparison",
    "StepConfig",
    "StepTable",
    "Timing",
    "bench_cost",
    "bench_step",
    "compare_steps",
    "read_steps",
]
