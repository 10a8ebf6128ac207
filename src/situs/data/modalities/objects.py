"""Images with objects in COCO's json: boxes, outlines, classes and crowds.

    annotations/instances_train2017.json  train2017/….jpg      as COCO is published; val2017 beside it
    instances.json                        images/….jpg         one file and a folder of images
    train/_annotations.coco.json          train/….jpg          the splits outside

or the path of one json file. Ids of categories may have gaps; here classes count from 0.

A worker shrinks an image to the size that its draw needs, antialiased, and the device does the rest of the same draw,
by the same hash of (seed, epoch, draw id). An evaluation sees images whole, resized so that they fit the model's size.
"""

from __future__ import annotations

import marshal
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from situs.core.random import uniform
from situs.data.augment.geometry import CROP_NOISE
from situs.data.augment.recipes import AugmentConfig, apply_objects, as_floats, normalise
from situs.data.batch import VOID, Batch
from situs.data.modalities.image import WITHOUT_CLASSES, Image, PixelPipeline, alike, repeat_border, take_nearest
from situs.data.objects import ObjectConfig, pack_masks
from situs.data.pipeline import Noise, Pipeline
from situs.data.resize import resized
from situs.data.sources.base import SPLIT_WORDS, Source, Wanted, choose_split, split_name
from situs.data.sources.folder import FileSource, printable
from situs.data.sources.images import decode, size_text
from situs.errors import BrokenSampleError, DataError, SitusError, counted, missing_extra, verb
from situs.files import read_json

if TYPE_CHECKING:
    from situs.data.config import DataConfig


_TABLES = ("images", "annotations", "categories")
_SPLIT = re.compile(r"(?:^|[^a-z])(train(?:ing)?|validation|valid|val|dev|test)(?![a-z])")
_NO_AREA = "with a box that has no area within its image"
_NO_OUTLINE = "without an outline"


class Truth(NamedTuple):
    """The ground truth of an image. number: its id in the file. sides: height, width.

    boxes: [m, 4] float64 left, top, right, bottom as in the file. classes, crowd, areas: [m].
    """

    number: Any
    sides: tuple[int, int]
    boxes: Tensor
    classes: Tensor
    crowd: Tensor
    areas: Tensor
    rles: list[Rle]


class CocoSource(FileSource):
    """`read` gives "image", and for its m objects "boxes" [m, 4] within it, "classes" and "crowd" [m], and "masks"
    (`situs.data.objects.pack_masks`). categories: the file's id of each class, None where it has none. dropped: the ids
    of annotations that were left out, by reason."""

    target = "objects"  # pyright: ignore[reportAssignmentType]

    def __init__(self, path: Path, wanted: Wanted) -> None:
        mask_api()  # refuses at once where it is not installed
        file, chosen = _file_of(path, wanted.split)
        state = file.stat()
        annotations = _read(file, state.st_mtime_ns, state.st_size)
        classes = wanted.settings.classes or tuple(annotations.names)
        numbers = _class_numbers(annotations.names, classes, file)
        self.root = _folder_of(annotations.files, path, file, chosen)
        self._labels, self._annotations, self._files = None, annotations, annotations.files
        self._classes = numbers[annotations.kinds]
        ids = dict(zip(numbers.tolist(), annotations.categories, strict=True))
        self.categories = tuple(ids.get(number) for number in range(len(classes)))
        folder = (path.parent.parent if path.parent.name == "annotations" else path.parent) if path.is_file() else path
        super().__init__(split_name(folder.name, chosen), classes, wanted.channels, wanted.strict)
        self.dropped = annotations.dropped
        self.notes = [
            f"{self.name}: left out {counted(len(ids), 'objects')} {reason}; the first is annotation {ids[0]}"
            for reason, ids in annotations.dropped.items()
            if ids
        ]

    def truth(self, index: int) -> Truth:
        """The ground truth of an image."""
        annotations = self._annotations
        span = slice(annotations.starts[index], annotations.starts[index + 1])
        sides, boxes = annotations.sides[index], torch.from_numpy(annotations.boxes[span])
        rles = []
        for row in range(span.start, span.stop):
            try:
                rles.append(rle_of(annotations.outline(row), sides))
            except SitusError as error:
                reason = f"the outline of annotation {annotations.ids[row]} {error}"
                raise BrokenSampleError(f"{self.entry(index)}: {reason}") from error
        corners = torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], dim=1)
        columns = (self._classes, annotations.crowd, annotations.areas)
        classes, crowd, areas = (torch.from_numpy(column[span]) for column in columns)
        drawn = torch.tensor([float(mask_api().area(rle)) for rle in rles], dtype=areas.dtype)
        areas = torch.where(areas.isnan(), drawn, areas)
        return Truth(annotations.images[index], sides, corners, classes, crowd, areas, rles)

    def empty_outlines(self, index: int) -> list[str]:
        """A sentence on each object whose outline encloses no pixel of the image, for example one outside of it."""
        first, rles = self._annotations.starts[index], self.truth(index).rles
        empty = [self._annotations.ids[first + number] for number, rle in enumerate(rles) if not mask_api().area(rle)]
        return [f"the outline of annotation {number} encloses no pixel" for number in empty]

    def read(self, index: int) -> dict[str, Any]:
        image = decode(self.payload(index), self.entry(index), self.channels)
        truth = self.truth(index)
        if truth.sides != tuple(image.shape[1:]):
            size = size_text(image, self.payload(index), self.entry(index))
            expected = " × ".join(map(str, truth.sides))
            raise BrokenSampleError(f"{self.entry(index)}: is {size}, but its annotations say {expected}")
        height, width = truth.sides
        boxes = truth.boxes.clamp(min=0).minimum(torch.tensor([width, height, width, height])).float()
        masks = pack_masks(decode_rles(truth.rles, truth.sides))
        return {"image": image, "boxes": boxes, "classes": truth.classes, "crowd": truth.crowd, "masks": masks}


