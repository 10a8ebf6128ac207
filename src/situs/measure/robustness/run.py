"""Robustness of a classifier on corrupted images (made here or published), on ImageNet-A and on ImageNet-O."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from situs import __version__
from situs.data.augment.recipes import denormalise, normalise
from situs.data.loader import Loader, make_loader
from situs.data.open import judged_split, open_source
from situs.data.sources.base import Source, TensorSource
from situs.data.sources.memory import addressed
from situs.data.sources.subset import Rows, Subset, class_labels
from situs.errors import SitusError, counted
from situs.limits import check_value
from situs.measure.accuracy import Accuracy, Classifier, Tally, labels_of, logits_of, measure_accuracy
from situs.measure.corruptions import GROUPS, SEVERITIES, corrupt, find_corruptions, find_severities
from situs.measure.robustness.measures import Anomalies, Cells, Natural, Robustness, aupr, aurra, response_curve
from situs.methods.base import Batch
from situs.models import Model
from situs.models.data import AnyData, AnyModel, Chosen, load_set, opened
from situs.models.inference import evaluating
from situs.models.model import check_classifier
from situs.progress import latest, task, tracked
from situs.results import Provenance

# --- published sets, and the matching of their classes --------------------------------------------


_WNID = re.compile(r"n\d{8}")
_LABELS = "labels.npy"


def row_numbers(source: Source) -> Tensor | None:
    """The rows of a subset in its whole set, so that an image gets the same corruption in both; None for a whole."""
    if not isinstance(source, Rows):
        return None
    rows, whole = torch.tensor(source.rows), row_numbers(source.source)
    return rows if whole is None else whole[rows]


def read_class_list(path: Path) -> tuple[str, ...]:
    """Class names in the order of a classifier's outputs, one per line; from "n01440764 tench" the wnid is taken."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SitusError(f"{path}: cannot be read ({reason})", field="class_list") from error
    stripped = [line.strip() for line in lines if line.strip()]
    names = tuple(match[0] if (match := _WNID.match(line)) else line for line in stripped)
    if not names:
        raise SitusError(f"{path}: holds no class names", field="class_list")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SitusError(f"{path}: names {twice!r} twice", field="class_list")
    return names


def match_classes(classes: Sequence[str] | None, names: Sequence[str] | None, outputs: int, what: str) -> list[int]:
    """The output of the classifier for each class of a set. classes: the set's. names: the outputs', where known."""
    if classes is None:
        raise SitusError(f"{what}: has no labels; its images must be in one folder per class")
    if names is not None and len(names) != outputs:
        raise SitusError(
            f"{len(names)} class names are given, but the classifier has {outputs} outputs", field="class_list"
        )
    if names is None:
        if len(classes) != outputs:
            raise SitusError(
                f"{what}: has {counted(len(classes), 'classes')}, but the classifier has {outputs} outputs, and their "
                "class names are unknown; give the class name of each output, in the order of the outputs",
                field="class_list",
            )
        return list(range(outputs))
    number = {name: index for index, name in enumerate(names)}
    stranger = next((name for name in classes if name not in number), None)
    if stranger is not None:
        raise SitusError(
            f"{what}: the classifier has no class {stranger!r}; it has {outputs} classes, for example {names[0]!r}",
            field="class_list",
        )
    return [number[name] for name in classes]


