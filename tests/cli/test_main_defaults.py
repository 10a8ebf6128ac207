"""The command line and Python do the same where nothing is said."""

from __future__ import annotations

import inspect
from dataclasses import fields
from importlib import import_module

import pytest

from situs.cli.main import verb_type

FUNCTIONS = {
    "adapt": "situs.measure.adapt.run.adapt_model",
    "audit gradients": "situs.audit.audit_gradients",
    "audit lock": "situs.locks.audit_lock",
    "audit split": "situs.audit.split.audit.audit_split",
    "audit texts": "situs.audit.text.audit.audit_texts",
    "bench": "situs.bench.bench_step",
    "data check": "situs.data.check.check",
    "data pack": "situs.data.pack.pack",
    "evaluate accuracy": "situs.measure.accuracy.evaluate_accuracy situs.measure.ensemble.evaluate_ensemble "
    "situs.measure.objects.evaluate_objects situs.measure.perplexity.evaluate_perplexity "
    "situs.measure.segments.evaluate_segments",
    "evaluate attention": "situs.measure.attention.analyze_attention",
    "evaluate consistency": "situs.measure.consistency.evaluate_consistency",
    "evaluate knn": "situs.measure.knn.evaluate_knn",
    "evaluate position": "situs.measure.position.head.evaluate_position "
    "situs.measure.position.vectors.analyze_positions situs.measure.correlation.analyze_correlation",
    "evaluate probe": "situs.measure.probe.classes.evaluate_probe",
    "evaluate reconstruct": "situs.measure.reconstruct.analyze_reconstruct",
    "evaluate robustness": "situs.measure.robustness.run.evaluate_robustness",
    "features": "situs.measure.features.extract_features",
    "info": "situs.locks.verify",
    "lock": "situs.locks.lock",
    "play": "situs.play.write_playground",
    "predict": "situs.measure.predict.predict",
    "report": "situs.measure.runs.analyze_runs",
    "split certs": "situs.split.transport.certificates.make_certificates",
    "split serve": "situs.split.serving.make_server",
    "study run": "situs.studies.run_study",
    "unlock": "situs.locks.unlock",
}
OWN = {
    "audit split": {"pictures", "public", "defences", "permute"},
    "bench": {"cases", "config"},
    "audit lock": {"config"},
    "predict": {"out"},
}
"""What the command line shows without being asked: pictures; the usual cases; a config of its own flags; a file that
must be named. Where images and texts have different defaults, a flag that is not given is left to the function."""


@pytest.mark.parametrize(
    ("verb", "function"), [(verb, each) for verb, functions in FUNCTIONS.items() for each in functions.split()]
)
def test_a_flag_has_the_default_of_the_function_behind_its_verb(verb: str, function: str) -> None:
    module, _, name = function.rpartition(".")
    parameters = inspect.signature(getattr(import_module(module), name)).parameters
    flags = {each.name: each.default for each in fields(verb_type(verb)) if each.name not in OWN.get(verb, ())}
    both = {name: each.default for name, each in parameters.items() if name in flags and each.default is not each.empty}
    assert both and {name: flags[name] or None for name in both} == {name: both[name] or None for name in both}