def coco_splits(path: Path) -> set[str]:
    """The splits that json files name."""
    return {split for file in coco_files(path) if (split := _split(file))} if path.is_dir() else set()


def coco_files(path: Path) -> list[Path]:
    """The json files at a path that may annotate objects: those whose name begins with instances, or all."""
    if path.is_file():
        return [path] if path.suffix == ".json" else []
    folders = [path, path / "annotations", *(path / word for word in SPLIT_WORDS)]
    files = [file for folder in folders for file in sorted(folder.glob("*.json"))]
    return [file for file in files if file.name.startswith("instances")] or files


def _split(file: Path) -> str | None:
    if file.parent.name in SPLIT_WORDS:
        return file.parent.name
    match = _SPLIT.search(file.stem.lower())
    return match[1] if match else None


def _file_of(path: Path, split: str | None) -> tuple[Path, str | None]:
    files = coco_files(path)
    if not files:
        raise DataError(f"{path}: contains no json with objects, such as annotations/instances_train.json")
    chosen = choose_split(coco_splits(path), split, str(path))
    matching = files if path.is_file() else [file for file in files if _split(file) == chosen]
    if len(matching) > 1:
        raise DataError(f"{path}: {matching[0].name} and {matching[1].name} both fit the split; give one of them")
    return matching[0], chosen


def _tables(file: Path) -> dict[str, list[dict[str, Any]]]:
    try:
        tables = read_json(file)
    except SitusError as error:
        raise DataError(str(error)) from error
    for name in _TABLES:
        table = tables.get(name)
        if not isinstance(table, list) or not all(isinstance(row, dict) for row in table):
            raise DataError(f"{file}: has no list of {name}, which COCO's json needs")
    for name in _TABLES:
        if not tables[name]:
            raise DataError(f"{file}: its list of {name} is empty")
    return tables


def _category_names(categories: list[dict[str, Any]], file: Path) -> dict[Any, str]:
    """The categories' ids, in their order, with their names."""
    valid = (is_number(row.get("id")) and _is_name(row.get("name")) for row in categories)
    if invalid := next((row for row, good in zip(categories, valid, strict=True) if not good), None):
        raise DataError(f"{file}: the category {invalid} must have a number as id, and a name")
    for key in ("id", "name"):
        counts = Counter(row[key] for row in categories)
        if twice := next((value for value, count in counts.items() if count > 1), None):
            raise DataError(f"{file}: has two categories with the {key} {twice!r}")
    return {row["id"]: str(row["name"]) for row in sorted(categories, key=lambda row: row["id"])}


def _class_numbers(names: list[str], classes: tuple[str, ...], file: Path) -> np.ndarray:
    """The class of each category, by its name."""
    number = {name: index for index, name in enumerate(classes)}
    if unknown := next((name for name in names if name not in number), None):
        reason = f"its category {unknown!r} is not among the {counted(len(classes), 'classes')}"
        raise DataError(f"{file}: {reason} {', '.join(classes[:3])}{' …' * (len(classes) > 3)}")
    return np.array([number[name] for name in names])


