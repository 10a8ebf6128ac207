"""Published corruption sets in both layouts, and whose class is whose."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from situs.data.open import open_source
from situs.data.sources.subset import Rows, Subset
from situs.errors import SitusError
from situs.measure.robustness.run import (
    match_classes,
    open_corrupted,
    open_folder,
    open_normal,
    read_class_list,
    row_numbers,
)


def write(folder: Path, classes: dict[str, int], value: int = 0) -> None:
    for name, count in classes.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(np.full((8, 8, 3), value + number, dtype=np.uint8)).save(folder / name / f"{number}.png")


def test_classes_are_matched_by_name() -> None:
    names = ("n01", "n02", "n03", "n04")
    assert match_classes(("n04", "n02"), names, 4, "a") == [3, 1]
    assert match_classes(("x", "y"), None, 2, "a") == [0, 1]
    with pytest.raises(SitusError, match=r"a: .*no class 'n05'.* 4 classes, .*'n01'"):
        match_classes(("n01", "n05"), names, 4, "a")
    with pytest.raises(SitusError, match=r"a: has 2 classes, but the classifier has 4 outputs"):
        match_classes(("n01", "n02"), None, 4, "a")
    with pytest.raises(SitusError, match="4 class names are given, but the classifier has 5 outputs"):
        match_classes(("n01",), names, 5, "a")
    with pytest.raises(SitusError, match="a: has no labels"):
        match_classes(None, names, 4, "a")


def test_class_lists(tmp_path: Path) -> None:
    file = tmp_path / "classes.txt"
    file.write_text("n01440764 tench, Tinca tinca\n\nn01443537\n  Ankle boot \n", encoding="utf-8")
    assert read_class_list(file) == ("n01440764", "n01443537", "Ankle boot")
    file.write_text("a\nb\na\n", encoding="utf-8")
    with pytest.raises(SitusError, match=r"names 'a' twice"):
        read_class_list(file)
    file.write_text("\n", encoding="utf-8")
    with pytest.raises(SitusError, match="holds no class names"):
        read_class_list(file)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SitusError, match=r"cannot be read \(it is not text\)"):
        read_class_list(file)
    with pytest.raises(SitusError, match=r"cannot be read \(No such file or directory\)"):
        read_class_list(tmp_path / "none")


@pytest.mark.parametrize("below", ["", "weather"])
def test_folders_as_in_imagenet_c(tmp_path: Path, below: str) -> None:
    write(tmp_path / below / "fog" / "2", {"cat": 2, "dog": 1}, value=40)
    source, numbered = open_corrupted(tmp_path, "fog", 2, 3)
    assert (source.classes, len(source), numbered) == (("cat", "dog"), 3, False)
    assert int(source.read(1)["image"][0, 0, 0]) == 41
    with pytest.raises(SitusError, match=r"fog: has no folder for severity 3; choose severities"):
        open_corrupted(tmp_path, "fog", 3, 3)
    with pytest.raises(SitusError, match=r"has no folder 'snow'; choose corruptions"):
        open_corrupted(tmp_path, "snow", 2, 3)
    (tmp_path / below / "fog" / "5").mkdir()
    with pytest.raises(SitusError, match=r"contains no images "):
        open_corrupted(tmp_path, "fog", 5, 3)
    with pytest.raises(SitusError, match=r"no such folder"):
        open_corrupted(tmp_path / "none", "fog", 1, 3)


def test_arrays_as_in_cifar_c(tmp_path: Path) -> None:
    images = np.arange(10, dtype=np.uint8).repeat(4 * 4 * 3).reshape(10, 4, 4, 3)
    np.save(tmp_path / "fog.npy", images)
    np.save(tmp_path / "labels.npy", np.array([2, 0] * 5, dtype=np.uint8))
    source, numbered = open_corrupted(tmp_path, "fog", 4, 3)
    assert numbered and len(source) == 2 and source.classes == ("0", "1", "2")
    image, label = source.read(1).values()
    assert image.shape == (3, 4, 4) and int(image[0, 0, 0]) == 7 and label == 0
    np.save(tmp_path / "snow.npy", images[:9])
    with pytest.raises(SitusError, match=r"snow.npy: must contain uint8 images .* But the images are uint8"):
        open_corrupted(tmp_path, "snow", 1, 3)
    (tmp_path / "frost.npy").write_bytes(b"no array")
    with pytest.raises(SitusError, match=r"frost.npy and labels.npy cannot be read "):
        open_corrupted(tmp_path, "frost", 1, 3)


def test_parts_know_their_rows(tmp_path: Path) -> None:
    write(tmp_path, {"cat": 3, "dog": 2})
    folder = open_source(tmp_path)
    assert row_numbers(folder) is None
    part = Subset(folder, 3)
    numbers = row_numbers(part)
    assert numbers is not None and numbers.tolist() == part.rows.tolist()
    chosen = Rows(folder, [4, 1])
    assert torch.equal(chosen.read(0)["image"], folder.read(4)["image"])
    assert row_numbers(Rows(chosen, [1])).tolist() == [1]  # type: ignore[union-attr]  (in the whole, not in the part)
    assert row_numbers(Rows(chosen, [0])).tolist() == [4]  # type: ignore[union-attr]


def test_normal_images_are_the_split_or_the_whole_of_an_unsplit_folder(tmp_path: Path) -> None:
    write(tmp_path / "whole", {"cat": 3, "dog": 2})
    write(tmp_path / "split" / "train", {"cat": 4})
    write(tmp_path / "split" / "val", {"cat": 1})
    write(tmp_path / "trained" / "train", {"cat": 4})
    assert len(open_normal(str(tmp_path / "whole"), None, 3)) == 5
    assert len(open_normal(str(tmp_path / "split"), None, 3)) == 1
    with pytest.raises(SitusError, match="has no split 'val'"):
        open_normal(str(tmp_path / "whole"), "val", 3)
    assert len(open_normal(str(tmp_path / "whole"), "val", 3, held_out=0.5)) < 5
    with pytest.raises(SitusError, match="has no split 'val'"):  # and the training images do not stand in
        open_normal(str(tmp_path / "trained"), None, 3)
    with pytest.raises(SitusError, match="no such folder"):
        open_normal(str(tmp_path / "none"), None, 3)
    with pytest.raises(SitusError, match=r"no such folder"):
        open_folder(tmp_path / "none", 3, "--imagenet-a")
