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
NO_DATA = "name the images, or samples for the embedded set of 9,000 pictures of clothes"

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
    clips in folders, as in Speech Commands, or in parquet; sentences in parquet, csv, tsv, jsonl or txt."""

    kind: Kind | None = None
    """Kind of the samples; by default that of the files at the path."""

    split: str | None = None
    """train, val or test; by default the training split where there is one, and val for evaluation."""

    multi_label: bool = False
    """Whether an image has any number of the classes: by a table among the files, or by a list or 0/1 columns of
    parquet files. By default it has one."""

    target: Target = "class"
    """What is learned of an image: its class (or any number of them), a mask with the class of each pixel, or its
    objects; of text the class of each sentence, or its words, for a language model."""

    held_out: Annotated[float, Within("[0, 1)")] | None = None
    """Share of data without a val or test split that is held out as both, by the samples' names; train is the rest. By
    default a fifth where labels are learned, otherwise nothing; 0: nothing."""

    img_size: Count | tuple[Count, Count] | None = None
    """Side of the square, or height and width, of the model's input; by default the model's own. For clips it follows
    from `audio`: features a frame, and frames."""

    channels: Count = 3
    """Channels of the model's input: grey is repeated to 3, RGB converted to 1, others must match. For clips 1."""

    count: Count | None = None
    """Train on at most so many samples, chosen at random and the same every time; by default on all."""

    per_class: Count | None = None
    """Train on at most so many samples of each class, chosen in the same way; by default on all."""

    balanced: bool = False
    """Draw every class equally often in training: samples of a small class come several times an epoch, each time
    augmented anew; of a large class each epoch takes another part."""

    batch: Count | None = None
    """Samples a step over all ranks; by default 256, or a tenth of a set of fewer than 2,560, and 8 at least."""

    workers: Natural = 4
    """Processes that decode a streamed set, at most one a core; 0 decodes in the main process."""

    resident: Literal["auto", "always", "never"] = "auto"
    """Whether the set is decoded once and kept on the device; auto: small images of one size that fit, without masks.
    Images with objects are always streamed."""

    resident_gib: Positive = 4.0
    """Memory that a resident set may take."""

    order: Literal["auto", "exact", "blocks"] = "auto"
    """How a streamed set is shuffled: any sample anywhere, or mixed within a window of blocks, each read once; auto:
    blocks for parquet files that do not fit into memory, and for remote shards of more than 64 GiB."""

    window_gib: Positive = 2.0
    """Memory of the blocks that are mixed at a time, over all workers and ranks."""

    crop_share: Annotated[float, Within("(0, 1]")] = 1.0
    """Evaluation: share of the image's shorter side that the centre crop keeps (ImageNet: 0.875)."""

    mean: tuple[float, ...] = ()
    """Mean of each channel, subtracted; default: ImageNet's for three channels, else 0.5. For clips the mean of each
    feature; default: measured on the training split."""

    std: tuple[Positive, ...] = ()
    """Standard deviation of each channel; default: ImageNet's for three channels, else 0.25. For clips as `mean`."""

    seed: int = 0
    """Seed of order and augmentation."""

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
                raise SitusError(f"{name}: applies to {able}, but {model} takes {self.modality.things}", field=name)
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
