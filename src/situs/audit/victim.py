"""The victim of an audit: a model, and what computes its gradients: the bare backbone, or a run's own method."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from situs import __version__
from situs.audit.adapter import adapt
from situs.audit.cases import TestSet
from situs.audit.defences import THREAT, Defence, OwnDp
from situs.audit.stem import StemBackbone
from situs.backbones.base import Backbone
from situs.core.when import START, When
from situs.data.config import DataConfig
from situs.data.loader import Loader, make_loader, resolve
from situs.data.modalities import KINDS
from situs.data.open import kind_of, open_source
from situs.data.sources.base import Source
from situs.data.sources.memory import addressed
from situs.errors import SitusError
from situs.files import load_code
from situs.locks.manifest import read_manifest
from situs.methods.base import Batch, Draws, Method, Output
from situs.methods.mp3 import MP3
from situs.methods.supervised import Supervised, SupervisedConfig
from situs.models import PUBLISHED, Model, open_model
from situs.models.data import AnyData, opened
from situs.models.module import OwnModule
from situs.train.checkpoint.files import digest
from situs.train.tuning import describe

PUBLIC = 64
"""The most images of a data set, after those under attack, that an attacker may have."""


@dataclass(frozen=True)
class Victim:
    """model: what is audited, and how its images are prepared. trains: what computes the gradients: the bare backbone,
    or a run's own method. when: the run's last step, for its schedules. notes: for a reader, by name."""

    model: Model
    trains: Backbone | Method
    when: When = START
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def own_defence(self) -> Defence | None:
        """The run's own defence (DP-SGD); None where gradients are sent unchanged."""
        spent = self.model.spent
        if spent is None:
            return None
        promise = "ε not known" if spent.epsilon is None else f"ε = {spent.epsilon:.3g} at δ = {spent.delta:g}"
        return OwnDp(spent.clip, spent.noise, promise)


