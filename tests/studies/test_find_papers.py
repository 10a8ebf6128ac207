"""Every figure that a study of the package names is one that its job writes, as a small result of each verb shows."""

from __future__ import annotations

import json
import re
import runpy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from situs.audit.split.result import SCORES
from situs.errors import SitusError
from situs.measure.robustness.measures import Anomalies, Natural
from situs.results import finite
from situs.studies.find import find
from situs.studies.form import VERBS, Study
from situs.studies.plan import cell_of, planned, point_of, study_names

RESULTS = {
    "evaluate accuracy": ["ClassAccuracy", "LabelAccuracy", "Ensemble", "Perplexity", "Detections", "Segments"],
    "evaluate consistency": ["ConsistencyCurve"],
    "evaluate knn": ["LayerKnn"],
    "evaluate position": ["PositionCurve", "PositionGrid", "PositionTables", "PositionAudit"],
    "evaluate probe": ["ClassProbes", "PositionProbes", "SegmentProbes"],
    "evaluate robustness": ["Robustness"],
    "evaluate attention": ["Attention", "Correlations"],
    "evaluate reconstruct": ["Reconstruction"],
    "audit gradients": ["Audit", "Comparison"],
    "audit lock": ["LockAudit"],
    "audit split": ["SplitAudit", "PromptAudit"],
    "audit texts": ["TextAudit"],
    "bench": ["StepTable"],
    "split infer": ["ClassAccuracy", "LabelAccuracy"],
    "info": ["Verification"],
}
"""What a verb gives, by the names of tests/pages/test_init.py."""

LOGGED = (
    "loss",
    "val_top1",
    "val_top5",
    "val_miou",
    "val_loss",
    "val_perplexity",
    "position_accuracy",
    "accuracy",
    "knn",
    "lr",
)
"""What trainings log."""


@pytest.fixture(scope="module")
def samples() -> dict[str, list[dict[str, Any]]]:
    """By verb, the numbers that it may write."""
    small = runpy.run_path(str(Path(__file__).parents[1] / "pages" / "test_init.py"))["RESULTS"]
    made = {
        verb: [json.loads(json.dumps(finite(small[n][0]().to_json()))) for n in names]
        for verb, names in RESULTS.items()
    }
    kinds = {"imagenet_a": Natural, "imagenet_o": Anomalies}
    made["evaluate robustness"][0] |= {name: {f.name: 0.5 for f in fields(kind)} for name, kind in kinds.items()}
    for attack in made["audit split"][0]["settings"][0]["attacks"]:
        attack |= {name.replace(" ", "_"): 0.5 for name in SCORES}
    made["info"][0]["findings"][0]["errors"] |= dict.fromkeys(("forward", "backward", "steps"), 0.0)
    entry = {"step": 1, "epoch": 1.0, "seconds": 1.0, "value": 0.5}
    log = {**dict.fromkeys(LOGGED, 0.5), "log": {name: [entry] for name in LOGGED}}
    return {**made, **{verb: [log] for verb, how in VERBS.items() if how.trains}}


def figures(study: Study) -> set[tuple[str, str]]:
    """Job and figure of every cell and point."""
    found = {cell_of(table, row, c) for table in study.tables for row in table.rows for c in range(len(table.columns))}
    for line in (line for curves in study.curves for line in curves.lines):
        found |= {point_of(line, index) for index in range(len(line.at) or 1)}
        found |= {(point_of(line, 0)[0], line.over)} if line.over else set()
    return {(job, figure) for job, figure in found if job}


def is_there(numbers: dict[str, Any], figure: str) -> bool:
    """Whether the path leads anywhere; which entry of a list, which model and which corruption is not looked at."""
    path = re.sub(r"\[(?!\*\])[^\]]*\]", "[0]", figure)
    try:
        find(numbers, re.sub(r"(?<=^models\.)[^.]+|(?<=^corruptions\.)[^.]+", "*", path))
    except SitusError as error:
        return str(error).endswith("in the value None")  # a score that this small result lacks
    return True


@pytest.mark.parametrize("name", study_names())
def test_every_figure_is_one_that_the_job_writes(
    name: str, samples: dict[str, list[dict[str, Any]]], every: dict[str, Study]
) -> None:
    study = every[name]
    jobs = planned(study)
    wrong = [
        f"{job} ({jobs[job].verb}): {figure}"
        for job, figure in sorted(figures(study))
        if not any(is_there(numbers, figure) for numbers in samples[jobs[job].verb])
    ]
    assert wrong == []


def test_a_figure_that_no_job_writes_is_found(samples: dict[str, list[dict[str, Any]]]) -> None:
    (numbers,) = samples["evaluate consistency"]
    assert is_there(numbers, "rows[ratio=0.15,told=true].consistency") and not is_there(numbers, "rows[0].consistancy")
    assert {verb for verb, how in VERBS.items() if not how.trains} - RESULTS.keys() == {"export", "keygen", "lock"}
