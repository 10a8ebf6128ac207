"""Numbers in files to classes: by a slow rule, and what is said of those that mean nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from situs.data.batch import VOID
from situs.data.modalities.mask import MaskConfig, class_numbers, names_beside, numbered, to_classes, usual_masks
from situs.errors import BrokenSampleError, SitusError


@given(st.integers(0, 5), st.sets(st.integers(0, 12), max_size=4), st.integers(1, 6))
def test_every_number_has_its_class_or_none(first: int, void: set[int], count: int) -> None:
    config, known, number = MaskConfig(first, tuple(void)), {}, first
    while len(known) < count:  # slowly: the next number that is not void is the next class
        if number not in void:
            known[number] = len(known)
        number += 1
    assert class_numbers(config, count) == list(known)
    file = torch.tensor([[*known, *sorted(void)]])
    assert to_classes(file, config, count, "x")[0].tolist() == [*range(count), *[VOID] * len(void)]
    strange = next(each for each in range(20) if each not in known and each not in void)
    have = f"{count} classes are numbered " if count > 1 else "only class is "
    with pytest.raises(BrokenSampleError, match=f"x: its mask contains the class number {strange}, but the {have}"):
        to_classes(torch.tensor([[first, strange]]), config, count, "x")


@pytest.mark.parametrize("number", [-1, 1 << 16, 1 << 20])
def test_a_number_beyond_all_tables_is_no_class(number: int) -> None:
    with pytest.raises(
        BrokenSampleError, match=rf"number {number:,}, but the 2 classes are numbered 0 to 1 \(255 means no class\)"
    ):
        to_classes(torch.tensor([[0, number]]), MaskConfig(), 2, "x")


def test_classes_end_where_the_numbers_of_a_file_do() -> None:
    assert to_classes(torch.tensor([[65534, 65535]]), MaskConfig(65534, ()), 2, "x").tolist() == [[0, 1]]
    with pytest.raises(SitusError, match=r"^class number 65,536: numbers in a mask must be below 65,536$") as error:
        to_classes(torch.tensor([[65534, 65535]]), MaskConfig(65534, ()), 3, "x")
    assert error.value.field == "masks.first"


def test_255_is_asked_about_where_it_is_no_class() -> None:
    with pytest.raises(BrokenSampleError, match=r"1 to 2 \(0 means no class\); if 255 means no class, add 255"):
        to_classes(torch.tensor([[1, 255]]), MaskConfig(1, (0,)), 2, "x")


def test_a_mask_of_no_class_is_empty() -> None:
    with pytest.raises(BrokenSampleError, match="x: no pixel of its mask has a class"):
        to_classes(torch.full((2, 2), 255), MaskConfig(), 2, "x")


def test_only_the_list_of_ade20k_tells_how_masks_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard, ade = tmp_path / "train.parquet", MaskConfig(1, (0,))
    shard.touch()
    (tmp_path / "classes.txt").write_text("sky\n")
    assert usual_masks(str(tmp_path), None, None) == usual_masks(str(shard), None, None) == MaskConfig()
    (tmp_path / "objectInfo150.txt").write_text("1\t.2\twall\n")
    assert usual_masks(str(tmp_path), None, None) == usual_masks(str(shard), None, None) == ade
    assert usual_masks(str(tmp_path), 0, None) == MaskConfig(0, (0,))
    assert usual_masks(str(tmp_path), None, ()) == MaskConfig(1, ())
    monkeypatch.chdir(tmp_path)
    for elsewhere in (None, "", "samples", str(tmp_path / "other" / "train.parquet")):
        assert usual_masks(elsewhere, None, None) == MaskConfig()


def test_names_come_from_a_list_or_are_the_numbers(tmp_path: Path) -> None:
    assert names_beside(tmp_path) == ()
    (tmp_path / "classes.txt").write_text("sky\n tree \n\n")
    assert names_beside(tmp_path) == ("sky", "tree")
    rows = ["Idx\tRatio\tName", "1\t.2\twall", "2\t.1\tbuilding, edifice", "3\t.1\tscreen", "4\t0\tscreen; door"]
    (tmp_path / "objectInfo150.txt").write_text("\n".join(rows))
    assert names_beside(tmp_path) == ("wall", "building", "screen (3)", "screen (4)")
    (tmp_path / "objectInfo150.txt").unlink()
    (tmp_path / "classes.txt").write_text("sky\nsky\n")
    with pytest.raises(SitusError, match="names the class 'sky' twice"):
        names_beside(tmp_path)
    assert numbered([4, 2], MaskConfig(1, (3,)), "x") == ("1", "2", "4")
    assert numbered([0, 1, 255], MaskConfig(), "x") == ("0", "1")  # which means none by default
    assert len(numbered(range(256), MaskConfig(0, ()), "x")) == 256
    for found, missing in (([0, 2, 255], 253), ([0, 2, 254, 255], 252), ([0, 255], 254)):
        with pytest.raises(SitusError, match=f"contain 255, .* because {missing} of the 254 class numbers"):
            numbered(found, MaskConfig(1, (0,)), "x")
    with pytest.raises(SitusError, match=r"x: no pixel of its masks has a class number; class numbers start at 5"):
        numbered([4], MaskConfig(5), "x")
    with pytest.raises(SitusError, match="names that differ"):
        MaskConfig(classes=("a", "a"))
