"""COCO's json: layouts, classes by name, crowds, images without objects, and each fault in one sentence."""

from __future__ import annotations

import gc
import json
import multiprocessing
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from figures import CROWD, DISC, NUMPY, RECTANGLE, dots, write_coco
from PIL import Image

from situs.data.augment.recipes import AugmentConfig
from situs.data.config import DataConfig
from situs.data.loader import make_loader
from situs.data.modalities import objects as coco
from situs.data.objects import ObjectConfig, unpack_masks
from situs.data.open import judged_split, open_source, splits_at
from situs.errors import BrokenSampleError, SitusError
from situs.files import read_json


def opened(path: Path, split: str | None = None, classes: tuple[str, ...] = ()) -> Any:
    return open_source(path, split, target="objects", objects=ObjectConfig(classes))


def test_the_published_layout_is_read_with_classes_from_0_on(tmp_path: Path) -> None:
    write_coco(tmp_path, {"train": 4, "val": 2})
    assert splits_at(tmp_path, target="objects") == {"train", "val"}
    source = opened(tmp_path)
    assert (len(source), source.target) == (4, "objects")
    assert source.name.endswith("(train)")
    assert source.classes == ("rectangle", "disc", "crowd of dots")  # in the order of their ids
    assert source.categories == (RECTANGLE, DISC, CROWD)
    assert len(opened(tmp_path, "val")) == 2
    first, empty = source.read(0), source.read(2)
    assert first["classes"].tolist() == [1, 0, 2]
    assert first["crowd"].tolist() == [False, False, True]
    masks = unpack_masks(first["masks"], torch.arange(3))
    assert masks.shape == (3, 40, 60)
    left, top, right, bottom = first["boxes"][1].int().tolist()
    rectangle = torch.zeros(40, 60, dtype=torch.bool)
    rectangle[top:bottom, left:right] = True
    assert torch.equal(masks[1], rectangle)
    assert masks[2].sum(1).tolist() == [0] * 38 + [60, 60]
    (x, y), radius = (first["boxes"][0, :2] + first["boxes"][0, 2:]) / 2, first["boxes"][0, 2:] - first["boxes"][0, :2]
    rows, columns = np.mgrid[:40, :60] + 0.5
    away = np.hypot(columns - float(x), rows - float(y)) - float(radius[0]) / 2
    assert masks[0].numpy()[away < -0.8].all() and not masks[0].numpy()[away > 0.8].any()
    assert empty["boxes"].shape == (0, 4) and empty["masks"].shape == (0, 52, 60)
    assert source.truth(0).number == 1000 and source.truth(0).areas[1] == float(masks[1].sum())


def test_one_json_and_a_folder_of_images_is_one_set(tmp_path: Path) -> None:
    write_coco(tmp_path / "coco", {"train": 3})
    home = tmp_path / "plain"
    shutil.copytree(tmp_path / "coco" / "train2017", home / "images")
    shutil.copyfile(tmp_path / "coco" / "annotations" / "instances_train2017.json", home / "instances.json")
    assert splits_at(home, target="objects") == set() and judged_split(home, target="objects") is None
    whole = opened(home)
    names = {home: "plain", home / "instances.json": "plain", tmp_path / "coco": "coco (train)"}
    names[tmp_path / "coco" / "annotations" / "instances_train2017.json"] = "coco"
    assert {path: opened(path).name for path in names} == names
    for other in (home / "instances.json", tmp_path / "coco" / "annotations" / "instances_train2017.json"):
        source = opened(other)
        assert [source.key(row) for row in range(3)] == [whole.key(row) for row in range(3)]
        assert torch.equal(source.read(0)["masks"], whole.read(0)["masks"])
    (tmp_path / "apart" / "valid").mkdir(parents=True)
    for file in (home / "images").iterdir():
        shutil.copyfile(file, tmp_path / "apart" / "valid" / file.name)
    shutil.copyfile(home / "instances.json", tmp_path / "apart" / "valid" / "_annotations.coco.json")
    assert len(opened(tmp_path / "apart", "val")) == 3


