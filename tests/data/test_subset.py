"""A part of a source: drawn once, of every class, read through the source itself."""

from __future__ import annotations

import pytest
import torch

from situs.data.base import Source, TensorSource
from situs.data.images import BrokenImageError
from situs.data.loader import DataConfig, make_loader
from situs.data.subset import Subset


def numbered(count: int, classes: int, *, turns: bool) -> TensorSource:
    """Image i holds the number i in its two pixels; classes take turns or stand in a row."""
    numbers = torch.arange(count)
    images = torch.stack([numbers // 256, numbers % 256], dim=1).to(torch.uint8).view(count, 1, 1, 2)
    labels = numbers % classes if turns else numbers * classes // count
    return TensorSource(images, labels, tuple(map(str, range(classes))), "numbered")


def rows(subset: Subset) -> list[int]:
    read = [subset.read(index)[0].flatten().tolist() for index in range(len(subset))]
    return [256 * high + low for high, low in read]


def test_a_part_is_distinct_repeatable_and_keeps_images_with_their_labels() -> None:
    source = numbered(1000, 10, turns=True)
    part = Subset(source, 200)
    assert len(part) == 200
    chosen = rows(part)
    assert len(set(chosen)) == 200
    assert chosen == rows(Subset(numbered(1000, 10, turns=True), 200))
    assert [part.read(index)[1] for index in range(200)] == [row % 10 for row in chosen]
    assert (part.name, part.classes, part.channels, part.strict) == ("numbered", source.classes, None, False)


@pytest.mark.parametrize("turns", [True, False])
def test_every_class_is_there_in_either_order(turns: bool) -> None:
    part = Subset(numbered(1000, 10, turns=turns), 200)
    counts = torch.bincount(torch.tensor([part.read(index)[1] for index in range(200)]), minlength=10)
    # 20 of each are expected; a hypergeometric count is within 5 deviations (19) of that.
    assert counts.min() > 1
    assert counts.max() < 40


def test_more_than_there_are_is_all_of_them() -> None:
    assert rows(Subset(numbered(30, 3, turns=True), 50)) == list(range(30))


def test_a_loader_reads_a_part_and_skips_what_is_broken() -> None:
    class Broken(Source):
        def __len__(self) -> int:
            return 20

        def read(self, index: int) -> tuple[torch.Tensor, int | None]:
            if index % 4 == 0:
                raise BrokenImageError(f"image {index}")
            return torch.full((1, 4, 4), index, dtype=torch.uint8), index

    source = Broken("broken", tuple(map(str, range(20))), 1, False)
    part = Subset(source, 10)
    good = [row for row in part.rows if row % 4]
    config = DataConfig(img_size=4, channels=1, batch=4, workers=0)
    loader = make_loader(config, None, source=part)
    labels = [label for batch in loader if batch.labels is not None for label in batch.labels.tolist()]
    assert labels == good
    assert len(part.skipped) == 10 - len(good) > 0
