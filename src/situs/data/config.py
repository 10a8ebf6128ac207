"""Where samples lie and how they come to a model: the config that every loader is made by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from situs.config import ANY, Checked, from_dict, to_dict
from situs.data.audio import AudioConfig
from situs.data.masks import MaskConfig
from situs.data.objects import ObjectConfig
from situs.data.sources.base import Kind
from situs.data.text import COLUMNS, LONGEST, TextConfig
from situs.errors import SitusError, counted
from situs.limits import Count, Natural, Positive, Within

_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Target = Literal["class", "mask", "objects", "words"]
"""What is known of a sample."""

BATCH = 256
_OF_IMAGES = ("multi_label", "crop_share", "target")
_NOT_OF_TEXT = (*_OF_IMAGES[:-1], "img_size", "channels", "mean", "std")
_OF_CLASSES = ("multi_label", "per_class", "balanced")
DENSE = {"mask": "masks", "objects": "objects"}
"""Targets that say more of an image than its class, and the field that says how each is read."""
NO_DATA = "give the images, or samples for the embedded set of 9,000 pictures of clothes"


@dataclass(frozen=True)
class DataConfig(Checked):
    """Where the samples are and how they come to the model."""

    retired: ClassVar = {"decode": (ANY, ""), "resize": (ANY, "")}

    path: str = ""
    """Images, clips or sentences: a folder, parquet, tar, CIFAR batches, csv, txt, or "samples" (embedded images);
    clips lie in folders, as Speech Commands has them, or in parquet; sentences in parquet, csv, tsv, jsonl or txt."""

    kind: Kind | None = None
    """image, audio or text; by default what lies at the path."""

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

    audio: AudioConfig = field(default_factory=AudioConfig)
    """Clips of sound: their length, their classes and their features."""

    masks: MaskConfig = field(default_factory=MaskConfig)
    """Masks: what the numbers in them mean."""

    objects: ObjectConfig = field(default_factory=ObjectConfig)
    """Objects: their classes."""

    text: TextConfig = field(default_factory=TextConfig)
    """Sentences: their columns and their ids."""

    def check(self) -> None:
        clips = self.kind == "audio"
        self._check_text()
        count, each = (self.audio.width, "number of a frame") if clips else (self.channels, "channel")
        for name in ("mean", "std"):
            if len(getattr(self, name)) not in {0, count}:
                allowed = f"{counted(count, 'numbers')}, one a {each}"
                raise SitusError(field=(name, "channels"), value=getattr(self, name), allowed=allowed)
        plain = DataConfig.__dataclass_fields__
        for name in _OF_IMAGES if clips else ():
            if (value := getattr(self, name)) != plain[name].default:
                raise SitusError(f"{name}={value}: is for images, and {self.path or 'the set'} holds clips", field=name)
        things = DENSE.get(self.target)
        for name in () if things is None else _OF_CLASSES:
            if (value := getattr(self, name)) != plain[name].default:
                raise SitusError(f"{name}={value}: is for a class an image, and {things} are asked for", field=name)
        if clips and self.img_size not in (None, self.audio.size):
            allowed = f"{self.audio.size[0]},{self.audio.size[1]}, which the clips' features have"
            raise SitusError(field="img_size", value=self.img_size, allowed=allowed)

    def _check_text(self) -> None:
        texts, plain = self.kind == "text", DataConfig.__dataclass_fields__
        for name in _NOT_OF_TEXT if texts else ():
            if (value := getattr(self, name)) != plain[name].default:
                said = f"{name}={value}: is for images, and {self.path or 'the set'} is read as sentences"
                raise SitusError(said, field=name)
        if (texts and self.target in DENSE) or (self.kind not in (None, "text") and self.target == "words"):
            allowed = "class or words for text" if texts else "class, mask or objects: words are read from text"
            raise SitusError(field="target", value=self.target, allowed=allowed)

    def wanted(self) -> dict[str, Any]:
        """How the set is asked for, by the arguments of `open_source`."""
        names = ("channels", "strict", "held_out", "multi_label", "kind", "audio", "text")
        dense = {things: getattr(self, things) if self.target == target else None for target, things in DENSE.items()}
        return {name: getattr(self, name) for name in names} | dense | {"words": self.target == "words"}

    def learned_by(self, method: str, needs: Sequence[str]) -> DataConfig:
        """With the targets that a method needs: masks, objects or words are read for one that learns from them."""
        for dense in DENSE:
            if dense in needs:
                return replace(self, target=dense, multi_label=False)
        if self.target in DENSE:
            learns = "learns a class an image" if "label" in needs else f"learns without {DENSE[self.target]}"
            said = f"{method} {learns}, and {DENSE[self.target]} are asked for"
            raise SitusError(said, field=("data.target", "method"))
        if "words" in needs:
            return replace(self, target="words", kind="text")
        return replace(self, target="class") if self.target == "words" else self

    def split_by(self) -> dict[str, Any]:
        """What decides which splits the set has, by the arguments of `splits_at`."""
        dense = {things: self.target == target for target, things in DENSE.items()}
        return {"multi_label": self.multi_label, "kind": self.kind, **dense, "words": self.target == "words"}

    def told(self) -> dict[str, Any]:
        """How a model's samples are prepared, as an export of it tells: no places on any machine.

        Of images mean, std and crop, and "masks" or "objects" where they have some; of clips "audio", with their mean
        and deviation in it; of sentences "text", how long they may be and the columns that were asked for.
        """
        if self.kind == "text":
            columns = {name: getattr(self.text, name) for name in COLUMNS}
            return {"text": {"longest": self.longest, **{name: own for name, own in columns.items() if own}}}
        mean, std = self.normalisation
        if self.kind != "audio":
            things = DENSE.get(self.target)
            dense = {} if things is None else {things: to_dict(getattr(self, things))}
            return {"mean": mean, "std": std, "crop": self.crop_share, **dense}
        return {"audio": to_dict(replace(self.audio, noise=None, snr_db=None)) | {"mean": mean, "std": std}}

    @staticmethod
    def of_clips(told: Mapping[str, Any], path: str = "") -> DataConfig:
        """The config of clips that `told` says under "audio"."""
        own = {name: value for name, value in told.items() if name not in ("mean", "std")}
        audio = from_dict(AudioConfig, own, where="audio")
        mean, std = tuple(told["mean"]), tuple(told["std"])
        return DataConfig(path, kind="audio", img_size=audio.size, channels=1, audio=audio, mean=mean, std=std)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width that the model sees; of sentences 1 and the ids of the longest."""
        if self.kind == "text":
            return 1, self.longest
        if self.kind == "audio":
            return self.audio.size
        if self.img_size is None:
            raise SitusError("img_size: must be given where no model says it", field="img_size")
        return (self.img_size, self.img_size) if isinstance(self.img_size, int) else self.img_size

    @property
    def longest(self) -> int:
        """Ids of a sentence at most."""
        return self.text.longest or LONGEST

    @property
    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation of each channel, with the defaults filled in; of clips of each number of a frame."""
        if self.kind == "audio":
            return self.mean or (0.0,) * self.audio.width, self.std or (1.0,) * self.audio.width
        mean, std = _IMAGENET if self.channels == 3 else ((0.5,) * self.channels, (0.25,) * self.channels)
        return self.mean or mean, self.std or std
