from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from builders import small_vit
from torch import Tensor

from situs.errors import SitusError
from situs.measure.accuracy import Accuracy, measure_accuracy
from situs.measure.ensemble import Ensemble, combine, evaluate_ensemble, measure_ensemble
from situs.methods.base import Batch

CLASSES = 6


def batches(count: int = 11, size: int = 4, start: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(count, CLASSES, 1, 1, generator=generator)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    whole = Batch(images, torch.arange(start, start + count), {"label": labels})
    return [whole.part(slice(at, at + size)) for at in range(0, count, size)]


def sharp(images: Tensor) -> Tensor:
    return 9 * images.flatten(1)


def turned(images: Tensor) -> Tensor:
    return images.flatten(1).roll(1, dims=1)


def test_it_is_the_mean_of_the_probabilities_by_hand() -> None:
    found = measure_ensemble({"a": sharp, "b": turned}, {name: batches() for name in "ab"})
    right, loss, count = 0, 0.0, 0
    for batch in batches():
        for image, label in zip(batch.inputs, batch.targets["label"], strict=True):
            mean = (sharp(image[None]).softmax(-1) + turned(image[None]).softmax(-1))[0] / 2
            right += int(mean.argmax() == label)
            loss -= float(mean[label].log())
            count += 1
    assert found.together.count == count == 11
    assert found.together.top1 == right / count
    assert found.together.loss == pytest.approx(loss / count, rel=1e-5)
    assert found.alone == {"a": measure_accuracy(sharp, batches()), "b": measure_accuracy(turned, batches())}


def test_agreement_and_the_share_any_has_right_by_hand() -> None:
    found = measure_ensemble({"a": sharp, "b": turned, "c": lambda x: -sharp(x)}, {name: batches() for name in "abc"})
    said = [[model(batch.inputs).argmax(-1) for batch in batches()] for model in (sharp, turned, lambda x: -sharp(x))]
    a, b, c = (torch.cat(parts).tolist() for parts in said)
    labels = torch.cat([batch.targets["label"] for batch in batches()]).tolist()
    for i, one in enumerate((a, b, c)):
        for j, two in enumerate((a, b, c)):
            assert found.agreement[i][j] == pytest.approx(sum(x == y for x, y in zip(one, two, strict=True)) / 11)
    assert found.agreement[0][2] == 0
    right = sum(truth in answers for truth, *answers in zip(labels, a, b, c, strict=True))
    assert found.any_right == pytest.approx(right / 11)
    assert 0 < found.any_right < 1


def test_softmax_and_logits_are_different_averages() -> None:
    sure, two = torch.tensor([10.0, 0.0, 0.0]), torch.tensor([-30.0, 1.0, 0.0])
    logits = torch.stack([sure, two])[:, None]
    assert combine(logits, "softmax").argmax() == 0
    assert combine(logits, "logits").argmax() == 1
    torch.testing.assert_close(combine(logits, "logits")[0], (sure + two) / 2)
    torch.testing.assert_close(combine(logits)[0].exp(), (sure.softmax(0) + two.softmax(0)) / 2)


def test_a_model_with_itself_is_itself() -> None:
    for average in ("softmax", "logits"):
        found = measure_ensemble({"a": sharp, "b": sharp}, {name: batches() for name in "ab"}, average=average)
        assert found.together.top1 == found.alone["a"].top1
        assert found.together.loss == pytest.approx(found.alone["a"].loss, rel=1e-5)


def test_each_model_may_have_its_own_view_of_the_same_samples() -> None:
    halved = [batch._replace(inputs=batch.inputs / 2) for batch in batches()]
    own = measure_ensemble({"a": sharp, "b": lambda x: sharp(2 * x)}, {"b": halved, "a": batches()})
    same = measure_ensemble({"a": sharp, "b": sharp}, {name: batches() for name in "ab"})
    assert own.together == same.together
    assert own.alone["b"] == same.alone["a"]


def test_what_a_source_complains_of_is_not_taken_for_another_length() -> None:
    def broken() -> Iterator[Batch]:
        yield batches()[0]
        raise SitusError("cat.png: cannot be decoded")

    with pytest.raises(SitusError, match=r"^cat\.png: cannot be decoded"):
        measure_ensemble({"a": sharp, "b": turned}, {"a": batches(), "b": broken()})


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (batches(start=1), "samples or labels"),
        (batches(size=3), "differ in size"),
    ],
)
def test_other_samples_are_refused(other: list[Batch], said: str) -> None:
    with pytest.raises(SitusError, match=said):
        measure_ensemble({"a": sharp, "b": sharp}, {"a": batches(), "b": other})