def open_corrupted(root: Path, name: str, severity: int, channels: int) -> tuple[Source, bool]:
    """One corruption at one severity of a published set, and whether its labels are numbers without names.

    Folders as in ImageNet-C, ROOT/CORRUPTION/SEVERITY/CLASS/IMAGE (or below the kind: ROOT/blur/defocus_blur/…), or
    arrays as in CIFAR-C, ROOT/CORRUPTION.npy with the five severities one after the other and ROOT/labels.npy.
    """
    if not root.is_dir():
        raise SitusError(f"{root}: no such folder", field="imagenet_c")
    if (root / f"{name}.npy").is_file():
        return _open_array(root, name, severity, channels), True
    kind = next(kind for kind, members in GROUPS.items() if name in members)
    home = next((folder for folder in (root / name, root / kind / name) if folder.is_dir()), None)
    if home is None:
        raise SitusError(
            f"{root}: has no folder {name!r}; choose corruptions that have a folder there",
            field="corruptions",
        )
    folder = home / str(severity)
    if not folder.is_dir():
        raise SitusError(
            f"{home}: has no folder for severity {severity}; choose severities that have a folder there",
            field="severities",
        )
    return open_folder(folder, channels, "imagenet_c"), False


def open_folder(root: Path, channels: int, field: str) -> Source:
    """The images of a folder that is one set, not split."""
    if not root.is_dir():
        raise SitusError(f"{root}: no such folder", field=field)
    try:
        return open_source(root, None, channels=channels)
    except SitusError as error:
        raise SitusError(str(error), field=field) from None


def open_normal(path: str, split: str | None, channels: int, held_out: float | None = None) -> Source:
    """In-distribution images: of the split named, or of the default split of an evaluation."""
    return open_source(path, split or judged_split(path, held_out), channels=channels, held_out=held_out)


def _open_array(root: Path, name: str, severity: int, channels: int) -> TensorSource:
    import numpy as np

    try:
        images, labels = (np.load(root / file, mmap_mode="r", allow_pickle=False) for file in (f"{name}.npy", _LABELS))
    except (OSError, ValueError, EOFError) as error:
        raise SitusError(f"{root}: {name}.npy and {_LABELS} cannot be read ({error})", field="imagenet_c") from error
    count, rest = divmod(len(images), 5)
    if images.ndim != 4 or images.dtype != np.uint8 or rest or not count or len(labels) != len(images):
        raise SitusError(
            f"{root / name}.npy: must contain uint8 images of the shape [5 n, H, W, C] (n images at each of 5 "
            f"severities), and {_LABELS} must contain 5 n labels. But the images are {images.dtype} numbers of the "
            f"shape {list(images.shape)}, and the labels have the shape {list(labels.shape)}",
            field="imagenet_c",
        )
    part = slice((severity - 1) * count, severity * count)
    pixels = torch.from_numpy(np.ascontiguousarray(images[part].transpose(0, 3, 1, 2)))
    numbers = torch.from_numpy(labels[part].astype("int64"))
    classes = tuple(str(number) for number in range(int(numbers.max()) + 1))
    return TensorSource(pixels, numbers, classes, f"{root.name}/{name}/{severity}", channels=channels)


# --- the measurement ------------------------------------------------------------------------------


@dataclass(frozen=True)
class PublishedSets:
    """Published sets to measure on.

    imagenet_c: corrupted images, FOLDER/CORRUPTION/SEVERITY/CLASS/IMAGE or arrays as in CIFAR-C. imagenet_a and
    imagenet_o: FOLDER/CLASS/IMAGE. in_distribution: images of the classifier's classes beside ImageNet-O; by default
    the clean ones. class_list: a file with the names of the outputs in their order, if the model does not have them.
    """

    imagenet_c: Path | None = None
    imagenet_a: Path | None = None
    imagenet_o: Path | None = None
    in_distribution: str | None = None
    class_list: Path | None = None


