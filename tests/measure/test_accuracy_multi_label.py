"""Scores of multi-label classifiers against scikit-learn and by their definitions; and a run of one from end to end."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.metrics import accuracy_score, average_precision_score, f1_score, log_loss
from torch import Tensor

from situs.backbones import BackboneConfig
from situs.data.augment.recipes import AugmentConfig
from situs.data.config import DataConfig
from situs.data.loader import make_loader
from situs.data.sources.base import TensorSource
from situs.errors import SitusError
from situs.measure import evaluate_accuracy, evaluate_consistency, evaluate_ensemble, evaluate_knn, evaluate_probe
from situs.measure.accuracy import (
    LabelAccuracy,
    average_precision,
    label_scores,
    labels_of,
    measure_accuracy,
    measure_labels,
)
from situs.measure.features import extract_features, write_features
from situs.measure.finetune import FinetuneConfig, finetune_config
from situs.measure.hooks import validation_hooks
from situs.methods import Batch, SupervisedConfig
from situs.models import open_model
from situs.models.export import export_run
from situs.models.start import starting
from situs.train.assemble import Setup
from situs.train.checkpoint import RunFolder
from situs.train.config import TrainConfig
from situs.train.optim import OptimConfig
from situs.train.run import RunConfig, load_run, train_run


def slow_average_precision(scores: list[float], truth: list[bool]) -> float:
    """By the definition: at each distinct score, highest first, the recall gained times the precision there."""
    found, before = 0.0, 0.0
    for bound in sorted(set(scores), reverse=True):
        taken = [true for score, true in zip(scores, truth, strict=True) if score >= bound]
        recall, precision = sum(taken) / sum(truth), sum(taken) / len(taken)
        found, before = found + (recall - before) * precision, recall
    return found


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=30))
def test_average_precision_is_its_definition_and_scikit_learn_s_with_ties(pairs: list[tuple[int, bool]]) -> None:
    scores, truth = [float(score) for score, _ in pairs], [true for _, true in pairs]
    found = average_precision(torch.tensor(scores, dtype=torch.float64), torch.tensor(truth))
    if not any(truth):
        assert found is None
        return
    assert found == pytest.approx(slow_average_precision(scores, truth), abs=1e-12)
    assert found == pytest.approx(average_precision_score(truth, scores), abs=1e-12)


def some(count: int = 60, unknown: bool = True) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(count, 4, generator=generator).mul(2).round() / 2  # with ties
    labels = (logits + torch.randn(count, 4, generator=generator) > torch.tensor([0.0, 0.5, 1.0, 9.0])).to(torch.int8)
    if unknown:
        labels[torch.rand(count, 4, generator=generator) < 0.2] = -1
        labels[7] = -1
    return logits, labels


def test_every_number_is_scikit_learn_s() -> None:
    logits, labels = some(unknown=False)
    found = label_scores(logits, labels)
    truth, said, likely = labels.numpy(), (logits > 0).numpy(), logits.double().sigmoid().numpy()
    assert [each.positives for each in found.by_class] == truth.sum(0).tolist() and truth[:, 3].sum() == 0
    for number, each in enumerate(found.by_class[:3]):
        assert each.average_precision == pytest.approx(average_precision_score(truth[:, number], logits[:, number]))
        assert each.accuracy == accuracy_score(truth[:, number], said[:, number])
        assert each.f1 == pytest.approx(f1_score(truth[:, number], said[:, number]))
    assert found.mean_ap == pytest.approx(average_precision_score(truth[:, :3], logits[:, :3], average="macro"))
    assert found.f1 == pytest.approx(f1_score(truth[:, :3], said[:, :3], average="macro"))
    assert found.accuracy == pytest.approx((truth == said).mean())
    assert found.exact == accuracy_score(truth, said) and (found.count, found.unknown) == (60, 0)
    losses = [log_loss(truth[:, number], likely[:, number], labels=[0, 1]) for number in range(4)]
    assert found.loss == pytest.approx(np.mean(losses), rel=1e-9)
    assert found.majority == pytest.approx(np.mean([max(share, 1 - share) for share in truth.mean(0)]))
    assert (found.by_class[3].average_precision, found.by_class[3].f1) == (None, None)
    told = LabelAccuracy(found, ("a", "b", "c", "none")).summary()
    assert told.notes == ("1 class has no images here, so its average precision and F1 are undefined: none.",)


def test_unknown_labels_are_left_out_of_every_number() -> None:
    logits, labels = some()
    found, known = label_scores(logits, labels), labels >= 0
    for number, each in enumerate(found.by_class):
        rows = known[:, number]
        alone = label_scores(logits[rows, number, None], labels[rows, number, None])
        assert each == alone.by_class[0]
    told = known.any(1)
    right = ((logits > 0) == (labels > 0)) | ~known
    assert found.exact == pytest.approx(float(right[told].all(1).double().mean())) and int(told.sum()) == 59
    assert found.unknown == int((~known).sum())
    assert f"{found.unknown} labels are unknown" in LabelAccuracy(found, tuple("abcd")).summary().notes[0]
    with pytest.raises(SitusError, match="none of the labels"):
        label_scores(logits, torch.full_like(labels, -1))
    assert math.isnan(label_scores(logits, torch.zeros_like(labels)).mean_ap)


def batches(logits: Tensor, labels: Tensor, *ends: int) -> list[Batch]:
    spans = [slice(start, stop) for start, stop in zip((0, *ends), ends, strict=False)]
    return [Batch(logits[span], torch.arange(len(logits))[span], {"labels": labels[span]}) for span in spans]


def test_batches_and_ranks_of_any_size_come_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = some()
    whole = measure_labels(lambda images: images, batches(logits, labels, 60))
    assert measure_labels(lambda images: images, batches(logits, labels, 7, 30, 60)) == whole
    rest, told = torch.zeros(40, 4), torch.zeros(40, 4, dtype=torch.int8)
    rest[:20], told[:20] = logits[40:], labels[40:]
    theirs = iter([torch.tensor([20]), rest, torch.tensor([20]), told])  # of another rank, padded to 40 rows

    def gather(into: list[Tensor], own: Tensor, group: object) -> None:
        into[0].copy_(own)
        into[1].copy_(next(theirs))

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather", gather)
    assert measure_labels(lambda images: images, batches(logits[:40], labels[:40], 40)) == whole


def test_one_class_and_several_are_not_taken_for_each_other() -> None:
    logits, labels = some()
    with pytest.raises(SitusError, match=r"needs labels \(one class per sample\), but the data has any number"):
        measure_accuracy(lambda images: images, batches(logits, labels, 60))
    one = Batch(logits, torch.arange(60), {"label": torch.zeros(60).long()})
    with pytest.raises(SitusError, match=r"needs labels \(any number of classes per sample\), but the data has one"):
        measure_labels(lambda images: images, [one])
    with pytest.raises(SitusError, match="the data has no labels"):
        labels_of(one._replace(targets={}))


# A run from a folder to an export


@pytest.fixture(scope="module")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of which any number of the channels is bright, some labels unknown."""
    folder = tmp_path_factory.mktemp("data") / "squares"
    chance = np.random.default_rng(0)
    for split, count in (("train", 48), ("val", 20)):
        (folder / split).mkdir(parents=True)
        rows = ["file,red,green,blue"]
        for number in range(count):
            has = chance.random(3) < 0.4
            pixels = chance.integers(0, 90, (8, 8, 3)) + 160 * has
            Image.fromarray(pixels.astype(np.uint8)).save(folder / split / f"{number}.png")
            cells = [str(int(each)) for each in has]
            if number % 5 == 0:
                cells[number % 3] = ""
            rows.append(",".join([f"{number}.png", *cells]))
        (folder / split / "labels.csv").write_text("\n".join(rows))
    return folder


