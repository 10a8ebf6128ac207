"""Samples in memory as a source: every form of an image, labels, classes, and what is refused in one sentence."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_files import encoded
from memory_kinds import CLASSES, KINDS, HuggingFaceSet, TorchSet, pictures
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from situs.data.open import open_source, splits_at
from situs.data.sources.memory import addressed
from situs.errors import BrokenSampleError, SitusError

PIXELS, LABELS = pictures(12)


FORMS: dict[str, Any] = {
    "pillow": Image.fromarray,
    "array": lambda each: each,
    "array CHW": lambda each: each.transpose(2, 0, 1),
    "read-only array": lambda each: np.frombuffer(each.tobytes(), np.uint8).reshape(each.shape),
    "floats": lambda each: (each / 255).astype(np.float64),
    "big-endian": lambda each: each.astype(">u2") * 257,
    "tensor": lambda each: torch.from_numpy(each).permute(2, 0, 1),
    "tensor floats": lambda each: torch.from_numpy(each / 255).permute(2, 0, 1),
    "encoded": encoded,
    "not decoded": lambda each: {"bytes": encoded(each), "path": None},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sample", ["alone", "pair", "dict", "list of one"])
def test_every_form_of_an_image_is_its_pixels(form: str, sample: str) -> None:
    shapes = {"alone": lambda x, _: x, "pair": lambda x, y: (x, y), "dict": lambda x, y: {"img": x, "label": y}}
    shape = shapes.get(sample, lambda x, _: [x])
    if (form, sample) == ("not decoded", "alone"):
        pytest.skip("a dict with 'bytes' alone is a dict without an image")
    data = [shape(FORMS[form](each), label) for each, label in zip(PIXELS, LABELS, strict=True)]
    source = open_source(addressed(data), channels=3)
    for index in range(len(PIXELS)):
        found = source.read(index)
        pixels = found["image"] if found["image"].dtype == torch.uint8 else (found["image"] * 255).round().byte()
        assert torch.equal(pixels, torch.from_numpy(PIXELS[index]).permute(2, 0, 1))
        assert found.get("label") == (LABELS[index] if sample in ("pair", "dict") else None)


@pytest.mark.parametrize("kind", KINDS)
def test_classes_have_the_names_that_the_data_knows(kind: str) -> None:
    source = open_source(addressed(KINDS[kind](PIXELS, LABELS)))
    assert source.classes == (("0", "1", "2") if kind == "tensors" else CLASSES)
    assert [source.label(index) for index in range(12)] == LABELS
    assert source.notes == []


def test_labels_beside_the_images_spare_reading_them() -> None:
    class Counted(HuggingFaceSet):
        read = 0

        def __getitem__(self, key: int | str) -> Any:
            type(self).read += isinstance(key, int)
            return super().__getitem__(key)

    data = Counted(np.repeat(PIXELS, 50, axis=0), [label for label in LABELS for _ in range(50)])
    addressed(data)
    assert Counted.read < 40
    torch_set: Any = TorchSet(PIXELS, LABELS)
    part = Subset(torch_set, [5, 4, 3])
    assert open_source(addressed(part)).classes == CLASSES
    torch_set.targets = [0] * 12  # which are not what the samples have
    assert [open_source(addressed(torch_set)).label(index) for index in range(12)] == LABELS


def test_an_image_that_is_open_and_not_read_yet_is_its_file(tmp_path: Path) -> None:
    """Forked workers would share the place in the open file."""
    turned = Image.fromarray(PIXELS[0][:8])
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(tmp_path / "a.jpg", exif=exif)
    opened = Image.open(tmp_path / "a.jpg")
    filed = open_source(tmp_path).read(0)["image"]
    for _ in range(2):
        assert torch.equal(open_source(addressed([opened])).read(0)["image"], filed)
    assert filed.shape == (3, 16, 8)
    assert opened.fp is not None  # nothing of it is held
    opened.load()
    assert torch.equal(open_source(addressed([opened])).read(0)["image"], filed)


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("form", ["list", "array", "tuple"])
def test_images_and_labels_may_be_two_columns(form: str, labelled: bool) -> None:
    columns: dict[str, Any] = {"list": [*PIXELS], "array": PIXELS, "tuple": tuple(PIXELS)}
    data = {"image": columns[form], "label": LABELS} if labelled else {"img": columns[form]}
    for each in (data, (columns[form], LABELS)) if labelled else (data,):
        source = open_source(addressed(each))
        assert [source.label(index) for index in range(12)] == (LABELS if labelled else [None] * 12)
        assert (len(source), source.classes) == (12, ("0", "1", "2") if labelled else None)
        for index in (0, 7, 11):
            sample = source.read(index)
            assert torch.equal(sample.pop("image"), torch.from_numpy(PIXELS[index]).permute(2, 0, 1))
            assert sample == ({"label": LABELS[index]} if labelled else {})


def test_labels_that_cannot_be_listed_are_read_from_the_samples() -> None:
    class Hidden(TorchSet):
        @property
        def targets(self) -> list[int]:
            raise RuntimeError("not computed yet")

    source = open_source(addressed(Hidden(PIXELS, LABELS)))
    assert [source.label(index) for index in range(12)] == LABELS


def test_the_four_sets_that_were_passed_last_are_known() -> None:
    def address(number: int) -> str:
        return addressed([PIXELS[number]] * (number + 1))

    first, *others = [address(number) for number in range(4)]
    assert address(0) == first  # passed again: now the second is the oldest
    address(5)
    assert [len(open_source(each)) for each in (first, *others[1:])] == [1, 3, 4]
    with pytest.raises(SitusError, match=r"the data \(2 images in memory\) no longer exists; pass the data again"):
        open_source(others[0])


def test_splits_and_many_labels() -> None:
    hot = [[1, 0, 1], [0, 0, 0], [-1, 1, 0]]
    address = addressed({"train": (PIXELS[:3], hot), "validation": [(PIXELS[3], [0, 1, 1])]})
    assert splits_at(address) == {"train", "validation"}
    train, val = (open_source(address, split, multi_label=True) for split in ("train", "val"))
    assert [train.label(index).tolist() for index in range(3)] == hot
    assert (len(val), val.label(0).tolist(), val.classes) == (1, [0, 1, 1], ("0", "1", "2"))
    assert open_source(address).classes is None  # which were not asked for


def test_the_address_is_that_of_the_same_data_and_of_no_other() -> None:
    first = addressed(TorchSet(PIXELS, LABELS))
    assert addressed(TorchSet(PIXELS.copy(), [*LABELS])) == first
    others = [
        TorchSet(PIXELS[:-1], LABELS[:-1]),
        TorchSet(PIXELS, [*LABELS[1:], 0]),
        TorchSet(np.flip(PIXELS, axis=1), LABELS),
        {"train": TorchSet(PIXELS, LABELS), "val": TorchSet(PIXELS, LABELS)},
    ]
    assert len({first, *map(addressed, others)}) == 5


class Random(TorchSet):
    def __getitem__(self, index: int) -> Any:
        return np.roll(self.pixels[index], random.randrange(1, 9), axis=0), 0


class Raises(TorchSet):
    def __getitem__(self, index: int) -> Any:
        raise OSError("disk gone\nand more")


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


class Table:
    """Of pandas, as far as it is looked at."""

    __module__ = "pandas.core.frame"

    def __len__(self) -> int:
        return 2

    def __getitem__(self, name: str) -> Any:
        return PIXELS[:2]


class NoLength(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return index


REFUSED: list[tuple[Any, str]] = [
    ([], "the data: is empty; pass images"),
    (7, "the data: is a int; pass images"),
    (Image.fromarray(PIXELS[0]), "is one image; pass a list of them"),
    (
        np.zeros((16, 12, 3), dtype=np.uint8),
        r"has the shape \[16, 12, 3\]: it is either one colour image or several grey images",
    ),
    (torch.zeros(3, 16, 12), r"has the shape \[3, 16, 12\]: it is either one colour image"),
    ((np.zeros((16, 12, 4), dtype=np.uint8), [0] * 16), "pass an array of four axes"),
    (np.array([[[1]], [["a"]]], dtype=object), "is an array of objects; pass a list"),
    (DataLoader(TensorDataset(torch.zeros(2, 3, 4, 4))), "pass its dataset"),
    (Endless(), "pass data that can be indexed"),
    (iter(PIXELS), "pass data that can be indexed"),
    (NoLength(), "is a NoLength without a length"),
    (Table(), "is a pandas table; pass a list of its images, or of"),
    ({"image": Table()}, "is a pandas table; pass a list of its images, or of"),
    (b"an image", "the data: is a bytes; pass images"),
    (["a cat", "a dog"], "is a str, not a Pillow image"),
    (np.array(["a", "b"]), r"is an array \[2\]; images must be \[n, H, W\]"),
    (np.full((2, 3, 4, 4), "a"), "is an array of <U1; pixels must be uint8"),
    (PIXELS.astype(np.int64), "has pixels of int64; pixels must be uint8"),
    (PIXELS.astype(np.float32), r"its pixels must be between 0 and 1, not from \d+ to \d+; pass uint8"),
    ([torch.randn(3, 4, 4) for _ in range(4)], "without Normalize"),
    ([torch.full((3, 4, 4), float("nan"))], "must be between 0 and 1"),
    (torch.zeros(2, 2, 2, 3, 4), r"is an array \[2, 2, 2, 3, 4\]"),
    ((PIXELS, LABELS[:-1]), "has 12 images and 11 labels"),
    ([(PIXELS[0], 0), PIXELS[1]], "sample 1 has no label, but sample 0 has"),
    ([(PIXELS[0], 0.5)], "has the label 0.5; a label must be a class number"),
    ([(PIXELS[0], -1)], "has the label -1"),
    ([(PIXELS[0], np.zeros((16, 16)))], r"has the label of shape \[16, 16\]"),
    ([(PIXELS[0], [0, 1]), (PIXELS[1], [0, 1, 1])], r"its labels have different numbers of classes \(2 and 3\)"),
    ([(PIXELS[0], 1, 2)], "is a list of 3 items; pass images or"),
    ([{"photo": PIXELS[0]}], "is a dict of 'photo'; pass images"),
    ({"photo": PIXELS, "class": LABELS}, "is a dict of 'photo', 'class'"),
    (Random(PIXELS, LABELS), "differs each time it is read, for example by a random transform"),
    (Raises(PIXELS, LABELS), "reading this sample raises OSError: disk gone"),
]


@pytest.mark.parametrize(("data", "said"), REFUSED)
def test_what_is_refused_is_one_sentence(data: Any, said: str) -> None:
    with pytest.raises(SitusError, match=said) as stop:
        addressed(data)
    assert "\n" not in str(stop.value)
    assert stop.value.field == "data"


def test_what_only_the_reading_shows() -> None:
    names = addressed({"train": [(PIXELS[0], "cat")], "val": [(PIXELS[1], "bee")]})
    with pytest.raises(SitusError, match="class 'bee' is not among the 1 "):
        open_source(names, "val")
    with pytest.raises(SitusError, match="its labels are names and numbers; pass labels of one kind"):
        open_source(addressed([(PIXELS[0], "cat"), (PIXELS[1], 1)]))
    with pytest.raises(SitusError, match="has one class per image"):
        open_source(addressed((PIXELS, LABELS)), multi_label=True)
    with pytest.raises(SitusError, match="has no split 'val'"):
        open_source(addressed((PIXELS, LABELS)), "val")
    with pytest.raises(SitusError, match="to read sentences, give a path to files"):
        open_source(addressed((PIXELS, LABELS)), kind="text")
    with pytest.raises(SitusError, match="contains images, but clips are expected"):
        open_source(addressed((PIXELS, LABELS)), kind="audio")
    with pytest.raises(SitusError, match="2 channels, but 3 are expected"):
        open_source(addressed([np.zeros((2, 8, 8), np.uint8)]), channels=3).read(0)
    half: list[Any] = [PIXELS[0], np.full((8, 8), 7.0)]
    assert len(open_source(addressed(half))) == 2  # a broken sample is skipped as in a folder, unless most are
    one_bad = [*[PIXELS[index] for index in range(11)], np.full((8, 8), 7.0)]
    source = open_source(addressed(one_bad), channels=3)
    with pytest.raises(BrokenSampleError, match=r"list in memory, sample 11: its pixels .* from 7 to 7"):
        source.read(11)
    mixed = open_source(addressed([PIXELS[0], PIXELS[1][..., 0]]), channels=3)  # grey among colours, as in a folder
    assert {tuple(mixed.read(index)["image"].shape) for index in (0, 1)} == {(3, 16, 16)}