def test_categories_are_known_by_their_names(tmp_path: Path) -> None:
    write_coco(tmp_path, {"train": 1})
    source = opened(tmp_path, classes=("disc", "square", "crowd of dots", "rectangle"))
    assert source.read(0)["classes"].tolist() == [0, 3, 2]
    assert source.categories == (DISC, None, CROWD, RECTANGLE)
    with pytest.raises(SitusError, match="its category 'rectangle' is not among the 2 classes disc, crowd of dots"):
        opened(tmp_path, classes=("disc", "crowd of dots"))
    for more, said in (
        (("a",), "3 classes disc, crowd of dots, a"),
        (("a", "b"), "4 classes disc, crowd of dots, a …"),
    ):
        with pytest.raises(SitusError, match=f"its category 'rectangle' is not among the {said}$"):
            opened(tmp_path, classes=("disc", "crowd of dots", *more))


def test_a_json_is_read_once_for_its_classes_and_its_objects_and_anew_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_coco(tmp_path, {"train": 2})
    read = []
    monkeypatch.setattr(coco, "read_json", lambda file: (read.append(file), read_json(file))[1])
    config = DataConfig(str(tmp_path), target="objects", img_size=32, batch=2, workers=0)
    loader = make_loader(config, AugmentConfig(crop="fitted"), "cpu")
    assert loader.classes == ("rectangle", "disc", "crowd of dots") and len(read) == 1
    assert opened(tmp_path, classes=("disc", "crowd of dots", "rectangle")).read(0)["classes"].tolist() == [0, 2, 1]
    assert loader.source.read(0)["classes"].tolist() == [1, 0, 2] and len(read) == 1
    write_coco(tmp_path, {"train": 2}, lambda told: told["annotations"].pop(0) and None)
    assert opened(tmp_path).read(0)["classes"].tolist() == [0, 2] and len(read) == 2


Change = Callable[[dict[str, Any]], None]


def edit(table: str, row: int, **fields: Any) -> Change:
    return lambda told: told[table][row].update(fields)


