"""Do received weights look chosen? How far a model lies from what training and initialisation make.

    situs.audit.check_weights("received/", like="public/")

A server that reads single samples out of a sum of gradients needs neurons that switch on one after another: many
neurons with one direction and other thresholds, steep, behind an attention that does nothing. Each measure here looks
for one of these marks, in the matrices of the blocks or in the neurons' answers to made-up inputs. Beside a public
model the changes of all tensors are measured too: a written classifier, embedding or norm is noticed only there.

    limit = 4 · the highest value of all honest trainings, at any stage, pruned or quantised
    score = log(value / median) / log(limit / median)            above 1: noticed

The honest trainings are those of `benchmarks/chosen.py`; no crafted weights were used to set a limit. The sizes of
channels, rows and numbers are not measured without a public model: real models differ in these by more than a factor
of 4 from all others, so each new kind would be a false alarm.

The score of a model is its highest. A model below 1 is "not noticed", never safe: weights can be crafted to pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs.backbones.base import Backbone
from situs.backbones.block import Block
from situs.backbones.weights import load_weights
from situs.errors import SitusError, first_line
from situs.gate import ABOVE, NOT_JUDGED, PASSED
from situs.models.data import AnyModel
from situs.models.inference import evaluating
from situs.models.model import Model
from situs.models.open import RANDOM, open_model
from situs.results import Figure, Provenance, Result, Summary, Table, Tone

PARALLEL = 0.98
"""Rows count as parallel above this cosine, either sign."""

EQUAL = 0.995
"""Neurons answer alike above this correlation of their inputs' weighted sums, either sign."""

STRONGEST = 8
"""A measure of single neurons takes the one of this rank in its layer: an attack needs many, an outlier is one."""

TOKENS, LENGTH, SAMPLES = 1024, 64, 16
"""Of the made-up inputs: tokens that are looked at, words of a text, images or texts at most."""

COMMON = 0.95
"""Share of tokens that is looked at: language models have a few whose numbers exceed all others (attention sinks)."""

UNTOUCHED = 1e-3
"""Relative change of a neuron that counts as none: what half precision rounds."""

FRESH = 0.02
"""What a tensor that begins at 0 is compared with: the usual deviation of fresh weights."""

PART = 0.05
"""Tensors that changed less count as changed so much: who trains a part of a model leaves the others as they are."""

GONE = 0.5
"""A vector is gone if a larger ratio of its numbers became exactly 0."""

MOST = 1e9
"""What infinity counts as."""


class Measure(NamedTuple):
    """about: what is high, in words with the value as {}. usual, limit: median of honest weights, and what is noticed
    above. scale: "times" for a number above 0, "decades" for the -log10 of a chance."""

    about: str
    usual: float
    limit: float
    scale: Literal["times", "decades"] = "times"

    def score(self, value: float) -> float:
        """0: as usual or below; 1: at the limit."""
        value, usual, limit = (self.scaled(number) for number in (value, self.usual, self.limit))
        return max(0.0, (value - usual) / (limit - usual))

    def scaled(self, value: float) -> float:
        """The number whose differences count."""
        return value if self.scale == "decades" else math.log2(max(value, 1 / MOST))


MEASURES = {
    "parallel neurons": Measure("{:.0f} neurons have parallel weights", 1, 8),
    "equal answers": Measure("{:.0f} neurons have proportional outputs", 1, 58),
    "few directions": Measure("its effective rank is {:.3g} times lower than that of a random matrix", 1.2, 36),
    "flat attention": Measure("query or key weights are {:.3g} times smaller than value weights", 1, 13),
    "ordered biases": Measure(
        "consecutive biases only rise or only fall, which happens by chance in 1 of 1e{:.1f} cases",
        0,
        6,
        "decades",
    ),
    "steep neurons": Measure("the inputs of the strongest neurons have a standard deviation of about {:.3g}", 0.41, 21),
    "tensor changed": Measure("it changed {:.3g} times as much as the median tensor", 2, 180),
    "few numbers changed": Measure(
        "one of its rows, columns or numbers changed {:.3g} times as much as the median one", 4, 100
    ),
    "few neurons changed": Measure("some neurons changed {:.3g} times as much as the median neuron", 1.5, 30),
}
"""The marks of chosen weights, with their limits. Those of the last three, changes from a public model, were set on
few pairs of weights before and after training, and are wider."""