def _folder_of(names: list[str], path: Path, file: Path, split: str | None) -> Path:
    """The folder of the images, which must hold all of them."""
    base = file.parent.parent if file.parent.name == "annotations" else file.parent
    base = base if path.is_file() else path
    tails = [tail for tail in (file.stem.removeprefix("instances_"), split) if tail]
    folders = [parent / tail for tail in tails for parent in (base, base / "images")]
    folders += [base / "images", file.parent, base]
    root = next((folder for folder in folders if (folder / names[0]).is_file()), None)
    if root is None:
        tried = ", ".join(printable(str(folder)) for folder in dict.fromkeys(folders) if folder.is_dir())
        raise DataError(f"{file}: names the image {names[0]!r}, which is in none of these folders: {tried}")
    existing = {
        f"{folder}{entry.name}"
        for folder in {name[: name.rfind("/") + 1] for name in names}
        if (root / folder).is_dir()
        for entry in os.scandir(root / folder)
    }
    if missing := [name for name in names if name not in existing]:
        count = (
            f"{len(missing):,} of its {len(names):,} images {verb(len(missing), 'are')} not in {printable(str(root))}"
        )
        raise DataError(f"{file}: {count}; the first: {missing[0]!r}")
    return root


class _Annotations:
    """A parsed json file, independent of the numbers of the classes.

    Of its categories their ids and names; of its images the ids, files and sides; of its objects one row each, in the
    order of their images; starts: the first row of each image. dropped: the ids of unusable objects, by reason.
    """

    def __init__(self, tables: dict[str, list[dict[str, Any]]], file: Path) -> None:
        kinds = _category_names(tables["categories"], file)
        self.categories, self.names = [*kinds], [*kinds.values()]
        self.images, self.files, self.sides = [], [], []
        for row in tables["images"]:
            self._add_image(row, file)
        self.dropped: dict[str, list[Any]] = {_NO_AREA: [], _NO_OUTLINE: []}
        numbers = [{key: number for number, key in enumerate(keys)} for keys in (self.images, self.categories)]
        if len(numbers[0]) < len(self.images):
            twice = next(number for number, count in Counter(self.images).items() if count > 1)
            raise DataError(f"{file}: has two images with the id {twice!r}")
        rows = []
        for row in tables["annotations"]:
            try:
                rows.append(self._object(row, *numbers))
            except SitusError as error:
                raise DataError(f"{file}: annotation {row.get('id')} {error}") from error
        rows = [row for row in rows if row is not None]
        if not rows:
            count = counted(len(tables["annotations"]), "annotations")
            raise DataError(f"{file}: none of its {count} has a box and an outline")
        rows.sort(key=lambda row: row[0])
        images, kinds, crowd, boxes, areas, self.ids, outlines = zip(*rows, strict=True)
        # One bytes object: reading a Python object changes its reference count, so a forked worker would copy its page.
        self._outlines, self._ends = b"".join(outlines), np.cumsum([0, *map(len, outlines)])
        self.starts = np.searchsorted(np.array(images), np.arange(len(self.images) + 1)).tolist()
        self.kinds, self.crowd, self.boxes, self.areas = map(np.array, (kinds, crowd, boxes, areas))

    def outline(self, row: int) -> bytes:
        """The packed outline of an object."""
        return self._outlines[self._ends[row] : self._ends[row + 1]]

    def _add_image(self, row: dict[str, Any], file: Path) -> None:
        number, sides = row.get("id"), (row.get("height"), row.get("width"))
        # LVIS has only the URL, which ends as COCO's paths do.
        name = row.get("file_name") or "/".join(str(row.get("coco_url", "")).split("/")[-2:])
        named = _is_name(number) and isinstance(name, str) and name
        if not named or not all(isinstance(side, int) and side > 0 for side in sides):
            fields = "must have an id, a file_name, and a height and width above 0"
            raise DataError(f"{file}: the image {str(row)[:80]} {fields}")
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise DataError(f"{file}: names the image {name!r}, which is outside the folder of the images")
        self.images.append(number)
        self.files.append(name)
        self.sides.append(sides)

    def _object(self, row: dict[str, Any], images: dict[Any, int], kinds: dict[Any, int]) -> tuple[Any, ...] | None:
        """The row of an annotation; None for an unusable one. Raises SitusError, the end of a sentence."""
        image, category, box, area = (row.get(name) for name in ("image_id", "category_id", "bbox", "area"))
        if not _is_name(image) or image not in images:
            raise SitusError(f"belongs to the image {image!r}, but no image has this id")
        if not _is_name(category) or category not in kinds:
            low, high = min(kinds), max(kinds)
            gaps = " with gaps" if high - low + 1 > len(kinds) else ""
            raise SitusError(f"has the category {category!r}, but the categories have the ids {low} to {high}{gaps}")
        if not isinstance(box, list) or len(box) != 4 or not all(isinstance(number, int | float) for number in box):
            raise SitusError(f"has the bbox {box!r}, but a bbox must be a list of x, y, width and height")
        if (crowd := row.get("iscrowd") or 0) not in (0, 1):
            raise SitusError(f"has the iscrowd {crowd!r}, but iscrowd must be 0 or 1")
        number = images[image]
        height, width = self.sides[number]
        left, top, right, bottom = box[0], box[1], box[0] + box[2], box[1] + box[3]
        if not (min(right, width) > max(left, 0) and min(bottom, height) > max(top, 0)):  # false with a NaN, too
            self.dropped[_NO_AREA].append(row.get("id"))
            return None
        try:
            outline = packed_outline(row.get("segmentation"), (height, width))
        except SitusError as error:
            raise SitusError(f"has an invalid segmentation: it {error}") from error
        if outline is None:
            self.dropped[_NO_OUTLINE].append(row.get("id"))
            return None
        area = float(area) if area is not None and is_number(area) else math.nan
        return number, kinds[category], bool(crowd), [*map(float, box)], area, row.get("id"), outline


