"""Verbs that measure a model, or write its predictions and features: `evaluate …`, `predict`, `features`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from cyclopts import Parameter

from situs.cli.model_args import DataArgs, FewImagesArgs, ModelArgs, open_from, open_one_of
from situs.cli.parser.flags import POSITIONAL
from situs.cli.result import (
    MeasureArgs,
    SentenceArgs,
    measure,
    open_each,
    options_for,
    options_of,
    present,
    print_skipped,
)
from situs.cli.shell import answer
from situs.errors import SitusError, counted, verb

if TYPE_CHECKING:
    from situs.models import Model
    from situs.results import Result


@dataclass(frozen=True, kw_only=True)
class Predict(ModelArgs):
    """Predict the class of every image, clip or sentence. The csv file has the columns path, class, probability.

    For example: situs predict runs/ft --out predictions.csv

    Labels are not needed and not used. A file that cannot be read gets a row without a class.
    """

    data: Annotated[str | None, Parameter(metavar="PATH")] = None
    """Path of the images. Default: the images that the run was trained on."""

    out: Annotated[Path, Parameter(metavar="FILE")]
    """The csv file to write."""

    split: str = "all"
    """train, val, test or all."""

    count: Annotated[int | None, Parameter(metavar="IMAGES")] = None
    """At most this many images, chosen at random with a fixed seed. Default: all."""

    batch: int = 256
    """Images per batch."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the forward pass."""

    column: Annotated[str | None, Parameter(name="--text.column", metavar="NAME")] = None
    """Text data: column with the sentences. Default: the column used in training, or the only text column."""

    pair: Annotated[str, Parameter(name="--text.pair", metavar="NAME")] = ""
    """Text data: column with the second sentence. Use none for single sentences. Default: as in training."""

    def run(self) -> None:
        """Predicts, writes the file, and prints how often each class was predicted."""
        from situs.data.text import Columns
        from situs.measure.predict import check_csv, predict

        check_csv(self.out)
        text = Columns(column=self.column, pair=self.pair) if self.column or self.pair else None
        options = {name: getattr(self, name) for name in ("data", "split", "count", "batch", "precision")}
        predictions = predict(open_from(self), **options, text=text)
        predictions.write(self.out)
        rows, broken, counts = predictions.rows, predictions.broken, predictions.counts
        few = ", ".join(f"{name} {count:,}" for name, count in list(counts.items())[:5])
        more = f", and {len(counts) - 5:,} more classes" if len(counts) > 5 else ""
        lines = [f"{self.out}: {counted(len(rows) - len(broken), 'rows')} with a class: {few}{more}"]
        if broken:
            names = ", ".join(broken[:3]) + ", …" * (len(broken) > 3)
            have = f"{counted(len(broken), 'rows')} {verb(len(broken), 'have')} no class"
            lines.append(f"{have}, because these files could not be read: {names}")
        if len(counts) == 1 and len(rows) > 1 and len(predictions.classes) > 1:
            lines.append(f"every row has the same class, {next(iter(counts))}")
        document = {"file": self.out, "rows": len(rows), "named": counts, "broken": broken}
        answer({**document, "left_out": list(predictions.left_out)}, *lines)
        print_skipped(predictions.left_out)


@dataclass(frozen=True, kw_only=True)
class Features(DataArgs):
    """Extract features of every image [n, D] or of every patch [n, N, D], with ids and labels, into one file.

    For example: situs features runs/mp3 --out features.safetensors
    """

    out: Annotated[Path, Parameter(metavar="FILE")]
    """The output file: .safetensors, .npz or .npy. A second file, NAME.names.csv, gives the image name of each row."""

    split: str = "train"
    """train, val, test or all."""

    tokens: Literal["pooled", "patches"] = "pooled"
    """What a vector describes. pooled: an image. patches: a patch; the patches are ordered row by row."""

    pool: Literal["mean", "cls"] = "mean"
    """With --tokens pooled: mean (of the patch tokens) or cls (the CLS token)."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the forward pass."""

    column: Annotated[str | None, Parameter(name="--text.column", metavar="NAME")] = None
    """Text data: column with the sentences. Default: the column used in training, or the only text column."""

    def run(self) -> None:
        """Extracts the features, writes them, and prints their shape."""
        from situs.measure.features import check_form, extract_features, write_features

        if self.tokens == "patches" and self.pool != "mean":
            raise SitusError(
                f"pool={self.pool}: has no effect on patch features, which are not pooled; leave pool out",
                field=("pool", "tokens"),
            )
        check_form(self.out)
        table = extract_features(open_from(self), **options_of(self))
        write_features(self.out, table)
        shape, labelled = list(table.features.shape), table.labels is not None
        size = " × ".join(map(str, shape[1:]))
        line = (
            f"{self.out}: {counted(shape[0], 'features')} of {size} numbers, {'with' if labelled else 'without'} labels"
        )
        answer({"file": self.out, "shape": shape, "labels": labelled, "left_out": table.left_out}, line)
        print_skipped(table.left_out)


