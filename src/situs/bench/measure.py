"""The measurement of one case: the step of a run, on images of noise."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from situs.backbones import create_backbone
from situs.bench.cases import StepCase, Timing, measured_class
from situs.bench.clock import Times, Turn, time_steps
from situs.config import from_dict, to_dict
from situs.core.tokens import pair
from situs.core.when import When
from situs.data.objects import pack_masks
from situs.methods import Batch, Method, classifies
from situs.progress import notes_to
from situs.train.optim import OptimConfig
from situs.train.step import Stepper, autocast

OBJECTS = 8
"""Objects in an image of noise; COCO has 7.3 per image."""


@dataclass(frozen=True)
class StepRow:
    """A case and its measurements. flops: of a step, forward and backward. notes: printed by the step."""

    case: StepCase
    times: Times
    flops: int
    notes: tuple[str, ...] = ()

    @property
    def images_per_second(self) -> float:
        """By the median step."""
        return self.case.batch / self.times.median

    @property
    def flops_per_second(self) -> float:
        """By the median step."""
        return self.flops / self.times.median

    def to_json(self) -> dict[str, Any]:
        """The measurements, and numbers derived from them."""
        follows = {
            "ms": 1e3 * self.times.median,
            "images_per_second": self.images_per_second,
            "steps_per_second": 1 / self.times.median,
            "busy": self.times.busy,
        }
        numbers = {"case": to_dict(self.case), "flops": self.flops, "said": list(self.notes)}
        return {"name": self.case.label, **numbers, **self.times.to_json(), **follows}

    @classmethod
    def from_json(cls, numbers: dict[str, Any]) -> StepRow:
        """What `to_json` gave."""
        return cls(
            from_dict(StepCase, numbers["case"]), Times.from_json(numbers), numbers["flops"], tuple(numbers["said"])
        )


def measure_case(case: StepCase, timing: Timing, device: torch.device, turn: Turn = nullcontext) -> StepRow:
    """Makes the method, counts the operations of its step, and times it."""
    torch.compiler.reset()  # earlier compiled code keeps its weights in memory
    gc.collect()
    cuda = device.type == "cuda"
    torch.cuda.empty_cache()
    if cuda:
        torch.set_float32_matmul_precision("high")  # as a run does
    torch.manual_seed(0)
    case = replace(case, precision=precision_on(case, device), compile=case.compile and cuda, graph=case.graph and cuda)
    method = make_method(case).to(device).train()
    flops = method_flops(method, case, device)
    torch.cuda.empty_cache()
    notes: list[str] = []
    with notes_to(notes.append):
        times = time_steps(make_update(method, case, device), device, timing, turn)
    return StepRow(case, times, flops, tuple(notes))


def precision_on(case: StepCase, device: torch.device) -> str:
    """The arithmetic of a case on this device."""
    return case.precision or ("bf16" if device.type == "cuda" else "fp32")


def make_method(case: StepCase) -> Method:
    """The method of a case on its backbone, with random weights."""
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
    """`size` images of noise with random labels, masks or objects."""
    size_of_any = case.img_size or 224  # for a model that takes any size
    sides = method.backbone.input.shape or pair(size_of_any)
    images = torch.randn(size, method.backbone.input.channels, *sides, device=device)
    ids = torch.arange(size, device=device)
    if "objects" in method.needs_targets:
        return Batch(images, ids, _objects(size, sides, case.num_classes, device))
    masked = "mask" in method.needs_targets
    labels = torch.randint(case.num_classes, (size, *sides) if masked else (size,), device=device)
    return Batch(images, ids, {"mask" if masked else "label": labels})


def _objects(size: int, sides: tuple[int, ...], classes: int, device: torch.device) -> dict[str, Tensor]:
    """`OBJECTS` random boxes per image, filled by their objects, with sides of an eighth to a half of the image."""
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
    """The update of a run, always on the same images, with new draws."""
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


# --- floating point operations ---------------------------------------------------------------------------------------
# Counted by matrix products: one of [m, k] and [k, n] is 2 m k n. Attention counts as its two products, and four in the
# backward: what a fused kernel recomputes is not counted, and neither is anything but products.

SIZES = 1, 2
"""Batch sizes of the two steps that are counted; the products of a step grow linearly with its batch."""


def step_flops(loss_of: Callable[[int], torch.Tensor], batch: int) -> int:
    """Operations of a forward and backward over `batch` samples. loss_of: the loss of that many samples."""
    less, more = (_count(loss_of, size) for size in SIZES)
    per_sample = (more - less) // (SIZES[1] - SIZES[0])
    return less + (batch - SIZES[0]) * per_sample


def _count(loss_of: Callable[[int], torch.Tensor], size: int) -> int:
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss_of(size).backward()
    return counter.get_total_flops()
