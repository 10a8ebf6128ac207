"""The evaluation against plain loops, on a classifier simple enough to follow."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from builders import small_vit
from PIL import Image
from torch import Tensor

from situs.data.config import DataConfig
from situs.data.loader import Loader, make_loader
from situs.data.sources.base import TensorSource
from situs.data.sources.samples import load_samples
from situs.data.sources.subset import Subset
from situs.errors import SitusError
from situs.measure.corruptions import corrupt
from situs.measure.robustness import run as robustness
from situs.measure.robustness.run import (
    PublishedSets,
    answers,
    corrupted_accuracy,
    evaluate_robustness,
    seen,
)
from situs.models import Model
from situs.progress import listening

MEAN, STD = 0.4, 0.3
CLASSES = ("a", "b", "c", "d")


def by_brightness(images: Tensor) -> Tensor:
    """Logits of four classes by the mean brightness of normalised images."""
    bright = (images * STD + MEAN).mean((1, 2, 3))
    return -40 * (bright[:, None] - torch.tensor([0.1, 0.25, 0.4, 0.6])).abs()


@pytest.fixture(scope="module")
def source() -> TensorSource:
    images = load_samples("test").images[:40]
    labels = by_brightness((images.float() / 255 - MEAN) / STD).argmax(1)
    labels[::7] = (labels[::7] + 1) % 4  # not always right on clean images either
    return TensorSource(images, labels, CLASSES)


def load(source: object, batch: int) -> Loader:
    config = DataConfig(img_size=28, channels=1, batch=batch, mean=(MEAN,), std=(STD,))
    return make_loader(config, None, source=source)  # type: ignore[arg-type]


def test_images_come_back_from_normalisation_exactly(source: TensorSource) -> None:
    loader = load(source, 40)
    batch = next(iter(loader))
    assert torch.equal((seen(batch.inputs, loader) * 255).round().byte(), source.images)


@pytest.mark.thin(2)
@pytest.mark.parametrize("batch", [40, 7])
def test_every_cell_is_what_a_plain_loop_counts(source: TensorSource, batch: int) -> None:
    names = ("shot_noise", "snow", "contrast")
    told: list[tuple[float, int | None, str]] = []
    with listening(lambda tasks: told.extend((each.done, each.total, each.now) for each in tasks if each.now)):
        clean, cells = corrupted_accuracy(by_brightness, load(source, batch), names, (1, 4), seed=3)
    labels = source.labels
    assert labels is not None
    for name in (None, *names):
        for severity in (1, 4):
            right = 0
            for row in range(40):
                image = source.images[row : row + 1].float() / 255
                if name is not None:
                    image = corrupt(image, name, severity, torch.tensor([row]), seed=3)
                right += int(by_brightness((image - MEAN) / STD).argmax()) == int(labels[row])
            found = clean if name is None else cells[name][severity]
            assert found.top1 == pytest.approx(right / 40) and found.count == 40
    assert list(cells) == list(names) and all(list(row) == [1, 4] for row in cells.values())
    steps = -(-40 // batch) * 6
    assert (
        told[0] == (0, steps, "shot_noise 1")
        and told[-1][:2] == (steps - 1, steps)
        and len({done for done, *_ in told}) == steps
    )


def test_a_part_is_corrupted_as_in_the_whole(source: TensorSource) -> None:
    part = Subset(source, 9)
    rows = torch.tensor(part.rows)
    assert rows.tolist() != list(range(9))
    _, cells = corrupted_accuracy(by_brightness, load(part, 4), ("gaussian_noise",), (5,))
    images = corrupt(source.images[rows].float() / 255, "gaussian_noise", 5, rows)
    labels = source.labels
    assert labels is not None
    right = by_brightness((images - MEAN) / STD).argmax(1) == labels[rows]
    assert cells["gaussian_noise"][5].top1 == pytest.approx(right.float().mean().item())


def test_labels_go_through_the_index_of_classes(source: TensorSource) -> None:
    swap = torch.tensor([1, 0, 3, 2])
    straight, _ = corrupted_accuracy(by_brightness, load(source, 40), ())
    labels = source.labels
    assert labels is not None
    renamed = TensorSource(source.images, swap[labels], ("b", "a", "d", "c"))
    again, _ = corrupted_accuracy(by_brightness, load(renamed, 40), (), index=swap)
    wrong, _ = corrupted_accuracy(by_brightness, load(renamed, 40), ())
    assert again.top1 == straight.top1 > wrong.top1


def test_what_cannot_be_read_is_owned_up_to_in_every_set(tmp_path: Path) -> None:
    """One broken file in each: the clean images, ImageNet-C, ImageNet-A, ImageNet-O and what stands beside it."""
    folders = {name: tmp_path / name for name in ("clean", "c/fog/1", "a", "o", "beside")}
    chance = np.random.default_rng(0)
    for name, folder in folders.items():
        for kind in CLASSES:
            (folder / kind).mkdir(parents=True)
            Image.fromarray(chance.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / kind / "0.png")
        (folder / "a" / f"broken-{name[0]}.png").write_bytes(b"no picture")
    backbone = small_vit(8, num_classes=4)
    model = Model("m", backbone, input=DataConfig(img_size=8, workers=0), classes=CLASSES)

    def skipped(*data: Path, **sets: Path) -> str:
        given = {"sets": PublishedSets(**sets), "severities": [1]} | ({} if data else {"corruptions": ["none"]})
        return " ".join(evaluate_robustness(model, *map(str, data), **({"corruptions": ["fog"]} | given)).skipped)

    assert "broken-c.png" in skipped(folders["clean"])
    assert "broken-a.png" in skipped(imagenet_a=folders["a"])
    strange = skipped(imagenet_o=folders["o"], in_distribution=folders["beside"])
    assert "broken-o.png" in strange and "broken-b.png" in strange
    both = skipped(folders["clean"], imagenet_c=tmp_path / "c")
    assert both.count("broken-c.png") == 2  # the clean set's and the given one's


def test_answers_are_among_the_given_outputs_alone(source: TensorSource) -> None:
    outputs = torch.tensor([3, 0])
    loader = load(source, 11)
    confidence, answer, labels = answers(by_brightness, loader, outputs)
    logits = torch.cat([by_brightness(batch.inputs) for batch in loader])[:, [3, 0]]
    shares = torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True)
    torch.testing.assert_close(confidence, shares.max(1).values)
    assert torch.equal(answer, shares.argmax(1)) and set(answer.tolist()) == {0, 1}
    assert labels is not None and torch.equal(labels, source.labels)  # type: ignore[arg-type]
    unlabelled = load(TensorSource(source.images, None, None), 40)
    assert answers(by_brightness, unlabelled, outputs)[2] is None


def images_below(folder: Path, names: tuple[str, ...], each: int = 2) -> Path:
    chance = np.random.default_rng(0)
    for name in names:
        (folder / name).mkdir(parents=True)
        for number in range(each):
            Image.fromarray(chance.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / name / f"{number}.png")
    return folder


def four(**fields: Any) -> Model:
    return Model("m", small_vit(8, num_classes=4), input=DataConfig(img_size=8, workers=0), classes=CLASSES, **fields)


def test_so_many_images_of_every_set(tmp_path: Path) -> None:
    strange, normal = images_below(tmp_path / "o", CLASSES), images_below(tmp_path / "n", CLASSES)
    counts = []
    for count in (None, 3, 8, 9):
        given = {} if count is None else {"count": count}
        sets = PublishedSets(imagenet_a=strange, imagenet_o=strange, in_distribution=normal)
        found = evaluate_robustness(four(), corruptions=["none"], sets=sets, **given)
        assert found.natural is not None and found.anomalies is not None
        counts.append((found.natural.count, found.anomalies.anomalies, found.anomalies.normal))
    assert counts == [(8, 8, 8), (3, 3, 3), (8, 8, 8), (8, 8, 8)]


def test_normal_images_are_of_the_same_classes(tmp_path: Path) -> None:
    strange, normal = images_below(tmp_path / "o", ("a", "b")), images_below(tmp_path / "n", ("c", "d"))
    for sets, said in (
        (PublishedSets(imagenet_o=strange, in_distribution=normal), "n: must contain normal images of the classes"),
        (PublishedSets(imagenet_o=strange), "ImageNet-O also needs normal images of the classifier's classes"),
    ):
        with pytest.raises(SitusError, match=said) as caught:
            evaluate_robustness(four(), corruptions=["none"], sets=sets)
        assert caught.value.field == "in_distribution"


def test_arrays_of_more_classes_than_the_model_has_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "fog.npy", np.zeros((10, 8, 8, 3), dtype=np.uint8))
    clean = images_below(tmp_path / "clean", CLASSES)
    for last in (3, 4):
        np.save(tmp_path / "labels.npy", np.array([0, last] * 5))
        call = partial(
            evaluate_robustness, four(), str(clean), corruptions=["fog"], severities=[1],
            sets=PublishedSets(imagenet_c=tmp_path),
        )  # fmt: skip
        if last == 3:
            assert call().cells["fog"][1].count == 2
            continue
        said = "fog/1: its labels go up to 4, but the model's outputs go up to 3"
        with pytest.raises(SitusError, match=said) as caught:
            call()
        assert caught.value.field == "imagenet_c"


def test_no_image_has_no_answer(source: TensorSource) -> None:
    loader = load(source, 11)
    empty: Any = type("Empty", (), {"source": loader.source, "steps_per_epoch": 0, "__iter__": lambda _: iter(())})()
    with pytest.raises(SitusError, match="none of its images can be read"):
        answers(by_brightness, empty, torch.arange(4))


@pytest.mark.parametrize("count", [1, 3, 7, 100, 250])
def test_the_response_curve_is_read_at_every_per_cent(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a rate of 1 % of few images there is the most confident answer alone."""
    generator = torch.Generator().manual_seed(count)
    confidence, right = torch.rand(count, generator=generator), torch.rand(count, generator=generator) < 0.5
    truth = torch.arange(count) % 2
    told = (confidence, torch.where(right, truth, 1 - truth), truth)
    set_ = SimpleNamespace(source=SimpleNamespace(name="a", left_out=lambda: ["one is broken"]))
    monkeypatch.setattr(robustness, "answers", lambda *_: told)
    monkeypatch.setattr(robustness, "open_folder", lambda *_: None)
    monkeypatch.setattr(robustness._Run, "wrap", lambda *_: set_)
    monkeypatch.setattr(robustness._Run, "index", lambda *_: torch.arange(2))
    run = object.__new__(robustness._Run)
    run.model, run.backbone = SimpleNamespace(data=SimpleNamespace(channels=3)), None  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
    run.precision, run.skipped = "fp32", []
    found = run.natural(Path("a"))
    order = sorted(range(count), key=lambda at: -float(confidence[at]))
    for rate, share in enumerate(found.curve, start=1):
        first = order[: max(1, round(count * rate / 100))]
        assert share == pytest.approx(sum(bool(right[at]) for at in first) / len(first))
    assert len(found.curve) == 100 and run.skipped == ["one is broken"]
    assert (found.count, found.classes, found.accuracy) == (count, 2, pytest.approx(float(right.double().mean())))


@pytest.mark.parametrize("count", [0, -1])
def test_a_count_without_an_image_is_refused(count: int) -> None:
    model = Model("m", small_vit(8, num_classes=4), input=DataConfig(img_size=8, workers=0), classes=CLASSES)
    with pytest.raises(SitusError, match=rf"^count={count}: must be >= 1") as caught:
        evaluate_robustness(model, "nowhere", corruptions=["fog"], count=count)
    assert caught.value.field == "count"
