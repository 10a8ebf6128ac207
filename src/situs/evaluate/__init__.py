"""Evaluation: features, neighbours, probes, accuracy, robustness; of any model, never while it trains.

`evaluate_NAME(model, data)` is the verb `situs evaluate NAME` for Python: it takes whatever `situs.models.open_model`
takes and a path or a source of images, and returns a result that `situs.pages.publish` writes.
"""

from situs.evaluate.accuracy import evaluate_accuracy

__all__ = ["evaluate_accuracy"]
