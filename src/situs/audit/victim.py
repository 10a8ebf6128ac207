"""Who is audited: a run with its own method, an export, a locked folder, a timm name, or a user's own module."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from situs.audit.adapter import OwnModule, adapt
from situs.backbones import create_backbone
from situs.backbones.base import Backbone
from situs.data.loader import DataConfig
from situs.errors import SitusError
from situs.evaluate.subject import PUBLISHED, RANDOM, Subject, open_subject
from situs.locks.manifest import NAME as MANIFEST
from situs.locks.manifest import read_manifest
from situs.methods.base import Method
from situs.methods.mp3 import MP3
from situs.train.checkpoint import RunFolder
from situs.train.run import is_run


@dataclass(frozen=True)
class Victim:
    """subject: the model and how its images are prepared. trains: what makes the gradients, the bare backbone or a
    run's own method. epoch: the run's last, for its method's schedules. notes: what a reader must know, by name."""

    subject: Subject
    trains: Backbone | Method
    epoch: int = 0
    notes: dict[str, str] = field(default_factory=dict)


def open_victim(
    source: str,
    *,
    weights: str | None = None,
    img_size: tuple[int, int] | None = None,
    classes: int = 1000,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Victim:
    """The victim by name, on its device and in eval mode.

    classes: of the new classifier that a model without one gets, because a client's loss needs one. seed: of random
    weights.
    """
    notes = _lock_notes(source)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if names_factory(source):
            subject, notes = _open_factory(source, weights, img_size, device)
        else:
            subject = _open_model(source, weights, img_size, classes, device)
    method = subject.method
    if method is None or "label" not in method.needs_targets:
        return Victim(subject, subject.backbone, 0, notes)
    name = str(subject.facts["method"])
    notes["trained by"] = f"the run's own method, {name}, with all that it trained; defences stand on top of it"
    return Victim(subject, method, _last_epoch(source), notes)


def open_predictor(source: str, victim: Backbone, device: torch.device | str = "cpu") -> MP3:
    """A trained MP3 that says of patches where they were, for images and patches of the victim's size."""
    method = open_subject(source, device=device).method
    if not isinstance(method, MP3):
        raise SitusError(f"predictor={source}: must be a run of MP3, and is none (--predictor)")
    own, asked = ((model.img_size, model.grid) for model in (method.backbone, victim))
    if own != asked:
        said = f"sees images of {own[0]} pixels in {own[1]} patches, and the model {asked[0]} in {asked[1]}"
        raise SitusError(f"predictor={source}: {said} (--predictor)")
    return method.eval()


def outputs_of(subject: Subject) -> int:
    """How many classes the model has."""
    shape = (1, subject.backbone.in_chans, *subject.data.size)
    with torch.no_grad():
        return subject.backbone(torch.zeros(shape, device=next(subject.backbone.parameters()).device)).shape[-1]


def labels_for(subject: Subject, labels: Tensor | None, count: int) -> Tensor:
    """The images' own labels where the classifier has them all, else 0, 1, 2 … through its classes; [count]."""
    classes = outputs_of(subject)
    if labels is not None and int(labels.max()) < classes:
        return labels
    return torch.arange(count, device=next(subject.backbone.parameters()).device) % classes


def names_factory(source: str) -> bool:
    """Whether `source` is package.module:function, and not a folder or a name of a library ("hf:…")."""
    module, colon, function = source.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), function)) and module != "hf"


def _open_factory(
    source: str, weights: str | None, img_size: tuple[int, int] | None, device: torch.device | str
) -> tuple[Subject, dict[str, str]]:
    """The subject, and what a reader must know of it."""
    if weights is not None:
        raise SitusError(f"weights={weights}: {source} brings its own (--weights)")
    module, _, function = source.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # as python -m does
        sys.path.insert(0, here)
    try:
        make = getattr(import_module(module), function)
    except Exception as error:  # whatever the user's own code raises while it is imported
        said = error if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        raise SitusError(f"{source}: cannot be had as package.module:function: {said} (MODEL)") from error
    made = _make(source, make)
    if isinstance(made, nn.Module) and not isinstance(made, Backbone):
        if img_size is None:
            raise SitusError(f"{source}: gives a bare module, whose image size must be said (--img-size)")
        made = adapt(made, img_size, name=source)
    if not isinstance(made, Backbone):
        raise SitusError(f"{source}: gives {type(made).__name__}, and must give an nn.Module or situs.audit.adapt(…)")
    if made.img_size is None or not made.in_chans:
        raise SitusError(f"{source}: gives a model that takes no images of one size")
    if img_size not in (None, made.img_size):
        raise SitusError(f"img_size={img_size}: {source} takes {made.img_size} (--img-size)")
    mean, std = (made.normalisation if isinstance(made, OwnModule) else None) or ((), ())
    made.name = source
    held = made.held if isinstance(made, OwnModule) else None
    if held is None and next(made.parameters()).dtype != torch.float32:
        held = str(next(made.parameters()).dtype).removeprefix("torch.")
        made.float()
    notes = {} if held is None else {"precision": f"held in {held}; the step is made in float32 all the same"}
    data = DataConfig("samples", img_size=made.img_size, channels=made.in_chans, mean=tuple(mean), std=tuple(std))
    facts = {"kind": "module", "model": source, "weights": "its own"}
    return Subject(source, made.to(device).eval(), True, True, data, None, facts), notes


def _make(source: str, make: Any) -> Any:
    """What package.module:name stands for: a module as it is, else what calling it gives."""
    if isinstance(make, nn.Module):
        return make
    if not callable(make):
        raise SitusError(
            f"{source}: is {type(make).__name__}, and must be a module, or a function that gives one (MODEL)"
        )
    try:
        return make()
    except SitusError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise SitusError(
            f"{source}: is called without arguments and ends with {said}; a function of your own can give them (MODEL)"
        ) from error


def _open_model(
    source: str, weights: str | None, img_size: tuple[int, int] | None, classes: int, device: torch.device | str
) -> Subject:
    """A run, a folder or a timm name; a new classifier where it has none."""
    named = not is_run(source) and not (Path(source) / "config.json").is_file()
    weights = weights or (RANDOM if named else None)
    subject = open_subject(source, weights=weights, img_size=img_size, device=device)
    if is_run(source) or weights == PUBLISHED or outputs_of(subject) != subject.backbone.out_dim:
        return subject
    # As many outputs as channels: pooled features, and no classes.
    file = None if weights == RANDOM else weights
    backbone = create_backbone(source, img_size=img_size, weights=file, num_classes=classes)
    return replace(subject, backbone=backbone.to(device).eval())


def _lock_notes(source: str) -> dict[str, str]:
    """What a lock means here, for a folder that `situs lock` wrote; a sealed one is refused."""
    folder = Path(source)
    if not (folder / MANIFEST).is_file():
        return {}
    manifest = read_manifest(folder, None)
    if manifest.sealed:
        raise SitusError(f"{source}: is sealed, and without its key there is no model to train; unlock it first")
    if manifest.withheld is not None:
        raise SitusError(
            f"{source}: lacks what its owner withheld ({', '.join(manifest.withheld.parts)}), and without it there is "
            "no model to train; unlock it first"
        )
    said = (
        f"locked with the key {manifest.key_id}: the channels between the blocks are permuted; the patch embedding and "
        "the positions, which the closed forms read, are not"
    )
    return {"lock": said}


def _last_epoch(run: str) -> int:
    """The epoch of the run's last step: its method's schedules stand where they ended."""
    state = RunFolder.open(run, writer=False).facts()
    return max(0, state["step"] - 1) // state["steps_per_epoch"] if state else 0