@dataclass(frozen=True, kw_only=True)
class Accuracy(SentenceArgs):
    """Measure the accuracy of a model, and show its errors.

    The metric depends on the model. Classifiers have top-1 and balanced accuracy, or mean average precision
    (multi-label). Segmentation has mIoU, detection has COCO's AP, and language models have perplexity. Several
    classifiers are also measured as an ensemble.

    For example: situs evaluate accuracy runs/ft
    """

    topics: ClassVar = SentenceArgs.topics | {
        "segments": ("mode", "overlap"),
        "objects": ("save_detections",),
    }
    only: ClassVar[dict[str, tuple[str, ...]]] = {
        "average": ("several models",),
        "mode": ("a segmentation",),
        "overlap": ("a segmentation",),
        "save_detections": ("a detection",),
        "show": ("a segmentation", "a detection"),
    }

    model: Annotated[tuple[str, ...], POSITIONAL, Parameter(metavar="MODEL…")]  # pyright: ignore[reportIncompatibleVariableOverride]
    """One or several models: a run, an export, a model folder, a locked folder, or a timm name with its weights
    (NAME=FILE)."""

    average: Literal["softmax", "logits"] = "softmax"
    """With several models: average the probabilities (softmax) or the logits."""

    batch: int | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Samples per batch. Default: 256, or 16 for segmentation and 8 for detection."""

    show: Annotated[int, Parameter(metavar="IMAGES")] = 8
    """For segmentation and detection: number of lowest-scoring images that the page shows."""

    mode: Literal["slide", "whole"] = "slide"
    """How to segment large images. slide: cut windows of the model's size, and average overlapping windows. whole:
    segment the whole image at once, with resampled position embeddings."""

    overlap: Annotated[float, Parameter(metavar="RATIO")] = 1 / 3
    """With --mode slide: smallest overlap of neighbouring windows, as a ratio of the window."""

    save_detections: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """Write the detections to this file in COCO's results format. Coordinates are pixels of the original files."""

    def run(self) -> None:
        if len(self.model) > 1:
            from situs.measure.ensemble import evaluate_ensemble

            options = options_for("several models", self, held_out=self.held_out, batch=_or_default(self.batch, 256))
            del options["text"]
            present(evaluate_ensemble(open_each(self.model, self), **options), self.out)
            return
        model = open_from(self, self.model[0])  # pyright: ignore[reportGeneralTypeIssues]
        kind, evaluate, batch = _evaluation_of(model)
        options = options_for(kind, self, batch=_or_default(self.batch, batch))
        if "show" in options:
            options["pictures"] = options.pop("show")
            del options["text"]
        present(evaluate(model, **options), self.out)


def _or_default(number: int | None, default: int) -> int:
    return default if number is None else number  # 0 is a mistake, and refused as one


def _evaluation_of(model: Model) -> tuple[str, Callable[..., Result], int]:
    """The kind of a model, the function that evaluates it, and its default batch."""
    from situs.measure.accuracy import evaluate_accuracy
    from situs.measure.objects import evaluate_objects
    from situs.measure.perplexity import evaluate_perplexity
    from situs.measure.segments import evaluate_segments
    from situs.methods.detection import Detection
    from situs.methods.segmentation import Segmentation

    trained = model.facts.get("method")
    if isinstance(model.method, Segmentation) or trained == "segmentation":
        return "a segmentation", evaluate_segments, 16
    if isinstance(model.method, Detection) or trained == "detection":
        return "a detection", evaluate_objects, 8
    if model.backbone.next_words:
        return "a language model", evaluate_perplexity, 256
    return "a classifier", evaluate_accuracy, 256