class Reading(NamedTuple):
    """The highest value of a measure in a model, in which layer, and its score. public: the public model's value."""

    name: str
    value: float
    layer: str
    score: float
    public: float | None = None

    def __str__(self) -> str:
        place = f"{self.layer}: " if self.layer else ""
        limit = f"limit {MEASURES[self.name].limit:.3g}"
        return f"{self.name} ({place}{MEASURES[self.name].about.format(self.value)}; {limit})"


class Layer(NamedTuple):
    """A matrix of a block. part: query, key, value, out, up or down. weight: [out, in]. module: the layer whose output
    is what its neurons get, None for other parts."""

    name: str
    part: str
    weight: Tensor
    bias: Tensor | None = None
    module: nn.Module | None = None


Values = dict[str, tuple[float, str]]
"""Measure -> its highest value so far, and the layer."""


@dataclass(frozen=True)
class WeightCheck(Result):
    """Whether weights look chosen. like: name of the public model, "" without one. distance: the median relative change
    of a matrix from it. missing: what could not be measured, in sentences."""

    file: ClassVar[str] = "chosen"
    subject: ClassVar[str] = "were its weights crafted?"
    meaning: ClassVar[str] = (
        "A server can craft weights that make single samples readable in an upload. Each measure looks for one sign of "
        "such weights. Each measure has a limit: weights above the limit look crafted. The value of a measure is "
        "rescaled to a score, so that a value at the limit has the score 1. The limits were set on honest (not "
        "crafted) weights only. A score below 1 does not prove that the weights are honest, because a server can craft "
        "weights that stay below all limits."
    )

    model: str
    like: str
    readings: tuple[Reading, ...]
    distance: float | None = None
    missing: tuple[str, ...] = ()

    @property
    def score(self) -> float:
        """The highest of all measures; above 1 the weights are noticed."""
        return max((reading.score for reading in self.readings), default=0.0)

    @property
    def reasons(self) -> list[Reading]:
        """The readings above their limits, the highest first."""
        return [reading for reading in self.readings if reading.score > 1]

    @property
    def status(self) -> int:
        """The exit status: 3 noticed, 4 if something could not be measured, else 0."""
        return ABOVE if self.reasons else NOT_JUDGED if self.missing else PASSED

    @property
    def tone(self) -> Tone:
        return "bad" if self.reasons else "unsure"

    @property
    def mark(self) -> str:
        return "noticed" if self.reasons else "inconclusive" if self.status else "not noticed"

    @property
    def sentence(self) -> str:
        """The verdict, with its reasons."""
        if self.reasons:
            more = f", and {len(self.reasons) - 2} more" if len(self.reasons) > 2 else ""
            reasons = "; ".join(map(str, self.reasons[:2]))
            verdict = f"noticed: its weights look crafted, not trained (score {self.score:.3g})"
            return f"{self.model}: {verdict}: {reasons}{more}."
        if not self.readings or self.missing:
            return f"{self.model}: inconclusive: {'; '.join(self.missing)}."
        return (
            f"{self.model}: not noticed (score {self.score:.2g} of 1), because every measure is in the range of "
            "honest weights. This does not prove that the weights are honest, because a server can craft weights "
            "that stay below all limits."
        )

    def summary(self) -> Summary:
        """The verdict, and a row for each measure."""
        header = ("measure", "value", "limit", "score", "layer", *(["public"] if self.like else []))
        rows = [
            (r.name, r.value, MEASURES[r.name].limit, round(r.score, 2), r.layer, *([r.public] if self.like else []))
            for r in self.readings
        ]
        notes = list(self.missing if self.reasons else ())
        if self.distance is not None:
            notes.append(_distance_note(self.distance, self.like))
        numbers = ((f"{self.score:.3g}", "score; above 1 the weights look crafted"),)
        return Summary(self.sentence, (Table(self.model, header, rows),), tuple(notes), numbers)

    def numbers(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "like": self.like or None,
            "noticed": bool(self.reasons),
            "score": self.score,
            "status": self.status,
            "reasons": [reading.name for reading in self.reasons],
            "distance": self.distance,
            "missing": list(self.missing),
            "measures": [reading._asdict() | {"limit": MEASURES[reading.name].limit} for reading in self.readings],
        }

    def figures(self) -> Sequence[Figure]:
        scores = {r.name: (min(r.score, 10.0), "bad" if r.score > 1 else "") for r in self.readings}
        caption = (
            "Score of each measure. A score above 1 means that the weights look crafted. Scores above 10 are drawn "
            "as 10."
        )
        return [Figure("", caption, "bars", (scores, ""))]


