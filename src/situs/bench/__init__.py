"""The cost of a training step: time, memory, and the share of the machine's peak rate.

`bench_step(cases)` is the verb `situs bench` for Python, `compare_steps` its flag `--compare`; both return a result
that `situs.pages.publish` writes.
"""

from situs.bench.cases import StepCase, StepConfig, Timing
from situs.bench.compare import StepComparison, compare_steps
from situs.bench.step import StepTable, bench_step, read_steps

__all__ = [
    "StepCase",
    "StepComparison",
    "StepConfig",
    "StepTable",
    "Timing",
    "bench_step",
    "compare_steps",
    "read_steps",
]
