"""Series of one or several channels (sensors, ECG, waves): windows of them, normalised by channel, [C, 1, T] a sample.

A recording is a file in a folder of its class, `.npy` ([T] or [C, T]) or `.npz` (an array for each channel), or a row
of parquet files with one or several columns of lists. To a model it is an image of one row: patches of (1, t) are
intervals of t steps, and their positions are times.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from situs.config import Checked
from situs.core.random import uniform
from situs.data.augment.recipes import AugmentConfig
from situs.data.batch import Batch
from situs.data.modalities.audio import AUDIO_SUFFIXES
from situs.data.modalities.base import Measured, grey_levels, measure
from situs.data.modalities.image import check_scale
from situs.data.pipeline import Noise, Pipeline
from situs.data.sources.base import SPLITS, EncodedSource, Source, Wanted, has_shards, list_shards, split_of, splits_of
from situs.data.sources.folder import FolderSource, find_splits
from situs.data.sources.images import IMAGE_SUFFIXES, check_bytes, read_npy, read_npy_header
from situs.data.sources.labels import LABEL_COLUMNS, class_names, classes_of, is_list, is_missing
from situs.data.sources.parquet import ParquetSource, open_parquet, reading
from situs.errors import BrokenSampleError, DataError, SitusError, first_line
from situs.limits import Count

if TYPE_CHECKING:
    from situs.data.config import DataConfig

SUFFIXES = frozenset({".npy", ".npz"})
COLUMNS = ("series", "signal", "values", "sequence", "waveform", "ecg", "eeg", "emg")
_OTHERS = (IMAGE_SUFFIXES | AUDIO_SUFFIXES) - SUFFIXES


@dataclass(frozen=True, kw_only=True)
class SeriesConfig(Checked):
    """How recordings are read and cut into windows."""

    steps: Count | None = None
    """Length of a window in time steps. Default: the length of the shortest training recording. Shorter recordings
    are padded with zeros at the end."""

    stride: Count | None = None
    """Distance between the windows of a recording, in time steps. Every window is a sample. By default, a recording
    gives one window: a random window in training, the middle window in evaluation."""

    columns: tuple[str, ...] = ()
    """Columns of parquet files, one per channel. Default: the first column named series, signal, values, sequence,
    waveform, ecg, eeg or emg."""

    label: str | None = None
    """Column with the labels. Default: label, labels, fine_label, cls or class."""

    time_first: bool = False
    """Whether two-dimensional arrays have the shape [T, C] instead of [C, T]."""

    scale: Literal["set", "each"] = "set"
    """Normalise each channel by mean and standard deviation. set: those of the training split. each: those of each
    window."""


class Recordings(EncodedSource):
    """Recordings by number: `read` gives "series" [C, T] float32, and "label" where there is one."""

    things = "recordings"

    def arrays(self, index: int, *, whole: bool) -> list[Any]:
        """The arrays of a recording: one, or one for each channel. whole: all of it is needed."""
        raise NotImplementedError

    def read(self, index: int) -> dict[str, Any]:
        return self.window(index)

    def window(self, index: int, start: int = 0, steps: int | None = None) -> dict[str, Any]:
        """What `read` gives, for `steps` steps from `start` on."""
        part = self._channels(index, whole=steps is None)[:, start : None if steps is None else start + steps]
        with np.errstate(over="ignore"):
            values = np.array(part, np.float32, order="C")
        if not np.isfinite(values).all():
            raise BrokenSampleError(f"{self.entry(index)}: contains values that are not finite numbers")
        return self.labelled({"series": torch.from_numpy(values)}, index)

    def length(self, index: int) -> int:
        """The steps of a recording."""
        return self._channels(index, whole=False).shape[1]

    def _channels(self, index: int, *, whole: bool) -> np.ndarray:
        """A recording as [C, T], of any type of real numbers."""
        parts = self.arrays(index, whole=whole)
        try:
            parts = [part if isinstance(part, np.ndarray) else np.asarray(part, np.float64) for part in parts]
            values = parts[0] if len(parts) == 1 else np.stack(parts)
        except (ValueError, TypeError) as error:
            reason = "its channels differ in length, or are not numbers"
            raise BrokenSampleError(f"{self.entry(index)}: {reason}") from error
        if values.dtype.kind not in "buif":
            raise BrokenSampleError(
                f"{self.entry(index)}: contains {values.dtype}; a recording must contain real numbers"
            )
        values = values[0] if values.ndim == 3 and len(values) == 1 else values
        flipped = self.settings.time_first and len(parts) == 1
        values = values[None] if values.ndim == 1 else values.T if flipped else values
        if values.ndim != 2 or not values.size:
            raise BrokenSampleError(
                f"{self.entry(index)}: has the shape {list(values.shape)}; a recording must be [T] or [C, T]"
            )
        return values


class SeriesFiles(Recordings, FolderSource):
    """`.npy` and `.npz` files in folders, arranged as image folders are."""

    suffixes = SUFFIXES

    def arrays(self, index: int, *, whole: bool) -> list[Any]:
        packed = self._files[index].lower().endswith(".npz")
        data = self.payload(index) if whole or packed else b""
        try:
            if packed:
                return self._unpacked(data, index)
            return [read_npy(data) if whole else _mapped(self.root / self._files[index])]
        except BrokenSampleError:
            raise
        except Exception as error:  # zip files, their packers and NumPy raise classes of their own
            raise BrokenSampleError(f"{self.entry(index)}: cannot be read as an array ({first_line(error)})") from error

    def _unpacked(self, data: bytes, index: int) -> list[Any]:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = sorted(archive.infolist(), key=lambda member: member.filename.removesuffix(".npy"))
            size = sum(member.file_size for member in members)
            check_bytes(size, lambda: f"{self.entry(index)}, unpacked", "a recording")
            if not members:
                raise ValueError("it is empty")
            return [read_npy(archive.read(member)) for member in members]


def _mapped(file: Path) -> np.ndarray:
    """A NumPy file as a memory map."""
    with file.open("rb") as stream:
        shape, fortran, dtype = read_npy_header(stream, file.stat().st_size)
        return np.memmap(stream, dtype, "r", stream.tell(), shape, "F" if fortran else "C")


class SeriesRows(Recordings, ParquetSource):
    """Rows of parquet files."""

    def __init__(self, path: Path, wanted: Wanted) -> None:
        super().__init__(path, wanted)
        label = _label_column(self._files[0], wanted.settings) if wanted.labels else None
        self._values, self._number = None, {}
        if label is not None:
            shards, split = list_shards(path, ".parquet"), split_of(self._files[0])
            train = next((name for name in SPLITS["train"] if not path.is_file() and name in splits_of(shards)), split)
            training = [file for file in shards if split_of(file) == train] if train != split else self._files
            names = class_names(training[0], open_parquet(training[0]).schema_arrow, label)
            labels = _label_values(training, label)
            self.classes, self._number = classes_of(labels, names, f"{path}, column {label!r}")
            self._values = _label_values(self._files, label) if self.classes else None

    def find_columns(self, file: Path, schema: Any, wanted: Wanted) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The columns, one for each channel."""
        lists = [column.name for column in schema if _holds_lists(column.type)]
        names = wanted.settings.columns or tuple(name for name in COLUMNS if name in lists) or tuple(lists)
        if missing := [name for name in names if name not in lists]:
            reason = (
                f"column {missing[0]!r} contains no lists of numbers; columns with lists: {', '.join(lists) or 'none'}"
            )
            raise SitusError(f"{file}: {reason}", field="series.columns")
        if not names:
            raise SitusError(f"{file}: has no column that contains lists of numbers", field="series.columns")
        return names, ()

    def arrays(self, index: int, *, whole: bool) -> list[Any]:  # noqa: ARG002
        group, row = self._place(index)
        return [values[row].as_py() for values in self._load(group)[0]]

    def label(self, index: int) -> int | None:
        if self._values is None:
            return None
        value = self._values[index]
        if value not in self._number:
            label = (
                "no label, but other rows have one"
                if is_missing(value)
                else f"the label {value!r}, which is not in the training split"
            )
            raise BrokenSampleError(f"{self.entry(index)}: the row has {label}")
        return self._number[value]


