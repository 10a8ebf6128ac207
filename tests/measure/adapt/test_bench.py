"""One way on the folds and on all labels, against the steps done by hand."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from builders import small_vit
from memory_kinds import CLASSES, SIDE, pictures

from situs.data.config import DataConfig
from situs.data.sources.base import TensorSource
from situs.data.sources.subset import Subset
from situs.errors import SitusError
from situs.measure.adapt.bench import DECAYS, SCALES, Bench, part_of, rates_of, updates
from situs.measure.adapt.ways import Initial, Way, folds_of
from situs.measure.finetune import FinetuneConfig
from situs.measure.probe.linear import head_of
from situs.models.start import addressed_model, starting
from situs.train.optim import peak_rate


@pytest.fixture(scope="module")
def bench() -> tuple[Bench, Initial]:
    """Thirty pictures, and a small ViT in memory."""
    pixels, labels = pictures(30)
    train = TensorSource(torch.tensor(pixels).permute(0, 3, 1, 2), torch.tensor(labels), CLASSES)
    torch.manual_seed(0)
    source = addressed_model(small_vit(SIDE, depth=1))
    assert source is not None
    config = FinetuneConfig(data=DataConfig("samples", img_size=SIDE, batch=8))
    return Bench(config, train, train, torch.tensor(labels), CLASSES, torch.device("cpu"), starting()), Initial(
        "", source
    )


def test_features_are_what_the_head_is_fed(bench: tuple[Bench, Initial]) -> None:
    own, origin = bench
    backbone = own.make(origin, "class means")[1].backbone
    features, labels, rows = own.features(backbone)
    assert rows.tolist() == list(range(30)) and labels.equal(own.labels)
    batch = next(iter(own.loader()))
    with torch.no_grad():
        torch.testing.assert_close(head_of(backbone, 3)(features[: len(batch.inputs)]), backbone.eval()(batch.inputs))


@pytest.mark.parametrize(
    "way", ["head", *(pytest.param(way, marks=pytest.mark.slow) for way in ("LoRA", "all layers"))]
)
def test_a_training_is_stopped_and_repeated_where_it_did_best(way: Any, bench: tuple[Bench, Initial]) -> None:
    own, origin = bench
    features = own.features(own.make(origin, "class means")[1].backbone)[0]
    folds = folds_of(own.labels)
    row = own.trained(way, origin, features, 0.1, folds, 2, 4)
    assert row.right.isnan().equal(folds >= 2)  # two folds were tested
    shares = []
    for stop in (1, 2, 3, 4):  # by hand: the same training to each moment
        right = 0
        for fold in (0, 1):
            config, model = own.make(origin, way)
            rest = (folds != fold).nonzero()[:, 0]
            own._begin(model, features, 0.1, rest)
            for step in updates(model, own.loader(rest, training=True), config, 4):
                if step == stop:
                    break
            rows = (folds == fold).nonzero()[:, 0]
            right += int(own._answers(model, own.loader(rows), config).sum())
        shares.append(right)
    assert row.updates == 1 + shares.index(max(shares)) and int(row.right.nansum()) == max(shares)
    row = row._replace(updates=2)
    config, model = own.make(origin, way)
    own._begin(model, features, 0.1, torch.arange(30))
    for step in updates(model, own.loader(training=True), config, 4):
        if step == 2:
            break
    same = own.refit(row, features, 0.1)[1].state_dict()
    assert all(torch.equal(value, same[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("total", "looks"),
    [(1, [1]), (4, [1, 2, 3, 4]), (16, [2, 4, 6, 8, 10, 12, 14, 16]), (80, [10, 20, 30, 40, 50, 60, 70, 80])],
)
def test_a_training_is_judged_eight_times_and_at_its_end(
    total: int, looks: list[int], bench: tuple[Bench, Initial], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of equal moments the first is taken: here all that come after the third look."""
    own, origin = bench
    now, seen, asked = [0], list[int](), list[int]()

    def steps(*_: Any) -> Any:
        for step in range(1, total + 1):
            now[0] = step
            yield step

    def answers(_: Any, method: Any, loader: Any, config: Any) -> torch.Tensor:
        seen.append(now[0])
        return torch.full((len(loader.source),), float(len(seen) >= 3)).double()

    monkeypatch.setattr("situs.measure.adapt.bench.updates", steps)
    monkeypatch.setattr(Bench, "_answers", answers)
    row = own.trained("head", origin, torch.empty(0), None, torch.arange(30) % 2, 1, total, lambda: asked.append(1))
    assert seen == looks and len(asked) == total and row.total == total
    assert row.updates == looks[min(2, len(looks) - 1)] if len(looks) > 2 else looks[0]


