"""A small result of every kind that has a page, for the tests of pages."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from sent import not_tried, setting, split_audit, tried

from situs.audit import April, NoDefence, PatchEmbedding
from situs.audit.cases import Case, ImageFinding
from situs.audit.chosen import MEASURES, Reading, WeightCheck
from situs.audit.defences import Step
from situs.audit.gradients import Audit
from situs.audit.scores import measure_all
from situs.audit.settings import Comparison
from situs.audit.split.result import SplitAudit
from situs.audit.split.stage import Kept
from situs.audit.split.text import PromptAudit, Row
from situs.audit.sweep.curve import IMAGES, Curves
from situs.audit.sweep.curve import Line as TracedLine
from situs.audit.sweep.curve import Point as TracedPoint
from situs.audit.sweep.ladder import Cost, Remedies, Remedy, Trial
from situs.audit.text.recovered import Read
from situs.audit.text.result import TextAudit, finding_of
from situs.bench.cases import StepCase, Timing
from situs.bench.clock import Kernels, Times
from situs.bench.compare import StepComparison, compare_steps
from situs.bench.measure import StepRow
from situs.bench.step import StepTable
from situs.config import from_dict
from situs.data.check import KINDS, DataCheck, Issue
from situs.data.pack import Packed
from situs.findings import Remark
from situs.gate import Limit
from situs.locks.attacks import LockAudit
from situs.locks.attacks.recovery import KeyRecovery
from situs.locks.equivariance import Finding, Verification
from situs.locks.veil import Veil
from situs.measure.accuracy import Accuracy, ClassAccuracy, LabelAccuracy, label_scores
from situs.measure.adapt import Adapted
from situs.measure.adapt.ways import Initial, TriedWay
from situs.measure.attention import Attention, AttentionMaps, Survey
from situs.measure.consistency import Consistency, ConsistencyCurve
from situs.measure.correlation import Correlation, Correlations
from situs.measure.ensemble import Ensemble
from situs.measure.knn import LayerAccuracy, LayerKnn
from situs.measure.objects import Answers, ApScores, Detections, DrawnObjects, ShownObjects
from situs.measure.perplexity import Perplexity, WordScores
from situs.measure.position.head import GridCell, PositionCurve, PositionGrid
from situs.measure.position.knowledge import OWN, PlaceReading, PositionAudit, Probed
from situs.measure.position.vectors import PositionTable, PositionTables, look_at
from situs.measure.probe.classes import (
    ClassProbe,
    ClassProbes,
    PositionProbe,
    PositionProbes,
    SegmentProbe,
    SegmentProbes,
)
from situs.measure.probe.linear import Fitted, Linear, Score, Tried
from situs.measure.reconstruct import Puzzle, PuzzleRatios, PuzzleScores, Reconstruction
from situs.measure.robustness.measures import Robustness
from situs.measure.runs import Run, Runs
from situs.measure.segments import Inference, Segments, SegmentScores, ShownMask
from situs.results import Origin, Provenance, Result
from situs.studies.form import Study as StudyForm
from situs.studies.result import Cell as StudyCell
from situs.studies.result import Drawn, Ended, StudyResult

NAME = "<b>mine</b> & {{ 7 * 7 }}"
ANSWERS = torch.tensor([[3, 1], [0, 2]])
SCORE = Accuracy(0.5, 0.75, 40, 1.25, 0.45, 0.4, 12)

IMAGE = torch.rand(1, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _fitted() -> Fitted:
    weight = torch.zeros(2, 3)
    return Fitted(
        Linear(weight, weight[:, 0], weight[0], weight[0]), 0.1, (Tried(0.1, 0.5, 1.0), Tried(1.0, 0.25, 2.0))
    )


def _score(classes: int) -> Score:
    return Score(0.5, 0.7, 2 * classes, torch.ones(classes, classes, dtype=torch.int64))


def _attention() -> Attention:
    layers = torch.full((2, 2), 0.5, dtype=torch.float64)
    found = Survey((2, 2), 3, 5, layers, torch.rand(2, 2, 3, 3), layers, layers)
    return Attention(found, AttentionMaps(torch.rand(2, 3, 8, 8), torch.full((2, 2, 2, 2), 0.25), 1, cls=True))


def _positions() -> PositionTables:
    rows = torch.randn(12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return PositionTables([look_at(NAME, PositionTable("learned table", rows, (3, 4)))], [])


def _reconstruction() -> Reconstruction:
    places = torch.tensor([[0, 1, 2, 3]])
    puzzle = Puzzle(places, places.flip(1), 2, 0, (2, 2))
    setting = PuzzleRatios(0.5)
    return Reconstruction(torch.rand(1, 3, 8, 8), {setting: puzzle}, {setting: PuzzleScores(1, 0.5, 1.0, 0.0)}, setting)


def _remedies() -> Remedies:
    trial = Trial(NAME, "above", 30.0, "patchembed", NAME, 2)
    named = Remedy("noise", NAME, NAME, trial, trial, trial, Cost(0.5, 1.0, None, NAME), tried=(trial,))
    return Remedies(NAME, Limit("psnr", 20.0), (named, Remedy("clip", None, NAME)), 2, 2, ("patchembed",))


def _curves() -> Curves:
    values = {"psnr": 30.0, "worst": 31.0, "exact": 0.0, "patches": 0.5}
    points = [TracedPoint("0", NAME, "tokens", values, (29.0, 31.0)), TracedPoint("1", NAME, "", {}, reason=NAME)]
    return Curves(NAME, [TracedLine("noise", NAME, NAME, points)], IMAGES, 2)


def _robustness() -> Robustness:
    cells = {"fog": dict.fromkeys(range(1, 6), SCORE)}
    return Robustness("val", None, SCORE, cells, torch.rand(1, 6, 3, 8, 8), None, None, 10, (), 8)


def _probes(kind: str) -> Result:
    made = {NAME: provenance()}
    if kind == "class":
        return ClassProbes({NAME: ClassProbe(_score(2), _fitted(), 20, "mean")}, made, classes=("a", "b"))
    if kind == "segments":
        return SegmentProbes({NAME: SegmentProbe(_score(2), _fitted(), 20)}, made, classes=("a", NAME))
    return PositionProbes({NAME: PositionProbe(_score(4), _fitted(), 20, 1.5, 2.0, "zeros")}, made, grid=(2, 2))


def _segments() -> Segments:
    mask = torch.tensor([[0, 1, -1], [1, 1, 0]], dtype=torch.int16)
    worst = [ShownMask(NAME, 0.25, torch.rand(3, 4, 6), mask, mask.flip(1).clamp(min=0))]
    return Segments(SegmentScores(torch.tensor([[3, 1], [0, 2]]), 0.5), (NAME, "b"), 1, worst, Inference())


def _detections() -> Detections:
    boxes = torch.tensor([[0.0, 0, 2, 2], [1, 0, 3, 2]])
    masks = torch.tensor([[[1, 1, 0], [1, 1, 0]], [[0, 0, 1], [0, 0, 1]]]).bool()
    drawn = DrawnObjects(boxes, torch.tensor([0, 1]), masks)
    worst = [ShownObjects(NAME, 0.25, torch.rand(3, 4, 6), (2, 3), drawn, drawn._replace(scores=torch.ones(2)))]
    scores = ApScores(0.25, 0.5, 0.125, math.nan, 0.25, 0.5, [0.5, math.nan])
    answers = Answers(torch.tensor([[3, 1, 0], [0, 2, 1], [1, 0, 0]]))
    return Detections(scores, scores, answers, (NAME, "b"), 1, worst)


def _runs() -> Runs:
    lines = [{"step": step, "epoch": step / 2, "loss": 3 / step, "val_top1": 0.1 * step} for step in (1, 2)]
    return Runs([Run(NAME, {"method": {"name": "mp3"}, "note": NAME}, lines, {"total_steps": 2}, False)])


def _position_audit() -> PositionAudit:
    read = [PlaceReading(depth, (3, 4), 0.5, 0.9, 0.75, 1.0, 0.25, 1.0) for depth in ("embedding", "norm")]
    looks = tuple(_positions().looks)
    row = Consistency(0.5, 2, False, 9, None, 1.0, 1.0, None, 2.0)
    return PositionAudit(
        NAME, (3, 4), ("table",), True, False, "mean", looks, "", Probed({OWN: read}, 4, 4), (row,), None
    )


def _outcomes() -> list[ImageFinding]:
    model: Any = None
    scores = measure_all(IMAGE.flip(3), IMAGE, 8)
    case = Case(NAME, model, NoDefence(), PatchEmbedding())
    attacked = case.finding("done", [0], scores=scores, facts=[{}], shown=IMAGE)
    return [attacked, Case(NAME, model, NoDefence(), April()).refused(NAME)]


def _audit() -> Audit:
    notes = {"lock": NAME}
    return Audit(_outcomes(), [NAME], IMAGE, NAME, Step(), {}, about={"none": NAME}, notes=notes, remedies=_remedies())


def _comparison() -> Comparison:
    guesses = {("a", "mean image"): measure_all(IMAGE * 0.5, IMAGE, 8)}
    return Comparison(_outcomes(), [NAME], IMAGE, IMAGE, guesses, 0.2, 1, 4, ())


def _split_audit() -> SplitAudit:
    done = replace(tried(NAME, psnr=30.0, places=0.5), shown=IMAGE)
    skipped = not_tried("labels", NAME)
    strengths = [Veil("noise", strength, rows=True) for strength in (0.2, 0.5)]
    found = [setting(veil, Kept(0.9, 0.5), done, skipped) for veil in (Veil(), *strengths)]
    return split_audit(*found, name=NAME, samples=1, public=4, pictures=IMAGE)


def _lock_audit() -> LockAudit:
    attacks = [KeyRecovery(f"drifted-base, {amount} ×", 4, 4 - 2 * amount, 0.5, NAME) for amount in (0, 1)]
    return LockAudit(NAME, (4,), 0, tuple(attacks))


def _verification() -> Verification:
    whole = Finding("blocks", "row", "holds", NAME, {"forward": 1e-15}, {"forward": 1e-6})
    return Verification(NAME, "float32", 1e-10, 1e-3, 3, 0.5, (whole, replace(whole, part="blocks.*.norm", native={})))


def _weight_check() -> WeightCheck:
    return WeightCheck(NAME, "", tuple(Reading(name, 1.0, "blocks.0", 0.5) for name in MEASURES))


def _steps(*seconds: float) -> StepTable:
    times = Times(
        seconds or (0.01, 0.012), 3.0, 1.5, Kernels(7.5, {"matmul": 6.0}, {NAME: 6.0}, 12.0, {"matmul": 12.0})
    )
    row = StepRow(StepCase(method="mp3", model=NAME, precision="bf16"), times, 10**12, (NAME,))
    machine = {"kind": "cuda", "device": NAME, "torch": "2.11"}
    return StepTable((row,), {"bf16": 8e14}, machine, Timing(), ((StepCase(method="mae"), NAME),), profile=True)


def _comparison_of_steps() -> StepComparison:
    before, after = _steps(0.01, 0.011, 0.012), _steps(0.02, 0.021, 0.022)
    return compare_steps(replace(before, machine={**before.machine, "device": "another"}), after)


def _checked() -> DataCheck:
    found = {kind: [Issue("train", NAME, NAME)] if kind == "broken" else [] for kind in KINDS}
    counts = {kind: len(every) for kind, every in found.items()}
    return DataCheck(images={"train": 4}, counts=counts, issues=found, sizes={}, classes={NAME: 4})


def _packed() -> Packed:
    shard = {"split": "train", "file": "train-00000.tar", "sha256": "0", "bytes": 9, "source_bytes": 0, "images": 3}
    broken = [{"split": "train", "number": 2, "name": NAME, "reason": NAME}]
    held = {"data": "set", "splits": ["train"], "config": {}, "shards": [shard], "broken": broken, "left_out": []}
    return Packed(manifest=held)


def _study_result() -> StudyResult:
    job = {"verb": "pretrain"}
    columns, line = [{"name": NAME, "figure": "top1"}], {"name": NAME, "at": [1, 2], "job": "a", "figure": "f"}
    table = {"columns": columns, "rows": [{"name": NAME, "paper": [0.5], "job": "a"}]}
    told = {"title": NAME, "shows": NAME, "note": NAME, "paper": "mp3", "place": "Table 1", "jobs": {"a": job}}
    curves = [{"x": NAME, "y": NAME, "lines": [line], "scale": "log"}]
    study = from_dict(StudyForm, {**told, "tables": [table], "curves": curves})
    cells = [StudyCell("a", 50.0, {0: 40.0, 1: 42.0}, 1), StudyCell("a", "", {}, 1, 0.5, NAME)]
    ended = (Ended("a-0", "a", "done", 3.0), Ended("a-1", "a", "failed", None, NAME))
    lines = ((Drawn(NAME, tuple(zip((1.0, 2.0), cells, strict=True))),),)
    return StudyResult("mine", study, "paper", 2, ended, (((cells[0],),),), lines)


def _prompt_audit() -> PromptAudit:
    read, row = Read("text 1", (2, 6), (2, 9), (True, False)), Row(1, Veil(columns=True))
    finding = finding_of(str(row), 1, "done", [read], [Remark("gap", NAME)], [{"proved": 1}], 2.0, "prompts")
    shown = {2: "[CLS]", 6: NAME, 9: "b"}
    about = {str(row): row.about}
    return PromptAudit([finding], NAME, ["text 1"], 1, shown=shown, about=about, rows=[row])


def _text_audit() -> TextAudit:
    read = Read("sentence 1", (2, 6), (2, 9), (True, False))
    row = finding_of("word gradient sent", 1, "done", [read], [Remark("gap", NAME)], [{"rank": 4}], 2.0)
    shown = {2: "[CLS]", 6: NAME, 9: "b"}
    return TextAudit([row], NAME, ["sentence 1"], 1, shown=shown, about={row.defence: NAME})


def _adapted() -> Adapted:
    labels, right = torch.tensor([0, 0, 1, 1]), torch.tensor([1.0, 0.0, 1.0, torch.nan]).double()
    ways = [
        TriedWay("class means", Initial("", ""), right),
        TriedWay("LoRA", Initial("mp3", ""), 0 * right, 0.0, 3, 8),
    ]
    return Adapted(Path("run"), tuple(ways), ways[0], labels, (NAME, "b"), SCORE, SCORE, ANSWERS, (NAME,))


RESULTS: dict[str, tuple[Callable[[], Result], set[str]]] = {
    "Adapted": (_adapted, {"classes", "confusion"}),
    "Attention": (_attention, {"images", "heads", "relative"}),
    "Audit": (_audit, set()),
    "ClassAccuracy": (lambda: ClassAccuracy(SCORE, ANSWERS, (NAME, "b")), {"classes", "confusion"}),
    "ClassProbes": (lambda: _probes("class"), {"classes", "confusion"}),
    "Comparison": (_comparison, {"pictures-a"}),
    "ConsistencyCurve": (
        lambda: ConsistencyCurve([Consistency(0.5, 2, False, 9, 0.5, 1.0, 1.0, 0.5, 2.0)], "mean", None, NAME, (2, 2)),
        {"norms", "shares"},
    ),
    "Correlations": (
        lambda: Correlations({"norm": Correlation((2, 2), torch.eye(4).double(), torch.eye(4).double(), 3)}),
        {"maps", "distance", "layers"},
    ),
    "Curves": (_curves, {"noise-psnr", "noise-patches"}),
    "DataCheck": (_checked, set()),
    "Ensemble": (
        lambda: Ensemble({NAME: SCORE, "b": SCORE}, SCORE, ((1.0, 0.5), (0.5, 1.0)), 0.75),
        {"top1", "agreement"},
    ),
    "LabelAccuracy": (
        lambda: LabelAccuracy(label_scores(torch.ones(2, 2), torch.tensor([[1, 0], [-1, 0]])), (NAME, "b")),
        {"classes"},
    ),
    "LayerKnn": (
        lambda: LayerKnn(
            tuple(LayerAccuracy(n, "mean", n / 4, n / 5) for n in (1, 2)), 8, 4, None, 3, None, ANSWERS, (NAME, "b")
        ),
        {"layers"},
    ),
    "LockAudit": (_lock_audit, set()),
    "Packed": (_packed, set()),
    "PositionAudit": (_position_audit, {"error", "named", "vectors", "spectrum"}),
    "PositionCurve": (lambda: PositionCurve({0.0: 0.5, 0.5: 0.25}, 4, 16, 0.5), {"curve"}),
    "PositionGrid": (lambda: PositionGrid((GridCell(0.5, 0.5, 8, 4, 0.25),), 4, 16, (0.5, 0.5)), {"grid"}),
    "PositionProbes": (lambda: _probes("position"), {"accuracy", "places"}),
    "PositionTables": (_positions, {"pca-2d", "pca-3d", "cosine", "energy", "guesses"}),
    "PromptAudit": (_prompt_audit, set()),
    "Reconstruction": (_reconstruction, {"one", "placed"}),
    "Remedies": (_remedies, set()),
    "Robustness": (_robustness, {"accuracy", "severity", "corruptions"}),
    "Runs": (_runs, {"held-out", "curves"}),
    "SplitAudit": (_split_audit, {"pictures", "psnr", "places"}),
    "StepComparison": (_comparison_of_steps, set()),
    "StepTable": (_steps, set()),
    "SegmentProbes": (lambda: _probes("segments"), {"classes", "confusion"}),
    "Perplexity": (lambda: Perplexity(WordScores(math.exp(2.0), 2.0, 0.25, 40)), set()),
    "Detections": (_detections, {"classes-boxes", "classes-masks", "confusion", "worst"}),
    "Segments": (_segments, {"classes", "confusion", "worst"}),
    "StudyResult": (_study_result, {"curves"}),
    "TextAudit": (_text_audit, set()),
    "Verification": (_verification, set()),
    "WeightCheck": (_weight_check, set()),
}
"""The class of a result -> a small one, and the pictures of its page."""


def provenance() -> Provenance:
    """With a name that must be escaped wherever it stands."""
    return Provenance({"name": NAME, "data": NAME, "seed": 3}, (Origin(NAME, "0123"),), (NAME,))
