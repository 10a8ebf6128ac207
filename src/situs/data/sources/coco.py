"""Images with objects in COCO's json: boxes, outlines, classes and crowds.

    annotations/instances_train2017.json  train2017/….jpg      as COCO is published; val2017 beside it
    instances.json                        images/….jpg         one file and a folder of images
    train/_annotations.coco.json          train/….jpg          the splits outside

or the path of one json file. Numbers of categories may have holes; here classes count from 0.
"""

from __future__ import annotations

import marshal
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from situs.data.objects import pack_masks
from situs.data.sources.base import SPLIT_WORDS, Wanted, choose_split
from situs.data.sources.folder import FileSource, plain
from situs.data.sources.images import decode, said_size
from situs.errors import BrokenSampleError, DataError, SitusError, counted, missing_extra
from situs.files import read_json

_TABLES = ("images", "annotations", "categories")
_SPLIT = re.compile(r"(?:^|[^a-z])(train(?:ing)?|validation|valid|val|dev|test)(?![a-z])")
_FLAT = "with a box that has no area within its image"
_BARE = "without an outline"


class Truth(NamedTuple):
    """What the annotations say of an image. number: its id there. sides: height, width.

    boxes: [m, 4] float64 left, top, right, bottom as they are in the file. classes, crowd, areas: [m].
    """

    number: Any
    sides: tuple[int, int]
    boxes: Tensor
    classes: Tensor
    crowd: Tensor
    areas: Tensor
    rles: list[Rle]


class CocoSource(FileSource):
    """`read` gives "image", and of its m objects "boxes" [m, 4] within it, "classes" and "crowd" [m], and "masks"
    (`situs.data.objects.pack_masks`). categories: the file's id of each class, None where it has none. left: the ids of
    annotations that were left out, by why."""

    target = "objects"  # pyright: ignore[reportAssignmentType]

    def __init__(self, path: Path, wanted: Wanted) -> None:
        mask_api()  # which says at once that it is missing
        file, chosen = _file_of(path, wanted.split)
        state = file.stat()
        told = _read(file, state.st_mtime_ns, state.st_size)
        classes = wanted.settings.classes or tuple(told.names)
        places = _places(told.names, classes, file)
        self.root = _folder_of(told.files, path, file, chosen)
        self._labels, self._told, self._files = None, told, told.files
        self._classes = places[told.kinds]
        own = dict(zip(places.tolist(), told.categories, strict=True))
        self.categories = tuple(own.get(number) for number in range(len(classes)))
        name = (path.parent.parent if path.parent.name == "annotations" else path.parent) if path.is_file() else path
        super().__init__(name.name + (f" ({chosen})" if chosen else ""), classes, wanted.channels, wanted.strict)
        self.left = told.left
        self.notes = [
            f"{self.name}: left out {counted(len(found), 'objects')} {why}, the first annotation {found[0]}"
            for why, found in told.left.items()
            if found
        ]

    def truth(self, index: int) -> Truth:
        """What the annotations say of an image."""
        told = self._told
        span = slice(told.starts[index], told.starts[index + 1])
        sides, boxes = told.sides[index], torch.from_numpy(told.boxes[span])
        rles = []
        for place in range(span.start, span.stop):
            try:
                rles.append(rle_of(told.outline(place), sides))
            except SitusError as error:
                said = f"the outline of annotation {told.ids[place]} {error}"
                raise BrokenSampleError(f"{self.entry(index)}: {said}") from error
        corners = torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], dim=1)
        classes, crowd, areas = (torch.from_numpy(each[span]) for each in (self._classes, told.crowd, told.areas))
        drawn = torch.tensor([float(mask_api().area(rle)) for rle in rles], dtype=areas.dtype)
        return Truth(told.images[index], sides, corners, classes, crowd, torch.where(areas.isnan(), drawn, areas), rles)

    def undrawn(self, index: int) -> list[str]:
        """A sentence on each object whose outline encloses no pixel of the image, as one that lies outside."""
        first, rles = self._told.starts[index], self.truth(index).rles
        none = [self._told.ids[first + each] for each, rle in enumerate(rles) if not mask_api().area(rle)]
        return [f"the outline of annotation {number} encloses no pixel" for number in none]

    def read(self, index: int) -> dict[str, Any]:
        image = decode(self.payload(index), self.entry(index), self.channels)
        truth = self.truth(index)
        if truth.sides != tuple(image.shape[1:]):
            own = said_size(image, self.payload(index), self.entry(index))
            there = " × ".join(map(str, truth.sides))
            raise BrokenSampleError(f"{self.entry(index)}: is {own}, and its annotations are of {there}")
        high, wide = truth.sides
        within = truth.boxes.clamp(min=0).minimum(torch.tensor([wide, high, wide, high]))
        masks = pack_masks(decode_rles(truth.rles, truth.sides))
        own = {"boxes": within.float(), "classes": truth.classes, "crowd": truth.crowd, "masks": masks}
        return {"image": image, **own}


