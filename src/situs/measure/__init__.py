"""Measurements of any model, never while it trains: accuracy, robustness, features, what it knows of position.

`evaluate_NAME(model, data)` is the verb `situs evaluate NAME` for Python, `analyze_NAME` the verb `situs analyze NAME`:
each takes whatever `situs.models.open_model` takes and a path or a source of samples, and returns a result that
`situs.pages.publish` writes.
"""

from situs.measure.accuracy import evaluate_accuracy
from situs.measure.attention import analyze_attention
from situs.measure.consistency import evaluate_consistency
from situs.measure.correlation import analyze_correlation
from situs.measure.ensemble import evaluate_ensemble
from situs.measure.features import extract_features, write_features
from situs.measure.knn import evaluate_knn
from situs.measure.objects import evaluate_objects
from situs.measure.position.head import evaluate_position
from situs.measure.position.vectors import analyze_positions
from situs.measure.predict import predict
from situs.measure.probe.classes import evaluate_probe
from situs.measure.reconstruct import analyze_reconstruct
from situs.measure.robustness.run import PublishedSets, evaluate_robustness
from situs.measure.runs import analyze_runs
from situs.measure.segments import evaluate_segments

__all__ = [
    "PublishedSets",
    "analyze_attention",
    "analyze_correlation",
    "analyze_positions",
    "analyze_reconstruct",
    "analyze_runs",
    "evaluate_accuracy",
    "evaluate_consistency",
    "evaluate_ensemble",
    "evaluate_knn",
    "evaluate_objects",
    "evaluate_position",
    "evaluate_probe",
    "evaluate_robustness",
    "evaluate_segments",
    "extract_features",
    "predict",
    "write_features",
]