@lru_cache(maxsize=2)
def _read(file: Path, changed: int, size: int) -> _Annotations:  # noqa: ARG001
    """A parsed json file; cached, because its classes are read before its objects."""
    return _Annotations(_tables(file), file)


def _is_name(value: Any) -> bool:
    """Whether a JSON value can be an id or a name: a number or text."""
    return isinstance(value, int | float | str) and value != ""


_CORNERS = 3  # of a polygon at least

Rle = dict[str, Any]
"""A run-length encoded mask: "size", height and width, and "counts", packed into bytes."""


def mask_api() -> Any:
    """The library that draws polygons as COCO does."""
    try:
        from faster_coco_eval.core import mask
    except ImportError as error:
        raise missing_extra("faster-coco-eval", "dense", "reading the outlines of objects") from error
    return mask


def packed_outline(segmentation: Any, sides: tuple[int, int]) -> bytes | None:
    """A "segmentation" as bytes, because a million lists of numbers would take ten times the memory; None where it
    encloses nothing: no polygon has three corners.

    sides: of its image. Raises SitusError, the end of a sentence, on what is no outline.
    """
    if isinstance(segmentation, dict):
        _check_runs(segmentation, sides)
        return marshal.dumps(segmentation["counts"])
    if segmentation is None:
        return None
    if not isinstance(segmentation, list) or not all(isinstance(part, list) for part in segmentation):
        raise SitusError("must be a list of polygons, or run lengths")
    parts = [part for part in segmentation if len(part) >= 2 * _CORNERS]
    for part in parts:
        if len(part) % 2 or not all(map(is_number, part)):
            raise SitusError("has a polygon that is not a list of numbers x, y, x, y, …")
    return marshal.dumps(parts) if parts else None


def rle_of(outline: bytes, sides: tuple[int, int]) -> Rle:
    """A packed outline as run lengths in an image of these sides, cut at its border. Raises SitusError, the end of a
    sentence, where it cannot be drawn."""
    counts, api = marshal.loads(outline), mask_api()  # noqa: S302  (of what was packed here)
    try:
        if isinstance(counts, str):
            rle = {"size": list(sides), "counts": counts.encode()}
            api.decode(rle)  # fails where the pixels do not add up
            return rle
        if isinstance(counts[0], list):
            return api.merge(api.frPyObjects(counts, *sides))
        return api.frPyObjects({"size": list(sides), "counts": counts}, *sides)
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


def _check_runs(rle: dict[str, Any], sides: tuple[int, int]) -> None:
    size, counts = rle.get("size"), rle.get("counts")
    if not isinstance(size, list) or tuple(size) != sides:
        shape = " × ".join(map(str, size)) if isinstance(size, list) else size
        raise SitusError(f"is a mask of {shape} pixels, but the image has {sides[0]} × {sides[1]} pixels")
    if isinstance(counts, str) and counts.isascii():
        return
    if not isinstance(counts, list) or not all(isinstance(count, int) and count >= 0 for count in counts):
        raise SitusError("has run lengths that are negative or not whole numbers")
    if sum(counts) != sides[0] * sides[1]:
        raise SitusError(
            f"has a mask whose run lengths add up to {sum(counts):,} pixels, but the image has {sides[0] * sides[1]:,}"
        )