def test_other_labels_are_refused() -> None:
    other = [batch._replace(targets={"label": (batch.targets["label"] + 1) % CLASSES}) for batch in batches()]
    with pytest.raises(SitusError, match="samples or labels"):
        measure_ensemble({"a": sharp, "b": sharp}, {"a": batches(), "b": other})


def test_other_classes_and_other_averages_are_refused() -> None:
    with pytest.raises(SitusError, match="a has 6, b has 5"):
        measure_ensemble({"a": sharp, "b": lambda x: sharp(x)[:, :5]}, {name: batches(4) for name in "ab"})
    with pytest.raises(SitusError, match="average='votes': must be softmax or logits"):
        measure_ensemble({"a": sharp}, {name: batches() for name in "a"}, average="votes")


def test_one_model_is_no_ensemble() -> None:
    for models in ([small_vit(16, num_classes=3)], []):
        with pytest.raises(SitusError, match="an ensemble needs at least two models") as caught:
            evaluate_ensemble(models, "samples")
        assert caught.value.field == "model"


def scored(top1: float, top5: float = 0.75) -> Accuracy:
    return Accuracy(top1, top5, 40, 0.25, top1 - 0.125, 0.4, 12)


@pytest.mark.parametrize(
    ("together", "said"),
    [
        (0.75, "25.00 percentage points less than the ensemble"),
        (0.5, "0.00 percentage points less than the ensemble"),
        (0.375, "12.50 percentage points more than the ensemble"),
    ],
)
def test_the_gain_is_over_the_best_model_alone(together: float, said: str) -> None:
    alone = {"a": scored(0.25), "b": scored(0.5)}
    found = Ensemble(alone, scored(together), ((1.0, 0.25), (0.25, 1.0)), 0.875, members={"a": {"model": "vit"}})
    text = found.summary().sentence
    assert f"classify {100 * together:.2f} % of the images right. The best single model (b) classifies 50.00 %" in text
    assert f" right, {said}. At least" in text
    assert "At least one model is right on 87.50 %" in text and "has a top-1 of 40.00 %." in text
    (table,) = found.summary().tables
    assert [list(row) for row in table.rows] == [
        ["a", "25.00", "12.50", "75.00", "0.2500"], ["b", "50.00", "37.50", "75.00", "0.2500"],
        ["together (softmax)", f"{100 * together:.2f}", f"{100 * together - 12.5:.2f}", "75.00", "0.2500"],
    ]  # fmt: skip
    few = replace(found, together=replace(scored(together), classes=10)).summary().tables[0]
    assert [len(row) for row in few.rows] == [4] * 3 and "top-5, %" not in few.header
    assert found.summary().numbers == (
        (f"{100 * together:.2f} %", "top-1 together"),
        ("50.00 %", "the best single model"),
    )
    bars, alike = found.figures()
    assert bars.values[0] == {"a": 25.0, "b": 50.0, "together (softmax)": 100 * together, "any model right": 87.5}
    ((shares, _),), rows, columns = alike.values[0].values(), *alike.values[1:3]
    assert shares == [[100.0, 25.0], [25.0, 100.0]] and rows == columns == ["a", "b"]
    assert [list(row) for row in found.details()[0].rows] == [
        ["a", None, "vit"]
    ] and found.title == "2 classifiers as one"
