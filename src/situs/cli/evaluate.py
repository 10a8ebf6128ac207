"""Verbs that measure a model, or take its answers and features: `evaluate …`, `predict`, `features`."""

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
    asked,
    asked_for,
    measure,
    open_each,
    present,
    tell_left_out,
)
from situs.cli.shell import answer
from situs.errors import SitusError, counted

if TYPE_CHECKING:
    from situs.models import Model
    from situs.results import Result


@dataclass(frozen=True, kw_only=True)
class Predict(ModelArgs):
    """The class of every image, clip or sentence, with its probability, as one csv file: path, class, probability.

    For example: situs predict runs/ft --out predictions.csv

    Labels are not needed and not looked at; what cannot be read has a row without a class.
    """

    data: Annotated[str | None, Parameter(metavar="PATH")] = None
    """The images; by default those a run was trained on."""

    out: Annotated[Path, Parameter(metavar="FILE")]
    """The csv file to write, whole or not at all."""

    split: str = "all"
    """train, val or test; by default all of the data."""

    count: Annotated[int | None, Parameter(metavar="IMAGES")] = None
    """At most this many images, chosen at random and the same every time; by default all."""

    batch: int = 256
    """Images at a time."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the forward."""

    column: Annotated[str | None, Parameter(name="--text.column", metavar="NAME")] = None
    """Of text: the column of the sentences; by default what the model was trained on, or the only one that holds
    words."""

    pair: Annotated[str, Parameter(name="--text.pair", metavar="NAME")] = ""
    """Of text: the column of the second sentence, by default what the model was trained on; none: single ones."""

    def run(self) -> None:
        """Predicts, writes, and says how often each class was named."""
        from situs.data.text import Columns
        from situs.measure.predict import check_csv, predict

        check_csv(self.out)
        text = Columns(column=self.column, pair=self.pair) if self.column or self.pair else None
        asked = {name: getattr(self, name) for name in ("data", "split", "count", "batch", "precision")}
        found = predict(open_from(self), **asked, text=text)
        found.write(self.out)
        named = found.counts
        few = ", ".join(f"{name} {count:,}" for name, count in list(named.items())[:5])
        more = f", and {len(named) - 5:,} more classes" if len(named) > 5 else ""
        lines = [f"{self.out}: {counted(len(found.rows) - len(found.broken), 'rows')} with a class: {few}{more}"]
        if found.broken:
            lines.append(f"{counted(len(found.broken), 'rows')} without: {', '.join(found.broken[:3])}"
                         f"{', …' if len(found.broken) > 3 else ''} could not be read")  # fmt: skip
        if len(named) == 1 and len(found.rows) > 1 and len(found.classes) > 1:
            lines.append(f"it names one class, {next(iter(named))}, for everything")
        rows = {"file": self.out, "rows": len(found.rows), "named": named, "broken": found.broken}
        answer({**rows, "left_out": list(found.left_out)}, *lines)
        tell_left_out(found.left_out)


@dataclass(frozen=True, kw_only=True)
class Features(DataArgs):
    """Features of every image, as one file: features [n, D] or of its patches [n, N, D], ids, labels, what made them.

    For example: situs features runs/mp3 --out features.safetensors
    """

    out: Annotated[Path, Parameter(metavar="FILE")]
    """The file to write: .safetensors, .npz or .npy. NAME.names.csv beside it says which image each row is."""

    split: str = "train"
    """train, val or test, or all of them."""

    tokens: Literal["pooled", "patches"] = "pooled"
    """One vector an image, or one a patch, row by row of the model's grid."""

    pool: Literal["mean", "cls"] = "mean"
    """The mean of the patch tokens, or the CLS token, where they are pooled."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the forward."""

    column: Annotated[str | None, Parameter(name="--text.column", metavar="NAME")] = None
    """Of text: the column of the sentences; by default what the model was trained on, or the only one that holds
    words."""

    def run(self) -> None:
        """Extracts and writes them, and says what was written."""
        from situs.measure.features import check_form, extract_features, write_features

        if self.tokens == "patches" and self.pool != "mean":
            raise SitusError(f"pool={self.pool}: of patches nothing is pooled; leave it out", field=("pool", "tokens"))
        check_form(self.out)
        found = extract_features(open_from(self), **asked(self))
        write_features(self.out, found)
        count, *patches, dim = found.features.shape
        labels = "with labels" if found.labels is not None else "without labels"
        said = f"{self.out}: {count} features of {'× '.join(f'{each} ' for each in (*patches, dim))}numbers, {labels}"
        known = found.labels is not None
        answer({"file": self.out, "shape": [count, *patches, dim], "labels": known, "left_out": found.left_out}, said)
        tell_left_out(found.left_out)