@dataclass(frozen=True, kw_only=True)
class Knn(MeasureArgs):
    """Measure k-nearest-neighbour accuracy on the frozen features of each layer. Neighbours come from the training
    split (the bank).

    Features are the CLS token and the mean of the patch tokens.

    For example: situs evaluate knn runs/mp3 --k 20
    """

    k: Annotated[int | None, Parameter(metavar="N")] = None
    """Number of neighbours. The default is 20, or fewer if a class has fewer images in the bank."""

    temperature: Annotated[float | None, Parameter(metavar="τ|none")] = 0.07
    """Temperature τ in exp(similarity / τ), the weight of a neighbour. With none, all neighbours have the same
    weight."""

    train_count: Annotated[int | None, Parameter(metavar="IMAGES")] = 10_000
    """Largest number of training images in the bank (none: all of them)."""

    def run(self) -> None:
        measure(self, "situs.measure.knn.evaluate_knn")


@dataclass(frozen=True, kw_only=True)
class Probe(MeasureArgs):
    """Fit a linear classifier on frozen features. The classifier predicts the position of patches, the class of images,
    or the class of pixels.

    For example: situs evaluate probe runs/mp3 --kind position --after runs/ft --train-count 200
    """

    topics: ClassVar = MeasureArgs.topics | {"masks": ("first", "void", "classes")}
    only: ClassVar[dict[str, tuple[str, ...]]] = {
        "ratio": ("position",),
        "pool": ("class",),
        "first": ("segments",),
        "void": ("segments",),
        "classes": ("segments",),
    }

    kind: Literal["position", "class", "segments"] = "position"
    """What the classifier predicts. position: where patches belong whose position embedding is left out. class: the
    class of an image. segments: the class of each pixel; this needs masks."""

    after: Annotated[str | None, Parameter(metavar="MODEL")] = None
    """A second model to compare with, such as the fine-tuned model."""

    train_count: Annotated[int, Parameter(metavar="IMAGES")] = 2000
    """Largest number of training images for the fit."""

    ratio: Annotated[float, Parameter(metavar="RATIO")] = 0.75
    """With --kind position: ratio of patches without position embedding."""

    pool: Literal["mean", "cls"] = "mean"
    """With --kind class: mean (of the patch tokens) or cls (the CLS token)."""

    first: Annotated[int | None, Parameter(metavar="NUMBER")] = None
    """With --kind segments: pixel value of the first class in the mask files. Default: 0, or 1 with ADE20K's class
    list."""

    void: Annotated[tuple[int, ...] | None, Parameter(metavar="NUMBER,…")] = None
    """With --kind segments: pixel values that mean no class. Default: 255, and also 0 with ADE20K's class list."""

    classes: Annotated[tuple[str, ...], Parameter(metavar="NAME,…")] = ()
    """With --kind segments: class names. Default: a class list beside the data. Without a list, the names are
    numbers."""

    def run(self) -> None:
        from situs.data.modalities.mask import usual_masks
        from situs.measure.probe.classes import evaluate_probe

        options = options_for(self.kind, self)
        model = open_from(self)
        options["after"] = None if self.after is None else open_one_of(self.after, self)
        masks = usual_masks(self.data or model.samples.path, self.first, self.void)
        options = {name: value for name, value in options.items() if name not in ("first", "void", "classes")}
        present(evaluate_probe(model, kind=self.kind, masks=replace(masks, classes=self.classes), **options), self.out)


@dataclass(frozen=True, kw_only=True)
class Consistency(MeasureArgs):
    """Measure how a classifier's predictions change when patches are shuffled. The metrics for each γ are top-1,
    consistency (the ratio of unchanged predictions) and Diff.Norm (the mean distance of the features). Every metric is
    measured twice: with and without a mask that tells the model which patches were shuffled.

    For example: situs evaluate consistency runs/ft --ratios 0,.15,.5
    """

    ratios: Annotated[tuple[float, ...], Parameter(metavar="γ,γ,…")] = (0.0, 0.03, 0.09, 0.15, 0.27, 0.5, 0.75, 0.9)
    """Values of γ, the ratio of shuffled patches."""

    grid: Annotated[tuple[int, int] | None, Parameter(metavar="ROWS,COLUMNS")] = None
    """Grid of the shuffled patches, for a network without tokens (ResNet). Default: the grid of the run. Without a run,
    the default is 14,14, or 8,8 if 14 does not divide the image size."""

    def run(self) -> None:
        measure(self, "situs.measure.consistency.evaluate_consistency")


