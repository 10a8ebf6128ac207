"""`check`: what is wrong or odd in a set of images, before a run meets it.

Every image is read once by a worker and 46 bytes are kept of it, so a million images take 46 MB. Duplicates are found
at the end by sorting the hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from situs.data.config import Target
from situs.data.modalities.mask import MASKS, MaskConfig, has_masks
from situs.data.modalities.objects import CocoSource, coco_files
from situs.data.open import only_images, open_source, splits_at, unread_labels
from situs.data.sources.base import SPLIT_WORDS, EncodedSource, Source
from situs.data.sources.folder import printable
from situs.data.sources.images import decode, read_header
from situs.data.sources.manifest import MANIFEST, check_shard, read_manifest
from situs.data.sources.remote import RemoteError, is_remote
from situs.data.work import in_order
from situs.errors import BrokenSampleError, SitusError, counted, unknown_name
from situs.results import Figure, Provenance, Result, Summary, Table, Tone

BROKEN_IMAGE, BROKEN_ANNOTATION, NO_OBJECT = "broken", "annotation", "no object"
"""Kinds of issues with a reason: of an image, of its mask or objects, and of one of its objects."""

_DEEP_MODES = {"I;16", "I;16B", "I;16L", "I;16N", "I", "F"}
_GREY_MODES = {"1", "L", "LA", "La"} | _DEEP_MODES
ROW = np.dtype(
    [
        ("broken", "?"),
        ("grey", "?"),
        *((name, "i4") for name in ("height", "width", "label")),
        ("data", "V16"),
        ("pixels", "V16"),
    ]
)
"""46 bytes an image. label: −1 without one. pixels: zeros where the image was not decoded."""


def row_of(source: Source) -> np.dtype:
    """The type of a set's rows: where an image may have several classes (multi-label, masks, objects), also one byte
    for each class."""
    if not source.multi_label and not source.dense:
        return ROW
    return np.dtype([*((name, ROW[name]) for name in ROW.names or ()), ("labels", "i1", (len(source.classes or ()),))])


def survey(source: Source, decoding: bool, numbers: list[int]) -> tuple[np.ndarray, list[tuple[int, str, str]]]:
    """A row for each image, and (number, kind, reason) of each issue."""
    rows, issues = np.zeros(len(numbers), row_of(source)), []
    for row, number in zip(rows, numbers, strict=True):
        try:
            issues += [(number, kind, reason) for kind, reason in _survey_one(source, decoding, number, row)]
        except RemoteError:
            raise
        except SitusError as error:
            row["broken"] = True
            issues.append((number, BROKEN_IMAGE, str(error)))
    return rows, issues


def _survey_one(source: Source, decoding: bool, number: int, row: Any) -> list[tuple[str, str]]:
    """Fills the row of an image, and gives (kind, reason) of each issue that it has by itself."""
    row["label"] = -1
    if isinstance(source, EncodedSource):
        data = source.payload(number)
        row["data"] = _digest(data)
        header = read_header(data, source.entry(number))
        row["height"], row["width"], row["grey"] = header.height, header.width, header.mode in _GREY_MODES
        deep = header.mode in _DEEP_MODES or (header.kind == "NPY" and header.mode != "uint8")
        kinds = {"cmyk": header.mode == "CMYK", "transparent": header.transparent, "turned": header.turned}
        label = None if source.dense else source.label(number)
        image = decode(data, source.entry(number)) if decoding else None
        annotations = _check_annotations(source, number, row) if decoding and source.dense else []
    else:
        sample = source.read(number)
        image, label = sample["image"], sample.get("label")
        row["height"], row["width"] = image.shape[1:]
        kinds, deep, annotations = {}, image.is_floating_point(), []
        row["data"] = _digest(image.contiguous().numpy().tobytes())
    if label is not None and not source.dense:
        row["labels" if source.multi_label else "label"] = np.asarray(label)
    if image is not None:
        row["grey"] |= image.shape[0] == 1
        row["pixels"] = _digest(
            str(tuple(image.shape)).encode() + image.permute(1, 2, 0).contiguous().numpy().tobytes()
        )
    return [(kind, "") for kind, holds in (kinds | {"deep": deep}).items() if holds] + annotations


def _check_annotations(source: Source, number: int, row: Any) -> list[tuple[str, str]]:
    """The issues with the mask or the objects of an image that can be decoded, read as in training."""
    try:
        sample = source.read(number)
    except BrokenSampleError as error:
        return [(BROKEN_ANNOTATION, str(error))]
    classes = sample["classes"] if source.target == "objects" else sample["mask"]
    row["labels"][[label for label in classes.unique().tolist() if label >= 0]] = 1
    whole, index = source.origin(number)
    return [(NO_OBJECT, reason) for reason in whole.empty_outlines(index)] if isinstance(whole, CocoSource) else []


def _digest(data: bytes) -> np.void:
    return np.void(hashlib.blake2b(data, digest_size=16).digest())


Progress = Callable[[int, int, str], None]

KINDS = {
    "checksum": "shards that are missing or changed after packing",
    "broken": "images that cannot be read or decoded; a run skips them",
    "annotation": "the mask or the objects of an image are missing, broken, of another size, or of unknown "
    "classes; a run skips the image",
    "no object": "an annotation whose box lies outside its image, or that has no outline; a run leaves it out",
    "grey": "one channel, although other images have three; a run with three channels repeats the channel",
    "cmyk": "CMYK pixels; the loader converts them to RGB without a colour profile",
    "transparent": "an alpha channel, or a transparent colour; the loader puts white behind the image",
    "deep": "more than 8 bits per channel; the loader converts the pixels to floats",
    "turned": "an EXIF tag rotates or mirrors the image; the loader applies this tag, but other programs may not",
    "huge": "more pixels than the limit: slow to decode and large in memory",
    "odd": "much longer than wide, or much smaller than the other images: a crop shows little of the image",
    "duplicate": "the same bytes as an earlier image of the split",
    "same pixels": "the same pixels as an earlier image of the split, but other bytes",
    "leak": "an image of another split has the same pixels as an image of the training split",
    "contradiction": "the same pixels as an earlier image, but another label",
}
"""The kinds of issues, and what each means."""

NOUNS = {
    "checksum": "damaged shards",
    "annotation": "unusable annotations",
    "no object": "empty annotations",
    "duplicate": "duplicates",
    "same pixels": "re-encoded duplicates",
    "leak": "leaks",
    "contradiction": "contradictions",
}
"""The noun of a kind whose name does not follow a number: 3 leaks, but 3 grey."""

FAILING = ("checksum", "broken", "annotation")
LISTED = 10_000
_SHOWN = 3
_LONG = 4  # times the shorter side
_SMALL = 4  # times smaller than the median
_TRAIN = {"train", "training"}


class Issue(NamedTuple):
    """One issue. name: the image or shard. what: details, if any."""

    split: str
    name: str
    what: str = ""

    def __str__(self) -> str:
        place = f"{self.split}: {self.name}" if self.split else self.name
        return f"{place} ({self.what})" if self.what else place


def _counted(kind: str, count: int) -> str:
    """ "3 broken", "1 duplicate"."""
    return counted(count, NOUNS[kind]) if kind in NOUNS else f"{count:,} {kind}"


@dataclass(frozen=True, kw_only=True)
class DataCheck(Result):
    """counts: how many issues of each kind. issues: the first 10,000 of each. images: by split. classes: images of each
    class over all splits, by name."""

    file = "check"

    images: dict[str, int]
    counts: dict[str, int]
    issues: dict[str, list[Issue]]
    sizes: dict[str, int]
    classes: dict[str, int]
    decoded: bool = True

    def failing(self, kinds: Sequence[str] = FAILING) -> list[str]:
        """The kinds in `kinds` that have an issue."""
        for kind in kinds:
            if kind not in KINDS:
                raise unknown_name("kind of issue", kind, KINDS, field="fail_on")
        return [kind for kind in kinds if self.counts.get(kind)]

    @property
    def tone(self) -> Tone:
        """Bad if a run cannot read a sample; good only if everything was decoded and has no issue."""
        clean = self.decoded and not any(self.counts.values())
        return "bad" if self.failing() else "good" if clean else "unsure"

    def summary(self) -> Summary:
        rows: list[list[Any]] = [
            [kind, count, "; ".join(map(str, self.issues[kind][:_SHOWN]))]
            for kind, count in self.counts.items()
            if count
        ]
        total = sum(self.images.values())
        listed = ", ".join(_counted(kind, count) for kind, count in self.counts.items() if count) or "no issues found"
        parts = ", ".join(f"{name} {count:,}" for name, count in self.images.items() if name)
        sentence = f"{counted(total, 'images')}{f' ({parts})' if parts else ''}: {listed}."
        notes = [f"{kind}: {KINDS[kind]}" for kind, count in self.counts.items() if count]
        if self.sizes:
            least, most, median = (
                f"{self.sizes[f'{word}_height']} × {self.sizes[f'{word}_width']}"
                for word in ("least", "most", "median")
            )
            notes.append(f"height × width: {least if least == most else f'from {least} to {most}, median {median}'}")
        if self.classes:
            few, many = (choose(self.classes, key=self.classes.__getitem__) for choose in (min, max))
            images, most = counted(self.classes[few], "images"), self.classes[many]
            sizes = f"of {images} each" if self.classes[few] == most else f"from {images} ({few}) to {most:,} ({many})"
            notes.append(f"{counted(len(self.classes), 'classes')}, {sizes}")
        if not self.decoded:
            notes.append(
                "the pixels were not decoded. Some images may be broken, and only files with equal bytes "
                "count as duplicates"
            )
        table = Table("Found", ["kind", "images", "for example"], rows or [["–", 0, "–"]])
        number = (f"{sum(self.counts.values()):,}", f"issues in {counted(total, 'images')}")
        return Summary(sentence, (table,), tuple(notes), (number,))

    @property
    def title(self) -> str:
        return f"{self.provenance.facts.get('data', 'images')}: checked"

    @property
    def mark(self) -> str:
        nothing = "No issues found" if self.decoded else "No issues found, but images were not decoded"
        return "Issues to inspect" if any(self.counts.values()) else nothing

    def figures(self) -> list[Figure]:
        """The number of issues of each kind, the largest first."""
        bars = {}
        for kind, count in sorted(self.counts.items(), key=lambda item: -item[1]):
            bars[kind] = count, ("bad" if kind in FAILING else "unsure") if count else "good"
        return [Figure("", "", "bars", (bars, "found"))]

    def details(self) -> list[Table]:
        """All issues that are listed, by kind."""
        tables = []
        for kind, issues in self.issues.items():
            rows = [[issue.split or "all", issue.name, issue.what or None] for issue in issues]
            note = f"{self.counts[kind]:,} in all, {len(issues):,} of them listed here. Meaning: {KINDS[kind]}."
            tables += [Table(kind.capitalize(), ["split", "image", "what"], rows, note)] if issues else []
        return tables

    def numbers(self) -> dict[str, Any]:
        issues = {kind: [issue._asdict() for issue in issues] for kind, issues in self.issues.items() if issues}
        fields = ("images", "counts", "sizes", "classes", "decoded")
        return {name: getattr(self, name) for name in fields} | {"found": issues}


def check(
    path: str | Path,
    *,
    splits: Sequence[str] | None = None,
    multi_label: bool = False,
    target: Target | None = None,
    masks: MaskConfig = MASKS,
    decode_pixels: bool = True,
    huge_mpx: float = 25.0,
    workers: int | None = None,
    progress: Progress | None = None,
) -> DataCheck:
    """Checks every image at `path`, and the checksums of a set that `situs data pack` made.

    splits:        those to check; by default all of the set.
    multi_label:   read the labels as any number of classes an image.
    target:        what comes with an image: its class, a mask or its objects; by default what is at the path.
    masks:         what the numbers in masks mean.
    decode_pixels: whether every image is decoded; without it only headers and bytes are read.
    huge_mpx:      millions of pixels above which an image counts as huge.
    """
    only_images(
        path,
        "only images can be checked; for other data, a training run reports samples that it cannot read",
        multi_label,
    )
    report = progress or (lambda *_: None)
    collector = _Collector(huge_mpx * 1e6, decode_pixels)
    folder = Path(path).expanduser()
    manifest = read_manifest(folder) if not is_remote(path) and folder.is_dir() else None
    if manifest is not None:
        _check_files(folder, manifest, collector, workers, report)
    target = target or _target_at(folder)
    options = {"multi_label": multi_label, "target": target, "masks": masks}
    names = list(splits if splits is not None else sorted(splits_at(path, **options), key=(*SPLIT_WORDS, "dev").index))
    names, name, notes = names or [""], "", unread_labels(path, multi_label=multi_label)
    for split in names:
        if any(issue.split == split for issue in collector.issues["checksum"]):
            notes.append(f"{split or 'the set'}: the images were not checked, because shards are damaged")
            continue
        source = open_source(path, split or None, **options)
        name, notes = name or source.name.removesuffix(f" ({split})"), notes + source.notes
        rows, start = np.zeros(len(source), row_of(source)), 0
        for part, issues in in_order(partial(survey, source, decode_pixels), range(len(source)), workers):
            rows[start : start + len(part)] = part
            for number, kind, reason in issues:
                collector.add_image(kind, split, source, number, reason)
            start += len(part)
            report(start, len(source), split or "images")
        collector.add_split(split, source, rows)
        for reason, numbers in source.dropped.items() if isinstance(source, CocoSource) else ():
            for number in numbers:
                collector.add(NO_OBJECT, Issue(split, f"annotation {number}", reason))
    facts = {"data": name or printable(folder.name), "huge_mpx": huge_mpx}  # a remote set is checked as it is fetched
    return collector.result(Provenance(facts, left_out=tuple(notes)))


def _target_at(folder: Path) -> Target:
    """What comes with the images at a path, by the files there."""
    if any(file.name.startswith("instances") or file == folder for file in coco_files(folder)):
        return "objects"
    return "mask" if has_masks(folder) else "class"


def _check_files(
    folder: Path, manifest: dict[str, Any], collector: _Collector, workers: int | None, report: Progress
) -> None:
    shards = manifest["shards"]
    check_numbers = partial(_check_shards, folder, shards)
    for number, (reason,) in enumerate(in_order(check_numbers, range(len(shards)), workers, at_once=1)):
        if reason:
            collector.add("checksum", Issue(shards[number]["split"], shards[number]["file"], reason))
        report(number + 1, len(shards), "checksums")
    listed = {shard["file"] for shard in shards}
    for file in sorted(folder.iterdir()):
        if file.suffix in {".tar", ".parquet"} and file.name not in listed:
            collector.add("checksum", Issue("", printable(file.name), f"is not in {MANIFEST}"))


def _check_shards(folder: Path, shards: list[dict[str, Any]], numbers: list[int]) -> list[str]:
    return [check_shard(folder, shards[number]) for number in numbers]


class _Collector:
    """The issues, split by split."""

    def __init__(self, huge: float, decoded: bool) -> None:
        self.huge, self.decoded = huge, decoded
        self.counts = dict.fromkeys(KINDS, 0)
        self.issues: dict[str, list[Issue]] = {kind: [] for kind in KINDS}
        self.images: dict[str, int] = {}
        self.classes: dict[str, int] = {}
        self.sides: list[np.ndarray] = []
        self.train: tuple[Source, np.ndarray] | None = None

    def add(self, kind: str, issue: Issue) -> None:
        """Counts an issue, and lists it where the list is not full."""
        self.counts[kind] += 1
        if len(self.issues[kind]) < LISTED:
            self.issues[kind].append(issue)

    def add_image(self, kind: str, split: str, source: Source, number: int, what: str = "") -> None:
        """Counts an issue of an image, whose name is looked up only if it is listed."""
        if len(self.issues[kind]) < LISTED:
            self.add(kind, Issue(split, printable(source.key(number)), what))
        else:
            self.counts[kind] += 1

    def add_split(self, split: str, source: Source, rows: np.ndarray) -> None:
        """The issues that the rows of a split show."""
        self.images[split] = len(rows)
        good = ~rows["broken"]
        height, width = rows["height"].astype(np.int64), rows["width"].astype(np.int64)
        short, long = np.minimum(height, width), np.maximum(height, width)
        grey, typical = rows["grey"], np.median(short[good]) if good.any() else 0
        masks = {
            "grey": grey & (2 * grey[good].sum() < good.sum()),  # no issue where most are grey
            "huge": height * width > self.huge,
            "odd": (long > _LONG * short) | (short * _SMALL < typical),
        }
        for kind, mask in masks.items():
            for number in np.flatnonzero(mask & good).tolist():
                size = f"{height[number]} × {width[number]}" if kind in {"huge", "odd"} else ""
                self.add_image(kind, split, source, number, size)
        self.sides.append(np.stack([height[good], width[good]]))
        self._add_duplicates(split, source, rows, good)
        if source.classes is not None and (self.decoded or not source.dense):
            if "labels" in (rows.dtype.names or ()):
                counts = (rows["labels"][good] > 0).sum(axis=0)
            else:
                counts = np.bincount(rows["label"][good & (rows["label"] >= 0)], minlength=len(source.classes))
            for name, count in zip(source.classes, counts.tolist(), strict=False):
                self.classes[printable(name)] = self.classes.get(printable(name), 0) + count
        if split in _TRAIN:
            self.train = source, rows
        elif self.train is not None:
            self._add_leaks(split, source, rows, good)

    def _add_duplicates(self, split: str, source: Source, rows: np.ndarray, good: np.ndarray) -> None:
        column = "pixels" if self.decoded else "data"
        first = _first_equal(rows[column], good)
        exact = first if column == "data" else _first_equal(rows["data"], good)
        for number in np.flatnonzero(first >= 0).tolist():
            equal = exact[number] >= 0
            same = f"as {printable(source.key(int(exact[number] if equal else first[number])))}"
            self.add_image("duplicate" if equal else "same pixels", split, source, number, same)
            if labels := _contradiction(source, rows, number, int(first[number])):
                self.add_image("contradiction", split, source, number, labels)

    def _add_leaks(self, split: str, source: Source, rows: np.ndarray, good: np.ndarray) -> None:
        assert self.train is not None
        column, (training, train_rows) = "pixels" if self.decoded else "data", self.train
        both = np.concatenate([train_rows[column], rows[column]])
        usable = np.concatenate([~train_rows["broken"], good])
        first = _first_equal(both, usable)[len(train_rows) :]
        for number in np.flatnonzero((first >= 0) & (first < len(train_rows))).tolist():
            self.add_image("leak", split, source, number, f"as {printable(training.key(int(first[number])))}")

    def result(self, provenance: Provenance) -> DataCheck:
        sides = np.concatenate(self.sides, axis=1) if self.sides else np.zeros((2, 0), np.int64)
        sizes: dict[str, int] = {}
        if sides.shape[1]:
            for word, statistic in (("least", np.min), ("median", np.median), ("most", np.max)):
                sizes |= {f"{word}_height": int(statistic(sides[0])), f"{word}_width": int(statistic(sides[1]))}
        return DataCheck(
            images=self.images,
            counts=self.counts,
            issues=self.issues,
            sizes=sizes,
            classes=self.classes,
            decoded=self.decoded,
            provenance=provenance,
        )


def _first_equal(digests: np.ndarray, usable: np.ndarray) -> np.ndarray:
    """For each digest [n] the index of the first equal one before it, or −1; unusable ones equal none."""
    numbers, first = np.flatnonzero(usable), np.full(len(digests), -1, np.int64)
    _, index, inverse = np.unique(digests[numbers], return_index=True, return_inverse=True)
    first[numbers] = numbers[index[inverse]]
    return np.where(first == np.arange(len(digests)), -1, first)


def _contradiction(source: Source, rows: np.ndarray, number: int, earlier: int) -> str:
    """The labels of two images with the same pixels; empty where they agree, or where one is unknown."""
    classes, twin = source.classes or (), printable(source.key(earlier))
    if not source.multi_label:
        label, other = int(rows["label"][number]), int(rows["label"][earlier])
        return "" if label == other else f"label {classes[label]}, but {twin} has the label {classes[other]}"
    labels, others = rows["labels"][number], rows["labels"][earlier]
    differ = np.flatnonzero((labels != others) & (labels >= 0) & (others >= 0)).tolist()
    listed = [f"{'' if labels[index] else 'not '}{classes[index]}" for index in differ[:_SHOWN]]
    return f"{', '.join(listed)}; in {twin}, these labels are the opposite" if listed else ""
