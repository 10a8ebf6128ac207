"""What a model has learned of position: its table, its features, its attention, and its puzzles, as numbers.

`analyze_NAME(model, data)` is the verb `situs analyze NAME` for Python, as `situs.evaluate` has them.
"""

from situs.analyze.attention import analyze_attention
from situs.analyze.correlation import analyze_correlation
from situs.analyze.positions import analyze_positions
from situs.analyze.reconstruct import analyze_reconstruct
from situs.analyze.runs import analyze_runs

__all__ = ["analyze_attention", "analyze_correlation", "analyze_positions", "analyze_reconstruct", "analyze_runs"]