class ChosenWeightsError(RuntimeError):
    """The received weights look chosen. result: what was measured."""

    def __init__(self, result: WeightCheck) -> None:
        super().__init__(result.sentence)
        self.result = result


def check_weights(source: AnyModel, like: AnyModel | Mapping[str, Tensor] = RANDOM, **opening: Any) -> WeightCheck:
    """Measures whether a model's weights look chosen by a server rather than made by training.

    source, opening: as `open_model` takes them. like: a public model of the same architecture, or its state dict:
    what it shows itself is not held against the weights, and changes from it are measured; "random": there is none.

    >>> print(situs.audit.check_weights("runs/mp3").sentence)
    """
    model = open_model(source, any_weights=True, **opening)
    backbone = model.backbone
    values, missing = measure(backbone)
    public, values_public, distance, name = None, Values(), None, ""
    if not (isinstance(like, str) and like == RANDOM):
        public, name, unknown = _public(backbone, like, opening)
        values_public, _ = measure(public)
        distance, changed = compare(layers_of(backbone), layers_of(public), name)
        alone = compare_others(backbone, public, unknown, values)
        values |= {"few neurons changed": changed}
        if alone:
            more = f" and {len(alone) - 3} more" if len(alone) > 3 else ""
            missing.append(
                f"not compared: {', '.join(alone[:3])}{more} ({name} lacks these tensors or has them in another shape)"
            )
    readings = [_reading(key, values[key], values_public.get(key)) for key in MEASURES if key in values]
    readings.sort(key=lambda reading: -reading.score)
    origin = Provenance(of=(model.origin,)) if model.identity else Provenance()
    return WeightCheck(model.name, name, tuple(readings), distance, tuple(missing), provenance=origin)


def _reading(name: str, value: tuple[float, str], public: tuple[float, str] | None) -> Reading:
    """What a public model shows itself, and a quarter more, is not held against the weights."""
    score = MEASURES[name].score(value[0])
    if public is not None:
        score /= max(1.0, 1.25 * MEASURES[name].score(public[0]))
    return Reading(name, value[0], value[1], score, None if public is None else public[0])


def _public(
    backbone: Backbone, like: AnyModel | Mapping[str, Tensor], opening: Mapping[str, Any]
) -> tuple[Backbone, str, list[str]]:
    """The public model, its name, and the names of tensors that it does not know."""
    if isinstance(like, Mapping):
        public, state = deepcopy(backbone), {name.removeprefix("model."): value for name, value in like.items()}
        return public, "the state dict", load_weights(public, state, "the state dict")
    if isinstance(like, Model | nn.Module):
        model = open_model(like)
    else:
        shape = {
            key: value for key, value in opening.items() if key in ("img_size", "patch_size", "in_chans", "device")
        }
        shape = {} if Path(str(like)).exists() else shape
        model = open_model(like, **shape)
    return model.backbone, model.name, []


# --- the matrices ----------------------------------------------------------------------------------------------------


def layers_of(backbone: Backbone) -> list[Layer]:
    """The matrices of all blocks, each once; every linear layer of a model whose blocks are not known."""
    names = {id(module): name.removeprefix("model.") for name, module in backbone.named_modules()}
    layers: dict[str, Layer] = {}
    try:
        blocks = backbone.parts()
    except (SitusError, NotImplementedError, AttributeError):
        blocks = []
    for block in blocks:
        for layer in _of_block(block, names):
            layers.setdefault(layer.name, layer)
    if not layers:
        linear = (module for module in backbone.modules() if isinstance(module, nn.Linear))
        layers = {names[id(m)]: Layer(names[id(m)], "up", _matrix(m), _bias(m), m) for m in linear}
    return list(layers.values())


