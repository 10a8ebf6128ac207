"""What a step costs: time, memory, the share of the machine's ceiling.

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
