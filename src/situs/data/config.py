"""Where samples lie and how they come to a model: the config that every loader is made by."""

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
NO_DATA = "give the images, or samples for the embedded set of 9,000 pictures of clothes"

if TYPE_CHECKING:
    Kind = Target = str

    class _Tables(Checked):
        def __getattr__(self, name: str) -> Any: ...
else:
    Kind, Target = Literal[tuple(KINDS)], Literal[TARGETS]
    _Tables = make_dataclass(
        "_Tables",
        [
            (each.table, each.Config, field(default_factory=each.Config, kw_only=True))
            for each in MODALITIES
            if each.table
        ],
        bases=(Checked,),
        frozen=True,
    )
    """A table for the settings of each modality that has some, by its name: audio, masks, objects, text."""


@dataclass(frozen=True)
class DataConfig(_Tables):
    """Where the samples are and how they come to the model. What is true of one modality alone stands in its table."""

    retired: ClassVar = {"decode": (ANY, ""), "resize": (ANY, "")}

    path: str = ""
    """Images, clips or sentences: a folder, parquet, tar, CIFAR batches, csv, txt, or "samples" (embedded images);
    clips lie in folders, as Speech Commands has them, or in parquet; sentences in parquet, csv, tsv, jsonl or txt."""

    kind: Kind | None = None
    """What the samples are; by default what lies at the path."""

    split: str | None = None
    """train, val or test; by default the training split where there is one, and val for evaluation."""

    multi_label: bool = False
    """Whether an image has any number of the classes: by a table among the files, or by a list or 0/1 columns of
    parquet files. By default it has one."""

    target: Target = "class"
    """What is known of an image: its class (or any number of them), a mask, which gives each of its pixels one, or its
    objects; of text the class of each sentence, or its words, for a language model."""

    held_out: Annotated[float, Within("[0, 1)")] | None = None
    """Share of data without a val or test split that is held out as both, by the images' names; train is the rest. By
    default a fifth where labels are learned, and nothing where none are; 0: nothing."""

    img_size: Count | tuple[Count, Count] | None = None
    """Side of the square, or height and width, that the model sees; by default the model's own. Of clips the numbers of
    a frame and the frames, which follow from `audio`."""

    channels: Count = 3
    """Channels the model sees: grey is repeated to 3, RGB weighed to 1, others must match. Of clips always 1."""

    count: Count | None = None
    """Train on at most so many of the images, chosen at random and the same every time; by default on all."""

    per_class: Count | None = None
    """Train on at most so many samples of each class, chosen likewise; by default on all."""

    balanced: bool = False
    """Draw every class equally often in training: samples of a small class come several times an epoch, each time
    augmented anew, and of a large class each epoch takes another part."""

    batch: Count | None = None
    """Images a step over all ranks; by default 256, or a tenth of a set of fewer than 2,560, and 8 at least."""

    workers: Natural = 4
    """Processes that decode a streamed set, at most one a core; 0 decodes in the main process."""

    resident: Literal["auto", "always", "never"] = "auto"
    """Whether the set is decoded once and kept on the device; auto: small images of one size that fit, and none with
    masks. Images with objects never are."""

    resident_gib: Positive = 4.0
    """Memory that a resident set may take."""

    order: Literal["auto", "exact", "blocks"] = "auto"
    """How a streamed set is shuffled: any sample anywhere, or mixed within a window of blocks, each read once; auto:
    blocks for parquet files that memory does not hold, and for remote shards of more than 64 GiB."""

    window_gib: Positive = 2.0
    """Memory of the blocks that are mixed at a time, over all workers and ranks."""

    crop_share: Annotated[float, Within("(0, 1]")] = 1.0
    """Evaluation: share of the image's shorter side that the centre crop keeps (ImageNet: 0.875)."""

    mean: tuple[float, ...] = ()
    """Mean of each channel, subtracted; default: ImageNet's for three channels, else 0.5. Of clips the mean of each
    number of a frame; default: measured on the training split."""

    std: tuple[Positive, ...] = ()
    """Deviation of each channel, divided by; default: ImageNet's for three channels, else 0.25. Of clips likewise."""

    seed: int = 0
    """Seed of order and augmentation."""

    strict: bool = False
    """Stop at a broken image instead of skipping it."""

    def check(self) -> None:
        self.modality.check(self)

    @property
    def modality(self) -> Modality:
        """What the samples are; images where nobody has looked or said."""
        return modality_of(self.kind, self.target)

    def for_method(self, method: str, needs: Sequence[str]) -> DataConfig:
        """With the target that a method needs: masks, objects or words are read for one that learns from them."""
        target = next((need for need in needs if need in TARGETS), "class")
        if target == self.target:
            return self
        if target == "class":
            asked = self.modality.known or self.target
            learns = "learns a class of each sample" if "label" in needs else f"learns without {asked}"
            raise SitusError(f"{method} {learns}, and {asked} are asked for", field=("data.target", "method"))
        modality = modality_of(self.kind, target)
        return replace(
            self, target=target, multi_label=False, kind=self.kind or (modality.kind if modality.last else None)
        )

    def read_as(self, model: str, readings: Mapping[str, Any]) -> DataConfig:
        """With another way of reading samples than the model was trained on (`Modality.reading`), where one is said."""
        data = self
        for name, value in readings.items():
            if value is None or (is_dataclass(value) and value == type(value)()):  # pyright: ignore[reportCallIssue]
                continue
            if name != self.modality.reading:
                able = things_of([each for each in MODALITIES if each.reading == name])
                raise SitusError(f"{name}: is for {able}, and {model} takes {self.modality.things}", field=name)
            data = self.modality.read_as(data, value)
        return data

    @property
    def size(self) -> tuple[int, int]:
        """Height and width that the model sees; of clips numbers of a frame and frames, of sentences 1 and ids."""
        return self.modality.size(self)

    @property
    def normalisation(self) -> Scale:
        """Mean and deviation of each channel, with the defaults filled in; of clips of each number of a frame."""
        return self.modality.normalisation(self)
