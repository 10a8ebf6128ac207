"""One case measured: the step that a run makes, on images that are noise."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from situs.backbones import create_backbone
from situs.bench.bare import measured_class
from situs.bench.cases import StepCase, Timing
from situs.bench.clock import Times, Turn, time_steps
from situs.bench.flops import step_flops
from situs.config import from_dict, to_dict
from situs.core.when import When
from situs.data.objects import pack_masks
from situs.methods import Batch, Method, classifies
from situs.progress import notes_to
from situs.train.optim import OptimConfig
from situs.train.step import Stepper, autocast

OBJECTS = 8
"""Of an image of noise: COCO has 7.3 in an image."""


@dataclass(frozen=True)
class StepRow:
    """A case and what it came to. flops: of a step, forward and backward. said: what the step itself told."""

    case: StepCase
    times: Times
    flops: int
    said: tuple[str, ...] = ()

    @property
    def images_per_second(self) -> float:
        """By the median step."""
        return self.case.batch / self.times.median

    @property
    def flops_per_second(self) -> float:
        """By the median step."""
        return self.flops / self.times.median

    def to_json(self) -> dict[str, Any]:
        """What was measured, and what follows from it."""
        follows = {
            "ms": 1e3 * self.times.median,
            "images_per_second": self.images_per_second,
            "steps_per_second": 1 / self.times.median,
            "busy": self.times.busy,
        }
        held = {"case": to_dict(self.case), "flops": self.flops, "said": list(self.said)}
        return {"name": self.case.label, **held, **self.times.to_json(), **follows}

    @classmethod
    def from_json(cls, held: dict[str, Any]) -> StepRow:
        """What `to_json` gave."""
        return cls(from_dict(StepCase, held["case"]), Times.from_json(held), held["flops"], tuple(held["said"]))


def measure_case(case: StepCase, timing: Timing, device: torch.device, turn: Turn = nullcontext) -> StepRow:
    """Makes the method, counts its step's operations, and times it."""
    torch.compiler.reset()  # what was compiled before this holds the memory of its weights
    gc.collect()
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.set_float32_matmul_precision("high")  # as a run does
    torch.manual_seed(0)
    case = replace(case, precision=precision_on(case, device), compile=case.compile and cuda, graph=case.graph and cuda)
    method = make_method(case).to(device).train()
    flops = method_flops(method, case, device)
    if cuda:
        torch.cuda.empty_cache()
    said: list[str] = []
    with notes_to(said.append):
        times = time_steps(make_update(method, case, device), device, timing, turn)
    return StepRow(case, times, flops, tuple(said))


def precision_on(case: StepCase, device: torch.device) -> str:
    """The arithmetic that a case has on this device."""
    return case.precision or ("bf16" if device.type == "cuda" else "fp32")


def make_method(case: StepCase) -> Method:
    """The method of a case on its backbone, with weights of chance."""
    kind: Any = measured_class(case.method)
    backbone = create_backbone(
        case.model,
        img_size=case.img_size,
        patch_size=case.patch_size,
        in_chans=case.in_chans,
        num_classes=case.num_classes if "label" in kind.needs_targets else 0,
        drop_path=case.drop_path,
        model_args=case.model_args,
    )
    backbone.require("images")
    settings = from_dict(kind.Config, case.settings)
    return kind(backbone, settings, case.num_classes) if classifies(kind) else kind(backbone, settings)


def make_batch(method: Method, case: StepCase, size: int, device: torch.device) -> Batch:
    """Images of noise, as many as are asked for, with labels, masks or objects of chance."""
    sides = method.backbone.input.shape or _sides(case)
    images = torch.randn(size, method.backbone.input.channels, *sides, device=device)
    ids = torch.arange(size, device=device)
    if "objects" in method.needs_targets:
        return Batch(images, ids, _objects(size, sides, case.num_classes, device))
    masked = "mask" in method.needs_targets
    labels = torch.randint(case.num_classes, (size, *sides) if masked else (size,), device=device)
    return Batch(images, ids, {"mask" if masked else "label": labels})


def _objects(size: int, sides: tuple[int, ...], classes: int, device: torch.device) -> dict[str, Tensor]:
    """In each image `OBJECTS` boxes of a side between an eighth and a half of its own, all of which is the object."""
    height, width = sides
    whole = torch.tensor([width, height], device=device)
    spans = (torch.rand(size, OBJECTS, 2, device=device) * 0.375 + 0.125) * whole
    first = torch.rand(size, OBJECTS, 2, device=device) * (whole - spans)
    boxes = torch.cat([first, first + spans], dim=-1)
    left, top, right, bottom = boxes[..., None, None].unbind(2)
    across, down = torch.arange(width, device=device), torch.arange(height, device=device)[:, None]
    masks = (across >= left) & (across < right) & (down >= top) & (down < bottom)
    return {
        "boxes": boxes,
        "classes": torch.randint(classes, (size, OBJECTS), device=device),
        "crowd": torch.zeros(size, OBJECTS, dtype=torch.bool, device=device),
        "masks": pack_masks(masks),
        "sides": torch.tensor([sides] * size, device=device),
    }


def _sides(case: StepCase) -> tuple[int, int]:
    """Of a model that takes images of any size."""
    size = case.img_size or 224
    return (size, size) if isinstance(size, int) else size


def method_flops(method: Method, case: StepCase, device: torch.device) -> int:
    """Operations of one step of this method."""

    def loss_of(size: int) -> torch.Tensor:
        batch = make_batch(method, case, size, device)
        draws = method.draw(batch, When(seed=0, epoch=0, progress=0.5))
        with autocast(device, precision_on(case, device)):
            return method(batch, draws).loss

    counted = step_flops(loss_of, case.batch)
    method.zero_grad(set_to_none=True)
    return counted


def make_update(method: Method, case: StepCase, device: torch.device) -> Callable[[], Any]:
    """The update of a run, on the same images each time and with new draws."""
    stepper = Stepper(
        method, OptimConfig(clip=case.clip, ema=case.ema), seed=0, precision=precision_on(case, device),
        accumulate=case.accumulate, parallel="ddp", compiled=case.compile, graph=case.graph,
    )  # fmt: skip
    batch, done = make_batch(method, case, case.batch, device), 0

    def update() -> None:
        nonlocal done
        stepper.update(batch, When(step=done, epoch=done, progress=0.5), 1e-4, ragged=False)
        done += 1

    return update