def coco_splits(path: Path) -> set[str]:
    """The splits that json files name."""
    return {split for file in coco_files(path) if (split := _split(file))} if path.is_dir() else set()


def coco_files(path: Path) -> list[Path]:
    """The json files at a path that may tell of objects: those named after instances, where there are some."""
    if path.is_file():
        return [path] if path.suffix == ".json" else []
    folders = [path, path / "annotations", *(path / word for word in SPLIT_WORDS)]
    found = [file for folder in folders for file in sorted(folder.glob("*.json"))]
    return [file for file in found if file.name.startswith("instances")] or found


def _split(file: Path) -> str | None:
    if file.parent.name in SPLIT_WORDS:
        return file.parent.name
    match = _SPLIT.search(file.stem.lower())
    return match[1] if match else None


def _file_of(path: Path, split: str | None) -> tuple[Path, str | None]:
    files = coco_files(path)
    if not files:
        raise DataError(f"{path}: holds no json with objects, such as annotations/instances_train.json")
    chosen = choose_split(coco_splits(path), split, str(path))
    own = files if path.is_file() else [file for file in files if _split(file) == chosen]
    if len(own) > 1:
        raise DataError(f"{path}: {own[0].name} and {own[1].name} both match; name one of them")
    return own[0], chosen


def _tables(file: Path) -> dict[str, list[dict[str, Any]]]:
    try:
        told = read_json(file)
    except SitusError as error:
        raise DataError(str(error)) from error
    for name in _TABLES:
        table = told.get(name)
        if not isinstance(table, list) or not all(isinstance(row, dict) for row in table):
            raise DataError(f"{file}: has no list of {name}, as COCO's json has one")
    for name in _TABLES:
        if not told[name]:
            more = ", so that there is nothing to learn and nothing to compare with" if name == "annotations" else ""
            raise DataError(f"{file}: its list of {name} is empty{more}")
    return told


def _kinds(categories: list[dict[str, Any]], file: Path) -> dict[Any, str]:
    """The categories' ids, in their order, with their names."""
    if strange := next(
        (row for row in categories if not is_number(row.get("id")) or not _is_name(row.get("name"))), None
    ):
        raise DataError(f"{file}: the category {strange} has not a number for an id, and a name")
    for key in ("id", "name"):
        counts = Counter(row[key] for row in categories)
        if twice := next((value for value, count in counts.items() if count > 1), None):
            raise DataError(f"{file}: has two categories of the {key} {twice!r}")
    return {row["id"]: str(row["name"]) for row in sorted(categories, key=lambda row: row["id"])}


def _places(names: list[str], classes: tuple[str, ...], file: Path) -> np.ndarray:
    """The class of each category, by its name."""
    place = {name: number for number, name in enumerate(classes)}
    if strange := next((name for name in names if name not in place), None):
        said = f"its category {strange!r} is not among the {counted(len(classes), 'classes')}"
        raise DataError(f"{file}: {said} {', '.join(classes[:3])}{' …' * (len(classes) > 3)}")
    return np.array([place[name] for name in names])


def _folder_of(names: list[str], path: Path, file: Path, split: str | None) -> Path:
    """The folder that the images are in; each of them is."""
    home = file.parent.parent if file.parent.name == "annotations" else file.parent
    home = home if path.is_file() else path
    tails = [tail for tail in (file.stem.removeprefix("instances_"), split) if tail]
    folders = [base / tail for tail in tails for base in (home, home / "images")]
    folders += [home / "images", file.parent, home]
    root = next((folder for folder in folders if (folder / names[0]).is_file()), None)
    if root is None:
        tried = ", ".join(plain(str(folder)) for folder in dict.fromkeys(folders) if folder.is_dir())
        raise DataError(f"{file}: names the image {names[0]!r}, and it is in none of {tried}")
    here = {
        f"{folder}{entry.name}"
        for folder in {name[: name.rfind("/") + 1] for name in names}
        if (root / folder).is_dir()
        for entry in os.scandir(root / folder)
    }
    gone = [name for name in names if name not in here]
    if gone:
        said = f"names {len(gone):,} of {len(names):,} images that are not in {plain(str(root))}, the first {gone[0]!r}"
        raise DataError(f"{file}: {said}")
    return root


