from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from scipy.stats import binomtest
from sklearn.metrics import balanced_accuracy_score, log_loss, top_k_accuracy_score
from torch import Tensor, nn

from situs.data.sources.base import TensorSource
from situs.errors import SitusError
from situs.measure import evaluate_ensemble
from situs.measure.accuracy import (
    Accuracy,
    ClassAccuracy,
    LabelTally,
    Tally,
    evaluate_accuracy,
    hard,
    measure_accuracy,
)
from situs.methods.base import Batch
from situs.models import open_model

CLASSES = 12


def batches(sizes: list[int], *, classes: int = CLASSES) -> Iterator[Batch]:
    torch.manual_seed(0)
    start = 0
    for size in sizes:
        labels = torch.randint(classes, (size,))
        yield Batch(torch.randn(size, 3, 4, 4), torch.arange(start, start + size), {"label": labels})
        start += size


class Model(nn.Module):
    """Logits that know a little of the label, and drop out in training mode."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(48, classes))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


def test_it_is_what_scikit_learn_says_over_a_ragged_set() -> None:
    model = Model().eval()
    whole = list(batches([7, 7, 3]))
    found = measure_accuracy(model, whole)
    logits = torch.cat([model(batch.inputs) for batch in whole]).detach()
    labels = torch.cat([batch.targets["label"] for batch in whole])
    names = range(CLASSES)
    assert found.count == 17
    assert found.top1 == top_k_accuracy_score(labels, logits, k=1, labels=names)
    assert found.top5 == top_k_accuracy_score(labels, logits, k=5, labels=names)
    assert 0 < found.top1 < found.top5 < 1
    with warnings.catch_warnings():  # of answers whose class no sample has
        warnings.simplefilter("ignore")
        assert found.balanced == pytest.approx(balanced_accuracy_score(labels, logits.argmax(-1)))
    assert (found.majority, found.classes, found.only) == (labels.bincount().max() / 17, CLASSES, None)
    assert found.loss == pytest.approx(log_loss(labels, logits.double().softmax(-1), labels=names), rel=1e-6)


def test_a_sample_counts_once_however_the_set_is_cut() -> None:
    whole = list(batches([17]))
    model = Model()
    one = measure_accuracy(model, whole)
    many = measure_accuracy(model, [whole[0].part(slice(at, at + 5)) for at in range(0, 17, 5)])
    assert (many.top1, many.top5, many.count) == (one.top1, one.top5, one.count)
    assert many.loss == pytest.approx(one.loss, rel=1e-6)


def test_the_model_is_quiet_inside_and_as_before_afterwards() -> None:
    model = Model()
    model.layers[1].eval()  # a part that its owner froze
    seen = []

    def watch(images: Tensor) -> Tensor:
        seen.append((model.training, torch.is_grad_enabled()))
        return model(images)

    measure_accuracy(watch, batches([4]))
    assert seen == [(True, False)]  # a function's modes are its own
    assert measure_accuracy(model, batches([4])) == measure_accuracy(model, batches([4]))
    assert (model.training, model.layers[0].training, model.layers[1].training) == (True, True, False)


def test_few_classes_and_soft_labels() -> None:
    images = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 1.0]]).view(2, 3, 1, 1)
    soft = torch.tensor([[0.1, 0.2, 0.7], [0.1, 0.8, 0.1]])
    found = measure_accuracy(lambda x: x.flatten(1), [Batch(images, torch.arange(2), {"label": soft})])
    assert (found.top1, found.top5) == (0.5, 1.0)


def test_a_dead_model_does_not_shine() -> None:
    """Equal or broken logits must not count as right, as a comparison of ranks would have it."""
    for value in (0.0, torch.nan):
        found = measure_accuracy(lambda x, v=value: torch.full((len(x), CLASSES), v), batches([60]))
        assert found.top1 < 0.4
        assert found.top5 < 0.8


def test_bf16_is_asked_for_by_name() -> None:
    kinds = []

    def model(images: Tensor) -> Tensor:
        logits = nn.functional.linear(images.flatten(1), torch.ones(CLASSES, 48))
        kinds.append(logits.dtype)
        return logits

    measure_accuracy(model, batches([3]), precision="bf16")
    measure_accuracy(model, batches([3]))
    assert kinds == [torch.bfloat16, torch.float32]


def test_no_labels_and_no_samples_are_said() -> None:
    with pytest.raises(SitusError, match="needs labels"):
        measure_accuracy(lambda x: x.flatten(1), [Batch(torch.zeros(1, 3, 1, 1), torch.zeros(1).long())])
    with pytest.raises(SitusError, match="no samples"):
        measure_accuracy(lambda x: x, [])
    with pytest.raises(SitusError, match=r"model has 12 classes.* data has 10"):
        measure_accuracy(Model(), batches([2]), classes=10)


def test_ranks_are_summed_and_not_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with 5 and 2 samples: the set's accuracy is of 7, not the mean of two shares."""
    import torch.distributed as dist

    whole = list(batches([5, 2]))
    model = Model()
    expected = measure_accuracy(model, whole)
    other: list[Tensor] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda value: other.append(value.clone()))
    measure_accuracy(model, whole[1:])
    monkeypatch.setattr(dist, "all_reduce", lambda value: value.add_(other[0]))
    found = measure_accuracy(model, whole[:1])
    assert isinstance(found, Accuracy)
    assert (found.top1, found.top5, found.count) == (expected.top1, expected.top5, 7)
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)