def evaluate_robustness(
    model: AnyModel,
    data: AnyData = None,
    *,
    corruptions: Sequence[str] = ("all",),
    severities: Sequence[int] = SEVERITIES,
    sets: PublishedSets | None = None,
    precision: str = "fp32",
    seed: int = 0,
    **images: Unpack[Chosen],
) -> Robustness:
    """How robust a classifier is to corrupted images, adversarial images (ImageNet-A) and unknown images (ImageNet-O).

    model: whatever `open_model` takes. data: the clean images, a path or a source; None for those of a run.
    corruptions: all, none, a kind (noise, blur, weather, digital) or names. sets: published. images: see `load_set`.
    """
    sets, data = sets or PublishedSets(), addressed(data)
    chosen, levels = find_corruptions(corruptions), find_severities(severities)
    names = None if sets.class_list is None else read_class_list(sets.class_list)
    model = opened(model, seed)
    check_classifier(model)
    if not model.data.modality.pixels:
        hint = "but corruptions apply only to images; measure accuracy with background noise instead"
        raise SitusError(f"{model.name}: takes {model.data.modality.things}, {hint}", field="model")
    if (count := images.get("count")) is not None:
        check_value("count", count, ">= 1")
    if not chosen and sets.imagenet_a is None and sets.imagenet_o is None:
        raise SitusError(
            "nothing to measure: choose at least one of corruptions, ImageNet-A and ImageNet-O", field="corruptions"
        )
    model = model.holding_out(images.pop("held_out", None))
    run = _Run(model, names or model.classes, images, precision, seed)
    natural = None if sets.imagenet_a is None else run.natural(sets.imagenet_a)
    anomalies = None if sets.imagenet_o is None else run.anomalies(sets.imagenet_o, sets.in_distribution or data)
    clean, cells, pictures, loader = None, {}, None, None
    # Published corrupted files need no clean set; it is measured too where it is known.
    if chosen and (sets.imagenet_c is None or data is not None or model.data.path):
        loader = load_set(model, data, **images)
    if chosen and sets.imagenet_c is not None:
        clean = None if loader is None else run.clean(loader)
        cells, pictures = run.on_published(sets.imagenet_c, chosen, levels)
    elif loader is not None:
        clean, cells, pictures = run.generated(loader, chosen, levels)
    name = None if loader is None else loader.source.name
    size = "x".join(map(str, model.data.size))
    facts = {"img_size": size, "data": name, "seed": seed, "precision": precision, "situs": __version__}
    return Robustness(
        data=name,
        published=None if sets.imagenet_c is None or not chosen else sets.imagenet_c.resolve().name,
        clean=clean,
        cells=cells,
        pictures=pictures,
        natural=natural,
        anomalies=anomalies,
        outputs=run.outputs,
        skipped=tuple(run.skipped),
        side=min(model.data.size),
        provenance=Provenance({"name": model.name, **model.facts, **facts}, (model.origin,)),
    )


def corrupted_accuracy(
    model: Classifier,
    loader: Loader,
    corruptions: tuple[str, ...],
    severities: tuple[int, ...] = SEVERITIES,
    *,
    index: Tensor | None = None,
    seed: int = 0,
    precision: str = "fp32",
) -> tuple[Accuracy, dict[str, dict[int, Accuracy]]]:
    """The accuracy on the loader's images, and on each of its corruptions, made on the fly.

    Images are corrupted as the model sees them, cropped and resized, before they are normalised. index: [classes], the
    output of each label; by default the label itself.
    """
    plain, tallies = Tally(), {(name, severity): Tally() for name in corruptions for severity in severities}
    done = 0
    with evaluating(model), task("corruptions", loader.steps_per_epoch * len(tallies)) as progress:
        for batch in relabelled(loader, index):
            labels, ids = labels_of(batch), _rows_of(batch, loader)
            images = seen(batch.inputs, loader)
            plain.add(logits_of(model, batch, precision), labels)
            for (name, severity), tally in tallies.items():
                progress.tell(done, f"{name} {severity}")
                changed = normalise(corrupt(images, name, severity, ids, seed=seed), loader.mean, loader.std)
                tally.add(logits_of(model, batch._replace(inputs=changed), precision), labels)
                done += 1
    cells = {name: {severity: tallies[name, severity].result() for severity in severities} for name in corruptions}
    return plain.result(), cells