_Folder = Annotated[Path | None, Parameter(metavar="FOLDER")]


@dataclass(frozen=True, kw_only=True)
class Robustness(MeasureArgs):
    """Measure a classifier on corrupted images (as in ImageNet-C), adversarial images (ImageNet-A) and
    out-of-distribution images (ImageNet-O).

    For example: situs evaluate robustness runs/ft --count 100
    """

    topics: ClassVar = MeasureArgs.topics | {
        "published": ("imagenet_c", "imagenet_a", "imagenet_o", "in_distribution", "class_list")
    }

    corruptions: Annotated[tuple[str, ...], Parameter(metavar="NAME,…")] = ("all",)
    """Corruptions to apply to --data: all, none, a kind (noise, blur, weather, digital) or names such as snow,fog."""

    severities: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Severities of the corruptions, from 1 to 5."""

    imagenet_c: _Folder = None
    """Ready-made corrupted images: FOLDER/CORRUPTION/SEVERITY/CLASS/IMAGE, or CORRUPTION.npy as in CIFAR-C."""

    imagenet_a: _Folder = None
    """Natural adversarial examples, FOLDER/CLASS/IMAGE. The metrics are accuracy and AURRA over the classes of this
    folder."""

    imagenet_o: _Folder = None
    """Images outside the classifier's classes, FOLDER/CLASS/IMAGE. The metric is AUPR against --in-distribution."""

    in_distribution: Annotated[str | None, Parameter(metavar="PATH")] = None
    """Images of the classifier's classes, to compare with --imagenet-o. Default: --data."""

    class_list: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """File with one class name per line, in the order of the outputs (for ImageNet, wnids). A model without class names
    needs this file."""

    def run(self) -> None:
        from situs.measure.robustness.run import PublishedSets, evaluate_robustness

        options = options_of(self)
        sets = PublishedSets(**{field.name: options.pop(field.name) for field in fields(PublishedSets)})
        present(evaluate_robustness(open_from(self), **options, sets=sets), self.out)


