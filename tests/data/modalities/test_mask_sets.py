"""Images with masks as they lie on disk: three layouts, the classes' names, and one sentence for each fault."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from image_files import encoded
from masked import disc, write_ade
from PIL import Image

from situs.data.batch import VOID
from situs.data.config import DataConfig
from situs.data.loader import resolve
from situs.data.modalities.mask import MaskConfig
from situs.data.open import open_source, splits_at
from situs.errors import BrokenSampleError, SitusError

ADE = MaskConfig(1, (0,))


def test_ade20ks_folders_are_read_as_they_are_published(tmp_path: Path) -> None:
    write_ade(tmp_path, {"training": 3, "validation": 2})
    assert splits_at(tmp_path, target="mask") == {"training", "validation"}
    train, val = (open_source(tmp_path, split, channels=3, target="mask", masks=ADE) for split in ("train", "val"))
    assert (len(train), len(val), train.classes, train.target) == (3, 2, ("ground", "disc"), "mask")
    sample = train.read(1)
    picture, inside = disc(40, 36, 801)
    assert np.array_equal(sample["image"].permute(1, 2, 0), picture)
    assert torch.equal(sample["mask"][2:], torch.from_numpy(inside[2:].astype(np.int16)))
    assert (sample["mask"][:2] == VOID).all() and sample["mask"].dtype == torch.int16


@pytest.mark.parametrize("layout", ["train/images", "images"])
def test_pairs_of_folders_need_no_splits_and_no_names(tmp_path: Path, layout: str) -> None:
    masks = {"train/images": "train/masks", "images": "masks"}[layout]
    for folder in (layout, masks):
        (tmp_path / folder / "more").mkdir(parents=True)
    for number, name in enumerate(("a.b", "more/c")):
        picture, inside = disc(20, 20, number)
        Image.fromarray(picture).save(tmp_path / layout / f"{name}.jpg")
        Image.fromarray(inside * 3).save(tmp_path / masks / f"{name}.png")
    Image.fromarray(inside).save(tmp_path / masks / "lonely.png")
    source = open_source(tmp_path, channels=3, target="mask", masks=MaskConfig())
    assert source.classes == ("0", "1", "2", "3") and [source.key(row) for row in (0, 1)] == ["a.b.jpg", "more/c.jpg"]
    assert source.read(0)["mask"].unique().tolist() == [0, 3]
    assert "left out 1 mask without an image; the first is lonely.png" in source.notes[0]
    named = open_source(tmp_path, channels=3, target="mask", masks=MaskConfig(0, (1, 2), ("off", "on")))
    assert named.classes == ("off", "on") and named.read(0)["mask"].unique().tolist() == [0, 1]


def test_a_palette_and_16_bits_hold_class_numbers_too(tmp_path: Path) -> None:
    write_ade(tmp_path, {"training": 3})
    folder = tmp_path / "annotations" / "training"
    source = open_source(tmp_path, channels=3, target="mask", masks=ADE)
    wanted = source.read(0)["mask"]
    plain = Image.open(folder / "ADE_00000000.png")
    numbers = np.asarray(plain)
    indexed = Image.frombytes("P", plain.size, numbers.tobytes())
    indexed.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0])
    indexed.save(folder / "ADE_00000000.png")
    assert torch.equal(source.read(0)["mask"], wanted)
    Image.fromarray(numbers.astype(np.uint16)).save(folder / "ADE_00000000.png")
    assert torch.equal(source.read(0)["mask"], wanted)
    Image.fromarray(np.stack([numbers] * 3, -1)).save(folder / "ADE_00000000.png")
    with pytest.raises(BrokenSampleError, match=r"its mask: cannot be decoded .*its pixels are RGB; a mask must have"):
        source.read(0)


FAULTS = {
    "missing": r"ADE_00000001\.png: has no mask of the same name in .*annotations/training$",
    "size": r"ADE_00000001\.png: is 40 × 36 and its mask 10 × 12$",
    "turned": r"ADE_00000001\.png: is 36 × 40 turned as its EXIF tag says and its mask 40 × 36$",
    "range": r"its mask contains the class number 9, but the 2 classes are numbered 1 to 2 \(0 means no class\)$",
    "empty": r"ADE_00000001\.png: no pixel of its mask has a class$",
    "bytes": r"ADE_00000001\.png, its mask: cannot be decoded as an image \(no known format\)$",
}


def spoil(root: Path, fault: str) -> None:
    file = root / "annotations" / "training" / "ADE_00000001.png"
    if fault == "missing":
        file.unlink()
    elif fault == "turned":
        exif, photograph = Image.Exif(), root / "images" / "training" / file.name
        exif[0x0112] = 6
        Image.open(photograph).save(photograph, exif=exif)
    elif fault == "bytes":
        file.write_bytes(b"")
    else:
        shape, value = ((10, 12), 1) if fault == "size" else ((40, 36), 9 if fault == "range" else 0)
        Image.fromarray(np.full(shape, value, np.uint8)).save(file)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_sentence(tmp_path: Path, fault: str) -> None:
    spoil(write_ade(tmp_path, {"training": 3}), fault)
    source = open_source(tmp_path, channels=3, target="mask", masks=ADE)
    with pytest.raises(BrokenSampleError, match=FAULTS[fault]):
        source.read(1)
    assert source.read(0).keys() == {"image", "mask"}


def test_a_list_of_other_classes_than_those_given_is_told(tmp_path: Path) -> None:
    write_ade(tmp_path, {"training": 1})
    assert open_source(tmp_path, target="mask", masks=replace(ADE, classes=("ground", "disc"))).notes == []
    [said] = open_source(tmp_path, target="mask", masks=replace(ADE, classes=("disc", "ground"))).notes
    assert said.endswith("the class list beside its images names other classes (ground, disc) and is not used")


def test_folders_that_are_no_such_set_are_refused(tmp_path: Path) -> None:
    (tmp_path / "told.json").write_text("{}")
    with pytest.raises(SitusError, match=r"told\.json: must be a folder or a \.parquet file, with images and masks"):
        open_source(tmp_path / "told.json", target="mask", masks=ADE)
    with pytest.raises(SitusError, match="must contain a folder of images"):
        open_source(tmp_path, target="mask", masks=ADE)
    write_ade(tmp_path, {"training": 1, "validation": 1})
    for file in (tmp_path / "annotations" / "validation").iterdir():
        file.unlink()
    (tmp_path / "annotations" / "validation").rmdir()
    with pytest.raises(SitusError, match=r"annotations: has no split 'validation', but .*images has"):
        open_source(tmp_path, "val", target="mask", masks=ADE)
    for file in (tmp_path / "images" / "training").iterdir():
        file.rename(file.with_suffix(".txt"))
    with pytest.raises(SitusError, match=r"images/training: contains no images$"):
        open_source(tmp_path, target="mask", masks=ADE)
    with pytest.raises(
        SitusError, match="samples: contains only images and their classes; to read images with masks, give a path"
    ):
        open_source("samples", target="mask", masks=ADE)


def write_rows(file: Path, rows: list[tuple[bytes, bytes | None]]) -> None:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = [pa.array([{"bytes": each, "path": ""} for each in column], kind) for column in zip(*rows, strict=True)]
    pq.write_table(pa.table({"image": columns[0], "mask": columns[1], "label": [0] * len(rows)}), file)


def test_parquet_has_a_column_of_each(tmp_path: Path) -> None:
    sets = [disc(20, 24, number) for number in range(3)]
    rows = [(encoded(picture, "JPEG"), encoded(inside + 1)) for picture, inside in sets]
    write_rows(tmp_path / "train-0.parquet", [*rows, (rows[0][0], None)])
    write_rows(tmp_path / "test-0.parquet", rows[:1])
    source = open_source(tmp_path, channels=3, target="mask", masks=MaskConfig(1, ()))
    assert (len(source), source.classes) == (4, ("1", "2"))
    for row, (_, inside) in enumerate(sets):
        assert np.array_equal(source.read(row)["mask"], inside)
    with pytest.raises(BrokenSampleError, match="row 3 of row group 0: the row contains no mask"):
        source.read(3)
    test = open_source(tmp_path, "val", channels=3, target="mask", masks=MaskConfig(1, ()))
    assert (len(test), test.classes) == (1, ("1", "2"))
    assert open_source(tmp_path).read(0).keys() == {"image", "label"}  # nobody asks for masks
    for gone, said in (
        (["mask"], "column 'label' has the type int64, but masks must be bytes"),
        (["mask", "label"], "has no column of masks .such as mask, masks, annotation"),
        (["image"], "has no image column"),
    ):
        pq.write_table(pq.read_table(tmp_path / "train-0.parquet").drop(gone), tmp_path / "other.parquet")
        with pytest.raises(SitusError, match=said) as caught:
            open_source(tmp_path / "other.parquet", target="mask", masks=ADE)
        assert caught.value.fields == ("data",)


@pytest.mark.shared_data
def test_the_pets_are_read_with_their_trimaps(shared_data: Path) -> None:
    source = open_source(
        shared_data / "pets", "val", channels=3, target="mask", masks=MaskConfig(1, (3,), ("pet", "background"))
    )
    sample = source.read(0)
    assert (len(source), tuple(sample["image"].shape), tuple(sample["mask"].shape)) == (296, (3, 171, 128), (171, 128))
    assert [int((sample["mask"] == each).sum()) for each in (0, 1, VOID)] == [10289, 8844, 2755]


def test_masks_of_which_none_can_be_read_are_not_called_masks_without_a_class(tmp_path: Path) -> None:
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
    Image.fromarray(disc(20, 20, 0)[0]).save(tmp_path / "images" / "a.png")
    Image.fromarray(disc(20, 20, 0)[1]).save(tmp_path / "masks" / "b.png")
    with pytest.raises(
        SitusError, match=r"its only mask cannot be read; the first: .*a\.png: has no mask of the same name"
    ):
        open_source(tmp_path, target="mask", masks=MaskConfig())


def test_masks_whose_numbers_start_at_1(tmp_path: Path) -> None:
    """Without a word: 1 is the first class, in what a run records too; a mask that holds 0 makes 0 a class."""
    for folder in ("train/images", "train/masks", "val/images", "val/masks"):
        (tmp_path / folder).mkdir(parents=True)
    for number in range(2):
        picture, inside = disc(20, 20, number)
        for split in ("train", "val"):
            Image.fromarray(picture).save(tmp_path / split / "images" / f"{number}.png")
            Image.fromarray(np.where(inside[:1], 255, 1 + inside)).save(tmp_path / split / "masks" / f"{number}.png")
    source = open_source(tmp_path, channels=3, target="mask", masks=MaskConfig())
    assert source.classes == ("1", "2")
    assert source.read(0)["mask"].unique().tolist() in ([-1, 0, 1], [0, 1])
    assert "its classes are the numbers 1 to 2 of its masks" in source.notes[-1]
    resolved = resolve(DataConfig(str(tmp_path), target="mask", img_size=20)).masks
    assert (resolved.first, resolved.classes) == (1, ("1", "2"))
    val = open_source(tmp_path, "val", channels=3, target="mask", masks=resolved)
    assert torch.equal(val.read(1)["mask"], source.read(1)["mask"])
    assert open_source(tmp_path, channels=3, target="mask", masks=MaskConfig(0)).classes == (
        "0",
        "1",
        "2",
    )  # where it is said
    Image.fromarray(inside).save(tmp_path / "train" / "masks" / "1.png")
    assert open_source(tmp_path, channels=3, target="mask", masks=MaskConfig()).classes == ("0", "1", "2")


@pytest.mark.parametrize(
    ("config", "numbers", "classes", "said"),
    [
        (MaskConfig(), (1, 2, 3), "123", "1 to 3"),
        (MaskConfig(2, (4,)), (2, 4, 5), "235", "2 to 5"),
        (MaskConfig(3), (6,), "3456", "3 to 6"),
        (MaskConfig(0), (1, 3), "0123", None),
    ],
)
def test_classes_without_names_are_the_numbers_up_to_the_largest(
    config: MaskConfig, numbers: tuple[int, ...], classes: str, said: str | None, tmp_path: Path
) -> None:
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
    for number, value in enumerate(numbers):
        Image.fromarray(disc(8, 8, 0)[0]).save(tmp_path / "images" / f"{number}.png")
        Image.fromarray(np.full((8, 8), value, np.uint8)).save(tmp_path / "masks" / f"{number}.png")
    source = open_source(tmp_path, target="mask", masks=config)
    assert source.classes == tuple(classes)
    told = [note.partition("its classes are the numbers ")[2] for note in source.notes]
    assert told == ([] if said is None else [f"{said} of its masks"])