def _of_block(block: Block, names: Mapping[int, str]) -> Iterable[Layer]:
    attention, mlp = block.attention, block.mlp
    parts = ("query", "key", "value")
    if len(attention.qkv) == 1:
        weight, name = _matrix(attention.qkv[0]), names.get(id(attention.qkv[0]), "")
        thirds = weight.unflatten(0, (attention.heads, 3, -1)).transpose(0, 1) if attention.by_head else weight.chunk(3)
        for part, rows in zip(parts, thirds, strict=True):
            yield Layer(f"{name} ({part})", part, rows.reshape(-1, weight.shape[1]))
    else:
        for part, layer in zip(parts, attention.qkv, strict=True):
            yield Layer(names.get(id(layer), part), part, _matrix(layer))
    yield Layer(names.get(id(attention.out), ""), "out", _matrix(attention.out))
    for number, up in enumerate(mlp.up):
        yield Layer(names.get(id(up), ""), "up", _matrix(up), _bias(up), up if number == 0 else None)
    if mlp.down is not None:
        yield Layer(names.get(id(mlp.down), ""), "down", _matrix(mlp.down))


def _matrix(layer: Any) -> Tensor:
    """A layer's weights as [out, in] in float32; transformers' Conv1D keeps the other order."""
    weight = layer.weight.detach().float().flatten(1)
    return weight.T if type(layer).__name__ == "Conv1D" else weight


def _bias(layer: Any) -> Tensor | None:
    bias = getattr(layer, "bias", None)
    return None if bias is None else bias.detach().float()


@torch.no_grad()
def measure(backbone: Backbone) -> tuple[Values, list[str]]:
    """Every measure of one model, and what could not be measured."""
    layers, values, missing = layers_of(backbone), Values(), list[str]()
    if not layers:
        return values, [f"{backbone.name} has no matrices to measure"]
    others = others_of(backbone)
    if not all(bool(weight.isfinite().all()) for weight in (*(layer.weight for layer in layers), *others.values())):
        raise SitusError(f"{backbone.name}: its weights contain NaN or infinity")
    _measure_matrices(layers, values)
    try:
        _measure_answers(backbone, layers, values)
    except Exception as error:  # noqa: BLE001  (a model whose inputs are not known runs into anything)
        missing.append(f"the outputs on random inputs could not be measured ({first_line(error)})")
    if not any(layer.module is not None for layer in layers):
        missing.append("its MLPs are of an unknown class, so their neurons were not measured")
    return values, missing


def _keep(values: Values, name: str, value: float, layer: str) -> None:
    value = min(value, MOST) if not math.isnan(value) else MOST
    if name not in values or value > values[name][0]:
        values[name] = (value, layer)


def _measure_matrices(layers: Sequence[Layer], values: Values) -> None:
    sizes = {part: [layer for layer in layers if layer.part == part] for part in ("query", "key", "value")}
    for layer in layers:
        weight = layer.weight
        begins_at_zero = layer.part in ("out", "down") and not bool(weight.any())  # a usual initialisation
        if layer.part in ("up", "down", "value", "out") and not begins_at_zero:
            _keep(values, "few directions", _chance_rank(weight) / max(directions(weight), 1 / MOST), layer.name)
        if layer.part == "up":
            _keep(values, "parallel neurons", parallel(weight, PARALLEL), layer.name)
            if layer.bias is not None:
                _keep(values, "ordered biases", order(layer.bias), layer.name)
    for small in (*sizes["query"], *sizes["key"]):
        for value in sizes["value"]:
            if small.name.split(" (")[0].rpartition(".")[0] == value.name.split(" (")[0].rpartition(".")[0]:
                ratio = _size(value.weight) / max(_size(small.weight), 1 / MOST)
                _keep(values, "flat attention", ratio, small.name)


def others_of(backbone: Backbone) -> dict[str, Tensor]:
    """Every tensor that is no matrix of a block, by the wrapped model's names: parameters, and buffers that are sent.

    A matrix [n, ...] is flat; a table [1, N, D] too; what has one row is a vector."""
    roles, tensors = backbone.roles(), dict[str, Tensor]()
    for full, value in backbone.state_dict().items():
        name, role = full.removeprefix("model."), roles.get(full, roles.get(full.removeprefix("model.")))
        inside = role is not None and role.part in ("qkv", "block") and value.dim() > 1
        if value.is_floating_point() and value.numel() > 1 and not inside:
            value = value.detach().float().squeeze()
            tensors[name] = value.flatten(1) if value.dim() > 1 else value
    return tensors


