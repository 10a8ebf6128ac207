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
NO_DATA = "give a path to images, or the word samples for the embedded set of 9,000 pictures of clothes"

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
    """The settings of each modality that has some, as a table by its name: audio, masks, objects, text, series."""


@dataclass(frozen=True)
class DataConfig(_Tables):
    """Where the samples are and how they are read. Settings of one modality alone are in its table."""

    retired: ClassVar = {"decode": (ANY, ""), "resize": (ANY, "")}

    path: str = ""
    """Images, clips or sentences: a folder, parquet, tar, CIFAR batches, csv, txt, or "samples" (embedded images);
    clips: folders as in Speech Commands, or parquet; sentences: parquet, csv, tsv, jsonl or txt."""

    kind: Kind | None = None
    """Kind of samples. Default: detected from the files."""

    split: str | None = None
    """train, val or test. Default: train if there is one; val for evaluation."""

    multi_label: bool = False
    """Samples may have several classes: from a table among the files, or a list or 0/1 columns in parquet. Default:
    one class each."""

    target: Target = "class"
    """Labels: class, mask (a class per pixel) or objects of an image; class or words (for a language model) of a
    sentence."""

    held_out: Annotated[float, Within("[0, 1)")] | None = None
    """Share to hold out as val and test, if the data has neither, chosen by file name. Default: a fifth if labels
    are learned, else 0."""

    img_size: Count | tuple[Count, Count] | None = None
    """Input size: side of a square, or height and width. Default: the model's. For clips it follows from `audio`."""

    channels: Count = 3
    """Input channels: grey is repeated to 3, RGB becomes grey for 1, others must match. Clips have 1."""

    count: Count | None = None
    """Train on at most this many samples, chosen at random with a fixed seed. Default: all."""

    per_class: Count | None = None
    """Train on at most this many samples per class, chosen at random with a fixed seed. Default: all."""

    balanced: bool = False
    """Draw every class equally often: small classes repeat within an epoch, with new augmentation; large classes
    use a different part in each epoch."""

    batch: Count | None = None
    """Samples per step over all ranks; default: 256; for fewer than 2,560 samples a tenth of them, at least 8;
    with dp, all of fewer than 256."""

    workers: Natural = 4
    """Processes that decode a streamed data set, at most one per core; 0: decode in the main process."""

    resident: Literal["auto", "always", "never"] = "auto"
    """Decode the data set once and keep it on the device. auto: if its images are small, of one size, fit, and have
    no masks. Never with objects."""

    resident_gib: Positive = 4.0
    """Largest memory of a resident data set, in GiB."""

    order: Literal["auto", "exact", "blocks"] = "auto"
    """Shuffling of a streamed data set: random access to every sample, or mixing within a window of blocks that are
    read once. auto: blocks for parquet that does not fit into memory and for remote shards above 64 GiB."""

    window_gib: Positive = 2.0
    """Memory of the blocks that are mixed at a time, over all workers and ranks, in GiB."""

    crop_share: Annotated[float, Within("(0, 1]")] = 1.0
    """Evaluation: share of the shorter side that the centre crop keeps (ImageNet: 0.875)."""

    mean: tuple[float, ...] = ()
    """Mean of each channel, for normalisation. Default: ImageNet's for three channels, else 0.5. For clips: of each
    coefficient, measured on the training split."""

    std: tuple[Positive, ...] = ()
    """Standard deviation of each channel, for normalisation. Default: ImageNet's for three channels, else 0.25. For
    clips: likewise."""

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
            raise SitusError(f"{method} {learns}, but {labels} are asked for", field=("data.target", "method"))
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
                raise SitusError(f"{name}: is for {able}, but {model} takes {self.modality.things}", field=name)
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
