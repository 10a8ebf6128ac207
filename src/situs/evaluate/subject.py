"""What an evaluation is made of: a run, an export or a timm model, with its data prepared as it was trained."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from situs.backbones import create_backbone
from situs.backbones.base import Backbone
from situs.backbones.timm_create import pretrained_state
from situs.backbones.weights import load_weights
from situs.config import check_range
from situs.data.loader import DataConfig, Loader, make_loader
from situs.data.sources import judged_split, open_source
from situs.data.subset import Subset
from situs.errors import SitusError
from situs.files import read_json
from situs.methods.base import Method
from situs.train import distributed
from situs.train.card import last_name
from situs.train.export import PREPARED
from situs.train.run import is_run, load_run

PUBLISHED, RANDOM = "pretrained", "random"
"""Values of --weights that are no file: those timm publishes, and none."""
_LOCKED = " (locked)"


@dataclass(frozen=True)
class Subject:
    """A backbone to evaluate.

    positions: whether its positions took part in training. classifier: whether it has a head that was trained. data:
    how its images are prepared. classes: their names, where they are known. facts: where it comes from, no paths.
    method: what a run was trained with, its own heads and tokens included; None for an export or a name. identity:
    a hash of where it was opened from, by which one model's results are told from another's. locked: whether it is the
    export of a locked model, opened without its key.
    """

    name: str
    backbone: Backbone
    positions: bool
    classifier: bool
    data: DataConfig
    classes: tuple[str, ...] | None
    facts: dict[str, Any]
    method: Method | None = None
    identity: str = ""
    locked: bool = False

    @property
    def device(self) -> torch.device:
        """Where its weights are; the CPU where it has none."""
        return next((weight.device for weight in self.backbone.parameters()), torch.device("cpu"))

    def unlocked(self, backbone: Backbone) -> Subject:
        """The same with the backbone that its key has opened."""
        name = self.name.removesuffix(_LOCKED)
        facts = {**self.facts, "locked": "opened with its key"}
        return replace(self, name=name, backbone=backbone.to(self.device).eval(), facts=facts, locked=False)

    def holding_out(self, share: float) -> Subject:
        """The same, with another share held out of data without a split to be judged on."""
        return replace(self, data=replace(self.data, held_out=share))


def open_subject(
    source: str,
    *,
    weights: str | None = None,
    img_size: tuple[int, int] | None = None,
    ema: bool | None = None,
    device: torch.device | str = "cpu",
) -> Subject:
    """A run folder, an export folder, or a timm name with `weights` (a file, "pretrained" or "random").

    ema: for a run, the mean of its weights; None takes it where there is one. img_size: for a timm name.
    """
    origin = Path(source).resolve().as_posix() if Path(source).exists() else f"{source}={weights}"
    if is_run(source):
        _refuse("a run", weights=weights, img_size=img_size)
        subject = _open_run(source, ema, device)
    elif (Path(source) / "config.json").is_file():
        _refuse("an export", weights=weights, img_size=img_size)
        subject = _open_folder(Path(source), device)
    else:
        subject = _open_name(source, weights, img_size, device)
    return replace(subject, identity=identity_of(origin))


def identity_of(origin: str) -> str:
    """A short hash of where something was opened from: results tell nobody's folders."""
    return hashlib.sha256(origin.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def load_set(
    subject: Subject,
    path: str | None,
    split: str | None,
    batch: int,
    device: torch.device | str,
    *,
    count: int | None = None,
    shared: bool = False,
) -> Loader:
    """The images at `path` as the subject was trained to see them: not augmented, in their own order.

    split: where none is named, val, or the share that the subject's data holds out; all of data that is not split.
    count: at most so many over all ranks, a uniform choice that is the same every time. shared: only this rank's part
    of them, for an evaluation that sums over the ranks; else each rank has them all.
    """
    rank, world = (distributed.rank(), distributed.world()) if shared else (0, 1)
    if path is None and subject.facts["kind"] != "run":
        raise SitusError(f"{subject.name}: only a run knows its data; say where the images are (--data)")
    if world > 1:  # each rank takes the same share of a batch
        batch = max(world, batch - batch % world)
    data = replace(subject.data, path=path or subject.data.path, split=split, batch=batch)
    chosen = split or judged_split(data.path, data.held_out)
    source = open_source(data.path, chosen, channels=data.channels, strict=data.strict, held_out=data.held_out)
    if chosen is None:
        told = ", those of the training too" if path is None else ""
        source.notes.append(f"{source.name}: is not split, so that all its images were taken{told} (--held-out)")
    if count is not None:
        check_range("count", count, 1, flag="--count")
        source = Subset(source, count)
    if world > max(1, len(source)):  # which would leave a rank with nothing to add to the sums
        raise SitusError(f"{source.name}: {len(source)} images are too few for {world} ranks (--count)")
    return make_loader(data, None, device, rank=rank, world=world, source=source)


def load_bank(
    subject: Subject,
    path: str | None,
    split: str | None,
    batch: int,
    *,
    bank_count: int | None = None,
    count: int | None = None,
    flag: str = "--bank-count",
) -> tuple[Loader, Loader]:
    """The training split to learn from, at most `bank_count` images of it, and another split to be judged on.

    Refuses to judge on what was learned from, and splits whose classes differ.
    """
    if split in ("train", "training"):
        raise SitusError(f"split={split!r}: is what the classifier is fitted to; judge it on val or test (--split)")
    if bank_count is not None:
        check_range(flag.removeprefix("--").replace("-", "_"), bank_count, 1, flag=flag)
    bank = load_set(subject, path, "train", batch, subject.device, count=bank_count)
    test = load_set(subject, path, split or "val", batch, subject.device, count=count)
    if bank.classes != test.classes:
        raise SitusError(f"{test.source.name}: its classes are not those of the training split (--data)")
    return bank, test


def check_classifier(subject: Subject) -> None:
    """Refuses a subject whose head was never trained."""
    if not subject.classifier:
        raise SitusError(f"{subject.name}: has no trained classifier; fine-tune it first (situs finetune)")


def check_labels(loader: Loader) -> tuple[str, ...]:
    """The classes of data that must have labels."""
    if loader.classes is None:
        raise SitusError(f"{loader.source.name}: has no labels to compare with (--data)")
    return loader.classes


def check_classes(subject: Subject, loader: Loader) -> None:
    """Refuses data whose labels do not mean what the classifier's outputs mean."""
    check_classifier(subject)
    classes = check_labels(loader)
    if subject.classes is not None and subject.classes != classes:
        pairs = zip(subject.classes, classes, strict=False)
        first = next((pair for pair in pairs if pair[0] != pair[1]), None)
        counts = f"there are {len(classes)}, not {len(subject.classes)}"
        said = f"{first[0]!r} there is {first[1]!r} here" if first else counts
        raise SitusError(
            f"{loader.source.name}: its classes are not those {subject.name} was trained on: {said} (--data)"
        )


def top1_reason(subject: Subject, loader: Loader) -> str | None:
    """Why the data's labels cannot be compared with the classifier's answers, or None where they can."""
    if loader.classes is None:
        return "the data has no labels"
    if subject.classes not in (None, loader.classes):
        return "the data's classes are not those the model was trained on"
    return None


def examples(loader: Loader, count: int) -> Tensor:
    """The first images as the model sees them, [n, C, H, W] in [0, 1] on the CPU, for pictures."""
    batch = next(iter(loader), None)
    if batch is None:
        raise SitusError(f"{loader.source.name}: has no images (--data)")
    mean, std = (part[:, None, None] for part in (loader.mean, loader.std))
    return (batch.inputs[:count] * std + mean).clamp(0, 1).cpu()


def made_with(subject: Subject, loader: Loader, seed: int, precision: str = "fp32") -> dict[str, Any]:
    """What a result must say of its making, without paths or dates."""
    from situs import __version__

    size = "x".join(map(str, subject.data.size))
    made = {"data": loader.source.name, "img_size": size, "seed": seed, "precision": precision, "situs": __version__}
    said = loader.source.left_out()
    return {"name": subject.name, **subject.facts, **made, **({"left out": " ".join(said)} if said else {})}


def _refuse(what: str, **given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise SitusError(f"{name}={value}: {what} brings its own (--{name.replace('_', '-')})")


def _open_run(source: str, ema: bool | None, device: torch.device | str) -> Subject:
    loaded = load_run(source, device, ema=ema)
    checkpoint = loaded.run.latest()
    assert checkpoint is not None  # load_run found one
    facts = {
        "kind": "run",
        "model": loaded.config.backbone.name,
        "method": loaded.config.method_name,
        "step": checkpoint.step,
        "ema": ema is not False and bool(checkpoint.tensors("ema")),
    }
    backbone, sees = loaded.method.backbone, loaded.method.sees_positions
    trained = "label" in loaded.method.needs_targets
    data = loaded.config.data
    return Subject(_name_of(source), backbone, sees, trained, data, loaded.classes, facts, loaded.method)


def _open_folder(folder: Path, device: torch.device | str) -> Subject:
    described = read_json(folder / "config.json")
    ours = described.get("situs", {})
    prepared = read_json(folder / PREPARED) if (folder / PREPARED).is_file() else {}
    crop = prepared.get("crop_size", {})
    # transformers keeps a square image_size for DINOv2; the images of our export need not be square.
    size = (crop["height"], crop["width"]) if ours and crop else None
    backbone = create_backbone(folder, img_size=size).to(device).eval()
    if backbone.source["library"] == "transformers":
        described = _as_timm_says(backbone, prepared)
    names = described.get("label_names")
    facts = {"kind": "export", "model": backbone.source["architecture"], "method": ours.get("method")}
    data = _data_of(backbone, described.get("pretrained_cfg", {}))
    classes = tuple(names) if isinstance(names, list) else None
    trained = described.get("num_classes", 1) > 0
    name, locked = _name_of(folder), _is_locked(folder)
    if locked:
        name, facts = f"{name}{_LOCKED}", {**facts, "locked": "yes, and looked at without its key"}
    return Subject(name, backbone, ours.get("positions", True), trained, data, classes, facts, locked=locked)


def _is_locked(folder: Path) -> bool:
    """Whether a lock's manifest stands beside the weights."""
    try:
        return read_json(folder / "manifest.json").get("format") == "situs-lock"
    except SitusError:
        return False


def _as_timm_says(backbone: Backbone, prepared: Mapping[str, Any]) -> dict[str, Any]:
    """A transformers folder in the words of timm's config.json: its classes, and how its images are prepared."""
    config = backbone.model.config
    sizes = (prepared.get(key) for key in ("size", "crop_size"))
    around, crop = (size if isinstance(size, Mapping) else {} for size in sizes)
    shown, kept = around.get("shortest_edge", around.get("height")), crop.get("height")
    share = kept / shown if prepared.get("do_center_crop", True) and shown and kept else 1.0
    images = {"mean": prepared.get("image_mean") or (), "std": prepared.get("image_std") or (), "crop_pct": share}
    classifies = backbone.name.endswith("ForImageClassification")
    names = [config.id2label[number] for number in sorted(config.id2label)]
    described = {"num_classes": len(names) if classifies else 0, "pretrained_cfg": images}
    if names == [f"LABEL_{number}" for number in range(len(names))]:
        return described
    return described | {"label_names": names if classifies else None}


def _open_name(name: str, weights: str | None, img_size: tuple[int, int] | None, device: torch.device | str) -> Subject:
    if weights is None:
        raise SitusError(
            f"{name}: is neither a run nor an export; a timm name needs weights: a file, {PUBLISHED} for those timm "
            f"publishes, or {RANDOM} (--weights)"
        )
    file = None if weights in (PUBLISHED, RANDOM) else weights
    backbone = create_backbone(name, img_size=img_size, weights=file)
    if weights == PUBLISHED:
        load_weights(backbone, pretrained_state(name, "--weights"), f"weights={weights}")
    backbone.to(device).eval()
    described = backbone.model.pretrained_cfg if backbone.source["library"] == "timm" else {}
    facts = {"kind": "name", "model": name, "weights": last_name(weights)}
    trained = weights != RANDOM and described.get("num_classes", 1) > 0
    return Subject(name, backbone, True, trained, _data_of(backbone, described), None, facts)


def _name_of(folder: str | Path) -> str:
    return Path(folder).resolve().name


def _data_of(backbone: Backbone, described: Any) -> DataConfig:
    """How a published model wants its images, by timm's description of it."""
    size = backbone.img_size or tuple(described.get("input_size", (3, 224, 224))[1:])
    if not backbone.in_chans:
        raise SitusError(f"{backbone.name} takes no images")
    channels = backbone.in_chans
    mean, std = (tuple(described.get(key, ())) for key in ("mean", "std"))
    fits = len(mean) == len(std) == channels
    crop = described.get("crop_pct") or 1.0
    return DataConfig(
        path="samples",
        img_size=(size[0], size[1]),
        channels=channels,
        crop_share=min(1.0, crop),
        mean=mean if fits else (),
        std=std if fits else (),
    )