class _Told:
    """What a json tells, whatever its classes are called later.

    Of its categories their ids and "names"; of its images the ids, "files" and "sides"; of its objects a row each, in
    the order of their images, of which the objects begin at "starts"; and the ids of those that are none, "left".
    """

    def __init__(self, tables: dict[str, list[dict[str, Any]]], file: Path) -> None:
        kinds = _kinds(tables["categories"], file)
        self.categories, self.names = [*kinds], [*kinds.values()]
        self.images, self.files, self.sides = [], [], []
        for row in tables["images"]:
            self._add_image(row, file)
        self.left: dict[str, list[Any]] = {_FLAT: [], _BARE: []}
        places = [{key: at for at, key in enumerate(keys)} for keys in (self.images, self.categories)]
        if len(places[0]) < len(self.images):
            twice = next(number for number, count in Counter(self.images).items() if count > 1)
            raise DataError(f"{file}: has two images of the id {twice!r}")
        rows = []
        for row in tables["annotations"]:
            try:
                rows.append(self._object(row, *places))
            except SitusError as error:
                raise DataError(f"{file}: annotation {row.get('id')} {error}") from error
        rows = [row for row in rows if row is not None]
        if not rows:
            said = f"none of its {counted(len(tables['annotations']), 'annotations')} has a box and an outline"
            raise DataError(f"{file}: {said}")
        rows.sort(key=lambda row: row[0])
        images, kinds, crowd, boxes, areas, self.ids, outlines = zip(*rows, strict=True)
        # One piece: to look at an object is to count its user, by which a forked worker would copy its page.
        self._outlines, self._ends = b"".join(outlines), np.cumsum([0, *map(len, outlines)])
        self.starts = np.searchsorted(np.array(images), np.arange(len(self.images) + 1)).tolist()
        self.kinds, self.crowd, self.boxes, self.areas = map(np.array, (kinds, crowd, boxes, areas))

    def outline(self, place: int) -> bytes:
        """That of an object, packed."""
        return self._outlines[self._ends[place] : self._ends[place + 1]]

    def _add_image(self, row: dict[str, Any], file: Path) -> None:
        number, sides = row.get("id"), (row.get("height"), row.get("width"))
        # LVIS names only the place in the web, which ends as COCO's folders do.
        name = row.get("file_name") or "/".join(str(row.get("coco_url", "")).split("/")[-2:])
        named = _is_name(number) and isinstance(name, str) and name
        if not named or not all(isinstance(side, int) and side > 0 for side in sides):
            said = "has not an id, a file_name, and a height and width above 0"
            raise DataError(f"{file}: the image {str(row)[:80]} {said}")
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise DataError(f"{file}: names the image {name!r}, outside of its folder")
        self.images.append(number)
        self.files.append(name)
        self.sides.append(sides)

    def _object(self, row: dict[str, Any], images: dict[Any, int], kinds: dict[Any, int]) -> tuple[Any, ...] | None:
        image, category, box, area = (row.get(name) for name in ("image_id", "category_id", "bbox", "area"))
        if not _is_name(image) or image not in images:
            raise SitusError(f"is of the image {image!r}, and no image has this id")
        if not _is_name(category) or category not in kinds:
            low, high = min(kinds), max(kinds)
            holes = ", not all of them" if high - low + 1 > len(kinds) else ""
            raise SitusError(f"is of the category {category!r}, and the categories are {low} to {high}{holes}")
        if not isinstance(box, list) or len(box) != 4 or not all(isinstance(each, int | float) for each in box):
            raise SitusError(f"has the bbox {box!r}, and not x, y, width and height")
        if (crowd := row.get("iscrowd") or 0) not in (0, 1):
            raise SitusError(f"has the iscrowd {crowd!r}, and not 0 or 1")
        number = images[image]
        high, wide = self.sides[number]
        left, top, right, bottom = box[0], box[1], box[0] + box[2], box[1] + box[3]
        if not (min(right, wide) > max(left, 0) and min(bottom, high) > max(top, 0)):  # nor with a NaN
            self.left[_FLAT].append(row.get("id"))
            return None
        try:
            outline = packed_outline(row.get("segmentation"), (high, wide))
        except SitusError as error:
            raise SitusError(f"has no outline: it {error}") from error
        if outline is None:
            self.left[_BARE].append(row.get("id"))
            return None
        area = float(area) if area is not None and is_number(area) else math.nan
        return number, kinds[category], bool(crowd), [float(each) for each in box], area, row.get("id"), outline


