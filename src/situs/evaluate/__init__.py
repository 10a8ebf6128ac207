"""Evaluation: features, neighbours, probes, accuracy, robustness; of any model, never while it trains.

`evaluate_NAME(model, data)` is the verb `situs evaluate NAME` for Python: it takes whatever `situs.models.open_model`
takes and a path or a source of images, and returns a result that `situs.pages.publish` writes.
"""

from situs.evaluate.accuracy import evaluate_accuracy
from situs.evaluate.consistency import evaluate_consistency
from situs.evaluate.features import extract_features, write_features
from situs.evaluate.knn import evaluate_knn
from situs.evaluate.position import evaluate_position
from situs.evaluate.probe import evaluate_probe

__all__ = [
    "evaluate_accuracy",
    "evaluate_consistency",
    "evaluate_knn",
    "evaluate_position",
    "evaluate_probe",
    "extract_features",
    "write_features",
]