def test_answers_are_counted_by_class() -> None:
    logits = torch.eye(3)[torch.tensor([0, 1, 1, 2, 0])]
    labels = torch.tensor([0, 0, 1, 1, 0])
    parts = [
        Batch(logits[:3], torch.arange(3), {"label": labels[:3]}),
        Batch(logits[3:], torch.arange(2), {"label": labels[3:]}),
    ]
    tally = Tally(3)
    accuracy = measure_accuracy(lambda images: images, parts, tally=tally)
    found = ClassAccuracy(accuracy, tally.answers(), ("a", "b", "c"))
    assert found.accuracy.top1 == 3 / 5
    assert found.answers.tolist() == [[2, 1, 0], [0, 1, 1], [0, 0, 0]]
    rows = found.numbers()["classes"]
    assert [tuple(row.values()) for row in rows] == [
        ("a", 3, 2 / 3, 2, "b"),
        ("b", 2, 1 / 2, 2, "c"),
        ("c", 0, None, 1, None),
    ]


def test_any_model_and_any_data_are_evaluated(tmp_path: Path) -> None:
    pixels = torch.randint(256, (9, 3, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    labels = torch.arange(9) % 3
    for pixel, label in zip(pixels, labels.tolist(), strict=True):
        folder = tmp_path / "val" / "abc"[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixel.permute(1, 2, 0).numpy()).save(folder / f"{len(list(folder.iterdir()))}.png")
    module = Model(3)
    model = open_model(module, img_size=4)
    mean, std = (torch.tensor(part).view(3, 1, 1) for part in model.data.normalisation)
    with torch.no_grad():
        logits = module.eval()((pixels / 255 - mean) / std)
    source = TensorSource(pixels, labels, ("a", "b", "c"), "nine")
    found = evaluate_accuracy(model, source, batch=4)
    assert (found.accuracy.top1, found.accuracy.count) == (float((logits.argmax(-1) == labels).double().mean()), 9)
    assert found.accuracy.loss == pytest.approx(float(nn.functional.cross_entropy(logits, labels)), rel=1e-5)
    assert (found.provenance.name, found.provenance.facts["data"]) == ("Model", "nine")
    assert torch.equal(evaluate_accuracy(model, tmp_path).answers, found.answers)
    assert evaluate_accuracy(model, source, count=5).accuracy.count == 5
    with torch.no_grad():
        next(module.parameters()).fill_(torch.nan)
    for judge in (
        evaluate_accuracy,
        lambda model, source: evaluate_ensemble([open_model(Model(3), img_size=4), model], source),
    ):
        with pytest.raises(SitusError, match=r"Model.*: some of its outputs are NaN"):
            judge(model, source)
    with pytest.raises(SitusError) as error:
        evaluate_accuracy(nn.Sequential(nn.AdaptiveAvgPool2d(4), module), source)  # it takes any size: which is it?
    assert error.value.field == "img_size"


def test_the_source_says_what_its_samples_are_called() -> None:
    class Maps(TensorSource):
        things = "maps"

    source = Maps(torch.rand(6, 3, 4, 4), torch.arange(6) % 3, ("a", "b", "c"), "seen")
    said = evaluate_accuracy(open_model(Model(3), img_size=4), source, count=4).summary()
    assert "of 4 maps of 3 classes" in said.sentence
    assert said.tables[0].title == "seen, 4 maps"


@pytest.mark.parametrize(("right", "count"), [(0, 7), (3, 7), (7, 7), (812, 1000)])
def test_the_interval_is_scipys(right: int, count: int) -> None:
    low, high = Accuracy(right / count, 1.0, count, 0.1, 0.5, 0.3, 12).interval
    known = binomtest(right, count).proportion_ci(0.95, method="wilson")
    assert (low, high) == pytest.approx((known.low, known.high), abs=1e-4)


def test_labels_of_several_classes_are_no_class_numbers() -> None:
    shares = torch.tensor([[0.2, 0.8, 0.0], [0.6, 0.0, 0.4]])
    assert hard(shares).tolist() == [1, 0] and hard(torch.tensor([2, 0])).tolist() == [2, 0]
    with pytest.raises(SitusError, match="the data is multi-label, but this evaluation needs one class per") as caught:
        hard(torch.tensor([[0, 1, 1]]))
    assert caught.value.field == "data"
    with pytest.raises(SitusError, match="there are no samples to evaluate on"):
        LabelTally().result()