@dataclass(frozen=True, kw_only=True)
class Position(MeasureArgs):
    """Measure how much a model knows about position.

    --kind answers: how often an MP3 or DropPos run predicts the right position, for several mask ratios. --kind
    vectors: pictures, spectrum and linear decoding of position embeddings. --kind all: for any model, what its position
    embeddings, features, predictions and blocks know about position.

    For example: situs evaluate position runs/mp3
    """

    topics: ClassVar = MeasureArgs.topics | {"advanced": ("position_ratios", "anchor_ratio", "folds", "snr_db")}

    only: ClassVar[dict[str, tuple[str, ...]]] = {
        "position_ratios": ("answers",),
        "anchor_ratio": ("answers",),
        "precision": ("answers",),
        "folds": ("vectors",),
        "equivariance": ("all",),
        **dict.fromkeys(("data", "held_out", "count", "batch", "split", "snr_db", "ratios"), ("answers", "all")),
    }

    model: Annotated[tuple[str, ...], POSITIONAL, Parameter(metavar="MODEL…")]  # pyright: ignore[reportIncompatibleVariableOverride]
    """A run, an export, a model folder, a locked folder, or a timm name with its weights (NAME=FILE). --kind vectors
    takes several models."""

    kind: Literal["answers", "vectors", "all"] = "answers"
    """What is measured."""

    ratios: Annotated[tuple[float, ...] | None, Parameter(metavar="RATIO,…")] = None
    """With --kind answers: mask ratios, MP3's η (default: 0,.25,.5,.75,.9) or DropPos's γ (default: 0,.25,.5,.75). With
    --kind all: ratios of shuffled patches (default: .15,.5,.9); the verdict reports only the first of them."""

    position_ratios: Annotated[tuple[float, ...] | None, Parameter(metavar="RATIO,…")] = None
    """With --kind answers: DropPos's γ_pos, the ratio of the visible patches that lose their position. Default:
    .25,.5,.75,.95."""

    anchor_ratio: Annotated[float | None, Parameter(metavar="RATIO")] = None
    """With --kind answers, for MP3: ratio of patches whose position is given as a hint. Default: as in training."""

    folds: int = 5
    """With --kind vectors: number of folds of the cross-validated regression."""

    equivariance: bool = True
    """With --kind all: also test whether the blocks are equivariant to token permutations."""

    count: Annotated[int | None, Parameter(metavar="IMAGES")] = None
    """At most this many images, chosen at random with a fixed seed. Default: all, or 64 with --kind all."""

    batch: int | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Images per batch. Default: 256, or 16 with --kind all."""

    def run(self) -> None:
        options = options_for(self.kind, self)
        if self.kind == "vectors":
            from situs.measure.position.vectors import analyze_positions

            present(analyze_positions(open_each(self.model, self), **options), self.out)
            return
        if len(self.model) > 1:
            reason = f"kind={self.kind}: takes one model, not {len(self.model)}"
            raise SitusError(reason, field=("model", "kind"))
        model = open_from(self, self.model[0])  # pyright: ignore[reportGeneralTypeIssues]
        if self.kind == "answers":
            from situs.measure.position.head import evaluate_position

            options["batch"] = _or_default(self.batch, 256)
            present(evaluate_position(model, **options), self.out)
            return
        from situs.audit.positions import audit_positions

        options |= {"count": _or_default(self.count, 64), "batch": _or_default(self.batch, 16)}
        if not options["ratios"]:
            del options["ratios"]
        present(audit_positions(model, **options), self.out)


@dataclass(frozen=True, kw_only=True)
class Attention(FewImagesArgs):
    """Show a model's attention: maps over images, mean attention for each relative offset, and the entropy of each
    head. With --kind correlation, show the similarity of features at two positions, within an image and between two
    images.

    For example: situs evaluate attention runs/mp3
    """

    only: ClassVar[dict[str, tuple[str, ...]]] = {"layer": ("maps",), "show": ("maps",), "depth": ("correlation",)}

    kind: Literal["maps", "correlation"] = "maps"
    """maps: the attention. correlation: the similarity of features at two positions."""

    layer: int | None = None
    """With --kind maps: layer whose maps are shown, counted from 1. Default: the last layer."""

    show: Annotated[int, Parameter(metavar="IMAGES")] = 6
    """With --kind maps: number of images shown."""

    depth: str = "norm"
    """With --kind correlation: layer of the features. Give embedding, the number of a block, or norm (the final
    norm)."""

    def run(self) -> None:
        from situs.measure.attention import analyze_attention
        from situs.measure.correlation import analyze_correlation

        analyze = {"maps": analyze_attention, "correlation": analyze_correlation}[self.kind]
        present(analyze(open_from(self), **options_for(self.kind, self)), self.out)


@dataclass(frozen=True, kw_only=True)
class Reconstruct(FewImagesArgs):
    """Show how an MP3 or DropPos run solves jigsaw puzzles. Each patch is drawn at its predicted position.

    For MP3, some puzzles mix the patches of two images.

    For example: situs evaluate reconstruct runs/mp3
    """

    ratios: Annotated[tuple[float, ...] | None, Parameter(metavar="RATIO,…")] = None
    """Mask ratios: MP3's η or DropPos's γ. Default: 0,.25,.5,.75, as in the papers."""

    position_ratios: Annotated[tuple[float, ...] | None, Parameter(metavar="RATIO,…")] = None
    """DropPos's γ_pos, the ratio of the visible patches that lose their position. Default: .75,.95."""

    anchor_ratio: Annotated[float | None, Parameter(metavar="RATIO")] = None
    """For MP3: ratio of patches whose position is given as a hint. Default: as in training."""

    show: Annotated[int, Parameter(metavar="IMAGES")] = 6
    """Number of images shown."""

    pairs: int = 2
    """For MP3: number of puzzles that mix the patches of two images."""

    def run(self) -> None:
        measure(self, "situs.measure.reconstruct.analyze_reconstruct")
