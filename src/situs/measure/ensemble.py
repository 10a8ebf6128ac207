"""Several classifiers as one: their softmax (or logits) averaged, each alone beside all together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal, Unpack

import torch
from torch import Tensor

from situs import __version__
from situs.data.sources.memory import addressed
from situs.errors import SitusError
from situs.measure.accuracy import TOP5_FROM, Accuracy, Classifier, Tally, check_numbers, hard, labels_of, logits_of
from situs.methods.base import Batch
from situs.models.data import AnyData, AnyModel, Chosen, check_classes, load_set, open_several
from situs.models.inference import Total, evaluating
from situs.results import Figure, Provenance, Result, Summary, Table, percent, points

Average = Literal["softmax", "logits"]
MEANING = """
Every model classifies every sample. Each model gets the samples prepared as in its own training (size, normalisation),
but without augmentation. The probabilities (or logits) of the models are averaged. The class with the largest average
is the ensemble's answer. The ensemble gains most if its models make errors on different samples. The ensemble can be
right on a sample that every single model classifies wrong.
"""


@dataclass(frozen=True)
class Ensemble(Result):
    """The accuracy of each model by name, and of the ensemble.

    agreement: the share of samples on which two models give the same answer, [M][M] in the order of `alone`. any_right:
    the share that at least one model classifies right, an upper bound for any choice among their answers. average: of
    probabilities or of logits. members: where each model comes from, by name.
    """

    file: ClassVar[str] = "ensemble"
    meaning: ClassVar[str] = MEANING
    alone: dict[str, Accuracy]
    together: Accuracy
    agreement: tuple[tuple[float, ...], ...]
    any_right: float
    average: Average = "softmax"
    members: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def summary(self) -> Summary:
        """The gain over the best model; a row for each model, then the ensemble."""
        name, best = max(self.alone.items(), key=lambda item: item[1].top1)
        gain, things = 100 * (self.together.top1 - best.top1), self.provenance.things
        text = (
            f"Together the models classify {percent(self.together.top1, 2)} of the {things} right. The best single "
            f"model ({name}) classifies {percent(best.top1, 2)} right, {abs(gain):.2f} percentage points "
            f"{'less' if gain >= 0 else 'more'} than the ensemble. At least one model is right on "
            f"{percent(self.any_right, 2)} of the {things}."
        )
        many = self.together.classes >= TOP5_FROM
        rows = [
            [name, points(score.top1), points(score.balanced),
             *([points(score.top5)] if many else []), f"{score.loss:.4f}"]
            for name, score in {**self.alone, f"together ({self.average})": self.together}.items()
        ]  # fmt: skip
        low, high = self.together.interval
        text += (
            f" The 95 % interval of the ensemble's top-1 is {percent(low)} to {percent(high)}. A model that always "
            f"predicts the largest class has a top-1 of {percent(self.together.majority, 2)}."
        )
        header = ["", "top-1, %", "balanced, %", *(["top-5, %"] if many else []), "loss"]
        title = self.provenance.title(self.provenance.counted(self.together.count))
        numbers = (percent(self.together.top1, 2), "top-1 together"), (percent(best.top1, 2), "the best single model")
        return Summary(text, (Table(title, header, rows),), numbers=numbers)

    def numbers(self) -> dict[str, Any]:
        """Each model, the ensemble, and the agreement of the models."""
        return {
            "average": self.average,
            "alone": {name: {**self.members.get(name, {}), **asdict(score)} for name, score in self.alone.items()},
            "together": asdict(self.together),
            "agreement": self.agreement,
            "any_right": self.any_right,
        }

    @property
    def title(self) -> str:
        """Of the page."""
        return f"{len(self.alone)} classifiers as one"

    def figures(self) -> list[Figure]:
        """The accuracy of each model and of the ensemble, and the agreement of the models."""
        names, things = list(self.alone), self.provenance.things
        top1 = {name: 100 * score.top1 for name, score in self.alone.items()}
        top1 |= {f"together ({self.average})": 100 * self.together.top1, "any model right": 100 * self.any_right}
        alike = {"": ([[100 * share for share in row] for row in self.agreement], f"same answer, % of the {things}")}
        return [
            Figure("top1", 'Top-1 of each model and of the ensemble ("together"). The last bar is the share of samples '
            "that at least one model classifies right.",
                   "figures.bars", (top1, f"top-1, % of the {things}"), {"digits": ".2f"}),
            Figure("agreement", f"Share of the {things} on which two models give the same answer, right or wrong.",
                   "figures.value_grids", (alike, names, names, "model", "model"), {"limits": (0, 100)}),
        ]  # fmt: skip

    def details(self) -> list[Table]:
        """Where the models come from."""
        rows = [[name, facts.get("method"), facts["model"]] for name, facts in self.members.items()]
        return [Table("The models", ["", "method", "model"], rows)] if rows else []


def combine(logits: Tensor, average: Average = "softmax") -> Tensor:
    """Logits [M, B, C] of M models -> logits [B, C] of the ensemble.

    softmax: the logarithm of the mean probability, whose cross entropy is the ensemble's own. logits: their mean.
    """
    if average == "logits":
        return logits.mean(dim=0)
    return logits.log_softmax(dim=-1).logsumexp(dim=0) - math.log(logits.shape[0])


def evaluate_ensemble(
    models: Iterable[AnyModel],
    data: AnyData = None,
    *,
    average: Average = "softmax",
    precision: str = "fp32",
    seed: int = 0,
    **chosen: Unpack[Chosen],
) -> Ensemble:
    """Measures several classifiers as one: each alone, their average, and their agreement.

    models: whatever `open_model` takes. data: a path or a source; None for the samples that the first run was trained
    on. Samples are prepared for each model as in its training. average: of probabilities (softmax) or of logits.
    chosen: see `load_set`.
    """
    opened = open_several(models, seed)
    if len(opened) < 2:
        raise SitusError("an ensemble needs at least two models", field="model")
    first = next(iter(opened.values())).holding_out(chosen.pop("held_out", None)).data
    loaders = {}
    for name, model in opened.items():
        split_model = model.holding_out(first.held_out)
        loaders[name] = load_set(split_model, addressed(data) or first.path or None, shared=True, **chosen)
        check_classes(model, loaders[name])
    backbones = {name: model.backbone for name, model in opened.items()}
    ensemble = measure_ensemble(backbones, loaders, average=average, precision=precision)
    for name, score in ensemble.alone.items():
        check_numbers(name, score.loss)
    name = next(iter(loaders.values())).source.name
    facts = {"data": name, "precision": precision, "average": average, "situs": __version__}
    sources = {name: loader.source for name, loader in loaders.items()}
    provenances = (
        Provenance({}, (model.origin,), tuple(sources[name].left_out()), sources[name].things)
        for name, model in opened.items()
    )
    members = {name: model.facts for name, model in opened.items()}
    return replace(ensemble, members=members, provenance=Provenance.joint(provenances, facts))


def measure_ensemble(
    models: Mapping[str, Classifier],
    batches: Mapping[str, Iterable[Batch]],
    *,
    average: Average = "softmax",
    precision: str = "fp32",
) -> Ensemble:
    """Each model alone and all together, in one pass.

    batches: by the model's name; the same samples in the same order, in the size and normalisation of that model.
    """
    if average not in ("softmax", "logits"):
        raise SitusError(field="average", value=average, allowed="softmax or logits")
    alone, together = {name: Tally() for name in models}, Tally()
    strangers, shared = Total(), Total()
    with evaluating(*models.values()):
        for row in zip(*(batches[name] for name in models), strict=True):
            first, outputs = row[0], []
            for name, batch in zip(models, row, strict=True):
                outputs.append(logits_of(models[name], batch, precision).float())
                alone[name].add(outputs[-1], labels_of(batch))
                strangers.add(_differs(first, batch))
            _check_classes(models, outputs)
            logits = torch.stack(outputs)
            together.add(combine(logits, average), labels_of(first))
            answers = logits.argmax(dim=-1)
            same = (answers[:, None] == answers[None]).sum(dim=-1).flatten()
            any_right = (answers == hard(labels_of(first))).any(dim=0).sum()
            shared.add(torch.cat([same, any_right[None]]).double())
    if strangers.over_ranks().item():
        raise SitusError(
            "the models of an ensemble must be tested on the same data, but their samples or labels differ"
        )
    result = together.result()
    *same, any_right = (shared.over_ranks() / result.count).tolist()
    pairs = tuple(zip(*[iter(same)] * len(models), strict=True))
    return Ensemble({name: tally.result() for name, tally in alone.items()}, result, pairs, any_right, average)


def _differs(one: Batch, two: Batch) -> Tensor:
    """How many samples differ in id or label, as a tensor on the device."""
    if one.ids.shape != two.ids.shape:
        raise SitusError(
            "the models of an ensemble must be tested on the same batches of samples, but their batches differ in size"
        )
    labels = (labels_of(one) != labels_of(two)).flatten().sum()
    return (one.ids != two.ids).sum() + labels


def _check_classes(models: Mapping[str, Classifier], logits: list[Tensor]) -> None:
    counts = {name: output.shape[-1] for name, output in zip(models, logits, strict=True)}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise SitusError(f"the models of an ensemble must have the same classes: {listed}")