WRONG: dict[str, tuple[Change, str]] = {
    "no annotations": (lambda told: told["annotations"].clear(), "its list of annotations is empty"),
    "no list": (lambda told: told.pop("categories"), "has no list of categories"),
    "no image": (edit("annotations", 0, image_id=5), "annotation 1 belongs to the image 5, but no image has this id"),
    "category": (edit("annotations", 0, category_id=3), "3, but the categories have the ids 2 to 40 with gaps"),
    "bbox": (edit("annotations", 0, bbox=[1, 2]), r"annotation 1 has the bbox \[1, 2\], but a bbox must be a list"),
    "file": (edit("images", 1, file_name="no.png"), "1 of its 3 images is not in .*; the first: 'no.png'"),
    "first file": (edit("images", 0, file_name="no.png"), "names the image 'no.png', which is in none of "),
    "outside": (edit("images", 0, file_name="../a.png"), "the image '../a.png', which is outside the folder"),
    "sides": (edit("images", 0, height=0), "must have an id, a file_name, and a height and width above 0"),
    "twice": (edit("images", 1, id=1000), "has two images with the id 1000"),
    "name twice": (edit("categories", 0, name="rectangle"), "has two categories with the name 'rectangle'"),
    "mask": (edit("annotations", 0, segmentation=dots(9, 9)["segmentation"]), "of 9 × 9 pixels, but the image has 40"),
    "runs": (edit("annotations", 0, segmentation={"size": [40, 60], "counts": [7]}), "add up to 7 pixels, but the"),
    "negative": (edit("annotations", 0, segmentation={"size": [40, 60], "counts": [2401, -1]}), "lengths that are neg"),
    "halves": (edit("annotations", 0, segmentation={"size": [40, 60], "counts": [2.5, 2397.5]}), "not whole numbers"),
    "no counts": (edit("annotations", 0, segmentation={"size": [40, 60]}), "has run lengths that are negative or not"),
    "other signs": (edit("annotations", 0, segmentation={"size": [40, 60], "counts": "ä"}), "has run lengths that"),
    "odd polygon": (edit("annotations", 0, segmentation=[[1, 2, 3, 4, 5, 6, 7]]), "a polygon that is not a list of"),
    "polygon": (edit("annotations", 0, segmentation=[[1, 2, 3, 4, 5, "x"]]), "a polygon that is not a list of numbers"),
    "list for an image": (edit("annotations", 0, image_id=[1]), r"1 belongs to the image \[1\], but no image has"),
    "list for a category": (edit("annotations", 0, category_id=[2]), r"has the category \[2\], but the categories"),
    "number for a file": (edit("images", 0, file_name=5), "must have an id, a file_name, and a height"),
    "list for an id": (edit("images", 0, id=[5]), "must have an id, a file_name, and a height"),
    "list for a name": (edit("categories", 0, name=["a"]), "must have a number as id, and a name"),
    "word for an id": (edit("categories", 0, id="7"), "'name': 'disc'} must have a number as id, and a name"),
    "word for a crowd": (edit("annotations", 0, iscrowd="0"), "annotation 1 has the iscrowd '0', but iscrowd must"),
    "outline": (edit("annotations", 0, segmentation=3), "has an invalid segmentation: it must be a list of polygons"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_sentence(tmp_path: Path, name: str) -> None:
    change, said = WRONG[name]
    write_coco(tmp_path, {"train": 3}, lambda told: change(_own(told)))
    with pytest.raises(SitusError, match=said) as error:
        opened(tmp_path)
    assert "instances_train2017.json: " in str(error.value) and "\n" not in str(error.value)


def _own(told: dict[str, Any]) -> dict[str, Any]:
    told["categories"] = [dict(row) for row in told["categories"]]
    return told


def test_broken_json_and_a_folder_without_any_are_one_sentence(tmp_path: Path) -> None:
    write_coco(tmp_path, {"train": 1})
    file = tmp_path / "annotations" / "instances_train2017.json"
    file.write_text(file.read_text()[:-20])
    with pytest.raises(SitusError, match=r"instances_train2017\.json: is not valid JSON: "):
        opened(tmp_path)
    file.write_text("[1]", encoding="utf-8-sig")  # with a mark of Windows in front
    with pytest.raises(SitusError, match="must contain a table at its top level, not a list"):
        opened(tmp_path)
    with pytest.raises(SitusError, match="contains no json with objects, such as "):
        opened(tmp_path / "train2017")
    file.with_name("instances_train2014.json").write_text("{}")
    with pytest.raises(SitusError, match="both fit the split; give one of them"):
        opened(tmp_path)


def test_what_is_no_object_is_left_out_and_counted(tmp_path: Path) -> None:
    def change(told: dict[str, Any]) -> None:
        rows = told["annotations"]
        rows[0]["bbox"][2] = 0
        rows += [
            rows[1] | {"id": 50 + n, "bbox": box} for n, box in enumerate(([70, 0, 5, 5], [float("nan"), 0, 5, 5]))
        ]
        rows.append(rows[1] | {"id": 60, "segmentation": [[1, 1, 9, 9]]})

    write_coco(tmp_path, {"train": 1}, change)
    source = opened(tmp_path)
    first, second = source.notes
    assert first.endswith("left out 3 objects with a box that has no area within its image; the first is annotation 1")
    assert second.endswith("left out 1 object without an outline; the first is annotation 60")
    assert source.read(0)["classes"].tolist() == [0, 2]
    write_coco(tmp_path, {"train": 1}, lambda told: [row.pop("segmentation") for row in told["annotations"]] and None)
    with pytest.raises(SitusError, match="none of its 3 annotations has a box and an outline"):
        opened(tmp_path)


def test_outlines_that_enclose_no_pixel_are_told(tmp_path: Path) -> None:
    def change(told: dict[str, Any]) -> None:
        told["annotations"][0]["segmentation"] = [[-9, -9, -5, -9, -5, -5], [300, 1, 310, 1, 310, 9]]
        told["annotations"][1]["segmentation"] = [[-9, -9, 20, -9, 20, 20], [-9, -9, -5, -9, -5, -5]]

    write_coco(tmp_path, {"train": 1}, change)
    assert opened(tmp_path).empty_outlines(0) == ["the outline of annotation 1 encloses no pixel"]
    write_coco(tmp_path, {"train": 2}, lambda told: change(told | {"annotations": told["annotations"][3:][::-1]}))
    source = opened(tmp_path)
    assert source.empty_outlines(0) == []
    assert source.empty_outlines(1) == ["the outline of annotation 5 encloses no pixel"]


@pytest.mark.parametrize(
    "border", [[60, 0, 5, 5], [0, 40, 5, 5], [-5, 0, 5, 5], [0, -5, 5, 5], [3, 3, 0, 4], [3, 3, 4, -1]]
)
def test_a_box_beside_the_image_is_no_object_and_one_pixel_of_it_is(tmp_path: Path, border: list[int]) -> None:
    def change(told: dict[str, Any], by: int) -> None:
        moves = [1 if at < 0 else -1 if at >= 40 else 0 for at in border[:2]]
        grown = 2 if border[2] < 1 or border[3] < 1 else 0
        box = [at + by * move for at, move in zip(border[:2], moves, strict=True)]
        told["annotations"][0]["bbox"] = [*box, *(side + by * grown for side in border[2:])]

    for by, left in ((0, 2), (1, 3)):
        write_coco(tmp_path, {"train": 1}, lambda told, by=by: change(told, by))
        sample = opened(tmp_path).read(0)
        assert len(sample["classes"]) == left


def test_lvis_names_its_images_by_their_address(tmp_path: Path) -> None:
    def change(told: dict[str, Any]) -> None:
        for row in told["images"]:
            row["coco_url"] = f"http://images.cocodataset.org/train2017/{row.pop('file_name')}"

    write_coco(tmp_path, {"train": 2}, change)
    source = opened(tmp_path)
    assert [source.key(row) for row in (0, 1)] == [f"train2017/{row:012}.png" for row in (0, 1)]
    assert source.read(1)["image"].shape == (3, 46, 50)


def test_ids_without_a_gap_are_said_to_have_none(tmp_path: Path) -> None:
    def change(told: dict[str, Any]) -> None:
        told["categories"] = [row | {"id": number} for number, row in enumerate(told["categories"], 7)]
        for row in told["annotations"]:
            row["category_id"] = 10

    write_coco(tmp_path, {"train": 1}, change)
    with pytest.raises(SitusError, match=r"has the category 10, but the categories have the ids 7 to 9$"):
        opened(tmp_path)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").is_file(), reason="Linux tells what a process has copied")
def test_a_worker_that_reads_outlines_does_not_copy_them(tmp_path: Path) -> None:
    def change(told: dict[str, Any]) -> None:
        angles = np.linspace(0, 6, 50)
        corners = np.stack([20 + 9 * np.cos(angles), 20 + 9 * np.sin(angles)], 1).flatten().tolist()
        row = told["annotations"][1] | {"segmentation": [corners]}
        numbers = [each["id"] for each in told["images"]]
        told["annotations"] += [row | {"id": 100 + n, "image_id": numbers[n % 20]} for n in range(5000)]

    def private_kib() -> int:
        rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return sum(int(row.split()[1]) for row in rows if row.startswith("Private_"))

    def read(copied: Any) -> None:
        gc.freeze()  # as a loader's workers do: a collection would copy what the whole suite has left
        source.truth(0)
        before = private_kib()
        for index in range(1, 20):
            source.truth(index)
        copied.value = private_kib() - before

    write_coco(tmp_path, {"train": 20}, change)
    source = opened(tmp_path)
    forked = multiprocessing.get_context("fork")
    copied = forked.Value("q", -1)
    worker = forked.Process(target=read, args=(copied,))
    worker.start()
    worker.join(60)
    assert worker.exitcode == 0 and 0 <= copied.value < 2 << 10  # of 4 MiB


def test_boxes_and_polygons_are_cut_at_the_border_and_sizes_are_held_to_the_file(tmp_path: Path) -> None:
    def change(told: dict[str, Any]) -> None:
        told["annotations"][1] |= {"bbox": [-10, -5, 30, 25], "segmentation": [[-10, -5, 20, -5, 20, 20, -10, 20]]}
        told["annotations"][2] |= {"segmentation": {"size": [40, 60], "counts": "PPP"}}
        told["images"][1]["height"] = 99

    write_coco(tmp_path, {"train": 3}, change)
    source = opened(tmp_path)
    with pytest.raises(BrokenSampleError, match=r"0\.png: the outline of annotation 3 cannot be drawn \(RLE string"):
        source.read(0)
    with pytest.raises(BrokenSampleError, match=r"1\.png: is 46 × 50, but its annotations say 99 × 50"):
        source.read(1)
    write_coco(tmp_path, {"train": 1}, lambda told: (change(told | {"images": [{}, {}]}), told["annotations"].pop())[1])
    sample = opened(tmp_path).read(0)
    assert sample["boxes"][1].tolist() == [0, 0, 20, 20]
    mask = unpack_masks(sample["masks"], torch.tensor([1]))[0]
    assert bool(mask[:20, :20].all()) and int(mask.sum()) == 400


def test_run_lengths_may_begin_with_the_object(tmp_path: Path) -> None:
    """Pixels are counted down the columns, those outside of the object first, of which there may be none."""

    def change(told: dict[str, Any]) -> None:
        told["annotations"][0]["segmentation"] = {"size": [40, 60], "counts": [0, 45, 2000, 0, 3, 352]}

    write_coco(tmp_path, {"train": 1}, change)
    mask = unpack_masks(opened(tmp_path).read(0)["masks"], torch.tensor([0]))[0]
    inside = torch.zeros(2400, dtype=torch.bool)
    inside[:45] = inside[2048:] = True
    assert torch.equal(mask, inside.view(60, 40).T)


def test_run_lengths_may_be_packed_as_coco_packs_them(tmp_path: Path) -> None:
    from faster_coco_eval.core import mask as api

    inside = np.zeros((40, 60), np.uint8)
    inside[3:17, 20:44] = 1
    packed = api.encode(np.asfortranarray(inside))

    def change(told: dict[str, Any]) -> None:
        told["annotations"][0]["segmentation"] = {"size": [40, 60], "counts": packed["counts"].decode()}

    write_coco(tmp_path, {"train": 1}, change)
    mask = unpack_masks(opened(tmp_path).read(0)["masks"], torch.tensor([0]))[0]
    assert torch.equal(mask, torch.from_numpy(inside).bool())


def test_annotations_are_of_the_photograph_turned_upright(tmp_path: Path) -> None:
    write_coco(tmp_path, {"train": 2})
    exif = Image.Exif()
    exif[0x0112] = 6
    file = tmp_path / "train2017" / f"{1:012}.png"
    upright = Image.open(file)  # as the annotations have it
    upright.transpose(Image.Transpose.ROTATE_90).save(file, exif=exif)
    assert torch.equal(opened(tmp_path).read(1)["image"], torch.from_numpy(np.array(upright)).permute(2, 0, 1))
    upright.save(file, exif=exif)
    with pytest.raises(BrokenSampleError, match=r"is 50 × 46 turned as its EXIF tag says, but its annotations say 46"):
        opened(tmp_path).read(1)


@pytest.mark.shared_data
@NUMPY
def test_masks_of_real_annotations_are_pycocotools(shared_data: Path) -> None:
    from pycocotools import mask as coco_mask

    real = shared_data / "detection"
    source, told = opened(real), json.loads((real / "instances.json").read_text())
    assert (len(source), len(source.classes), source.categories[-1]) == (88, 80, 90)
    seen = 0
    for row, image in enumerate(told["images"][:20]):
        own = [each for each in told["annotations"] if each["image_id"] == image["id"]]
        sample = source.read(row)
        assert sample["crowd"].tolist() == [bool(each["iscrowd"]) for each in own]
        for number, each in enumerate(own):
            made = coco_mask.frPyObjects(each["segmentation"], image["height"], image["width"])
            drawn = coco_mask.decode(coco_mask.merge(made) if isinstance(made, list) else made)
            mask = unpack_masks(sample["masks"], torch.tensor([number]))[0]
            assert np.array_equal(mask.numpy(), drawn.astype(bool))
            seen += 1
    assert seen > 100


def test_without_the_extra_one_sentence_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_coco(tmp_path, {"train": 1})
    monkeypatch.setitem(sys.modules, "faster_coco_eval.core", None)
    with pytest.raises(SitusError, match=r"needs the package 'faster-coco-eval': pip install 'situs\[dense\]'"):
        opened(tmp_path)