def config(folder: Path, steps: int = 40, **data: object) -> RunConfig:
    shape = {"depth": 1, "embed_dim": 24, "num_heads": 2}
    return RunConfig(
        method=SupervisedConfig(label_smoothing=0.05),
        backbone=BackboneConfig("vit_tiny_patch16_224", patch_size=4, model_args=shape),
        data=DataConfig(path=str(folder), img_size=8, batch=16, multi_label=True, workers=0, **data),  # type: ignore[arg-type]
        augment=AugmentConfig(crop="none", mixup=0.2),
        optim=OptimConfig(lr=1e-2, schedule="constant", warmup_epochs=0),
        train=TrainConfig(epochs=None, max_steps=steps, precision="fp32", save_every=7, log_every=10),
    )


@pytest.fixture(scope="module")
def run(squares: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    train_run(config(squares), Setup(hooks=validation_hooks(3)), out=out, device="cpu", quiet=True)
    return out


def test_it_learns_and_is_judged_as_it_was_validated(run: Path, squares: Path) -> None:
    found = evaluate_accuracy(run)
    assert isinstance(found, LabelAccuracy) and found.classes == ("red", "green", "blue")
    assert found.scores.mean_ap > 0.9 and found.scores.accuracy > found.scores.majority
    assert (found.scores.count, found.scores.unknown) == (20, 4)
    last = [record for record in RunFolder.open(run).records() if "val_map" in record][-1]
    kept = {"val_map": found.scores.mean_ap, "val_accuracy": found.scores.accuracy, "val_loss": found.scores.loss}
    assert {name: last[name] for name in kept} == pytest.approx(kept, rel=1e-6)
    again = evaluate_accuracy(run, squares, batch=3)
    assert isinstance(again, LabelAccuracy)
    assert again.scores.by_class == found.scores.by_class


def test_a_run_that_was_stopped_equals_one_that_was_not(run: Path, squares: Path, tmp_path: Path) -> None:
    part = tmp_path / "part"
    train_run(config(squares, 17), out=part, device="cpu", quiet=True)
    train_run(config(squares), resume=part, device="cpu", quiet=True)
    one, two = (RunFolder.open(each).newest().tensors("model") for each in (run, part))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_streamed_and_held_images_have_the_same_labels(squares: Path) -> None:
    plain = AugmentConfig(crop="none", flip=0.0)
    for augment in (None, plain, replace(plain, mixup=0.5, label_smoothing=0.1)):
        held, streamed = (
            [*make_loader(replace(config(squares).data, resident=kind), augment)] for kind in ("always", "never")
        )
        for one, other in zip(held, streamed, strict=True):
            assert torch.equal(one.ids, other.ids) and one.targets.keys() == other.targets.keys() == {"labels"}
            soft = augment is not None and augment.softens
            assert one.targets["labels"].dtype == (torch.float32 if soft else torch.int8)
            torch.testing.assert_close(one.targets["labels"], other.targets["labels"], equal_nan=True)


def test_outputs_that_are_no_numbers_have_no_accuracy(run: Path) -> None:
    model = open_model(run)
    with torch.no_grad():
        next(model.backbone.parameters()).fill_(torch.nan)
    with pytest.raises(SitusError, match=r"run: some of its outputs are NaN"):
        evaluate_accuracy(model)


def test_an_export_keeps_that_it_is_multi_label(run: Path, squares: Path, tmp_path: Path) -> None:
    export_run(run, tmp_path / "export")
    written = json.loads((tmp_path / "export" / "config.json").read_text())
    assert written["problem_type"] == "multi_label_classification"
    assert written["label_names"] == ["red", "green", "blue"]
    assert "3, any number of them per image (multi-label)" in (tmp_path / "export" / "README.md").read_text()
    model = open_model(tmp_path / "export")
    assert model.multi_label and model.classes == ("red", "green", "blue")
    found, own = evaluate_accuracy(model, squares), evaluate_accuracy(run)
    assert isinstance(found, LabelAccuracy) and isinstance(own, LabelAccuracy)
    assert found.scores.by_class == own.scores.by_class
    (squares / "val" / "labels.csv").rename(tmp_path / "aside.csv")
    try:
        with pytest.raises(SitusError, match="val: has no table of labels"):
            evaluate_accuracy(model, squares)
    finally:
        (tmp_path / "aside.csv").rename(squares / "val" / "labels.csv")


def test_fine_tuning_goes_on_with_the_run_s_labels(run: Path, squares: Path, tmp_path: Path) -> None:
    begun = finetune_config(FinetuneConfig(**vars(config(squares, 2))), run, None)
    train_run(
        begun, Setup(hooks=validation_hooks(1), start=starting()), out=tmp_path / "tuned", device="cpu", quiet=True
    )
    tuned = load_run(tmp_path / "tuned")
    assert tuned.classes == ("red", "green", "blue") and tuned.config.data.multi_label


def test_what_asks_for_one_class_says_so(run: Path, squares: Path, tmp_path: Path) -> None:
    said = "is multi-label, but only single-label classification is supported here"
    for ask in (evaluate_knn, lambda each: evaluate_probe(each, kind="class"), evaluate_consistency):
        with pytest.raises(SitusError, match=said):
            ask(run)
    export_run(run, tmp_path / "export")
    with pytest.raises(SitusError, match=said):
        evaluate_ensemble([run, tmp_path / "export"], squares)
    images, one = torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 2, 0])
    with pytest.raises(SitusError, match="one: the data is single-label, but run is a multi-label model"):
        evaluate_accuracy(run, TensorSource(images, one, ("red", "green", "blue"), "one"))
    with pytest.raises(SitusError, match=r"labels of shape \(4, 2\) and type torch.int64: must be \[4, 3\] int8"):
        TensorSource(images, torch.zeros(4, 2).long(), ("red", "green", "blue"))
    single = replace(config(squares), data=replace(config(squares).data, multi_label=False))
    with pytest.raises(SitusError, match="into a separate folder; for several classes per image, set multi_label"):
        train_run(single, out=tmp_path / "no", device="cpu", quiet=True)
    assert not (tmp_path / "no").exists()