def answers(
    model: Classifier, loader: Loader, outputs: Tensor, precision: str = "fp32"
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Confidence (largest softmax), answer in 0 … k − 1 and label of every image, among the `outputs` [k] alone.

    [n] each; labels are None where the set has none.
    """
    confidence, answer, labels = [], [], []
    with evaluating(model):
        for batch in tracked(loader, loader.source.name, loader.steps_per_epoch):
            best = logits_of(model, batch, precision).float()[:, outputs].softmax(dim=-1).max(dim=-1)
            confidence.append(best.values)
            answer.append(best.indices)
            labels += [batch.targets["label"]] if "label" in batch.targets else []
    if not confidence:
        raise SitusError(f"{loader.source.name}: none of its images can be read")
    return torch.cat(confidence), torch.cat(answer), torch.cat(labels) if labels else None


def seen(images: Tensor, loader: Loader) -> Tensor:
    """Normalised images turned back into [0, 1] with 256 levels."""
    return (denormalise(images, loader.mean, loader.std) * 255.0).round() / 255.0


def relabelled(loader: Loader, index: Tensor | None) -> Iterator[Batch]:
    """The loader's batches with outputs as labels; index: [classes], the output of each label, None for the same."""
    for batch in loader:
        yield batch if index is None else batch._replace(targets={"label": index[labels_of(batch)]})


def _rows_of(batch: Batch, loader: Loader) -> Tensor:
    """The images' numbers in their whole set, so that an image gets the same corruption in a subset."""
    rows = row_numbers(loader.source)
    return batch.ids if rows is None else rows.to(loader.device)[batch.ids]


class _Run:
    """The measurements of one model. names: of its outputs. images: which images, as `load_set` takes it."""

    def __init__(
        self,
        model: Model,
        names: Sequence[str] | None,
        images: Chosen,
        precision: str,
        seed: int,
    ) -> None:
        self.model, self.names, self.images = model, names, images
        self.precision, self.seed = precision, seed
        self.backbone, self.device = model.backbone, model.device
        self.skipped: list[str] = []
        with evaluating(self.backbone):
            blank = torch.zeros(1, model.data.channels, *model.data.size, device=self.device)
            self.outputs = self.backbone(blank).shape[-1]

    def wrap(self, source: Source, **data: Any) -> Loader:
        """A loader of an open source, with the model's preparation."""
        count = self.images.get("count")
        if count is not None and len(source) > count:
            source = Subset(source, count)
        config = replace(self.model.data, batch=self.images.get("batch", 256), **data)
        return make_loader(config, None, self.device, source=source)

    def index(self, loader: Loader, what: str) -> Tensor:
        """The output of each class of the loader."""
        return torch.tensor(match_classes(loader.classes, self.names, self.outputs, what), device=self.device)

    def note(self, *loaders: Loader) -> None:
        """Keeps what could not be read."""
        left_out = [text for loader in loaders for text in loader.source.left_out()]
        self.skipped += [text for text in left_out if text not in self.skipped]

    def clean(self, loader: Loader) -> Accuracy:
        """The accuracy on the images as they are."""
        index = self.index(loader, loader.source.name)
        accuracy = measure_accuracy(self.backbone, relabelled(loader, index), precision=self.precision)
        self.note(loader)
        return accuracy

    def generated(
        self, loader: Loader, corruptions: tuple[str, ...], severities: tuple[int, ...]
    ) -> tuple[Accuracy, Cells, Tensor]:
        """Corruptions made of the clean images, and the first image clean and corrupted."""
        clean, cells = corrupted_accuracy(
            self.backbone,
            loader,
            corruptions,
            severities,
            index=self.index(loader, loader.source.name),
            seed=self.seed,
            precision=self.precision,
        )
        self.note(loader)
        first = next(iter(loader)).part(slice(0, 1))
        ids, image = _rows_of(first, loader), seen(first.inputs, loader)
        strips = [
            torch.cat([image, *(corrupt(image, name, level, ids, seed=self.seed) for level in severities)])
            for name in corruptions
        ]
        return clean, cells, torch.stack(strips).cpu()

    def on_published(
        self, root: Path, corruptions: tuple[str, ...], severities: tuple[int, ...]
    ) -> tuple[Cells, Tensor]:
        """The published corrupted files, and the first image of each folder."""
        cells: dict[str, dict[int, Accuracy]] = {name: {} for name in corruptions}
        strips: list[Tensor] = []
        places = [(name, severity) for name in corruptions for severity in severities]
        for name, severity in tracked(places, "corruptions"):
            latest(f"{name} {severity}")
            source, numbered = open_corrupted(root, name, severity, self.model.data.channels)
            # The published files are cropped already.
            loader, what = self.wrap(source, crop_share=1.0), f"{root.name}/{name}/{severity}"
            last = len(loader.classes or ()) - 1
            if numbered and last >= self.outputs:
                reason = f"{what}: its labels go up to {last}, but the model's outputs go up to {self.outputs - 1}"
                raise SitusError(reason, field="imagenet_c")
            batches = relabelled(loader, None if numbered else self.index(loader, what))
            cells[name][severity] = measure_accuracy(self.backbone, batches, precision=self.precision)
            strips.append(seen(next(iter(loader)).inputs[:1], loader).cpu())
            self.note(loader)
        return cells, torch.cat(strips).unflatten(0, (len(cells), -1))

    def natural(self, root: Path) -> Natural:
        """Accuracy and AURRA on ImageNet-A, among its classes."""
        loader = self.wrap(open_folder(root, self.model.data.channels, "imagenet_a"))
        outputs = self.index(loader, root.name)
        confidence, answer, truth = answers(self.backbone, loader, outputs, self.precision)
        assert truth is not None  # it has classes
        self.note(loader)
        correct = answer == truth
        curve = response_curve(confidence, correct)
        shown = [curve[max(0, round(len(curve) * share / 100) - 1)] for share in range(1, 101)]
        return Natural(
            loader.source.name,
            float(correct.double().mean()),
            aurra(confidence, correct),
            len(correct),
            len(outputs),
            tuple(torch.stack(shown).tolist()),
        )

    def anomalies(self, root: Path, beside: AnyData) -> Anomalies:
        """ImageNet-O against in-distribution images of the same classes."""
        strange = self.wrap(open_folder(root, self.model.data.channels, "imagenet_o"))
        # Without folders of classes there is nothing to restrict the softmax to.
        outputs = torch.arange(self.outputs) if strange.classes is None else self.index(strange, root.name).cpu()
        normal = self._normal(beside, set(outputs.tolist()))
        anomalous, usual = (
            -answers(self.backbone, images, outputs.to(self.device), self.precision)[0] for images in (strange, normal)
        )
        self.note(strange, normal)
        names = strange.source.name, normal.source.name
        return Anomalies(*names, aupr(anomalous, usual), len(anomalous), len(usual), len(outputs))

    def _normal(self, beside: AnyData, outputs: set[int]) -> Loader:
        """The images of the in-distribution set whose class is among the outputs."""
        data, field = self.model.data, "in_distribution"
        if beside is None and not data.path:
            raise SitusError("ImageNet-O also needs normal images of the classifier's classes", field=field)
        source = beside
        if not isinstance(source, Source):
            source = open_normal(str(beside or data.path), self.images.get("split"), data.channels, data.held_out)
        meant = match_classes(source.classes, self.names, self.outputs, source.name)
        labels = class_labels(source).tolist()
        rows = [row for row, label in enumerate(labels) if label >= 0 and meant[label] in outputs]
        if not rows:
            reason = "must contain normal images of the classes that ImageNet-O is evaluated on, but has none"
            raise SitusError(f"{source.name}: {reason}", field=field)
        return self.wrap(Rows(source, rows))