def _size(weight: Tensor) -> float:
    return float(weight.double().square().mean().sqrt())


def directions(weight: Tensor) -> float:
    """The effective number of directions of a matrix: the exponential of its spectrum's entropy."""
    weight = weight.double()
    gram = weight @ weight.T if len(weight) < weight.shape[1] else weight.T @ weight
    powers = torch.linalg.eigvalsh(gram).clamp(min=0)
    total = powers.sum()
    return float(torch.special.entr(powers / total).sum().exp()) if float(total) else 0.0


def _chance_rank(weight: Tensor) -> float:
    """About the effective number of directions of a matrix of independent numbers."""
    least, most = sorted(weight.shape)
    return least / (1 + least / most) ** 0.5


def parallel(vectors: Tensor, bound: float) -> int:
    """How many of vectors [n, d] are parallel to one of them, at most; those that are 0 do not count."""
    norms = vectors.norm(dim=1)
    vectors = vectors[norms > 1e-12 * norms.max()]
    if len(vectors) < 2:
        return 1
    unit = F.normalize(vectors, dim=1)
    return max(int(((rows @ unit.T).abs() > bound).sum(dim=1).max()) for rows in unit.split(1024))


def order(bias: Tensor) -> float:
    """-log10 of the chance that so many of n numbers in a row rise or fall: 2n / length!."""
    longest = 1
    for steps in (bias.diff() > 0, bias.diff() < 0):
        length = 1
        for step in steps.tolist():
            length = length + 1 if step else 1
            longest = max(longest, length)
    return max(0.0, (math.lgamma(longest + 1) - math.log(2 * max(len(bias), 1))) / math.log(10))


# --- the answers to made-up inputs -----------------------------------------------------------------------------------