def _label_column(file: Path, series: SeriesConfig) -> str | None:
    names = open_parquet(file).schema_arrow.names
    if series.label is not None and series.label not in names:
        reason = f"has no column {series.label!r}, only {', '.join(names)[:200]}"
        raise SitusError(f"{file}: {reason}", field="series.label")
    return series.label or next((name for name in LABEL_COLUMNS if name in names), None)


def _label_values(files: list[Path], label: str) -> list[Any]:
    """The labels of all rows of some files."""
    import pyarrow as pa

    values = []
    for file in files:
        with reading(file):
            part = open_parquet(file).read(columns=[label])
        if label not in part.schema.names:
            raise DataError(f"{file}: has no column {label!r}, but other files have it")
        if pa.types.is_nested(kind := part[label].type):
            reason = f"column {label!r} has the type {str(kind)[:80]}; a label must be one number or name"
            raise SitusError(f"{file}: {reason}", field="series.label")
        values += part[label].to_pylist()
    return values


def _holds_lists(kind: Any) -> bool:
    """Whether a column of this type holds lists of numbers, or lists of such lists."""
    import pyarrow as pa

    depth = 0
    while is_list(kind):
        kind, depth = kind.value_type, depth + 1
    return depth > 0 and (pa.types.is_floating(kind) or pa.types.is_integer(kind))


