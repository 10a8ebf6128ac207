"""A part of a source: drawn once, of every class, read through the source itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from situs.data.augment.recipes import NONE, AugmentConfig
from situs.data.config import DataConfig
from situs.data.loader import make_loader
from situs.data.open import judged_split, open_source, splits_at
from situs.data.sources.base import Source, TensorSource
from situs.data.sources.subset import Joined, PerClass, Subset, hold_out
from situs.errors import BrokenSampleError, SitusError


def numbered(count: int, classes: int, *, turns: bool) -> TensorSource:
    """Image i holds the number i in its two pixels; classes take turns or stand in a row."""
    numbers = torch.arange(count)
    images = torch.stack([numbers // 256, numbers % 256], dim=1).to(torch.uint8).view(count, 1, 1, 2)
    labels = numbers % classes if turns else numbers * classes // count
    return TensorSource(images, labels, tuple(map(str, range(classes))), "numbered")


def rows(subset: Source) -> list[int]:
    read = [subset.read(index)["image"].flatten().tolist() for index in range(len(subset))]
    return [256 * high + low for high, low in read]


def test_a_part_is_distinct_repeatable_and_keeps_images_with_their_labels() -> None:
    source = numbered(1000, 10, turns=True)
    part = Subset(source, 200)
    assert len(part) == 200
    chosen = rows(part)
    assert len(set(chosen)) == 200
    assert chosen == rows(Subset(numbered(1000, 10, turns=True), 200))
    assert [part.read(index)["label"] for index in range(200)] == [row % 10 for row in chosen]
    assert (part.name, part.classes, part.channels, part.strict) == ("numbered", source.classes, None, False)


@pytest.mark.parametrize("turns", [True, False])
def test_every_class_is_there_in_either_order(turns: bool) -> None:
    part = Subset(numbered(1000, 10, turns=turns), 200)
    counts = torch.bincount(torch.tensor([part.read(index)["label"] for index in range(200)]), minlength=10)
    # 20 of each are expected; a hypergeometric count is within 5 deviations (19) of that.
    assert counts.min() > 1
    assert counts.max() < 40


def test_more_than_there_are_is_all_of_them() -> None:
    assert rows(Subset(numbered(30, 3, turns=True), 50)) == list(range(30))


class Torn(TensorSource):
    """A set whose third sample has no label that can be read."""

    def label(self, index: int) -> Any:
        if index == 2:
            raise BrokenSampleError("torn")
        return super().label(index)


@pytest.mark.parametrize("turns", [False, True])
def test_so_many_of_each_class_are_a_fair_choice_that_grows(turns: bool) -> None:
    source = numbered(200, 4, turns=turns)
    few, more = PerClass(source, 5), PerClass(source, 20)
    for part, count in ((few, 5), (more, 20)):
        labels = [part.read(index)["label"] for index in range(len(part))]
        assert sorted(labels) == sorted([*range(4)] * count)
        assert [part.label(index) for index in range(len(part))] == labels
        assert part.rows.tolist() == sorted(set(part.rows.tolist()))
    assert set(few.rows.tolist()) < set(more.rows.tolist())
    assert max(more.rows) - min(more.rows) > 150  # from all of the set, not its beginning
    assert len(PerClass(source, 1000)) == 200
    torn = Torn(source.images, source.labels, source.classes)
    assert set(range(200)) - set(PerClass(torn, 1000).rows.tolist()) == {2}
    config = DataConfig("", batch=4, per_class=3, channels=1, img_size=(1, 2))
    assert len(make_loader(config, AugmentConfig(), source=source).source) == 12
    assert len(make_loader(config, None, source=source).source) == 200  # what is judged is judged on all
    with pytest.raises(SitusError, match="has no labels; per_class applies only to single-label"):
        PerClass(TensorSource(source.images, None, None), 3)


def test_a_loader_reads_a_part_and_skips_what_is_broken() -> None:
    class Broken(Source):
        def __len__(self) -> int:
            return 20

        def read(self, index: int) -> dict[str, Any]:
            if index % 4 == 0:
                raise BrokenSampleError(f"image {index}")
            return {"image": torch.full((1, 4, 4), index, dtype=torch.uint8), "label": index}

    source = Broken("broken", tuple(map(str, range(20))), 1, False)
    part = Subset(source, 10)
    good = [row for row in part.rows if row % 4]
    config = DataConfig(img_size=4, channels=1, batch=4, workers=0)
    loader = make_loader(config, None, source=part)
    labels = [label for batch in loader if "label" in batch.targets for label in batch.targets["label"].tolist()]
    assert labels == good
    assert len(part.skipped) == 10 - len(good) > 0


def test_several_sources_are_one_after_another_and_must_have_the_same_classes() -> None:
    first, second = numbered(3, 2, turns=True), numbered(4, 2, turns=False)
    joined = Joined("both", [("a/", first), ("b/", second)])
    assert (len(joined), joined.name, joined.classes) == (7, "both", ("0", "1"))
    assert rows(joined) == [0, 1, 2, 0, 1, 2, 3]
    assert [joined.key(index) for index in range(7)] == ["a/0", "a/1", "a/2", "b/0", "b/1", "b/2", "b/3"]
    assert [joined.label(index) for index in range(7)] == [0, 1, 0, 0, 0, 1, 1]
    assert [joined.origin(index) for index in (2, 3)] == [(first, 2), (second, 0)]
    many = TensorSource(first.images, torch.zeros(3, 2, dtype=torch.int8), ("0", "1"))  # another kind of label
    for other in (numbered(4, 3, turns=True), many, TensorSource(first.images, None, None)):
        with pytest.raises(SitusError, match=r"^both: its splits have different classes; choose one split$") as error:
            Joined("both", [("a/", first), ("b/", second), ("c/", other)])
        assert error.value.field == "split"


class Named(Source):
    """Images that are only names."""

    def __init__(self, names: list[str]) -> None:
        super().__init__("named", None, None, False)
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def key(self, index: int) -> str:
        return self.names[index]

    def read(self, index: int) -> tuple[torch.Tensor, int | None]:
        return torch.full((1, 2, 2), index % 251, dtype=torch.uint8), None


def names(part: Source) -> set[str]:
    return {part.key(index) for index in range(len(part))}


def test_a_held_out_share_is_a_partition_and_stays_when_images_come_and_go() -> None:
    every = [f"class{number % 7}/{number}.jpg" for number in range(4000)]
    held, rest = (hold_out(Named(every), 0.1, test_side=side) for side in (True, False))
    assert names(held).isdisjoint(names(rest))
    assert names(held) | names(rest) == set(every)
    assert 340 < len(held) < 460  # 400 ± 3 deviations
    other = sorted({*every[::3], *(f"new/{number}.jpg" for number in range(1000))}, reverse=True)
    again = hold_out(Named(other), 0.1, test_side=True)
    assert names(again) & set(every) == names(held) & set(other)
    assert names(held) < names(hold_out(Named(every), 0.2, test_side=True))  # a greater share holds the smaller
    assert held.name == "named, held-out fraction 0.1"
    assert rest.name == "named, without the held-out fraction 0.1"


class Sorted(Named):
    """Images whose folder is their class; of a name that ends in "?" it cannot be read."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(names)
        self.classes = tuple(sorted({name.split("/")[0] for name in names}))

    def label(self, index: int) -> int:
        if self.key(index).endswith("?"):
            raise BrokenSampleError(f"{self.key(index)}: has no label")
        return self.classes.index(self.key(index).split("/")[0])