def made_up_inputs(backbone: Backbone) -> Tensor:
    """Random words [B, N], or images [B, C, ...] of which half are smooth and of different brightness, half noise."""
    chance = torch.Generator().manual_seed(0)
    weight = next(p for p in backbone.parameters() if p.is_floating_point())
    if backbone.input.words:
        shape = (SAMPLES, min(backbone.num_tokens, LENGTH))
        return torch.randint(backbone.input.words, shape, generator=chance).to(weight.device)
    sides = backbone.input.shape or (224, 224)
    tokens = 1 if "tokens" in backbone.refusals else backbone.num_tokens
    count = max(2, min(SAMPLES, TOKENS // tokens) // 2)
    noise = torch.randn(2 * count, backbone.input.channels or 3, *sides, generator=chance)
    coarse = torch.randn(count, noise.shape[1], *(4 for _ in sides), generator=chance)
    smooth = F.interpolate(coarse, sides, mode="bicubic" if len(sides) == 2 else "linear")
    light = torch.randn(count, 1, *(1 for _ in sides), generator=chance)
    return torch.cat([0.7 * smooth + light + 0.1 * noise[:count], noise[count:]]).to(weight)


def _measure_answers(backbone: Backbone, layers: Sequence[Layer], values: Values) -> None:
    """Runs the model on made-up inputs and measures what each MLP gets and what its neurons make of it."""

    def reader(name: str) -> Callable[..., None]:
        return lambda _, __, output: _measure_neurons(name, output.detach(), values)

    hooks = [layer.module.register_forward_hook(reader(layer.name)) for layer in layers if layer.module is not None]
    try:
        with evaluating(backbone):
            backbone(made_up_inputs(backbone))
    finally:
        for hook in hooks:
            hook.remove()


def _measure_neurons(name: str, sums: Tensor, values: Values) -> None:
    """sums: [..., H] before the activation."""
    sums = sums.float().flatten(0, -2)
    sums = sums[torch.linspace(0, len(sums) - 1, min(TOKENS, len(sums))).long()]
    moved = sums - sums.median(dim=0).values
    moved = moved[moved.norm(dim=1).argsort()[: math.ceil(COMMON * len(moved))]]
    moved = moved - moved.mean(dim=0)
    spread = 1.25 * moved.abs().mean(dim=0).sort(descending=True).values
    _keep(values, "steep neurons", float(spread[min(STRONGEST, len(spread)) - 1]), name)
    _keep(values, "equal answers", parallel(moved.T, EQUAL), name)


# --- the public model ------------------------------------------------------------------------------------------------


def compare(layers: Sequence[Layer], public: Sequence[Layer], name: str) -> tuple[float, tuple[float, str]]:
    """The median relative change of a matrix, and by how much more than the median of its layer a neuron changed.

    A server that crafts a few neurons of a real model leaves the others as they are; training moves all.
    """
    order = list(zip(layers, public, strict=False)) if len(layers) == len(public) else []  # a head may change the names
    pairs = [(layer, other.weight.to(layer.weight.device)) for layer, other in order if layer.part == other.part]
    pairs = [(layer, weight) for layer, weight in pairs if layer.weight.shape == weight.shape]
    if not pairs:
        raise SitusError(
            f"{name}: has a different architecture from the audited model, so the weights of the two cannot be "
            "compared; give a public model with the architecture of the audited model",
            field="like",
        )
    changes, most, place = list[float](), 0.0, ""
    for layer, weight in pairs:
        moved = layer.weight - weight
        changes.append(_size(moved) / max(_size(weight), 1 / MOST))
        if layer.part not in ("up", "down"):
            continue
        axis = 1 if layer.part == "up" else 0
        rows = moved.norm(dim=axis) / weight.norm(dim=axis).median().clamp(min=1 / MOST)
        rows = rows[layer.weight.norm(dim=axis) > 0].sort(descending=True).values  # a pruned neuron reads nothing
        if not len(rows):
            continue
        ratio = float(rows[min(STRONGEST, len(rows)) - 1] / rows.median().clamp(min=UNTOUCHED))
        if ratio > most:
            most, place = ratio, layer.name
    return sorted(changes)[len(changes) // 2], (min(max(most, 1 / MOST), MOST), place)


def compare_others(backbone: Backbone, public: Backbone, unknown: Sequence[str], values: Values) -> list[str]:
    """Measures the changes of all other tensors; gives the names of those that have no counterpart.

    A server that writes the classifier, the embedding, the positions or a norm alone changes it by far more than
    training does, or a few of its rows or numbers. Rows of words change if these occur.
    """
    theirs, changes, alone = others_of(public), dict[str, float](), list[str]()
    for name, value in others_of(backbone).items():
        other = theirs.get(name)
        if other is None or name in unknown or other.shape != value.shape:
            alone.append(name)
            continue
        other = other.to(value.device)
        moved, size = (value - other).abs(), max(_size(other), FRESH)
        lost = ((value == 0) & (other != 0)).float().mean()  # training leaves no tensor, and no half of a vector, at 0
        gone = bool(other.any()) and (float(lost) > GONE if value.dim() == 1 else not bool(value.any()))
        changes[name] = MOST if gone else max(_size(moved) / size, size / max(_size(value), FRESH) - 1)
        words = value.dim() > 1 and len(value) == backbone.input.words
        sizes = [moved] if value.dim() == 1 else [moved.norm(dim=axis) / moved.shape[axis] ** 0.5 for axis in (0, 1)]
        for part in sizes[:1] if words else sizes:
            if part.numel() >= STRONGEST:
                ratio = float(part.max() / part.median().clamp(min=UNTOUCHED * size))
                _keep(values, "few numbers changed", max(ratio, 1 / MOST), name)
    usual = sorted(changes.values())[len(changes) // 2] if changes else 0.0
    for name, change in changes.items():
        _keep(values, "tensor changed", max(change / max(usual, PART), 1 / MOST), name)
    alone += [name for name in theirs if name not in others_of(backbone)]
    return list(dict.fromkeys(alone))


def _distance_note(distance: float, name: str) -> str:
    if distance == 0:
        return f"The matrices of the model's blocks are equal to the matrices of {name}, bit for bit."
    related = "Fine-tuning can also cause such a difference" if distance < 0.7 else "The models are therefore unrelated"
    both = f"between the matrices of the model's blocks and the matrices of {name}"
    return f"The relative difference {both} is {distance:.2g} (median over the matrices). {related}."