class Windows(Source):
    """Every window of every recording; a recording no longer than a window is one."""

    def __init__(self, source: Source, steps: int, stride: int) -> None:
        super().__init__(source.name, source.classes, None, source.strict)
        self.source, self.steps, self.things, self.notes = source, steps, "windows", source.notes
        self.places: list[tuple[int, int]] = []
        for index in range(len(source)):
            try:
                whole, row = self._recording(index)
                length = whole.length(row)
            except BrokenSampleError:
                length = 0  # named when it is read
            self.places += [(index, start) for start in range(0, max(1, length - steps + 1), stride)]

    def __len__(self) -> int:
        return len(self.places)

    def key(self, index: int) -> str:
        row, start = self.places[index]
        return f"{self.source.key(row)}@{start}"

    def label(self, index: int) -> Any:
        return self.source.label(self.places[index][0])

    def read(self, index: int) -> dict[str, Any]:
        place, start = self.places[index]
        whole, row = self._recording(place)
        return whole.window(row, start, self.steps)

    def _recording(self, index: int) -> tuple[Recordings, int]:
        """The set that recording `index` is read from, and its number there."""
        whole, row = self.source.origin(index)
        assert isinstance(whole, Recordings)
        return whole, row


class SeriesPipeline(Pipeline):
    """Recordings [C, T] to batches [B, C, 1, steps] of mean 0 and deviation 1."""

    device_tensors = ("mean", "std")

    def __init__(self, source: Source, data: DataConfig, augment: AugmentConfig | None) -> None:
        super().__init__(source, training=augment is not None)
        self.steps, self.channels, self.seed = data.size[1], data.channels, data.seed
        self.smoothing = 0.0 if augment is None else augment.label_smoothing
        self.alone = data.series.scale == "each"
        self.mean, self.std = (torch.tensor(part)[:, None] for part in data.normalisation)
        self.row_bytes = 4 * self.steps * self.channels

    def fetch(self, index: int, epoch: int, draw: int) -> dict[str, Any]:
        """A random window in training, the middle one in evaluation; a shorter one is padded with zeros."""
        sample = super().fetch(index, epoch, draw)
        values = sample["series"]
        if len(values) != self.channels:
            reason = f"has {len(values)} channels, but the model takes {self.channels}"
            raise BrokenSampleError(f"{self.source.name}, {self.source.key(index)}: {reason}")
        free = max(0, values.shape[1] - self.steps)
        share = float(uniform(self.seed, epoch, torch.tensor([draw]), "series.window", ())) if self.training else 0.5
        start = int(share * (free + 1))
        values = values[:, start : start + self.steps]
        padding = self.steps - values.shape[1]
        return sample | {"series": torch.nn.functional.pad(values, (0, padding)), "steps": self.steps - padding}

    def collate(self, epoch: int, draws: list[int], samples: list[dict[str, Any]]) -> dict[str, Tensor]:  # noqa: ARG002
        """ "series" [b, C, steps], "steps" [b] that are real, and the labels."""
        values = {"series": torch.stack([sample["series"] for sample in samples])}
        for name in ("steps", "label"):
            if name in samples[0]:
                values[name] = torch.tensor([sample[name] for sample in samples])
        return values

    def finish(self, values: Mapping[str, Tensor], ids: Tensor, noise: Noise) -> Batch:  # noqa: ARG002
        series, steps = values["series"], values["steps"][:, None, None]
        real = torch.arange(self.steps, device=series.device) < steps
        mean, std = self.mean, self.std
        if self.alone:
            mean = series.sum(-1, keepdim=True) / steps
            std = (((series - mean) * real).square().sum(-1, keepdim=True) / steps).sqrt().clamp(min=1e-6)
        return Batch(((series - mean) / std * real)[:, :, None], ids, self.labels(values, self.smoothing))

    def shown(self, inputs: Tensor) -> Tensor:
        """A row of grey levels, the mean of the channels."""
        return grey_levels(inputs.mean(1, keepdim=True))


