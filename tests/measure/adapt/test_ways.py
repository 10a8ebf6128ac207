"""Folds, folded heads, and which way is taken: against exact laws and planted cases."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from situs.measure.accuracy import Accuracy
from situs.measure.adapt.ways import (
    Adapted,
    Initial,
    TriedWay,
    Way,
    choose,
    class_means,
    folds_of,
    gain,
    one_label,
    top1_better,
)
from situs.measure.knn import knn_scores
from situs.measure.probe.linear import fit_linear, fold_in
from situs.results import finite

GIVEN, AFTER = Initial("", "m"), Initial("mae", "p")


def features(classes: int, each: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(each)
    centres = torch.randn(classes, 6, generator=generator, dtype=torch.double)
    noise = torch.randn(classes * each, 6, generator=generator, dtype=torch.double)
    return 3 + centres[labels] + 0.3 * noise * torch.arange(1, 7), labels


@pytest.mark.parametrize("way", ["class means", "linear probe"])
def test_the_folded_head_gives_the_classifiers_own_logits(way: str) -> None:
    inputs, labels = features(4, 9)
    fitted = class_means(inputs, labels, 4, 20.0) if way == "class means" else fit_linear(inputs, labels, 4, 0.01)
    head = nn.Linear(6, 4, dtype=torch.double)
    fold_in(fitted, head)
    fresh = features(4, 50, seed=1)[0]
    torch.testing.assert_close(head(fresh), fitted(fresh), rtol=1e-12, atol=1e-12)
    assert float(fitted(fresh).std()) > 0.1  # and no zeros


def test_class_means_name_the_nearest_mean_and_at_one_label_the_nearest_neighbour() -> None:
    inputs, labels = features(5, 4)
    fresh = features(5, 30, seed=2)[0]
    unit = inputs / inputs.norm(dim=1, keepdim=True)
    means = torch.stack([unit[labels == each].mean(dim=0) for each in range(5)])
    slow = [int(torch.stack([torch.cosine_similarity(x, m, dim=0) for m in means]).argmax()) for x in fresh]
    assert class_means(inputs, labels, 5)(fresh).argmax(dim=1).tolist() == slow
    one, name = inputs[::4], labels[::4]
    near = knn_scores(one, name, fresh, classes=5, k=1).argmax(dim=1)
    assert class_means(one, name, 5, 7.0)(fresh).argmax(dim=1).equal(near)


@pytest.mark.parametrize("sizes", [(22, 22, 22), (7, 80, 2, 1, 13), (2, 2, 2, 2, 2), (5, 1, 1)])
def test_folds_are_disjoint_and_stratified(sizes: tuple[int, ...]) -> None:
    labels = torch.cat([torch.full((size,), at) for at, size in enumerate(sizes)])
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))]
    folds = folds_of(labels, seed=3)
    assert folds.equal(folds_of(labels, seed=3)) and not folds.equal(folds_of(labels, seed=4))
    for at, size in enumerate(sizes):
        counts = torch.bincount(folds[labels == at].clamp(min=0), minlength=5)
        if size == 1:
            assert folds[labels == at].tolist() == [-1]  # trained on in every fold, tested in none
            continue
        assert int(counts.max() - counts.min()) <= 1  # as even as whole numbers allow
        for fold in folds[labels == at].unique().tolist():
            assert ((folds != fold) & (labels == at)).any()  # what is tested was learned from another image
    whole = torch.bincount(folds[folds >= 0], minlength=5)
    assert int(whole.max() - whole.min()) <= 1


def tried(way: Way, right: float, origin: Initial = GIVEN, *, count: int = 100, tested: int | None = None) -> TriedWay:
    hits = (torch.arange(count) < round(right * count)).double()
    hits[tested if tested is not None else count :] = torch.nan
    return TriedWay(way, origin, hits)


LABELS = torch.zeros(100, dtype=torch.int64)


@pytest.mark.parametrize(
    ("rows", "taken"),
    [
        ([tried("class means", 0.5), tried("linear probe", 0.55), tried("all layers", 0.9)], ("all layers", "")),
        # 4 images more, each of them won: 4 > sqrt(4); 1 more is no more than sqrt(1)
        ([tried("class means", 0.5), tried("linear probe", 0.54)], ("linear probe", "")),
        ([tried("class means", 0.5), tried("linear probe", 0.51)], ("class means", "")),
        ([tried("all layers", 0.5), tried("class means", 0.5)], ("class means", "")),  # whatever the order of trying
        ([tried("class means", 0.9), tried("head", 0.5), tried("LoRA", 0.8)], ("class means", "")),
        ([tried("kNN", 1.0), tried("class means", 0.5)], ("class means", "")),  # which no head holds
        ([tried("linear probe", 0.6, AFTER), tried("class means", 0.5), tried("linear probe", 0.6)],
         ("linear probe", "")),
        ([tried("class means", 0.5), tried("class means", 0.7, AFTER)], ("class means", "mae")),
        # tested on 20 images alone, of which both have all right: the 100 of the other are no advantage
        ([tried("class means", 0.5), tried("all layers", 0.2, tested=20)], ("class means", "")),
    ],
)  # fmt: skip
def test_a_later_way_is_taken_where_it_is_better_by_more_than_chance(
    rows: list[TriedWay], taken: tuple[str, str]
) -> None:
    best = choose(rows, LABELS)
    assert (best.way, best.origin.name) == taken


def test_the_gain_counts_every_class_the_same_and_its_error_is_paired() -> None:
    labels = torch.tensor([0] * 90 + [1] * 10)
    old, new = torch.zeros(100).double(), torch.zeros(100).double()
    old[:45], new[:40], new[90:95] = 1, 1, 1
    more, error = gain(new, old, labels)
    assert more == pytest.approx((40 - 45) / 90 / 2 + 5 / 10 / 2)
    assert error == pytest.approx((5 * (1 / 180) ** 2 + 5 * (1 / 20) ** 2) ** 0.5)
    torch.manual_seed(0)  # against many draws of images: the error is that of the difference
    a, b = (torch.rand(20_000) < 0.6).double(), (torch.rand(20_000) < 0.55).double()
    draws = [gain(a[i : i + 100], b[i : i + 100], LABELS) for i in range(0, 20_000, 100)]
    spread = torch.tensor([d[0] for d in draws]).std()
    assert float(spread) == pytest.approx(float(torch.tensor([d[1] for d in draws]).mean()), rel=0.15)


def test_the_fixed_rule_is_for_classes_of_one_label() -> None:
    assert one_label(torch.tensor([0, 1, 2, 2])) and not one_label(torch.tensor([0, 0, 1, 1, 2]))


START = "class means (simplest recipe)"
TEN = torch.tensor([0] * 8 + [1] * 2)


def by_hand(way: str, right: str, origin: str = "", **more: int) -> TriedWay:
    hits = torch.tensor([torch.nan if letter == "-" else float(letter) for letter in right], dtype=torch.double)
    return TriedWay(way, Initial(origin, ""), hits, **more)  # pyright: ignore[reportArgumentType]


def test_the_table_and_the_sentence() -> None:
    means, probe = by_hand("class means", "1111000010"), by_hand("linear probe", "1111111100")
    layers = by_hand("all layers", "11--------", "mp3", updates=3, total=8)
    test, start = Accuracy(0.75, 1.0, 40, 0.5, 0.7, 0.5, 2), Accuracy(0.5, 1.0, 40, 0.5, 0.5, 0.5, 2)
    answers = torch.tensor([[15, 5], [5, 15]])
    found = Adapted(
        Path("runs/x"), (means, probe, layers), probe, TEN, ("a", "b"), test, start, answers, ("Mind this.",)
    )
    summary = found.summary()
    assert "too few" not in summary.sentence and "'a', the largest class, has a top-1 of 50.00 %" in summary.sentence
    assert "too few to distinguish" in replace(
        found, answers=torch.tensor([[20, 4], [9, 7]])
    ).summary().sentence  # fmt: skip
    assert "1 of 2 classes has no samples here, and was not tested ('b')." in replace(
        found, answers=torch.tensor([[30, 10], [0, 0]])
    ).summary().sentence  # fmt: skip
    rows = [list(row) for row in summary.tables[0].rows]
    # class a: 4 of 8 more, class b: 1 of 2 fewer
    error = ((4 * (1 / 16) ** 2) + (1 / 4) ** 2) ** 0.5
    assert rows[0] == ["class means", 10, "50.0", "50.0", f"+0.0 ± {100 * error:.1f}", None, False]
    assert rows[1] == ["linear probe", 10, "80.0", "50.0", None, None, True]
    assert rows[2] == ["all layers after mp3", 2, "100.0", "100.0", "+0.0 ± 0.0", "3 of 8", False]
    assert (
        summary.sentence.startswith("The chosen model (linear probe) recognises 75.0 % of 40 images of 2 classes")
        and "The simplest recipe" in summary.sentence
        and "50.0 %" in summary.sentence.partition("simplest recipe")[2]
    )
    assert summary.sentence.endswith("Mind this.") and [row[0] for row in summary.tables[1].rows] == [
        "linear probe",
        START,
    ]
    same = replace(found, chosen=means, test=start).summary()
    assert "The chosen recipe is the simplest one" in same.sentence and [row[0] for row in same.tables[1].rows] == [
        "class means"
    ]
    numbers = finite(found.numbers())
    assert json.loads(json.dumps(numbers)) == json.loads(json.dumps(numbers)) and numbers["test"]["interval"][0] > 0.5
    assert [row["chosen"] for row in numbers["tried"]] == [False, True, False]


def test_a_better_top1_than_the_choice_is_named() -> None:
    labels = torch.tensor([0] * 90 + [1] * 10)
    means, probe = by_hand("class means", "1" * 60 + "0" * 30 + "1" * 10), by_hand("linear probe", "1" * 90 + "0" * 10)
    assert choose([means, probe], labels) is means  # balanced .83 against .5
    (remark,) = top1_better([means, probe, by_hand("kNN", "1" * 100)], means)
    assert all(part in remark for part in ("balanced accuracy", "linear probe", "top-1", "90.0 %", "70.0 %"))
    assert top1_better([means, probe], probe) == []
    close = by_hand("head", "1" * 63 + "0" * 27 + "1" * 10)  # 3 images more
    assert top1_better([means, close], means) == [] and top1_better([by_hand("head", "-" * 100)], means) == []


def test_without_a_test_nothing_is_claimed() -> None:
    untested = by_hand("class means", "-" * 10)
    found = Adapted(Path("x"), (untested,), untested, TEN, ("a", "b"), None, None, None, ())
    assert found.summary().sentence == "Chosen: class means." and len(found.summary().tables) == 1
    assert found.summary().tables[0].rows[0][2:5] == [None, None, None]
    assert finite(found.numbers())["tried"][0]["balanced"] is None


@pytest.mark.parametrize(
    ("ways", "reason"),
    [(["kNN", "class means"], False), (["kNN", "class means", "linear probe"], True), (["class means"], False)],
)
def test_the_frozen_start_is_the_choice_where_no_other_is_better_and_where_there_is_no_other(
    ways: list[str], reason: bool
) -> None:
    rows = [by_hand(way, "1111000010") for way in ways]
    (means,) = (row for row in rows if row.way == "class means")
    score = Accuracy(0.75, 1.0, 40, 0.5, 0.7, 0.5, 2)
    answers = torch.tensor([[15, 5], [5, 15]])
    found = Adapted(Path("x"), tuple(rows), means, TEN, ("a", "b"), score, score, answers, ())
    said = found.summary().sentence
    assert "The chosen recipe is the simplest one (class means on " in said
    assert ("because no other recipe that was tried is better" in said) == reason
    assert found.summary().numbers[1] == ("75.00 %", "top-1 of the simplest recipe")
    (row,) = found.summary().tables[1].rows
    low, high = score.interval
    assert list(row) == ["class means", "75.0 %", f"{100 * low:.1f} to {100 * high:.1f} %", "70.0 %", "50.0 %"]


def test_nothing_that_both_were_tested_on_is_no_gain() -> None:
    one, other = by_hand("head", "11--------").right, by_hand("head", "--11------").right
    assert gain(one, other, TEN) == (0.0, 0.0)


def test_a_better_top1_of_one_image_is_by_chance_and_the_best_of_several_is_named() -> None:
    chosen = by_hand("class means", "0" * 20)
    rows = [
        by_hand(way, "1" * count + "0" * (20 - count)) for way, count in (("head", 4), ("LoRA", 9), ("all layers", 6))
    ]
    (said,) = top1_better(rows, chosen)
    assert "LoRA has a higher top-1" in said and "(45.0 %, compared with 0.0 %)" in said
    assert top1_better(rows[:1], chosen) and not top1_better([by_hand("head", "1" * 3 + "0" * 17)], chosen)  # 1.96 √3
    assert top1_better([rows[1], by_hand("head", "1" * 9 + "0" * 11)], chosen)[0].count("LoRA") == 1