def test_a_module_of_one_s_own_is_judged_on_a_source_of_one_s_own() -> None:
    logits, labels = some()
    pixels = torch.randint(256, (60, 3, 2, 2), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 4))
    found = evaluate_accuracy(open_model(module, img_size=2), TensorSource(pixels, labels, tuple("abcd"), "own"))
    assert isinstance(found, LabelAccuracy)
    assert [each.positives for each in found.scores.by_class] == (labels > 0).sum(0).tolist()
    assert len(logits) == found.scores.count


def test_features_come_with_all_labels(run: Path, tmp_path: Path) -> None:
    found = extract_features(run, split="val")
    assert found.labels is not None and found.labels.shape == (20, 3) and found.labels.dtype == torch.int8
    write_features(tmp_path / "x.npz", found)
    rows = (tmp_path / "x.names.csv").read_text().splitlines()[1:]
    for row, label in zip(rows, found.labels.tolist(), strict=True):
        assert row.split(",")[4] == ";".join(n for n, has in zip(found.classes or (), label, strict=True) if has == 1)


@pytest.mark.parametrize(("classes", "empty"), [(4, 1), (30, 5), (31, 6)])
def test_what_is_listed_and_drawn_of_many_and_of_few_labels(classes: int, empty: int) -> None:
    generator = torch.Generator().manual_seed(classes)
    logits = torch.randn(40, classes, generator=generator)
    labels = (torch.rand(40, classes, generator=generator) < 0.4).to(torch.int8)
    labels[:, :empty] = 0
    scores = label_scores(logits, labels)
    found = LabelAccuracy(scores, tuple(f"c{n}" for n in range(classes)))
    precisions = {f"c{n}": each.average_precision for n, each in enumerate(scores.by_class) if each.positives}
    (drawn,), (table,) = found.figures(), found.details()
    if classes <= 30:
        assert drawn.values[0] == pytest.approx({name: 100 * (value or 0.0) for name, value in precisions.items()})
    else:
        assert drawn.values[0] == {"mean average precision": pytest.approx(100 * scores.mean_ap)}
    order = sorted(precisions, key=lambda name: precisions[name] or 0.0)[:10]
    assert [row[0] for row in table.rows] == order
    first = scores.by_class[int(order[0][1:])]
    assert list(table.rows[0])[1:3] == [first.positives, 40]
    assert [float(str(cell)) for cell in list(table.rows[0])[3:]] == pytest.approx(
        [100 * (value or 0.0) for value in (first.average_precision, first.accuracy, first.f1)], abs=0.005
    )
    names = ", ".join(f"c{n}" for n in range(min(empty, 5))) + ", …" * (empty > 5)
    assert found.summary().notes[0].endswith(f"average precision and F1 are undefined: {names}.")
    assert (" their average" in found.summary().notes[0]) == (empty > 1)
    assert found.summary().numbers == ((f"{100 * scores.mean_ap:.2f} %", "mean average precision"),)
    assert len(found.numbers()["classes"]) == classes and "by_class" not in found.numbers()