def _is_series(file: Path) -> bool:
    """Whether a file holds no image: several arrays, one of one dimension, or one of numbers that are no pixels."""
    try:
        array = _mapped(file) if file.suffix.lower() == ".npy" else np.zeros(1)
        if array.ndim != 2 or not array.size:
            return array.ndim == 1
        deep = array.dtype.kind in "iu" and array.dtype.itemsize > 2
        return bool(deep or array.min() < 0 or (array.dtype.kind == "f" and array.max() > 1))
    except (ValueError, TypeError, OSError, EOFError):
        return False


class Series(Measured):
    """Recordings of one or several channels over time."""

    kind, things, suffixes, table, Config = "series", "recordings", SUFFIXES, "series", SeriesConfig
    unused, whole_set = ("multi_label", "crop_share"), True
    augments = frozenset({"label_smoothing", "repeated"})
    label_fields = ("data", "data.series.label")

    def check(self, data: DataConfig) -> None:
        super().check(data)
        check_scale(data, data.channels, "channel")
        if data.img_size is not None and (
            self.size(data)[0] != 1 or data.series.steps not in (None, self.size(data)[1])
        ):
            allowed = f"(1,{data.series.steps or 'STEPS'}): one row, and one column per step of a window"
            raise SitusError(field="img_size", value=data.img_size, allowed=allowed)

    def resolve(self, data: DataConfig, opened: Callable[[DataConfig], Source]) -> DataConfig:
        """With the channels, the steps of a window, and the mean and deviation over the training split."""
        if data.img_size is not None and data.mean and data.std:
            return data
        source = opened(replace(data, split=None, series=replace(data.series, stride=None)))
        mean, std, shortest = measure(source, lambda sample: sample["series"])
        scale = {"mean": data.mean or tuple(mean.tolist()), "std": data.std or tuple(std.tolist())}
        size = data.img_size or (1, data.series.steps or shortest)
        return replace(data, channels=len(mean), img_size=size, **scale)

    def size(self, data: DataConfig) -> tuple[int, int]:
        """1, and the steps of a window."""
        steps = data.series.steps
        return super().size(data) if data.img_size is not None or steps is None else (1, steps)

    def scale_length(self, data: DataConfig) -> int:
        return data.channels

    def prepared(self, data: DataConfig) -> dict[str, Any]:
        """With the steps of a window."""
        return super().prepared(data) | {"steps": self.size(data)[1]}

    def facts(self, data: DataConfig | None, shape: tuple[int, ...] | None, channels: int) -> list[str]:  # noqa: ARG002
        assert data is not None
        scale = "those of the window" if data.series.scale == "each" else "those under situs.series in config.json"
        return [
            f"Recordings: {channels} × {self.size(data)[1]} steps, input shape [{channels}, 1, {self.size(data)[1]}]",
            f"Each channel is normalised by its mean and standard deviation: {scale}",
        ]

    def is_at(self, path: Path, *, multi_label: bool) -> bool:  # noqa: ARG002
        """Whether arrays are the only samples, and the first array of the first and of the last folder is no image."""
        last: Path | None = None
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            arrays = []
            for name in names:
                suffix = name[name.rfind(".") :].lower()
                if suffix in _OTHERS and not name.startswith("."):
                    return False
                if suffix in SUFFIXES and not name.startswith("."):
                    arrays.append(name)
            if arrays and last is None and not _is_series(Path(folder, min(arrays))):
                return False
            last = Path(folder, min(arrays)) if arrays else last
        return last is not None and _is_series(last)

    def in_columns(self, schema: Any, *, asked: bool) -> bool:
        """Whether there are lists of numbers, under a usual name where the user does not ask for series."""
        return any((asked or column.name in COLUMNS) and _holds_lists(column.type) for column in schema)

    def splits(self, path: Path, data: DataConfig) -> set[str]:  # noqa: ARG002
        return set() if path.is_file() else find_splits(path, ".parquet")

    def open(self, path: Path, wanted: Wanted, data: DataConfig) -> Source:  # noqa: ARG002
        rows = has_shards(path, ".parquet")
        if not rows and not path.is_dir():
            raise DataError(f"{path}: must be a folder of .npy or .npz files, or parquet")
        return (SeriesRows if rows else SeriesFiles)(path, wanted)

    def cut(self, source: Source, data: DataConfig) -> Source:
        """Windows of the recordings; those of one recording are on one side of a split."""
        return source if data.series.stride is None else Windows(source, self.size(data)[1], data.series.stride)

    def pipeline(self, source: Source, data: DataConfig, augment: AugmentConfig | None, *_: Any) -> Pipeline:
        return SeriesPipeline(source, data, augment)
