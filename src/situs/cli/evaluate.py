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
    """Predict the class of every image, clip or sentence. The output is a csv file with the columns path, class and
    probability.

    Labels are not needed and not used. A file that cannot be read gets a row without a class.

    For example: situs predict runs/ft --out predictions.csv
    """

    data: Annotated[str | None, Parameter(metavar="PATH")] = None
    """Path of the images. If MODEL is a training run, the default is the data of this run."""

    out: Annotated[Path, Parameter(metavar="FILE")]
    """The csv file to write."""

    split: str = "all"
    """train, val, test or all."""

    count: Annotated[int | None, Parameter(metavar="IMAGES")] = None
    """Use at most this many images, chosen at random with a fixed seed. Default: all."""

    batch: int = 256
    """Images per batch."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the forward pass."""

    column: Annotated[str | None, Parameter(name="--text.column", metavar="NAME")] = None
    """For text data: column that contains the sentences. Default: the column used in training, or the only text
    column."""

    pair: Annotated[str, Parameter(name="--text.pair", metavar="NAME")] = ""
    """For text data: column that contains the second sentence of each pair. Use "none" for single sentences. Default:
    as in training."""

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
        more = f", and {counted(len(counts) - 5, 'more classes')}" if len(counts) > 5 else ""
        lines = [f"{self.out}: {counted(len(rows) - len(broken), 'rows')} with a class ({few}{more})"]
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
    """Write the features of all images or patches to one file, with ids and labels. For n images, the shape is [n, D]
    with one vector per image, or [n, N, D] with one vector for each of the N patches. D is the feature width.

    For example: situs features runs/mp3 --out features.safetensors
    """

    out: Annotated[Path, Parameter(metavar="FILE")]
    """The output file: .safetensors, .npz or .npy. If the images have names, a second file (extension .names.csv) lists
    the name and the class of each row."""

    split: str = "train"
    """train, val, test or all."""

    tokens: Literal["pooled", "patches"] = "pooled"
    """pooled: one vector per image. patches: one vector per patch, with the patches in row-major order."""

    pool: Literal["mean", "cls"] = "mean"
    """With --tokens pooled: mean (the mean of the patch tokens) or cls (the CLS token)."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the forward pass."""

    column: Annotated[str | None, Parameter(name="--text.column", metavar="NAME")] = None
    """For text data: column that contains the sentences. Default: the column used in training, or the only text
    column."""

    def run(self) -> None:
        """Extracts the features, writes them, and prints their shape."""
        from situs.measure.features import check_form, extract_features, write_features

        if self.tokens == "patches" and self.pool != "mean":
            raise SitusError(
                f"pool={self.pool}: has no effect on patch features, which are not pooled; do not set pool",
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
    """Measure the accuracy of a model, and show which errors the model makes.

    The metrics depend on the task. Classification: top-1 and balanced accuracy. Multi-label classification: mean
    average precision. Segmentation: mIoU. Detection: COCO's AP. Language models: perplexity. If you give several
    classifiers, Situs also measures their ensemble.

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
    """One or several models: training runs, exports, model folders, models locked by situs lock, or timm model names
    with a weight file (NAME=FILE)."""

    average: Literal["softmax", "logits"] = "softmax"
    """For an ensemble of several models: average the probabilities (softmax) or the logits."""

    batch: int | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Samples per batch. Default: 16 for segmentation, 8 for detection, and 256 otherwise."""

    show: Annotated[int, Parameter(metavar="IMAGES")] = 8
    """For segmentation and detection: number of images shown in the HTML file. These are the images with the lowest IoU
    (segmentation) or F1 (detection)."""

    mode: Literal["slide", "whole"] = "slide"
    """How to segment images that are larger than the model input. slide: segment overlapping windows, and average their
    logits. whole: segment the whole image at once, with resampled position embeddings."""

    overlap: Annotated[float, Parameter(metavar="RATIO")] = 1 / 3
    """With --mode slide: smallest overlap of neighbouring windows, as a fraction of the window size."""

    save_detections: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """Write the detections to this file in COCO's results format. Coordinates are in pixels of the original images."""

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
    """Measure the k-nearest-neighbour accuracy of the frozen features of each layer. The neighbours are images of the
    training split.

    Two kinds of features are measured separately: the CLS token, and the mean of the patch tokens.

    For example: situs evaluate knn runs/mp3 --k 20
    """

    k: Annotated[int | None, Parameter(metavar="N")] = None
    """Number of neighbours. Default: 20, or the mean number of training images per class if this mean is smaller."""

    temperature: Annotated[float | None, Parameter(metavar="τ|none")] = 0.07
    """Temperature τ. A neighbour has the weight exp(similarity / τ). With --temperature none, all neighbours have the
    same weight."""

    train_count: Annotated[int | None, Parameter(metavar="IMAGES")] = 10_000
    """Search for the neighbours among at most this many training images. With --train-count none, search all training
    images."""

    def run(self) -> None:
        measure(self, "situs.measure.knn.evaluate_knn")


@dataclass(frozen=True, kw_only=True)
class Probe(MeasureArgs):
    """Fit a linear classifier on frozen features. With --kind, choose whether the classifier predicts the position of a
    patch, the class of an image, or the class of a pixel.

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
    """position: predict the position of patches that have no position embedding. class: predict the class of an image.
    segments: predict the class of each pixel (needs masks)."""

    after: Annotated[str | None, Parameter(metavar="MODEL")] = None
    """A second model for comparison, such as the fine-tuned model."""

    train_count: Annotated[int, Parameter(metavar="IMAGES")] = 2000
    """Largest number of training images for fitting the classifier."""

    ratio: Annotated[float, Parameter(metavar="RATIO")] = 0.75
    """With --kind position: fraction of the patches that get no position embedding."""

    pool: Literal["mean", "cls"] = "mean"
    """With --kind class: mean (the mean of the patch tokens) or cls (the CLS token)."""

    first: Annotated[int | None, Parameter(metavar="NUMBER")] = None
    """With --kind segments: pixel value of the first class in the mask files. Default: 0, or 1 for data with the ADE20K
    class list."""

    void: Annotated[tuple[int, ...] | None, Parameter(metavar="NUMBER,…")] = None
    """With --kind segments: pixel values that belong to no class and are ignored. Default: 255. For data with the
    ADE20K class list, the default is 0."""

    classes: Annotated[tuple[str, ...], Parameter(metavar="NAME,…")] = ()
    """With --kind segments: names of the classes. Default: the names in the file objectInfo150.txt (ADE20K) or
    classes.txt in the data folder. Without such a file, the names are numbers."""

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
    """Measure how the predictions of a classifier change when patches are shuffled. γ is the fraction of shuffled
    patches.

    The metrics are top-1, consistency and Diff.Norm. Consistency is the fraction of images whose prediction is
    unchanged. Diff.Norm is the mean distance between the features of an image before and after shuffling. Every metric
    is measured twice. In one measurement, a mask tells the model which patches were shuffled. In the other measurement,
    the model gets no mask.

    For example: situs evaluate consistency runs/ft --ratios 0,.15,.5
    """

    ratios: Annotated[tuple[float, ...], Parameter(metavar="γ,γ,…")] = (0.0, 0.03, 0.09, 0.15, 0.27, 0.5, 0.75, 0.9)
    """Values of γ, the fraction of shuffled patches."""

    grid: Annotated[tuple[int, int] | None, Parameter(metavar="ROWS,COLUMNS")] = None
    """For a network without tokens, such as a ResNet: number of rows and columns of the patch grid. Default: the grid
    used in training. Without a training run, the default is 14,14 (8,8 if the image size is not a multiple of 14)."""

    def run(self) -> None:
        measure(self, "situs.measure.consistency.evaluate_consistency")


_Folder = Annotated[Path | None, Parameter(metavar="FOLDER")]


@dataclass(frozen=True, kw_only=True)
class Robustness(MeasureArgs):
    """Measure how well a classifier handles corrupted images (as in ImageNet-C), adversarial images (ImageNet-A) and
    out-of-distribution images (ImageNet-O).

    For example: situs evaluate robustness runs/ft --count 100
    """

    topics: ClassVar = MeasureArgs.topics | {
        "published": ("imagenet_c", "imagenet_a", "imagenet_o", "in_distribution", "class_list")
    }

    corruptions: Annotated[tuple[str, ...], Parameter(metavar="NAME,…")] = ("all",)
    """Corruptions of the images in --data: all, none, a kind (noise, blur, weather, digital), or names such as
    snow,fog."""

    severities: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Severities of the corruptions, from 1 to 5."""

    imagenet_c: _Folder = None
    """Folder of published corrupted images, with paths CORRUPTION/SEVERITY/CLASS/IMAGE (ImageNet-C) or CORRUPTION.npy
    (CIFAR-C)."""

    imagenet_a: _Folder = None
    """Folder of natural adversarial images, with paths CLASS/IMAGE. The metrics are accuracy and AURRA (accuracy of the
    k most confident predictions, averaged over k). The model chooses only among the classes in the folder."""

    imagenet_o: _Folder = None
    """Folder of out-of-distribution images, with paths CLASS/IMAGE. The metric is the AUPR for distinguishing these
    images from in-distribution images."""

    in_distribution: Annotated[str | None, Parameter(metavar="PATH")] = None
    """In-distribution images for the comparison with --imagenet-o. Default: the images of --data."""

    class_list: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """File with one class name per line, in the order of the model outputs (for ImageNet, WordNet ids such as
    n01440764). A model without class names needs this file."""

    def run(self) -> None:
        from situs.measure.robustness.run import PublishedSets, evaluate_robustness

        options = options_of(self)
        sets = PublishedSets(**{field.name: options.pop(field.name) for field in fields(PublishedSets)})
        present(evaluate_robustness(open_from(self), **options, sets=sets), self.out)


@dataclass(frozen=True, kw_only=True)
class Position(MeasureArgs):
    """Measure how much a model knows about position. The flag --kind sets what is measured.

    With --kind answers, Situs measures how often an MP3 or DropPos run predicts the right position, at several mask
    ratios. With --kind vectors, Situs plots the position embeddings and their spectrum, and fits a linear regression
    from embeddings to positions. With --kind all, MODEL can be any model. Situs then measures what the position
    embeddings, features, predictions and blocks of the model reveal about position.

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
    """A training run, an export, a model folder, a model locked by situs lock, or a timm model name with a weight file
    (NAME=FILE). With --kind vectors, you can give several models."""

    kind: Literal["answers", "vectors", "all"] = "answers"
    """What is measured."""

    ratios: Annotated[tuple[float, ...] | None, Parameter(metavar="RATIO,…")] = None
    """With --kind answers: mask ratios (called η in MP3, and γ in DropPos). Default: 0,.25,.5,.75,.9 for MP3, and
    0,.25,.5,.75 for DropPos. With --kind all: fractions of patches to shuffle. Default: .15,.5,.9. The results contain
    all fractions, but the verdict (the summary in words) mentions only the first fraction."""

    position_ratios: Annotated[tuple[float, ...] | None, Parameter(metavar="RATIO,…")] = None
    """With --kind answers, for DropPos: values of γ_pos, the fraction of visible patches whose position is dropped.
    Default: .25,.5,.75,.95."""

    anchor_ratio: Annotated[float | None, Parameter(metavar="RATIO")] = None
    """With --kind answers, for models trained with MP3: fraction of patches whose position is given to the model as a
    hint. Default: as in training."""

    folds: int = 5
    """With --kind vectors: number of cross-validation folds of the linear regression."""

    equivariance: bool = True
    """With --kind all: also test whether the blocks are equivariant to token permutations."""

    count: Annotated[int | None, Parameter(metavar="IMAGES")] = None
    """Use at most this many images, chosen at random with a fixed seed. Default: all images, or 64 with --kind all."""

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
    """Show the attention of a model: attention maps of images, the mean attention for each relative offset, and the
    entropy of each head. With --kind correlation, show instead how similar the features at two positions are, within
    one image and between two images.

    For example: situs evaluate attention runs/mp3
    """

    only: ClassVar[dict[str, tuple[str, ...]]] = {"layer": ("maps",), "show": ("maps",), "depth": ("correlation",)}

    kind: Literal["maps", "correlation"] = "maps"
    """maps shows the attention. correlation shows how similar the features are at each pair of positions."""

    layer: int | None = None
    """With --kind maps: number of the layer whose maps are shown. The first layer has number 1. Default: the last
    layer."""

    show: Annotated[int, Parameter(metavar="IMAGES")] = 6
    """With --kind maps: number of images for which maps are shown."""

    depth: str = "norm"
    """With --kind correlation: layer whose similarities are shown: "embedding", the number of a block, or "norm" (the
    final norm)."""

    def run(self) -> None:
        from situs.measure.attention import analyze_attention
        from situs.measure.correlation import analyze_correlation

        analyze = {"maps": analyze_attention, "correlation": analyze_correlation}[self.kind]
        present(analyze(open_from(self), **options_for(self.kind, self)), self.out)


@dataclass(frozen=True, kw_only=True)
class Reconstruct(FewImagesArgs):
    """Show how an MP3 or DropPos run solves jigsaw puzzles. The pictures show each patch at its predicted position. For
    MP3, some puzzles mix the patches of two images.

    For example: situs evaluate reconstruct runs/mp3
    """

    ratios: Annotated[tuple[float, ...] | None, Parameter(metavar="RATIO,…")] = None
    """Mask ratios of the puzzles (called η in MP3, and γ in DropPos). Default: 0,.25,.5,.75, as in the papers."""

    position_ratios: Annotated[tuple[float, ...] | None, Parameter(metavar="RATIO,…")] = None
    """For DropPos: values of γ_pos, the fraction of visible patches whose position is dropped. Default: .75,.95."""

    anchor_ratio: Annotated[float | None, Parameter(metavar="RATIO")] = None
    """For models trained with MP3: fraction of patches whose position is given to the model as a hint. Default: as in
    training."""

    show: Annotated[int, Parameter(metavar="IMAGES")] = 6
    """Number of images shown."""

    pairs: int = 2
    """For MP3: number of puzzles that mix the patches of two images."""

    def run(self) -> None:
        measure(self, "situs.measure.reconstruct.analyze_reconstruct")