@dataclass(frozen=True, kw_only=True)
class Accuracy(SentenceArgs):
    """How often a model is right, by its kind, and where it is not.

    A classifier: top-1 and balanced accuracy, or mean average precision of multi-label data. Several: each alone and
    all together. A segmentation: mIoU. A detection: COCO's AP. A language model: perplexity.

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
    """A run, an export, a model's folder, a locked one, or a name with weights (NAME=FILE); several are compared."""

    average: Literal["softmax", "logits"] = "softmax"
    """Several models: what is averaged, probabilities or logits."""

    batch: int | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Samples at a time; by default 256, for a segmentation 16, for a detection 8."""

    show: Annotated[int, Parameter(metavar="IMAGES")] = 8
    """How many of the worst images the page shows, of a segmentation or a detection."""

    mode: Literal["slide", "whole"] = "slide"
    """Windows of the model's own size, averaged where they overlap; or the whole image at once, its positions
    resampled."""

    overlap: Annotated[float, Parameter(metavar="SHARE")] = 1 / 3
    """slide: the least share of a window that the next one sees too."""

    save_detections: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """Write what was found there, in COCO's json of results: boxes and masks in the pixels of the files."""

    def run(self) -> None:
        if len(self.model) > 1:
            from situs.measure.ensemble import evaluate_ensemble

            words = asked_for("several models", self, held_out=self.held_out, batch=self.batch or 256)
            del words["text"]
            present(evaluate_ensemble(open_each(self.model, self), **words), self.out)
            return
        model = open_from(self, self.model[0])  # pyright: ignore[reportGeneralTypeIssues]
        kind, evaluate, batch = _evaluation_of(model)
        words = asked_for(kind, self, batch=self.batch or batch)
        if "show" in words:
            words["pictures"] = words.pop("show")
            del words["text"]
        present(evaluate(model, **words), self.out)


def _evaluation_of(model: Model) -> tuple[str, Callable[..., Result], int]:
    """What kind of model it is, the function that evaluates such a model, and its samples at a time."""
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
    """Nearest neighbours on frozen features, layer by layer: CLS and the mean of the patches, the training split as
    bank.

    For example: situs evaluate knn runs/mp3 --k 20
    """

    k: Annotated[int | None, Parameter(metavar="N")] = None
    """How many neighbours decide; by default 20, or as many as a class has in the bank, where that is fewer."""

    temperature: Annotated[float | None, Parameter(metavar="τ|none")] = 0.07
    """τ of the weights exp(similarity / τ); none counts every neighbour as one."""

    train_count: Annotated[int | None, Parameter(metavar="IMAGES")] = 10_000
    """At most so many images of the training split as the bank; none for all."""

    def run(self) -> None:
        measure(self, "situs.measure.knn.evaluate_knn")


@dataclass(frozen=True, kw_only=True)
class Probe(MeasureArgs):
    """What a linear classifier reads off frozen features: the place of patches without a position, the class of
    images, or the class of each pixel.

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
    """What is read: the place of patches whose position was taken away, the class of the image, or of each pixel
    (segments), by data with masks."""

    after: Annotated[str | None, Parameter(metavar="MODEL")] = None
    """A second model on the same page, such as the first one fine-tuned."""

    train_count: Annotated[int, Parameter(metavar="IMAGES")] = 2000
    """At most so many images of the training split to fit to."""

    ratio: Annotated[float, Parameter(metavar="SHARE")] = 0.75
    """position: share of the patches whose position is taken away."""

    pool: Literal["mean", "cls"] = "mean"
    """class: the mean of the patch tokens, or the CLS token."""

    weight_decays: Annotated[tuple[float, ...], Parameter(metavar="λ,λ,…")] = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
    """Weight decays to choose from, on a part of the training split."""

    first: Annotated[int | None, Parameter(metavar="NUMBER")] = None
    """segments: number of the first class in the mask files; by default 0, and 1 where ADE20K's list lies beside."""

    void: Annotated[tuple[int, ...] | None, Parameter(metavar="NUMBER,…")] = None
    """segments: numbers that mean no class; by default 255, and 0 where ADE20K's list lies beside the masks."""

    classes: Annotated[tuple[str, ...], Parameter(metavar="NAME,…")] = ()
    """segments: names of the classes; by default those of a list beside the data, else their numbers."""

    def run(self) -> None:
        from situs.data.masks import usual_masks
        from situs.measure.probe.classes import evaluate_probe

        words = asked_for(self.kind, self)
        model = open_from(self)
        words["after"] = None if self.after is None else open_one_of(self.after, self)
        masks = usual_masks(self.data or model.samples.path, self.first, self.void)
        words = {name: value for name, value in words.items() if name not in ("first", "void", "classes")}
        present(evaluate_probe(model, kind=self.kind, masks=replace(masks, classes=self.classes), **words), self.out)


