"""Where samples are and how they are read: the config of every loader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, make_dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from situs.config import ANY, Checked
from situs.data.modalities import KINDS, MODALITIES, TARGETS, modality_of
from situs.data.modalities.base import Modality, Scale, things_of
from situs.errors import SitusError
from situs.limits import Count, Natural, Positive, Within

BATCH = 256
NO_DATA = 'give a path to images, or "samples" for the 9,000 included images of clothes'

if TYPE_CHECKING:
    Kind = Target = str

    class _Tables(Checked):
        def __getattr__(self, name: str) -> Any: ...
else:
    Kind, Target = Literal[tuple(KINDS)], Literal[TARGETS]
    _Tables = make_dataclass(
        "_Tables",
        [
            (modality.table, modality.Config, field(default_factory=modality.Config, kw_only=True))
            for modality in MODALITIES
            if modality.table
        ],
        bases=(Checked,),
        frozen=True,
    )
    """The settings of single modalities, in one table each: `audio`, `masks`, `objects`, `text` and `series`."""


@dataclass(frozen=True)
class DataConfig(_Tables):
    """Where the samples are and how they are read. Settings of one modality are in that modality's table."""

    retired: ClassVar = {"decode": (ANY, ""), "resize": (ANY, "")}

    path: str = ""
    """Images, clips or sentences: a folder, parquet, tar, CIFAR batches, csv, txt, or "samples" (included images)."""

    kind: Kind | None = None
    """Kind of the samples. Default: detected from the files."""

    split: str | None = None
    """Split: train, val or test. By default, training uses train (if the data has splits), and evaluation uses val."""

    multi_label: bool = False
    """Samples may have several classes. The classes come from a table among the files. In parquet, they come from a
    column of lists or from columns of 0 and 1. By default, a sample has one class."""

    target: Target = "class"
    """Kind of labels. For images: class, mask (a class per pixel) or objects. For sentences: class, or words (for a
    language model)."""

    held_out: Annotated[float, Within("[0, 1)")] | None = None
    """For data without a val or test split: fraction of the samples that is held out for evaluation. The choice depends
    on file names (and, for rare classes, on labels). It rarely changes when samples are added. Default: a fifth if the
    method learns labels, otherwise 0."""

    img_size: Count | tuple[Count, Count] | None = None
    """Side of the images, or height and width; the default is the model's own image size. For clips, the fields of
    `data.audio` determine the size."""

    channels: Count = 3
    """Number of input channels. For 3 channels, the channel of a grey image is repeated. For 1 channel, RGB images
    become grey. Any other number must match the images. Clips have 1 channel."""

    count: Count | None = None
    """Train on at most this many samples, chosen at random with a fixed seed. Default: all samples."""

    per_class: Count | None = None
    """Train on at most this many samples per class, chosen at random with a fixed seed. Default: all samples."""

    balanced: bool = False
    """Draw every class equally often. Samples of small classes repeat within an epoch, with new augmentation. Each
    epoch uses only a random part of a large class."""

    batch: Count | None = None
    """Samples per step over all ranks; the default is 256. For fewer than 2,560 samples, the default is a tenth of the
    samples, but at least 8. With differential privacy, the default is 256, or all samples if the data set is
    smaller."""

    workers: Natural = 4
    """Number of processes that decode a streamed data set, at most one per core. With 0, the main process decodes."""

    resident: Literal["auto", "always", "never"] = "auto"
    """Whether to decode the data set once and keep it on the device. auto: yes, if the images are small, have one size
    and no masks, and fit into `resident_gib`. Images with objects are never kept."""

    resident_gib: Positive = 4.0
    """Largest memory of a data set on the device, in GiB."""

    order: Literal["auto", "exact", "blocks"] = "auto"
    """Shuffling of a streamed data set. exact: read samples in a fully random order. blocks: read each block (such as a
    row group of parquet) once, and mix samples within a window of blocks. auto: blocks for parquet files larger than
    the memory and for remote shards above 64 GiB, otherwise exact."""

    window_gib: Positive = 2.0
    """Memory for the window of blocks, over all workers and ranks, in GiB."""

    crop_share: Annotated[float, Within("(0, 1]")] = 1.0
    """In evaluation: size of the centre crop, as a fraction of the shorter side (0.875 is usual for ImageNet)."""

    mean: tuple[float, ...] = ()
    """Mean of each channel, for normalisation. Default: ImageNet's for three channels, otherwise 0.5. For clips: the
    mean of each MFCC or mel band, measured on the training split."""

    std: tuple[Positive, ...] = ()
    """Standard deviation of each channel, for normalisation. Default: ImageNet's for three channels, otherwise 0.25.
    For clips: the standard deviation of each MFCC or mel band, measured on the training split."""

    seed: int = 0
    """Random seed of order and augmentation."""

    strict: bool = False
    """Stop at a broken sample instead of skipping it."""

    def check(self) -> None:
        self.modality.check(self)

    @property
    def modality(self) -> Modality:
        """What the samples are; images where no kind is set."""
        return modality_of(self.kind, self.target)

    def for_method(self, method: str, needs: Sequence[str]) -> DataConfig:
        """With the target that a method needs: masks, objects or words are read for one that learns from them."""
        target = next((need for need in needs if need in TARGETS), "class")
        if target == self.target:
            return self
        if target == "class":
            labels = self.modality.annotations or self.target
            learns = "learns a class of each sample" if "label" in needs else f"learns without {labels}"
            raise SitusError(
                f"{method} {learns}, but the target of the data is {labels}", field=("data.target", "method")
            )
        modality = modality_of(self.kind, target)
        kind = self.kind or (modality.kind if modality.low_priority else None)
        return replace(self, target=target, multi_label=False, kind=kind)

    def read_as(self, model: str, readings: Mapping[str, Any]) -> DataConfig:
        """With other reading options than the model was trained with (`Modality.reading_option`), where any is set."""
        data = self
        for name, value in readings.items():
            if value is None or (is_dataclass(value) and value == type(value)()):  # pyright: ignore[reportCallIssue]
                continue
            if name != self.modality.reading_option:
                able = things_of([modality for modality in MODALITIES if modality.reading_option == name])
                raise SitusError(
                    f"{name}: applies only to models of {able}, but {model} takes {self.modality.things}", field=name
                )
            data = self.modality.read_as(data, value)
        return data

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the model's input; for clips features and frames, for sentences 1 and ids."""
        return self.modality.size(self)

    @property
    def normalisation(self) -> Scale:
        """Mean and standard deviation of each channel (for clips of each feature), with the defaults filled in."""
        return self.modality.normalisation(self)