def test_every_class_is_on_both_sides_and_a_class_of_one_is_trained_on() -> None:
    sizes = {"a": 80, "b": 30, "c": 7, "d": 3, "e": 2, "f": 2, "g": 1}
    every = [f"{name}/{number}.jpg" for name, size in sizes.items() for number in range(size)] + ["b/broken?"]
    for share in (0.01, 0.1, 0.5, 0.99):
        source = Sorted(every)
        held, rest = (hold_out(source, share, test_side=side) for side in (True, False))
        assert names(held).isdisjoint(names(rest)) and names(held) | names(rest) == set(every)
        tested, trained = ({name.split("/")[0] for name in names(part)} for part in (held, rest))
        assert (tested, trained) == ({*sizes} - {"g"}, {*sizes})
        said = "named: 1 of its 7 classes has only one image ('g'); the only sample of a class stays in training"
        assert said in held.left_out()


def test_what_was_trained_on_is_never_held_out_when_images_come() -> None:
    """Else a model would be judged on what it has seen, when its folder grows."""
    chance = np.random.default_rng(0)
    for _ in range(50):
        every = [f"{name}/{number}.jpg" for name in "abc" for number in range(chance.integers(2, 9))]
        more = [*every, *(f"{chance.choice([*'abc'])}/new {number}.jpg" for number in range(chance.integers(1, 9)))]
        trained = names(hold_out(Sorted(every), 0.2, test_side=False))
        assert trained.isdisjoint(names(hold_out(Sorted(more), 0.2, test_side=True)))


def test_a_share_that_leaves_a_side_empty_is_refused() -> None:
    with pytest.raises(SitusError, match=r"held_out=1e-09: no sample is held out \(3 images of named\)"):
        hold_out(Named(["a", "b", "c"]), 1e-9, test_side=True)
    with pytest.raises(SitusError, match=r"every sample is held out \(1 image of named\); choose another fraction"):
        hold_out(Named(["a"]), 1 - 1e-9, test_side=False)


def images_at(folder: Path, count: int = 40) -> Path:
    from PIL import Image

    folder.mkdir(parents=True)
    for number in range(count):
        Image.new("L", (4, 4), number).save(folder / f"{number}.png")
    return folder


