"""Measurements of any model, never while it trains: accuracy, robustness, features, what it knows of position.

`evaluate_NAME(model, data)` is the verb `situs evaluate NAME` for Python; those called `analyze_NAME` are kinds of such
verbs. Each takes whatever `situs.models.open_model` takes and a path or a source of samples, and returns a result that
`situs.pages.publish` writes.
"""

from situs.measure.accuracy import evaluate_accuracy as evaluate_accuracy
from situs.measure.attention import analyze_attention as analyze_attention
from situs.measure.consistency import evaluate_consistency as evaluate_consistency
from situs.measure.correlation import analyze_correlation as analyze_correlation
from situs.measure.ensemble import evaluate_ensemble as evaluate_ensemble
from situs.measure.features import extract_features as extract_features
from situs.measure.features import write_features as write_features
from situs.measure.knn import evaluate_knn as evaluate_knn
from situs.measure.objects import evaluate_objects as evaluate_objects
from situs.measure.position.head import evaluate_position as evaluate_position
from situs.measure.position.vectors import analyze_positions as analyze_positions
from situs.measure.predict import predict as predict
from situs.measure.probe.classes import evaluate_probe as evaluate_probe
from situs.measure.reconstruct import analyze_reconstruct as analyze_reconstruct
from situs.measure.robustness.run import PublishedSets as PublishedSets
from situs.measure.robustness.run import evaluate_robustness as evaluate_robustness
from situs.measure.runs import analyze_runs as analyze_runs
from situs.measure.segments import evaluate_segments as evaluate_segments