@lru_cache(maxsize=2)
def _read(file: Path, changed: int, size: int) -> _Told:  # noqa: ARG001
    """What a json tells; read once for one who asks for its classes and then for its objects."""
    return _Told(_tables(file), file)


def _is_name(value: Any) -> bool:
    """Whether JSON's value can stand for something: a number or a word."""
    return isinstance(value, int | float | str) and value != ""


_CORNERS = 3  # of a polygon at least

Rle = dict[str, Any]
"""A mask by the lengths of its runs: "size", height and width, and "counts", packed into bytes."""


def mask_api() -> Any:
    """What draws polygons as COCO does."""
    try:
        from faster_coco_eval.core import mask
    except ImportError as error:
        raise missing_extra("faster-coco-eval", "dense", "reading the outlines of objects") from error
    return mask


def packed_outline(told: Any, sides: tuple[int, int]) -> bytes | None:
    """A "segmentation" in one piece, for a million lists of numbers would take ten times the memory; None where it
    encloses nothing: no polygon has three corners.

    sides: of its image. Raises SitusError, the end of a sentence, on what is no outline.
    """
    if isinstance(told, dict):
        _check_runs(told, sides)
        return marshal.dumps(told["counts"])
    if told is None:
        return None
    if not isinstance(told, list) or not all(isinstance(part, list) for part in told):
        raise SitusError("is neither a list of polygons nor run lengths")
    parts = [part for part in told if len(part) >= 2 * _CORNERS]
    for part in parts:
        if len(part) % 2 or not all(map(is_number, part)):
            raise SitusError("has a polygon that is no list of x and y")
    return marshal.dumps(parts) if parts else None


def rle_of(outline: bytes, sides: tuple[int, int]) -> Rle:
    """A packed outline as run lengths in an image of these sides, cut at its border. Raises SitusError, the end of a
    sentence, where they cannot be counted out."""
    told, api = marshal.loads(outline), mask_api()  # noqa: S302  (of what was packed here)
    try:
        if isinstance(told, str):
            found = {"size": list(sides), "counts": told.encode()}
            api.decode(found)  # which counts the pixels
            return found
        if isinstance(told[0], list):
            return api.merge(api.frPyObjects(told, *sides))
        return api.frPyObjects({"size": list(sides), "counts": told}, *sides)
    except (ValueError, RuntimeError, TypeError) as error:
        raise SitusError(f"cannot be drawn ({str(error).rstrip('.')})") from error


def decode_rles(rles: Sequence[Rle], sides: tuple[int, int]) -> Tensor:
    """[m, H, W] bool."""
    if not rles:
        return torch.zeros(0, *sides, dtype=torch.bool)
    return torch.from_numpy(np.ascontiguousarray(mask_api().decode(list(rles)).transpose(2, 0, 1))).bool()


def encode_masks(masks: Tensor) -> list[Rle]:
    """Masks [m, H, W] bool as run lengths."""
    if not len(masks):
        return []
    return mask_api().encode(np.asfortranarray(masks.cpu().numpy().transpose(1, 2, 0), dtype=np.uint8))


def _check_runs(told: dict[str, Any], sides: tuple[int, int]) -> None:
    size, counts = told.get("size"), told.get("counts")
    if not isinstance(size, list) or tuple(size) != sides:
        said = " × ".join(map(str, size)) if isinstance(size, list) else size
        raise SitusError(f"is a mask of {said}, and its image is {sides[0]} × {sides[1]}")
    if isinstance(counts, str) and counts.isascii():
        return
    if not isinstance(counts, list) or not all(isinstance(each, int) and each >= 0 for each in counts):
        raise SitusError("has run lengths that are no numbers from 0 on")
    if sum(counts) != sides[0] * sides[1]:
        raise SitusError(f"has run lengths of {sum(counts):,} pixels, and its image has {sides[0] * sides[1]:,}")


def is_number(value: Any) -> bool:
    """Whether JSON's value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