def test_data_without_a_split_to_be_judged_on_can_hold_out_a_share(tmp_path: Path) -> None:
    flat = images_at(tmp_path / "flat")
    train, val, test = (open_source(flat, split, held_out=0.25) for split in ("train", "val", "test"))
    assert names(train) | names(val) == names(open_source(flat))
    assert names(train).isdisjoint(names(val))
    assert names(val) == names(test)
    assert names(train) == names(open_source(flat, held_out=0.25))  # what training takes by default
    with pytest.raises(SitusError, match="split='holdout'"):
        open_source(flat, "holdout", held_out=0.25)
    images_at(tmp_path / "only" / "train")  # a training split alone is divided alike
    only = open_source(tmp_path / "only", "val", held_out=0.25)
    assert (names(only), only.name) == (names(val), "only (train), held-out fraction 0.25")


def test_a_split_of_the_datas_own_comes_before_a_held_out_share(tmp_path: Path) -> None:
    images_at(tmp_path / "train")
    images_at(tmp_path / "test", 7)
    assert len(open_source(tmp_path, "train", held_out=0.5)) == 40
    assert len(open_source(tmp_path, "val", held_out=0.5)) == 7
    assert len(open_source("samples", "val", held_out=0.5)) == 2000


def test_a_share_must_be_one(tmp_path: Path) -> None:
    for share in (-0.1, 1.0, 7):
        with pytest.raises(SitusError, match=r"held_out=.*must be in \[0, 1\)"):
            open_source(tmp_path, held_out=share)
        with pytest.raises(SitusError, match=r"held_out=.*must be in \[0, 1\)$"):
            DataConfig(held_out=share)


def test_what_an_evaluation_takes_by_itself(tmp_path: Path) -> None:
    flat = images_at(tmp_path / "flat", 2)
    images_at(tmp_path / "split" / "train", 2)
    assert splits_at(tmp_path / "split") == {"train"}
    assert (judged_split(flat), judged_split(flat, 0.1)) == (None, "val")
    assert judged_split(tmp_path / "split") == "val"  # which it lacks: training images do not stand in
    images_at(tmp_path / "split" / "valid", 2)
    assert splits_at(tmp_path / "split") == {"train", "valid"}
    assert judged_split(tmp_path / "split") == "val"
    assert judged_split("samples") == "val"
    with pytest.raises(SitusError, match="no such folder"):
        judged_split(tmp_path / "none")


def test_training_and_judging_take_the_two_sides_of_a_config(tmp_path: Path) -> None:

    config = DataConfig(str(images_at(tmp_path / "flat")), held_out=0.25, img_size=4, channels=1, batch=4, workers=0)
    train, judged = make_loader(config, NONE), make_loader(config, None)
    assert names(train.source).isdisjoint(names(judged.source))
    assert len(train.source) + len(judged.source) == 40


@pytest.mark.parametrize("resident", ["always", "never"])
def test_balanced_training_draws_every_class_equally_often(tmp_path: Path, resident: Any) -> None:
    for name, size in {"a": 30, "b": 6}.items():
        images_at(tmp_path / name, size)
    told = {"img_size": 4, "channels": 1, "batch": 12, "workers": 0, "resident": resident}
    loader = make_loader(DataConfig(str(tmp_path), balanced=True, **told), AugmentConfig())
    labels = torch.cat([batch.targets["label"] for epoch in range(2) for batch in loader.iterate(epoch)])
    assert labels.bincount().tolist() == [36, 36]
    plain = make_loader(DataConfig(str(tmp_path), **told), AugmentConfig())
    assert loader.mark != plain.mark
    assert "each class equally often" in loader.mark
    held = make_loader(
        DataConfig(str(tmp_path), balanced=True, split="train", **told), None
    )  # to be judged on: as it is
    assert torch.cat([batch.targets["label"] for batch in held]).bincount().tolist() == [30, 6]


def test_steps_that_draw_by_chance_are_not_balanced(tmp_path: Path) -> None:
    source = TensorSource(torch.zeros(8, 1, 4, 4, dtype=torch.uint8), torch.arange(8) % 2, ("a", "b"), "set")
    config = DataConfig(balanced=True, img_size=4, channels=1, batch=4, workers=0)
    with pytest.raises(SitusError, match="cannot be used with differential privacy") as error:
        make_loader(config, AugmentConfig(), source=source, step_sampler=lambda step, n, batch: torch.arange(batch))
    assert error.value.field == "balanced"


def test_only_sets_with_a_class_a_sample_are_balanced(tmp_path: Path) -> None:
    config = DataConfig(str(images_at(tmp_path / "flat")), balanced=True, img_size=4, channels=1, workers=0)
    with pytest.raises(SitusError, match=r"has no labels; balanced applies only to single-label") as error:
        make_loader(config, AugmentConfig())
    assert error.value.field == "balanced"
