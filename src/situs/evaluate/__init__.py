"""Evaluation: features, neighbours, probes, accuracy, robustness; of any model, never while it trains.

`evaluate_NAME(model, data)` is the verb `situs evaluate NAME` for Python: it takes whatever `situs.models.open_model`
takes and a path or a source of samples, and returns a result that `situs.pages.publish` writes.
"""

from situs.evaluate.accuracy import evaluate_accuracy
from situs.evaluate.consistency import evaluate_consistency
from situs.evaluate.ensemble import evaluate_ensemble
from situs.evaluate.features import extract_features, write_features
from situs.evaluate.knn import evaluate_knn
from situs.evaluate.objects.measure import evaluate_objects
from situs.evaluate.position import evaluate_position
from situs.evaluate.predict import predict
from situs.evaluate.probe.classes import evaluate_probe
from situs.evaluate.robustness.run import PublishedSets, evaluate_robustness
from situs.evaluate.segments.measure import evaluate_segments

__all__ = [
    "PublishedSets",
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