def test_the_frozen_ways_leave_the_model_as_it_is(bench: tuple[Bench, Initial]) -> None:
    own, origin = bench
    start = own.make(origin, "class means")[1]
    features = own.features(start.backbone)[0]
    rows = own.frozen(origin, features, folds_of(own.labels))
    assert [row.way for row in rows] == ["kNN", "class means", "linear probe"]
    for row in rows[1:]:
        model = own.refit(row, features, 0.0)[1]
        same = {name for name, value in model.state_dict().items() if torch.equal(value, start.state_dict()[name])}
        assert {*model.state_dict()} - same - {"backbone.model.head.bias"} == {"backbone.model.head.weight"}
        accuracy, answers = own.judge(model.backbone)
        assert accuracy.top1 > 0.6 and int(answers.sum()) == 30  # shades of three classes are easily told


def test_rates_grow_with_the_batch(bench: tuple[Bench, Initial]) -> None:
    own, origin = bench
    model = own.make(origin, "all layers")[1]

    def peak(way: Way, batch: int) -> float:
        return peak_rate(rates_of(way, batch, model), batch)

    assert peak("head", 18) == peak("head", 256) == 1e-3
    assert peak("LoRA", 100) == pytest.approx(1e-3) and peak("LoRA", 25) == pytest.approx(5e-4)
    assert peak("all layers", 256) == pytest.approx(3.072e-4)
    assert rates_of("all layers", 8, model).layer_decay == 0.75


@pytest.mark.parametrize("method", [pytest.param("droppos", marks=pytest.mark.slow), "mp3"])
def test_pretraining_trains_the_new_head_first_and_the_weights_slowly(
    method: str, bench: tuple[Bench, Initial]
) -> None:
    own, origin = bench
    start, moved, head = None, list[float](), list[float]()
    for learner in own.pretrained(origin, method, own.train, 6):
        weights = {name: value.detach().clone() for name, value in learner.named_parameters()}
        start = weights if start is None else start
        far = {name: float((value - start[name]).abs().max()) for name, value in weights.items()}
        moved.append(max(far[name] for name in far if name.startswith("backbone.")))
        head.append(max(far[name] for name in far if not name.startswith("backbone.")))
    assert moved[:3] == [0.0] * 3 and 0 < moved[5] < 4e-6  # three updates, each of at most the rate and a little decay
    assert 0 < head[1] < head[2]


@pytest.mark.parametrize("settings", [DECAYS, SCALES])
def test_what_the_folds_choose_among_rises_by_equal_factors(settings: tuple[float, ...]) -> None:
    factors = [b / a for a, b in pairwise(settings)]
    assert len(settings) >= 4 and factors == pytest.approx([factors[0]] * len(factors)) and factors[0] > 1


def test_a_fold_without_images_is_left_out(bench: tuple[Bench, Initial]) -> None:
    own, origin = bench
    features = own.features(own.make(origin, "class means")[1].backbone)[0]
    folds = torch.arange(30) % 2  # the others are empty
    for row in own.frozen(origin, features, folds):
        assert bool(row.right.isfinite().all())
    row = own.trained("head", origin, features, 0.1, 2 * folds, 3, 1)
    assert bool(row.right.isfinite().all())


def test_without_a_probe_the_head_keeps_its_weights(bench: tuple[Bench, Initial]) -> None:
    own, origin = bench
    model = own.make(origin, "head")[1]
    features, head = torch.randn(30, 192), head_of(model.backbone, 3)
    before = head.weight.detach().clone()
    own._begin(model, features[:, : head.in_features], None, torch.arange(30))
    assert torch.equal(head.weight, before)
    own._begin(model, features[:, : head.in_features], 0.1, torch.arange(30))
    assert not torch.equal(head.weight, before)


def test_a_training_that_diverges_ends_in_one_sentence(bench: tuple[Bench, Initial]) -> None:
    own, origin = bench
    config, model = own.make(origin, "head")
    with torch.no_grad():
        head_of(model.backbone, 3).weight.fill_(torch.nan)
    with pytest.raises(SitusError, match="the loss is NaN or infinite") as caught:
        list(updates(model, own.loader(training=True), config, 2))
    assert caught.value.field == "data"


def test_a_part_of_a_set_has_its_rows(bench: tuple[Bench, Initial]) -> None:
    train, rows = bench[0].train, torch.tensor([7, 2, 29])
    for part in (part_of(train, rows), part_of(Subset(train, 30), rows)):
        assert len(part) == 3 and part.classes == CLASSES
        for at, row in enumerate(rows.tolist()):
            one, other = part.read(at), train.read(row)
            assert torch.equal(torch.as_tensor(one["image"]), torch.as_tensor(other["image"]))
            assert one["label"] == other["label"]
