"""The cost of a training step: time, memory, and the share of the machine's peak rate.

`bench_step(cases)` is the verb `situs bench` for Python, `compare_steps` its flag `--compare`; both return a result
that `situs.pages.publish` writes.
"""

from situs.bench.cases import StepCase as StepCase
from situs.bench.cases import StepConfig as StepConfig
from situs.bench.cases import Timing as Timing
from situs.bench.compare import StepComparison as StepComparison
from situs.bench.compare import compare_steps as compare_steps
from situs.bench.step import StepTable as StepTable
from situs.bench.step import bench_step as bench_step
from situs.bench.step import read_steps as read_steps
