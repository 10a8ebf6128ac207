"""A row of numbers for each image of a set: what its header says, and hashes of its bytes and of its pixels."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from situs.data.sources.base import EncodedSource, Source
from situs.data.sources.coco import CocoSource
from situs.data.sources.images import decode, read_header
from situs.data.sources.remote.transfer import RemoteError
from situs.errors import BrokenSampleError, SitusError

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
