"""What a segmentation's page shows of few classes and of many."""

from __future__ import annotations

import pytest
import torch

from situs.measure.segments import Inference, Segments, SegmentScores, ShownMask, segment_details, segment_figures


def answers(count: int) -> torch.Tensor:
    """Class n has 10 (n + 1) pixels, of which n are taken for the class before."""
    table = torch.diag(torch.tensor([10 * (n + 1) - n for n in range(count)]))
    for n in range(1, count):
        table[n, n - 1] = n
    return table


def by_hand(table: torch.Tensor) -> list[float]:
    sums = zip(table.diagonal().tolist(), table.sum(0).tolist(), table.sum(1).tolist(), strict=True)
    return [100 * right / (one + other - right) for right, one, other in sums]


def names(count: int) -> list[str]:
    return [f"c{n}" for n in range(count)]


@pytest.mark.parametrize("count", [2, 12, 13, 40, 41])
def test_few_classes_are_drawn_and_of_many_the_weakest_are_listed(count: int) -> None:
    scores = SegmentScores(answers(count), 0.5)
    figures = {figure.name: figure for figure in segment_figures(scores, names(count), ", in m")}
    assert [*figures] == ["classes"] * (count <= 40) + ["confusion"] * (count <= 12)
    ious = dict(zip(names(count), by_hand(scores.answers), strict=True))
    if count <= 40:
        assert figures["classes"].values == (pytest.approx(ious), "IoU, %")
        assert figures["classes"].caption.endswith("class, in m.")
    if count <= 12:
        ((shares, _),) = figures["confusion"].values[0].values()
        assert shares.sum(dim=1).tolist() == pytest.approx([100.0] * count)
        assert float(shares[1, 0]) == pytest.approx(5.0) and figures["confusion"].options["limits"] == (0, 100)
    assert [figure.name for figure in segment_figures(scores, names(count), "", "classes-2")] == ["classes-2"] * (
        count <= 40
    )
    tables = {table.title: table for table in segment_details(scores, names(count), ", in m")}
    weakest, pairs = "The 20 classes with the lowest IoU, in m", "The most confused pairs, in m"
    assert [*tables] == [weakest] * (count > 40) + [pairs] * (count > 12)
    if count > 40:
        order = sorted(ious, key=lambda name: ious[name])[:20]
        assert [row[0] for row in tables[weakest].rows] == order
        first = int(order[0][1:])
        assert list(tables[weakest].rows[0]) == [order[0], 10 * (first + 1), f"{ious[order[0]]:.2f}", f"c{first - 1}"]
    if count > 12:
        n = count - 1
        *first, share = tables[pairs].rows[0]
        assert first == [f"c{n}", f"c{n - 1}", n] and float(str(share)) == pytest.approx(10 * n / (n + 1), abs=0.051)
        assert len(tables[pairs].rows) == min(count - 1, 20)


def segments(worst: int) -> Segments:
    mask = torch.zeros(2, 3, dtype=torch.int16)
    shown = [ShownMask(f"i{n}", 0.125 * n, torch.rand(3, 4, 6), mask, mask + 1) for n in range(worst)]
    return Segments(SegmentScores(torch.tensor([[6, 2], [1, 3]]), 0.25), ("a", "b"), 7, shown, Inference("whole"))


@pytest.mark.parametrize("worst", [0, 1, 2, 3])
def test_two_of_the_worst_images_open_the_page(worst: int) -> None:
    result = segments(worst)
    drawn = [figure for figure in result.figures() if figure.name.startswith("worst")]
    assert [figure.name for figure in drawn] == [[], ["worst"], ["worst"], ["worst-first", "worst"]][worst]
    for figure, count in zip(drawn, [min(worst, 2), worst], strict=False):
        rows, classes = figure.values
        assert [row[0] for row in rows] == ["0 %", "12 %", "25 %"][:count] and classes == ("a", "b")
        assert all(row[2].keys() == {"truth", "predicted"} for row in rows)
    tables = [table for table in result.details() if table.title == "The worst images first"]
    assert len(tables) == bool(worst)
    assert not worst or [list(row) for row in tables[0].rows] == [[f"i{n}", f"{12.5 * n:.2f}"] for n in range(worst)]


def test_the_sentence_the_row_and_the_numbers() -> None:
    result = segments(1)
    said = result.summary()
    miou = (6 / 9 + 3 / 6) / 2
    assert said.sentence == (
        f"model reaches an mIoU of {100 * miou:.2f} % on 7 images of 2 classes (always predicting the most frequent "
        "class: 33.33 %)."
    )
    (table,) = said.tables
    assert (
        list(table.rows[0]) == ["model", f"{100 * miou:.2f} %", "75.00 %", "75.00 %", 0.25] and "whole" in table.title
    )
    assert said.numbers == ((f"{100 * miou:.2f} %", "mIoU"), ("75.00 %", "pixels right"))
    numbers = result.numbers()
    assert (numbers["mode"], numbers["overlap"], numbers["count"], numbers["loss"]) == (
        "whole",
        Inference.overlap,
        7,
        0.25,
    )
    assert numbers["worst"] == [{"name": "i0", "iou": 0.0}]
    assert numbers["classes"][0] == {"class": "a", "pixels": 8, "iou": pytest.approx(2 / 3), "taken_for": "b"}