class OwnLoss(Supervised):
    """A client's own loss: a function of logits [B, C] and labels [B] that gives the mean over the batch."""

    def __init__(self, backbone: Backbone, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(backbone, SupervisedConfig(label_smoothing=0.0))
        self.loss = loss

    def forward(self, batch: Batch, draws: Draws) -> Output:  # noqa: ARG002
        return Output(self.loss(self.backbone(batch.inputs, batch.mask), batch.targets["label"]))


def with_loss(victim: Victim, loss: str | Callable[[Tensor, Tensor], Tensor]) -> Victim:
    """The victim with a loss of the user's own, a function or "file.py:name", and a note about it."""
    function: Any = load_code(loss) if isinstance(loss, str) else loss
    name = Path(loss).name if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
    if not callable(function):
        raise SitusError(f"loss={name}: must be a function of logits [B, C] and labels [B]", field="loss")
    model, method = victim.model, OwnLoss(victim.model.backbone, cast("Any", function))
    like = next(model.backbone.parameters())
    images = torch.zeros(2, model.data.channels, *model.data.size, device=like.device, dtype=like.dtype)
    labels = torch.zeros(2, dtype=torch.int64, device=like.device)
    try:  # refuse a wrong loss before anything is attacked
        with torch.enable_grad():
            value: Any = method(Batch(images, torch.arange(2), {"label": labels}), {}).loss
    except Exception as error:  # whatever the user's own code raises
        reason = f"raised {type(error).__name__} for logits and labels of two images: {error}"
        raise SitusError(f"loss={name}: {reason}", field="loss") from error
    if not isinstance(value, Tensor) or value.dim() or not value.requires_grad:
        shown = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        reason = "must return one number that depends on the logits: the mean loss over the batch"
        raise SitusError(f"loss={name}: returns {shown}, but {reason}", field="loss")
    note = (
        f"your loss {name}, which the attacker knows. Closed-form attacks work for any loss. Attacks that search for "
        "the images use your loss. The attacker infers labels with a rule for cross entropy, so for your loss the "
        "inferred labels may be wrong. A defence with its own training method (mjp) uses that method's loss"
    )
    return replace(victim, trains=method, notes={**victim.notes, "loss": note})


def open_victim(source: Any, *, classes: int = 1000, loss: Any = None, **open_args: Any) -> Victim:
    """Opens the victim by `open_model`, to which the other options go; a timm name without weights gets random ones.

    classes: of the new classifier that a model without one gets, because a client's loss needs one. loss: the client's
    own, instead of cross entropy or of a run's own method.
    """
    victim = _opened(source, classes, open_args, single=loss is None)
    return victim if loss is None else with_loss(victim, loss)


def _opened(source: Any, classes: int, open_args: dict[str, Any], *, single: bool) -> Victim:
    """single: refuse a model with one output, whose cross entropy is always 0."""
    model = opened(open_model(source, any_weights=True, as_trained=True, **open_args))
    if model.input is not None and model.input.modality.ids:
        raise SitusError(f"{model.name}: reads sentences; use audit_texts (situs audit texts)", field="model")
    shaped = model.facts["kind"] in ("export", "name") and model.facts.get("weights") != PUBLISHED
    if shaped and outputs_of(model) == model.backbone.out_dim:  # as many outputs as channels: pooled features
        model = open_model(source, any_weights=True, num_classes=classes, **open_args)
    if model.multi_label:
        raise SitusError(f"{model.name}: is multi-label, and attacks support only one class per image")
    _check_loss(model, single=single)
    notes, backbone = {**model.notes, **other_loss(model.backbone)}, model.backbone
    if isinstance(backbone, OwnModule) and not isinstance(backbone, StemBackbone):
        shape = {
            "in_chans": backbone.input.channels,
            "name": backbone.name,
            "normalisation": backbone.normalisation,
        }
        assert backbone.input.shape is not None
        model = replace(model, backbone=adapt(backbone.model, backbone.input.shape, **shape))
    if model.locked:
        key = f" with the key {read_manifest(Path(source), None).key_id}" if isinstance(source, str | Path) else ""
        notes["lock"] = (
            f"locked{key}: the channels between the blocks are permuted. Closed-form attacks use the patch embedding "
            "and the positions, which are not permuted"
        )
    method = model.method
    if method is None or "label" not in method.needs_targets:
        return Victim(model, model.backbone, notes=notes)
    name = str(model.facts["method"])
    notes["trained by"] = (
        f"the audited step uses the run's method, {name}, and trains the weights that the run trained "
        f"({describe(model.tuning)}). Defences are added to this step"
    )
    if model.spent is not None:
        notes["differential privacy"] = str(model.spent)
    return Victim(model, method, model.when, notes)


def other_loss(backbone: Backbone) -> dict[str, str]:
    """A note where a transformers model is set up for another loss than the audited step's; else none."""
    named = getattr(getattr(getattr(backbone, "model", None), "config", None), "problem_type", None)
    if named in (None, "single_label_classification"):
        return {}
    return {
        "loss": f"the model is set up for another loss (problem_type {named}). The audited step uses single-label "
        "cross entropy, so the audited gradients differ from the gradients of the model's own training. A search "
        "also uses this cross entropy; closed-form attacks work for any loss"
    }


def _check_loss(model: Model, *, single: bool) -> None:
    """Refuses a model without a gradient to audit."""
    for name, weight in model.backbone.named_parameters():
        if not bool(weight.isfinite().all()):
            raise SitusError(f"MODEL {model.name}: {name} contains NaN or infinity, so no gradient is finite")
    if single and outputs_of(model) == 1:
        raise SitusError(
            f"MODEL {model.name}: has a single output, so its cross entropy is always 0 and there is no gradient to "
            "audit; give a model with two or more classes"
        )


def open_predictor(source: Any, victim: Backbone, device: torch.device | str = "cpu") -> MP3:
    """A run that predicts the places of patches (MP3), for images and patches of the victim's size."""
    try:
        method = open_model(source, any_weights=True, device=device).method
    except SitusError as error:
        raise SitusError(f"predictor={source}: {error}", field="predictor") from error
    if not isinstance(method, MP3):
        raise SitusError(field="predictor", value=str(source), allowed="an MP3 run")
    sizes, wanted = ((model.input.shape, model.grid) for model in (method.backbone, victim))
    if sizes != wanted:
        reason = (
            f"takes images of {sizes[0]} pixels in {sizes[1]} patches, but the model takes "
            f"{wanted[0]} pixels in {wanted[1]} patches"
        )
        raise SitusError(f"predictor={source}: {reason}", field="predictor")
    return method.eval()


def outputs_of(model: Model) -> int:
    """How many outputs the model's classifier has."""
    with torch.no_grad():
        return model.backbone(torch.zeros(1, model.data.channels, *model.data.size, device=model.device)).shape[-1]


def labels_for(model: Model, labels: Tensor | None, count: int) -> Tensor:
    """[count]: the images' own labels where the classifier has all of them, else 0, 1, 2 … through its classes."""
    classes = max(2, outputs_of(model))  # of one output a client's own loss makes two classes
    if labels is not None and int(labels.max()) < classes:
        return labels
    return torch.arange(count, device=model.device) % classes


def load_test_set(
    victim: Victim, data: AnyData, count: int = 12, split: str | None = None, device: torch.device | str = "cpu"
) -> TestSet:
    """The first samples that can be read, prepared for the model, with their files as names where they have some."""
    place: Any = addressed(data)
    in_memory = isinstance(place, Source)
    if not in_memory and Path(place).is_file() and KINDS[kind_of(str(place))].ids:
        reason = "holds sentences, but the model takes images; use audit_texts (situs audit texts) for a language model"
        raise SitusError(f"{place}: {reason}", field=("data", "texts"))
    config = victim.model.data if in_memory else _prepared(victim.model.data, str(place))
    modality = config.modality
    kind_args = {} if modality.pixels else {"kind": config.kind, modality.table: modality.settings(config)}
    source = place if in_memory else open_source(place, split, channels=config.channels, **kind_args)
    loader = make_loader(replace(config, batch=1, workers=0, resident="never"), None, device, source=source)
    # One by one: a broken sample is replaced by the next.
    reading = iter(loader)
    batches = list(islice(reading, count))
    left_out = source.left_out()
    if not batches:
        why = "; ".join(left_out) or "it is empty"
        raise SitusError(f"{source.name}: holds no {source.things} that can be read: {why}", field="data")
    labelled = [batch.targets["label"] for batch in batches if "label" in batch.targets]
    labels = labels_for(victim.model, torch.cat(labelled) if labelled else None, len(batches))
    numbers = [int(batch.ids) for batch in batches]
    names = [f"{source.name} {i}" if source.key(i) == str(i) else source.key(i) for i in numbers]
    pixels = torch.cat([batch.inputs for batch in batches])
    others = [batch.inputs for batch in islice(reading, PUBLIC)]
    public = torch.cat(others) if others else None
    test = TestSet(pixels, labels, config.normalisation, names, left_out=tuple(left_out), public=public)
    return test if modality.pixels else _measured(test, loader, modality.things)


def _prepared(config: DataConfig, data: str) -> DataConfig:
    """How the samples at `data` are prepared: as in the model's run, or, where the model is one of pictures and the
    samples are none, as their own modality does."""
    if config.modality.pixels and not (modality := KINDS[kind_of(data)]).pixels and not modality.ids:
        return resolve(DataConfig(data, kind=modality.kind, img_size=config.img_size))
    return resolve(replace(config, path=data))


def _measured(test: TestSet, loader: Loader, things: str) -> TestSet:
    """A test set of samples that are no pictures, scored in the range in which `Loader.shown` draws them."""
    zero, one = (float(loader.shown(torch.full((1, 1, 1, 1), value))) for value in (0.0, 1.0))
    peak, (channels, height, width) = 1 / (one - zero), test.pixels.shape[1:]
    notes = {
        "knows": THREAT["knows"].replace("images", things),
        "does not know": THREAT["does not know"].replace(
            "the images and the labels. The attacker assumes only that every pixel value is a byte (0 to 255)",
            f"the {things} and the labels. The attacker assumes nothing about the values of {things} or their range",
        ),
        "does": THREAT["does"].replace("images", things),
        "images": f"{things} as the model sees them: {channels} × {height} × {width} numbers of mean 0 and deviation 1 "
        "over the training set",
        "range": f"black is {zero * peak:g} standard deviations below the mean, and white is the same number of "
        "standard deviations above the mean. "
        "Values outside this range are clipped. For the PSNR, 10 log10(1 / MSE), this range is scaled to "
        f"[0, 1]. The whole range is {peak:g} standard deviations, so a step of one grey level "
        f"(1/255 of the range) is {peak / 255:.3f} standard deviations",
    }
    scale = (zero,) * channels, (one - zero,) * channels
    return replace(test, normalisation=scale, stored=False, things=things, notes=notes)


# ---------------------------------------------------------------------------------------------------------------------
# The facts that make an audit evidence: day and time, versions, and hashes of the audited model.


def evidence(model: nn.Module, weights: str | Path | None = None) -> dict[str, str | None]:
    """Facts by name: day and time, versions, and SHA-256 of the audited model.

    model: its parameters are hashed as they are in memory. weights: if that is a file, it is hashed too.
    """
    file = None if weights is None or not Path(weights).is_file() else Path(weights)
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "situs": __version__,
        "torch": torch.__version__,
        "weights_sha256": weights_digest(model),
        "weights_file_sha256": None if file is None else digest(file),
    }


def weights_digest(module: nn.Module) -> str:
    """SHA-256 of all parameters and buffers: of each, by name, its name, type, shape and bytes (little-endian)."""
    hashed = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        plain = tensor.detach().cpu().contiguous()
        hashed.update(f"{name} {str(plain.dtype).removeprefix('torch.')} {list(plain.shape)}\n".encode())
        hashed.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()