@dataclass(frozen=True, kw_only=True)
class Consistency(MeasureArgs):
    """What shuffled patches do to a classifier: top-1, Diff.Norm and consistency over γ, mask told and not told.

    For example: situs evaluate consistency runs/ft --ratios 0,.15,.5
    """

    ratios: Annotated[tuple[float, ...], Parameter(metavar="γ,γ,…")] = (0.0, 0.03, 0.09, 0.15, 0.27, 0.5, 0.75, 0.9)
    """Shares of the patches to shuffle."""

    grid: Annotated[tuple[int, int] | None, Parameter(metavar="ROWS,COLUMNS")] = None
    """For a network without tokens (ResNet): the patches to shuffle; else the run's, 14 × 14 or 8 × 8."""

    def run(self) -> None:
        measure(self, "situs.measure.consistency.evaluate_consistency")


_Folder = Annotated[Path | None, Parameter(metavar="FOLDER")]


@dataclass(frozen=True, kw_only=True)
class Robustness(MeasureArgs):
    """How robust a classifier is: corrupted (mCE), adversarial (ImageNet-A) and unknown images (ImageNet-O).

    For example: situs evaluate robustness runs/ft --count 100
    """

    topics: ClassVar = MeasureArgs.topics | {
        "published": ("imagenet_c", "imagenet_a", "imagenet_o", "in_distribution", "class_list")
    }

    corruptions: Annotated[tuple[str, ...], Parameter(metavar="NAME,…")] = ("all",)
    """all, none, a kind (noise, blur, weather, digital) or names such as snow,fog; made from --data."""

    severities: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Severities."""

    imagenet_c: _Folder = None
    """Corrupted images that exist: FOLDER/CORRUPTION/SEVERITY/CLASS/IMAGE, or CORRUPTION.npy as in CIFAR-C."""

    imagenet_a: _Folder = None
    """Natural adversarial examples: FOLDER/CLASS/IMAGE. Accuracy and AURRA among these classes."""

    imagenet_o: _Folder = None
    """Images of none of the classifier's classes: FOLDER/CLASS/IMAGE. AUPR against --in-distribution."""

    in_distribution: Annotated[str | None, Parameter(metavar="PATH")] = None
    """Images of the classifier's own classes beside ImageNet-O; by default --data."""

    class_list: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """Class names in the order of the outputs, one a line (for ImageNet the 1,000 wnids), where the model has none."""

    def run(self) -> None:
        """Measures, prints the tables and writes the page."""
        from situs.measure.robustness.run import PublishedSets, evaluate_robustness

        told = asked(self)
        sets = PublishedSets(**{each.name: told.pop(each.name) for each in fields(PublishedSets)})
        present(evaluate_robustness(open_from(self), **told, sets=sets), self.out)


