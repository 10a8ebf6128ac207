"""`check`: what is wrong or odd in a set of images, found before a run finds it.

Every image is read once by a worker and 45 bytes are kept of it, so that a million images take 45 MB. Duplicates are
found at the end by sorting the hashes.
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
from situs.data.masks import MASKS, MaskConfig, has_masks
from situs.data.open import only_images, open_source, splits_at, unread_labels
from situs.data.sources.base import SPLIT_WORDS, EncodedSource, Source
from situs.data.sources.coco import CocoSource, coco_files
from situs.data.sources.folder import plain
from situs.data.sources.images import decode, read_header
from situs.data.sources.manifest import MANIFEST, check_shard, read_manifest
from situs.data.sources.remote.transfer import RemoteError, is_remote
from situs.data.work import in_order
from situs.errors import BrokenSampleError, SitusError, counted, unknown_name
from situs.results import Figure, Provenance, Result, Summary, Table, Tone

GREY, CMYK, DEEP, TURNED, BROKEN, ALPHA = (1 << bit for bit in range(6))
BAD, MARKED, NOTHING = "broken", "annotation", "no object"
"""Kinds of what is told with a reason: of an image, of what is known of it, and of one of its objects."""

_DEEP_MODES = {"I;16", "I;16B", "I;16L", "I;16N", "I", "F"}
_GREY_MODES = {"1", "L", "LA", "La"} | _DEEP_MODES
ROW = np.dtype(
    [("flags", "u1"), ("height", "i4"), ("width", "i4"), ("label", "i4"), ("data", "V16"), ("pixels", "V16")]
)
"""45 bytes an image. label: −1 without one. pixels: zeros where the image was not decoded."""


def row_of(source: Source) -> np.dtype:
    """The type of a set's rows: one that has several classes an image has all their labels too, a byte each; of masks
    and objects those that are there."""
    if not source.multi_label and not source.dense:
        return ROW
    return np.dtype([*((name, ROW[name]) for name in ROW.names or ()), ("labels", "i1", (len(source.classes or ()),))])


def survey(source: Source, decoding: bool, numbers: list[int]) -> tuple[np.ndarray, list[tuple[int, str, str]]]:
    """A row for each image, and (number, kind, reason) of what is wrong with some."""
    rows, wrong = np.zeros(len(numbers), row_of(source)), []
    for row, number in zip(rows, numbers, strict=True):
        try:
            wrong += [(number, *each) for each in _survey_one(source, decoding, number, row)]
        except RemoteError:
            raise
        except SitusError as error:
            row["flags"] |= BROKEN
            wrong.append((number, BAD, str(error)))
    return rows, wrong


def _survey_one(source: Source, decoding: bool, number: int, row: Any) -> list[tuple[str, str]]:
    row["label"], wrong = -1, []
    if isinstance(source, EncodedSource):
        data = source.payload(number)
        row["data"] = _digest(data)
        header = read_header(data, source.entry(number))
        kind, flags = header.mode, TURNED if header.turned else 0
        row["height"], row["width"] = header.height, header.width
        flags |= GREY if kind in _GREY_MODES else 0
        flags |= CMYK if kind == "CMYK" else 0
        flags |= ALPHA if header.transparent else 0
        flags |= DEEP if kind in _DEEP_MODES or (header.kind == "NPY" and kind != "uint8") else 0
        row["flags"] = flags
        label = None if source.dense else source.label(number)
        image = decode(data, source.entry(number)) if decoding else None
        if decoding and source.dense:
            wrong = _dense(source, number, row)
    else:
        sample = source.read(number)
        image, label = sample["image"], sample.get("label")
        row["height"], row["width"] = image.shape[1:]
        row["flags"] = (GREY if image.shape[0] == 1 else 0) | (DEEP if image.is_floating_point() else 0)
        row["data"] = _digest(image.contiguous().numpy().tobytes())
    if label is not None and not source.dense:
        row["labels" if source.multi_label else "label"] = label
    if image is not None:
        if image.shape[0] == 1:
            row["flags"] |= GREY
        row["pixels"] = _digest(
            str(tuple(image.shape)).encode() + image.permute(1, 2, 0).contiguous().numpy().tobytes()
        )
    return wrong


def _dense(source: Source, number: int, row: Any) -> list[tuple[str, str]]:
    """What is wrong with the mask or the objects of an image that can be decoded, as a training would read them."""
    try:
        sample = source.read(number)
    except BrokenSampleError as error:
        return [(MARKED, str(error))]
    classes = sample["classes"] if source.target == "objects" else sample["mask"]
    row["labels"][[each for each in classes.unique().tolist() if each >= 0]] = 1
    whole, own = source.origin(number)
    return [(NOTHING, said) for said in whole.undrawn(own)] if isinstance(whole, CocoSource) else []


def _digest(data: bytes) -> np.void:
    return np.void(hashlib.blake2b(data, digest_size=16).digest())


Progress = Callable[[int, int, str], None]

KINDS = {
    "checksum": "shards that are missing or not what was packed",
    "broken": "cannot be read or decoded; a run skips them",
    "annotation": "the mask or the objects of an image cannot be used: missing, broken, of another size, or with class "
    "numbers that are none; a run skips the image",
    "no object": "an annotation without an area in its image, or without an outline; a run leaves it out",
    "grey": "one channel, among images of three; repeated to three where three are asked for",
    "cmyk": "four inks, turned into RGB without a colour profile",
    "transparent": "an alpha channel, or a colour that stands for none; laid over white",
    "deep": "more than 8 bits a channel; floats for the loader",
    "turned": "the EXIF tag turns or mirrors them, and so does the loader; other readers may not",
    "huge": "more pixels than the limit: slow to decode, and large in memory",
    "odd": "far longer than wide, or far smaller than most: a crop sees little of them",
    "duplicate": "the same bytes as an earlier image of the split",
    "same pixels": "the same pixels as an earlier image of the split, in other bytes",
    "leak": "the same pixels as an image of the training split, in another split",
    "contradiction": "the same pixels as an earlier image, under another label",
}
"""What can be found, and what it means."""

NOUNS = {
    "checksum": "damaged shards",
    "annotation": "unusable annotations",
    "no object": "empty annotations",
    "duplicate": "duplicates",
    "same pixels": "re-encoded duplicates",
    "leak": "leaks",
    "contradiction": "contradictions",
}
"""How a sentence counts those whose name does not follow a number."""

FAILING = ("checksum", "broken", "annotation")
LISTED = 10_000
_SHOWN = 3
_LONG = 4  # times the shorter side
_SMALL = 4  # times smaller than the median
_TRAIN = {"train", "training"}


class Found(NamedTuple):
    """One thing that was found. name: the image's own, or the shard's. what: more of it, where there is more to say."""

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
    """counts: how many of each kind. found: the first 10,000 of each. images: by split. classes: images of each class
    over all splits, by name."""

    file = "check"

    images: dict[str, int]
    counts: dict[str, int]
    found: dict[str, list[Found]]
    sizes: dict[str, int]
    classes: dict[str, int]
    decoded: bool = True

    def failing(self, kinds: Sequence[str] = FAILING) -> list[str]:
        """Those of `kinds` of which there is one."""
        for kind in kinds:
            if kind not in KINDS:
                raise unknown_name("kind of finding", kind, KINDS, field="fail_on")
        return [kind for kind in kinds if self.counts.get(kind)]

    @property
    def tone(self) -> Tone:
        """Bad where a run cannot read something; good only where all was decoded and nothing was found."""
        clean = self.decoded and not any(self.counts.values())
        return "bad" if self.failing() else "good" if clean else "unsure"

    def summary(self) -> Summary:
        rows: list[list[Any]] = [
            [kind, count, "; ".join(map(str, self.found[kind][:_SHOWN]))]
            for kind, count in self.counts.items()
            if count
        ]
        total = sum(self.images.values())
        told = ", ".join(_counted(kind, count) for kind, count in self.counts.items() if count) or "nothing odd"
        parts = ", ".join(f"{name} {count:,}" for name, count in self.images.items() if name)
        sentence = f"{counted(total, 'images')}{f' ({parts})' if parts else ''}: {told}."
        notes = [f"{kind}: {KINDS[kind]}" for kind, count in self.counts.items() if count]
        if self.sizes:
            notes.append("height × width from {least_height} × {least_width} to {most_height} × {most_width}, "
                         "median {median_height} × {median_width}".format(**self.sizes))  # fmt: skip
        if self.classes:
            few, many = (choose(self.classes, key=self.classes.__getitem__) for choose in (min, max))
            least, most = f"{counted(self.classes[few], 'images')} ({few})", f"{self.classes[many]:,} ({many})"
            notes.append(f"{counted(len(self.classes), 'classes')}, from {least} to {most}")
        if not self.decoded:
            notes.append(
                "the pixels were not decoded: an image may still be broken, and only equal bytes are duplicates"
            )
        table = Table("Found", ["kind", "images", "for example"], rows or [["–", 0, "–"]])
        number = (f"{sum(self.counts.values()):,}", f"findings in {counted(total, 'images')}")
        return Summary(sentence, (table,), tuple(notes), (number,))

    @property
    def title(self) -> str:
        return f"{self.provenance.facts.get('data', 'images')}: checked"

    @property
    def mark(self) -> str:
        nothing = "Nothing found" if self.decoded else "Nothing found, but not decoded"
        return "Look at these" if any(self.counts.values()) else nothing

    def figures(self) -> list[Figure]:
        """How many of each kind, the most first."""
        tones = {kind: ("bad" if kind in FAILING else "unsure") if count else "good"
                 for kind, count in self.counts.items()}  # fmt: skip
        most = sorted(self.counts.items(), key=lambda each: -each[1])
        return [Figure("", "", "bars", ({kind: (count, tones[kind]) for kind, count in most}, "found"))]

    def details(self) -> list[Table]:
        """All that is listed of each kind."""
        return [
            Table(kind.capitalize(), ["split", "image", "what"],
                  [[each.split or "all", each.name, each.what or None] for each in every],
                  f"{self.counts[kind]:,} in all, {len(every):,} listed: {KINDS[kind]}.")
            for kind, every in self.found.items()
            if every
        ]  # fmt: skip

    def numbers(self) -> dict[str, Any]:
        found = {kind: [each._asdict() for each in every] for kind, every in self.found.items() if every}
        own = ("images", "counts", "sizes", "classes", "decoded")
        return {name: getattr(self, name) for name in own} | {"found": found}


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
    """Looks at every image at `path`, and at the checksums where `situs data pack` made it.

    splits:        those to look at; by default all that the set has.
    multi_label:   read the labels as any number of classes an image.
    target:        what is known of an image: its class, a mask or its objects; by default what lies at the path.
    masks:         what the numbers in masks mean.
    decode_pixels: whether every image is decoded; without it headers and bytes alone are looked at.
    huge_mpx:      millions of pixels above which an image counts as huge.
    """
    only_images(path, "the check looks at images; a training names those that cannot be read", multi_label)
    tell = progress or (lambda *_: None)
    gather = _Gathering(huge_mpx * 1e6, decode_pixels)
    folder = Path(path).expanduser()
    manifest = read_manifest(folder) if not is_remote(path) and folder.is_dir() else None
    if manifest is not None:
        _check_files(folder, manifest, gather, workers, tell)
    target = target or _target_at(folder)
    how = {"multi_label": multi_label, "target": target, "masks": masks}
    names = list(splits if splits is not None else sorted(splits_at(path, **how), key=(*SPLIT_WORDS, "dev").index))
    names, name, notes = names or [""], "", unread_labels(path, multi_label=multi_label)
    for split in names:
        if any(each.split == split for each in gather.found["checksum"]):
            notes.append(f"{split or 'the set'}: its images were not looked at, because its shards are damaged")
            continue
        source = open_source(path, split or None, **how)
        name, notes = name or source.name.removesuffix(f" ({split})"), notes + source.notes
        rows, start = np.zeros(len(source), row_of(source)), 0
        for made, reasons in in_order(partial(survey, source, decode_pixels), range(len(source)), workers):
            rows[start : start + len(made)] = made
            for number, kind, reason in reasons:
                gather.add(kind, split, source, number, reason)
            start += len(made)
            tell(start, len(source), split or "images")
        gather.split(split, source, rows)
        for why, numbers in source.left.items() if isinstance(source, CocoSource) else ():
            for number in numbers:
                gather.note("no object", Found(split, f"annotation {number}", why))
    facts = {"data": name or plain(folder.name), "huge_mpx": huge_mpx}  # a remote set is checked as it is fetched
    return gather.result(Provenance(facts, left_out=tuple(notes)))


def _target_at(folder: Path) -> Target:
    """What is known of the images at a path, by the files that lie there."""
    if any(file.name.startswith("instances") or file == folder for file in coco_files(folder)):
        return "objects"
    return "mask" if has_masks(folder) else "class"


def _check_files(
    folder: Path, manifest: dict[str, Any], gather: _Gathering, workers: int | None, tell: Progress
) -> None:
    shards = manifest["shards"]
    wrong = partial(_wrong, folder, shards)
    for number, (said,) in enumerate(in_order(wrong, range(len(shards)), workers, at_once=1)):
        if said:
            gather.note("checksum", Found(shards[number]["split"], shards[number]["file"], said))
        tell(number + 1, len(shards), "checksums")
    listed = {shard["file"] for shard in shards}
    for file in sorted(folder.iterdir()):
        if file.suffix in {".tar", ".parquet"} and file.name not in listed:
            gather.note("checksum", Found("", plain(file.name), f"is not in {MANIFEST}"))


def _wrong(folder: Path, shards: list[dict[str, Any]], numbers: list[int]) -> list[str]:
    return [check_shard(folder, shards[number]) for number in numbers]


class _Gathering:
    """What is found, split by split."""

    def __init__(self, huge: float, decoded: bool) -> None:
        self.huge, self.decoded = huge, decoded
        self.counts = dict.fromkeys(KINDS, 0)
        self.found: dict[str, list[Found]] = {kind: [] for kind in KINDS}
        self.images: dict[str, int] = {}
        self.classes: dict[str, int] = {}
        self.sides: list[np.ndarray] = []
        self.train: tuple[Source, np.ndarray] | None = None

    def note(self, kind: str, found: Found) -> None:
        self.counts[kind] += 1
        if len(self.found[kind]) < LISTED:
            self.found[kind].append(found)

    def add(self, kind: str, split: str, source: Source, number: int, what: str = "") -> None:
        """An image of which a name is made only where it is listed."""
        if len(self.found[kind]) < LISTED:
            self.found[kind].append(Found(split, plain(source.key(number)), what))
        self.counts[kind] += 1

    def split(self, split: str, source: Source, rows: np.ndarray) -> None:
        """All images of a split."""
        self.images[split] = len(rows)
        good = (rows["flags"] & BROKEN) == 0
        height, width = rows["height"].astype(np.int64), rows["width"].astype(np.int64)
        short, long = np.minimum(height, width), np.maximum(height, width)
        grey, typical = rows["flags"] & GREY > 0, np.median(short[good]) if good.any() else 0
        flags = {"cmyk": CMYK, "transparent": ALPHA, "deep": DEEP, "turned": TURNED}
        masks = {kind: rows["flags"] & flag > 0 for kind, flag in flags.items()}
        masks["grey"] = grey & (2 * grey[good].sum() < good.sum())  # in a grey set none is odd
        masks["huge"] = height * width > self.huge
        masks["odd"] = (long > _LONG * short) | (short * _SMALL < typical)
        for kind, mask in masks.items():
            for number in np.flatnonzero(mask & good).tolist():
                sized = f"{height[number]} × {width[number]}" if kind in {"huge", "odd"} else ""
                self.add(kind, split, source, number, sized)
        self.sides.append(np.stack([height[good], width[good]]))
        self._repeated(split, source, rows, good)
        if source.classes is not None and (self.decoded or not source.dense):
            if "labels" in (rows.dtype.names or ()):
                counts = (rows["labels"][good] > 0).sum(axis=0)
            else:
                counts = np.bincount(rows["label"][good & (rows["label"] >= 0)], minlength=len(source.classes))
            for name, count in zip(source.classes, counts.tolist(), strict=False):
                self.classes[plain(name)] = self.classes.get(plain(name), 0) + count
        if split in _TRAIN:
            self.train = source, rows
        elif self.train is not None:
            self._leaks(split, source, rows, good)

    def _repeated(self, split: str, source: Source, rows: np.ndarray, good: np.ndarray) -> None:
        column = "pixels" if self.decoded else "data"
        first = _first_equal(rows[column], good)
        exact = first if column == "data" else _first_equal(rows["data"], good)
        for number in np.flatnonzero(first >= 0).tolist():
            equal = exact[number] >= 0
            same = f"as {plain(source.key(int(exact[number] if equal else first[number])))}"
            self.add("duplicate" if equal else "same pixels", split, source, number, same)
            if told := _contradiction(source, rows, number, int(first[number]), same):
                self.add("contradiction", split, source, number, told)

    def _leaks(self, split: str, source: Source, rows: np.ndarray, good: np.ndarray) -> None:
        assert self.train is not None
        column, (origin, known) = "pixels" if self.decoded else "data", self.train
        whole = np.concatenate([known[column], rows[column]])
        usable = np.concatenate([(known["flags"] & BROKEN) == 0, good])
        first = _first_equal(whole, usable)[len(known) :]
        for number in np.flatnonzero((first >= 0) & (first < len(known))).tolist():
            self.add("leak", split, source, number, f"as {plain(origin.key(int(first[number])))}")

    def result(self, provenance: Provenance) -> DataCheck:
        sides = np.concatenate(self.sides, axis=1) if self.sides else np.zeros((2, 0), np.int64)
        sizes: dict[str, int] = {}
        if sides.shape[1]:
            for word, of in (("least", np.min), ("median", np.median), ("most", np.max)):
                sizes |= {f"{word}_{side}": int(of(row)) for side, row in zip(("height", "width"), sides, strict=True)}
        return DataCheck(
            images=self.images,
            counts=self.counts,
            found=self.found,
            sizes=sizes,
            classes=self.classes,
            decoded=self.decoded,
            provenance=provenance,
        )


def _first_equal(digests: np.ndarray, usable: np.ndarray) -> np.ndarray:
    """For each digest [n] the place of the first equal one before it, or −1; unusable ones are equal to none."""
    places, first = np.flatnonzero(usable), np.full(len(digests), -1, np.int64)
    _, index, inverse = np.unique(digests[places], return_index=True, return_inverse=True)
    first[places] = places[index[inverse]]
    return np.where(first == np.arange(len(digests)), -1, first)


def _contradiction(source: Source, rows: np.ndarray, one: int, other: int, same: str) -> str:
    """What labels say of two images with the same pixels; empty where they agree, or where one is unknown."""
    classes = source.classes or ()
    if not source.multi_label:
        mine, theirs = (int(rows["label"][each]) for each in (one, other))
        return "" if mine == theirs else f"{classes[mine]}; {same} is {classes[theirs]}"
    mine, theirs = (rows["labels"][each] for each in (one, other))
    differ = np.flatnonzero((mine != theirs) & (mine >= 0) & (theirs >= 0)).tolist()
    said = [f"{'' if mine[each] else 'not '}{classes[each]}" for each in differ[:_SHOWN]]
    return f"{', '.join(said)}; {same} is the contrary" if said else ""