def is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class ObjectPipeline(PixelPipeline):
    """A source of images with objects to batches of both.

    Training: inputs [B, C, *size] and the targets that `situs.data.objects.objects_of` reads. Evaluation: inputs
    [B, C, *size], "sides" [B, 2] of what is image in them, from the top left on, and "whole" [B, 2] of the files.
    """

    fills: ClassVar = {"boxes": 0.0, "classes": VOID, "crowd": False, "masks": 0}

    def __init__(self, source: Source, data: DataConfig, augment: AugmentConfig | None) -> None:
        super().__init__(source, data, augment)
        if self.augment is not None and self.augment.crop == "none":  # an image stays whole, as in evaluation
            self.augment = replace(self.augment, crop="fitted", scales=(1.0, 1.0))
        self.row_bytes = ((self.source.channels or 3) + 2) * self.size[0] * self.size[1]

    def fetch(self, index: int, epoch: int, draw: int) -> dict[str, Any]:
        """In training no larger than its draw needs; in evaluation resized to fit the model's size."""
        sample = super().fetch(index, epoch, draw)
        have = sample["image"].shape[1], sample["image"].shape[2]
        ratio = self._scale(epoch, draw) * min(want / side for want, side in zip(self.size, have, strict=True))
        fitted = max(1, round(have[0] * ratio)), max(1, round(have[1] * ratio))
        if not self.training:
            return {"image": resized(sample["image"], fitted), "whole": have}
        if ratio >= 1:
            return sample
        factors = torch.tensor([fitted[1] / have[1], fitted[0] / have[0]])
        masks, boxes = take_nearest(sample["masks"], fitted), sample["boxes"] * factors.repeat(2)
        return sample | {"image": resized(sample["image"], fitted), "masks": masks, "boxes": boxes}

    def _scale(self, epoch: int, draw: int) -> float:
        """The factor by which the device scales the image of a draw."""
        if self.augment is None:
            return 1.0
        low, high = self.augment.scales
        share = float(uniform(self.seed, epoch, torch.tensor([draw]), "augment.crop", (CROP_NOISE,))[0, 0])
        return low + share * (high - low)

    def collate(self, epoch: int, draws: list[int], samples: list[dict[str, Any]]) -> dict[str, Tensor]:  # noqa: ARG002
        values = {"sides": torch.tensor([sample["image"].shape[1:] for sample in samples])}
        if not self.training:
            images = [repeat_border(image, *self.size) for image in alike([sample["image"] for sample in samples])]
            whole = torch.tensor([sample["whole"] for sample in samples])
            return {"image": torch.stack(images), **values, "whole": whole}
        padded = self.padded(samples, first=0)
        return {name: torch.stack([sample[name] for sample in padded]) for name in padded[0]} | values

    def finish(self, values: Mapping[str, Tensor], ids: Tensor, noise: Noise) -> Batch:
        if self.augment is None:
            images = normalise(as_floats(values["image"]), self.mean, self.std)
            high, wide = values["sides"].view(-1, 2, 1, 1, 1).unbind(1)
            rows, columns = (torch.arange(side, device=images.device) for side in self.size)
            inside = (rows[:, None] < high) & (columns < wide)
            return Batch(images * inside, ids, {name: values[name] for name in ("sides", "whole")})
        images, targets = apply_objects(values, noise, self.augment, self.size, (self.mean, self.std))
        return Batch(images, ids, targets)


class Objects(Image):
    """Images with objects: their boxes, classes and outlines."""

    labelled_unit, annotations, targets = "object (detection)", "objects", ("objects",)
    table, Config = "objects", ObjectConfig
    unused = ("multi_label", "per_class", "balanced")
    augments = WITHOUT_CLASSES
    crops = ("none", "fitted")

    def resolve(self, data: DataConfig, opened: Callable[[DataConfig], Source]) -> DataConfig:
        """With the names of the classes."""
        if data.objects.classes:
            return data
        return replace(data, objects=replace(data.objects, classes=opened(data).classes or ()))

    def splits(self, path: Path, data: DataConfig) -> set[str]:  # noqa: ARG002
        return coco_splits(path)

    def open(self, path: Path, wanted: Wanted, data: DataConfig) -> Source:  # noqa: ARG002
        return CocoSource(path, wanted)

    def pipeline(self, source: Source, data: DataConfig, augment: AugmentConfig | None, *_: Any) -> Pipeline:
        if augment is not None and data.resident == "always":
            source.notes.append(
                f"{source.name}: is streamed, because resident=always does not apply to images with objects"
            )
        return ObjectPipeline(source, data, augment)