@dataclass(frozen=True, kw_only=True)
class Position(MeasureArgs):
    """How much a model knows of position.

    answers: where an MP3 or DropPos run puts its patches, DropPos's grid of γ × γ_pos or MP3's accuracy over η.
    vectors: what the position vectors of one or several models hold: pictures, spectrum, what a linear map reads.
    all: what any model knows and gives away, in its vectors, features, answers and blocks, on one page.

    For example: situs evaluate position runs/mp3
    """

    only: ClassVar[dict[str, tuple[str, ...]]] = {
        "position_ratios": ("answers",),
        "anchor_ratio": ("answers",),
        "precision": ("answers",),
        "folds": ("vectors",),
        "equivariance": ("all",),
        **dict.fromkeys(("data", "held_out", "count", "batch", "split", "snr_db", "ratios"), ("answers", "all")),
    }

    model: Annotated[tuple[str, ...], POSITIONAL, Parameter(metavar="MODEL…")]  # pyright: ignore[reportIncompatibleVariableOverride]
    """A run, an export, a model's folder, a locked one, or a name with weights (NAME=FILE); vectors: or several."""

    kind: Literal["answers", "vectors", "all"] = "answers"
    """What is looked at."""

    ratios: Annotated[tuple[float, ...] | None, Parameter(metavar="SHARE,…")] = None
    """answers: MP3's η or DropPos's γ; by default 0, .25, .5, .75 (and .9 for MP3). all: shares of the patches to
    shuffle; by default .15, .5, .9, and the verdict speaks of the first."""

    position_ratios: Annotated[tuple[float, ...] | None, Parameter(metavar="SHARE,…")] = None
    """answers: DropPos's γ_pos; by default .25, .5, .75 and .95."""

    anchor_ratio: Annotated[float | None, Parameter(metavar="SHARE")] = None
    """answers: share of the patches whose place MP3 is given as a hint, 0 for none; by default as in the training."""

    folds: int = 5
    """vectors: folds of the cross-validated regression."""

    equivariance: bool = True
    """all: measure whether the blocks treat tokens as a set, in float64."""

    count: Annotated[int | None, Parameter(metavar="IMAGES")] = None
    """At most this many images, chosen at random and the same every time; by default all, and 64 for all."""

    batch: int | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Images at a time; by default 256, and 16 for all."""

    def run(self) -> None:
        words = asked_for(self.kind, self)
        if self.kind == "vectors":
            from situs.measure.position.vectors import analyze_positions

            present(analyze_positions(open_each(self.model, self), **words), self.out)
            return
        if len(self.model) > 1:
            said = f"kind={self.kind}: is for one model, and {len(self.model)} are given"
            raise SitusError(said, field=("model", "kind"))
        model = open_from(self, self.model[0])  # pyright: ignore[reportGeneralTypeIssues]
        if self.kind == "answers":
            from situs.measure.position.head import evaluate_position

            words["batch"] = self.batch or 256
            present(evaluate_position(model, **words), self.out)
            return
        from situs.audit.positions import audit_positions

        words |= {"count": self.count or 64, "batch": self.batch or 16}
        present(audit_positions(model, **{n: value for n, value in words.items() if n != "ratios" or value}), self.out)


@dataclass(frozen=True, kw_only=True)
class Attention(FewImagesArgs):
    """Where a model's heads look: maps over images, by relative offset, and entropy layer by head.

    correlation: how alike the features of two places are, in one image and in two, instead.

    For example: situs evaluate attention runs/mp3
    """

    only: ClassVar[dict[str, tuple[str, ...]]] = {"layer": ("maps",), "show": ("maps",), "depth": ("correlation",)}

    kind: Literal["maps", "correlation"] = "maps"
    """What is looked at."""

    layer: int | None = None
    """maps: the layer whose maps are laid over images, 1 for the first; by default the last."""

    show: Annotated[int, Parameter(metavar="IMAGES")] = 6
    """maps: how many images are shown."""

    depth: str = "norm"
    """correlation: the maps to draw, of "embedding", a block's number, or "norm", the model's end."""

    def run(self) -> None:
        from situs.measure.attention import analyze_attention
        from situs.measure.correlation import analyze_correlation

        analyze = {"maps": analyze_attention, "correlation": analyze_correlation}[self.kind]
        present(analyze(open_from(self), **asked_for(self.kind, self)), self.out)


@dataclass(frozen=True, kw_only=True)
class Reconstruct(FewImagesArgs):
    """Puzzles that an MP3 or DropPos run solves: each patch where the model puts it, at several ratios; two-image
    mixes.

    For example: situs evaluate reconstruct runs/mp3
    """

    ratios: Annotated[tuple[float, ...] | None, Parameter(metavar="SHARE,…")] = None
    """MP3's η or DropPos's γ; by default the papers' 0, .25, .5 and .75."""

    position_ratios: Annotated[tuple[float, ...] | None, Parameter(metavar="SHARE,…")] = None
    """DropPos's γ_pos; by default .75 and the paper's .95."""

    anchor_ratio: Annotated[float | None, Parameter(metavar="SHARE")] = None
    """MP3: share of the patches whose place is given as a hint, 0 for none; by default as in the training."""

    show: Annotated[int, Parameter(metavar="IMAGES")] = 6
    """How many images are shown."""

    pairs: int = 2
    """MP3: how many pairs of images are mixed."""

    def run(self) -> None:
        measure(self, "situs.measure.reconstruct.analyze_reconstruct")
